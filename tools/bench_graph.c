/* SPDX-License-Identifier: Apache-2.0 */

/** --graphs: each call captured in a graph of its own, and the whole step in one. */

#if EP_WITH_CUDA

#include <stdlib.h>

#include "bench_cuda.h"
#include "bench_error.h"

struct Graphs {
    cudaGraphExec_t phase[NUM_PHASES], step;
};

enum { WHOLE_STEP = NUM_PHASES };

static bool run(Case *c, int which) {
    return which == WHOLE_STEP ? phase_run_step(c) : phase_run(c, (PhaseId)which);
}

/* Thread-local: what other ranks' threads do meanwhile is no concern of this capture. */
static bool capture(Case *c, int which, cudaGraphExec_t *out) {
    cudaGraph_t graph = NULL;
    if (!cuda_ok(cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal),
                 "cudaStreamBeginCapture"))
        return false;
    bool ok = run(c, which);
    cudaError_t ended = cudaStreamEndCapture(c->stream, &graph);
    ok = ok && cuda_ok(ended, "cudaStreamEndCapture") &&
         cuda_ok(cudaGraphInstantiate(out, graph, 0), "cudaGraphInstantiate") &&
         cuda_ok(cudaGraphUpload(*out, c->stream), "cudaGraphUpload");
    if (graph) cudaGraphDestroy(graph);
    return ok;
}

static bool capture_all(Case *c, Graphs *graphs) {
    for (int p = 0; p < NUM_PHASES; p++) {
        if (!capture(c, p, &graphs->phase[p])) return false;
    }
    return capture(c, WHOLE_STEP, &graphs->step) && device_finish(c);
}

bool device_capture(Case *c) {
    Graphs *graphs = bench_alloc(1, sizeof(Graphs), "graphs");
    bool ok = graphs && device_finish(c) && capture_all(c, graphs);
    if (world_all(c->world, ok)) {
        c->device->graphs = graphs;
        return true;
    }
    graphs_destroy(graphs);
    return false;
}

bool graph_run(Case *c, PhaseId phase) {
    return cuda_ok(cudaGraphLaunch(c->device->graphs->phase[phase], c->stream), "cudaGraphLaunch");
}

bool graph_run_step(Case *c) {
    return cuda_ok(cudaGraphLaunch(c->device->graphs->step, c->stream), "cudaGraphLaunch");
}

void graphs_destroy(Graphs *graphs) {
    if (!graphs) return;
    for (int p = 0; p < NUM_PHASES; p++) {
        if (graphs->phase[p]) cudaGraphExecDestroy(graphs->phase[p]);
    }
    if (graphs->step) cudaGraphExecDestroy(graphs->step);
    free(graphs);
}

#endif
