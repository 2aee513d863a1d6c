/* SPDX-License-Identifier: Apache-2.0 */

/** Calls captured in graphs, each in one of its own; with --graphs the phases, and the whole step.
 */

#if EP_WITH_CUDA

#include <stdlib.h>

#include "bench_cuda.h"
#include "bench_error.h"

/* ---- chains -------------------------------------------------------------------------------- */

/* What queues nothing, as a phase that is not there, leaves a graph without nodes: none is kept. */
static bool instantiate(Case *c, cudaGraph_t graph, cudaGraphExec_t *out) {
    size_t nodes = 0;
    if (!cuda_ok(cudaGraphGetNodes(graph, NULL, &nodes), "cudaGraphGetNodes")) return false;
    return nodes == 0 || (cuda_ok(cudaGraphInstantiate(out, graph, 0), "cudaGraphInstantiate") &&
                          cuda_ok(cudaGraphUpload(*out, c->stream), "cudaGraphUpload"));
}

/* Thread-local: what other ranks' threads do meanwhile is no concern of this capture. */
static bool capture(Case *c, TimedCall call, void *context, int which, int64_t length,
                    cudaGraphExec_t *out) {
    cudaGraph_t graph = NULL;
    if (!cuda_ok(cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal),
                 "cudaStreamBeginCapture"))
        return false;
    bool ok = true;
    for (int64_t i = 0; ok && i < length; i++)
        ok = call(context, which);
    cudaError_t ended = cudaStreamEndCapture(c->stream, &graph);
    ok = ok && cuda_ok(ended, "cudaStreamEndCapture") && instantiate(c, graph, out);
    if (graph) cudaGraphDestroy(graph);
    return ok;
}

static bool capture_all(Chains *chains, TimedCall call, void *context, int64_t length) {
    Case *c = chains->c;
    if (!chains->graph || !device_finish(c)) return false;
    for (int i = 0; i < chains->count; i++) {
        if (!capture(c, call, context, i, length, &chains->graph[i])) return false;
    }
    return device_finish(c);
}

Chains *chains_open(Case *c, TimedCall call, void *context, int count, int64_t length) {
    Chains *chains = bench_alloc(1, sizeof(Chains), "graphs");
    if (chains) {
        *chains = (Chains){.c = c, .count = count};
        chains->graph = bench_alloc((size_t)count, sizeof(cudaGraphExec_t), "graphs");
    }
    if (world_all(c->world, chains && capture_all(chains, call, context, length))) return chains;
    chains_close(chains);
    return NULL;
}

bool chains_run(const Chains *chains, int which) {
    cudaGraphExec_t graph = chains->graph[which];
    return !graph || cuda_ok(cudaGraphLaunch(graph, chains->c->stream), "cudaGraphLaunch");
}

void chains_close(Chains *chains) {
    if (!chains) return;
    for (int i = 0; chains->graph && i < chains->count; i++) {
        if (chains->graph[i]) cudaGraphExecDestroy(chains->graph[i]);
    }
    free(chains->graph);
    free(chains);
}

/* ---- the library's calls ------------------------------------------------------------------- */

enum { WHOLE_STEP = NUM_PHASES };

static bool run(void *context, int which) {
    Case *c = context;
    return which == WHOLE_STEP ? phase_run_step(c) : phase_run(c, (PhaseId)which);
}

bool device_capture(Case *c) {
    Chains *graphs = chains_open(c, run, c, WHOLE_STEP + 1, c->options->chain);
    c->device->graphs = graphs;
    return graphs != NULL;
}

bool graph_run(Case *c, PhaseId phase) {
    return chains_run(c->device->graphs, phase);
}

bool graph_run_step(Case *c) {
    return chains_run(c->device->graphs, WHOLE_STEP);
}

#endif
