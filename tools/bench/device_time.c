/* SPDX-License-Identifier: Apache-2.0 */

/**
 * Timing by the GPU's clock: events around calls, also around calls that are captured in graphs.
 */

#include <stdlib.h>

#include "tools/bench/device.h"
#include "tools/common/time.h"
#include "tools/common/util.h"

#if EP_WITH_CUDA

/* ---- alignment of the ranks' streams ------------------------------------------------------- */


/* Longer than the host needs to issue an iteration, so that the GPU never waits for the host. */
static const double hold_us = 250;

/* Align the streams of all ranks: the work queued next begins at the same time on every rank. The
 * first barrier of an iteration waits from when it starts, the next ones from when the one before
 * was passed: if the call between has already waited for a lost rank, the barrier waits seconds. */
static bool align_streams(Case *c, bool first) {
    Device *d = c->device;
    if (!d->flags) {
        bool finished = device_finish(c);
        return world_barrier(c->world) && finished;
    }
    BarrierArgs args = {.rank = c->world->rank, .size = c->world->size, .first = first};
    args.late = device_words(c, args.rank) + WORD_LATE;
    args.passed = (uint64_t *)(device_words(c, args.rank) + WORD_PASSED);
    args.timeout_ns = (uint64_t)(world_deadline() * 1e9);
    for (int r = 0; r < args.size; r++)
        args.flags[r] = device_words(c, r);
    return cuda_ok(kernel_barrier(&args, ++d->epoch, c->stream), "the device barrier");
}

/* False, with a message, if a wait of ep_bench's own kernels has timed out. The library's message,
 * if it has one, says more. */
static bool check_timeouts(Case *c) {
    uint32_t late = 0;
    if (!c->device->flags) return true;
    bool ok = cuda_ok(cudaMemcpyAsync(&late, device_words(c, c->world->rank) + WORD_LATE,
                                      sizeof(late), cudaMemcpyDeviceToHost, c->stream),
                      "cudaMemcpyAsync");
    if (!device_finish(c) || !ok) return false;
    if (late == 0) return true;
    bench_lose_peer();
    if (!bench_ok(ep_group_status(c->group, NULL), "ep_group_status")) return false;
    return bench_fail("rank %d, ep_bench's own kernels: expected rank %u within %g s, it did not "
                      "arrive",
                      c->world->rank, late - 1, world_deadline());
}

/* ---- the GPU's clock ----------------------------------------------------------------------- */

typedef struct Clock {
    cudaEvent_t begin[TIMED_CALLS], end[TIMED_CALLS];
    TimedCall call;
    void *context;
    int count;
} Clock;

static bool clock_create(Clock *clock) {
    bool ok = clock->count <= TIMED_CALLS || bench_fail("%d calls to time", clock->count);
    for (int i = 0; ok && i < clock->count; i++)
        ok = cuda_ok(cudaEventCreate(&clock->begin[i]), "cudaEventCreate") &&
             cuda_ok(cudaEventCreate(&clock->end[i]), "cudaEventCreate");
    return ok;
}

static void clock_destroy(Clock *clock) {
    for (int i = 0; i < TIMED_CALLS; i++) {
        if (clock->begin[i]) cudaEventDestroy(clock->begin[i]);
        if (clock->end[i]) cudaEventDestroy(clock->end[i]);
    }
}

static bool record(Case *c, cudaEvent_t event) {
    return cuda_ok(cudaEventRecord(event, c->stream), "cudaEventRecord");
}

/* Queue one call between its events; `issue_us` is the host's time for the call. */
static bool enqueue(Case *c, Clock *clock, int which, bool ok, double *issue_us) {
    bool aligned = align_streams(c, which == 0); /* even if this rank failed: the others wait */
    ok = ok && aligned && record(c, clock->begin[which]);
    double start = time_now_us();
    ok = ok && clock->call(clock->context, which);
    *issue_us = time_now_us() - start;
    return ok && record(c, clock->end[which]);
}

/* All calls of an iteration, back to back. The stream is held while the host queues them, so that
 * none of them begins before all are queued. Without the other ranks, nothing is queued. */
static bool iterate(Case *c, Clock *clock, bool ok, double *issue_us) {
    if (!world_barrier(c->world)) return false;
    bool held = !c->device->flags || cuda_ok(kernel_hold(hold_us, c->stream), "holding the stream");
    for (int i = 0; i < clock->count; i++)
        ok = enqueue(c, clock, i, ok, &issue_us[i]);
    bool finished = device_finish(c) && check_timeouts(c);
    return ok && held && finished;
}

static bool elapsed(cudaEvent_t begin, cudaEvent_t end, double *us) {
    float ms = 0;
    bool ok = cuda_ok(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    *us = (double)ms * 1e3;
    return ok;
}

/* times and issues are [call][iteration]. */
static bool sample_device(Case *c, Clock *clock, int64_t iterations, double *times,
                          double *issues) {
    bool ok = world_all(c->world, clock_create(clock));
    if (!ok) return false;
    for (int64_t i = -c->options->run.warmup; i < iterations; i++) {
        double issue_us[TIMED_CALLS];
        ok = iterate(c, clock, ok, issue_us);
        for (int which = 0; ok && i >= 0 && which < clock->count; which++) {
            issues[which * iterations + i] = issue_us[which];
            ok = elapsed(clock->begin[which], clock->end[which], &times[which * iterations + i]);
        }
    }
    return ok;
}

bool device_time_calls(Case *c, int64_t iterations, TimedCall call, void *context, int count,
                       Quantiles *out, double *issue_us) {
    Clock clock = {.call = call, .context = context, .count = count};
    Quantiles issued[TIMED_CALLS];
    size_t total = (size_t)(count * iterations);
    double *times = bench_alloc(total, sizeof(double), "samples");
    double *issues = bench_alloc(total, sizeof(double), "samples");
    bool ok =
        world_all(c->world, times && issues) && sample_device(c, &clock, iterations, times, issues);
    ok = time_evaluate(c->world, ok, times, iterations, count, out) &&
         time_evaluate(c->world, ok, issues, iterations, count, issued);
    for (int i = 0; ok && issue_us && i < count; i++)
        issue_us[i] = issued[i].median_us;
    clock_destroy(&clock);
    free(times);
    free(issues);
    return ok;
}

/* ---- chains -------------------------------------------------------------------------------- */

static bool run_chain(Case *c, const Chain *chain, cudaEvent_t *events) {
    bool ok = align_streams(c, true) && record(c, events[0]);
    for (int64_t i = 0; ok && i < chain->length; i++)
        ok = chain->call(chain->context, chain->which) && record(c, events[i + 1]);
    bool finished = device_finish(c) && check_timeouts(c);
    return ok && finished;
}

bool device_time_chain(Case *c, const Chain *chain, double *times) {
    const size_t count = (size_t)chain->length + 1;
    cudaEvent_t *events = bench_alloc(count, sizeof(cudaEvent_t), "events");
    bool ok = events != NULL;
    for (size_t i = 0; ok && i < count; i++)
        ok = cuda_ok(cudaEventCreate(&events[i]), "cudaEventCreate");
    ok = world_all(c->world, ok) && run_chain(c, chain, events);
    for (int64_t i = 0; ok && i < chain->length; i++)
        ok = elapsed(events[i], events[i + 1], &times[i]);
    for (size_t i = 0; events && i < count; i++)
        if (events[i]) cudaEventDestroy(events[i]);
    free(events);
    return ok;
}

/* ---- graphs -------------------------------------------------------------------------------- */

/* Calls 0 .. count - 1, each captured a number of times in a graph of its own. */
struct Graphs {
    Case *c;
    int count;
    cudaGraphExec_t *graph; /* [count]; NULL if the call queues nothing */
};

/* A call that queues nothing, as an absent phase, gives a graph without nodes: *out stays NULL. */
static bool instantiate(Case *c, cudaGraph_t graph, cudaGraphExec_t *out) {
    size_t nodes = 0;
    if (!cuda_ok(cudaGraphGetNodes(graph, NULL, &nodes), "cudaGraphGetNodes")) return false;
    return nodes == 0 || (cuda_ok(cudaGraphInstantiate(out, graph, 0), "cudaGraphInstantiate") &&
                          cuda_ok(cudaGraphUpload(*out, c->stream), "cudaGraphUpload"));
}

/* The capture mode is thread-local, so that other ranks' threads do not affect this capture. */
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

static bool capture_all(Graphs *graphs, TimedCall call, void *context, int64_t length) {
    Case *c = graphs->c;
    if (!graphs->graph || !device_finish(c)) return false;
    for (int i = 0; i < graphs->count; i++) {
        if (!capture(c, call, context, i, length, &graphs->graph[i])) return false;
    }
    return device_finish(c);
}

Graphs *graphs_open(Case *c, TimedCall call, void *context, int count, int64_t length) {
    Graphs *graphs = bench_alloc(1, sizeof(Graphs), "graphs");
    if (graphs) {
        *graphs = (Graphs){.c = c, .count = count};
        graphs->graph = bench_alloc((size_t)count, sizeof(cudaGraphExec_t), "graphs");
    }
    if (world_all(c->world, graphs && capture_all(graphs, call, context, length))) return graphs;
    graphs_close(graphs);
    return NULL;
}

static bool graphs_run(const Graphs *graphs, int which) {
    cudaGraphExec_t graph = graphs->graph[which];
    return !graph || cuda_ok(cudaGraphLaunch(graph, graphs->c->stream), "cudaGraphLaunch");
}

void graphs_close(Graphs *graphs) {
    if (!graphs) return;
    for (int i = 0; graphs->graph && i < graphs->count; i++) {
        if (graphs->graph[i]) cudaGraphExecDestroy(graphs->graph[i]);
    }
    free(graphs->graph);
    free(graphs);
}

bool graphs_replay(void *graphs, int which) {
    return graphs_run(graphs, which);
}

/* The first launch of a kernel loads it, which must not happen during a capture. */
static bool run_once(Case *c, TimedCall call, void *context, int count) {
    bool ok = true;
    for (int i = 0; ok && i < count; i++)
        ok = call(context, i);
    return world_all(c->world, ok);
}

bool device_time_graphs(Case *c, TimedCall call, void *context, int count, Quantiles *out) {
    int64_t length = c->options->chain;
    if (!run_once(c, call, context, count)) return false;
    Graphs *graphs = graphs_open(c, call, context, count, length);
    bool ok = graphs && device_time_calls(c, c->options->run.iterations, graphs_replay, graphs,
                                          count, out, NULL);
    graphs_close(graphs);
    if (ok) time_divide(out, count, length);
    return ok;
}

/* ---- the library's calls ------------------------------------------------------------------- */

enum { WHOLE_STEP = NUM_PHASES };

static bool run(void *context, int which) {
    Case *c = context;
    return which == WHOLE_STEP ? phase_run_step(c) : phase_run(c, (PhaseId)which);
}

bool device_capture(Case *c) {
    Graphs *graphs = graphs_open(c, run, c, WHOLE_STEP + 1, c->options->chain);
    c->device->graphs = graphs;
    return graphs != NULL;
}

bool device_replay(Case *c, PhaseId phase) {
    return graphs_run(c->device->graphs, phase);
}

bool device_replay_step(Case *c) {
    return graphs_run(c->device->graphs, WHOLE_STEP);
}

#endif
