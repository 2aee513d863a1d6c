/* SPDX-License-Identifier: Apache-2.0 */
#if EP_WITH_CUDA

#include <stdlib.h>

#include "bench_cuda.h"
#include "bench_error.h"
#include "bench_kernels.h"

enum { MAX_CALLS = 8 };

/* Longer than the host takes to issue an iteration, so that the GPU never waits for it. */
static const double hold_us = 250;

/* ---- lining up ----------------------------------------------------------------------------- */

bool device_hold(Case *c) {
    return !c->device->flags || cuda_ok(kernel_hold(hold_us, c->stream), "holding the stream");
}

bool device_align(Case *c) {
    Device *d = c->device;
    if (!d->flags) {
        bool finished = device_finish(c);
        return world_barrier(c->world) && finished;
    }
    BarrierArgs args = {.rank = c->world->rank, .size = c->world->size};
    args.late = device_words(c, args.rank) + WORD_LATE;
    args.timeout_ns = (uint64_t)(world_deadline() * 1e9);
    for (int r = 0; r < args.size; r++)
        args.flags[r] = device_words(c, r);
    return cuda_ok(kernel_barrier(&args, ++d->epoch, c->stream), "the barrier on the device");
}

/* Whether no wait of the bench's own kernels has come to its deadline. */
static bool was_on_time(Case *c) {
    uint32_t late = 0;
    if (!c->device->flags) return true;
    bool ok = cuda_ok(cudaMemcpyAsync(&late, device_words(c, c->world->rank) + WORD_LATE,
                                      sizeof(late), cudaMemcpyDeviceToHost, c->stream),
                      "cudaMemcpyAsync");
    if (!device_finish(c) || !ok) return false;
    return late == 0 || bench_fail("rank %d, ep_bench's own kernels: expected rank %u within %g s, "
                                   "it did not come",
                                   c->world->rank, late - 1, world_deadline());
}

/* ---- events -------------------------------------------------------------------------------- */

typedef struct Clock {
    cudaEvent_t begin[MAX_CALLS], end[MAX_CALLS];
    TimedCall call;
    void *context;
    int count;
} Clock;

static bool clock_create(Clock *clock) {
    bool ok = clock->count <= MAX_CALLS || bench_fail("%d calls to time", clock->count);
    for (int i = 0; ok && i < clock->count; i++)
        ok = cuda_ok(cudaEventCreate(&clock->begin[i]), "cudaEventCreate") &&
             cuda_ok(cudaEventCreate(&clock->end[i]), "cudaEventCreate");
    return ok;
}

static void clock_destroy(Clock *clock) {
    for (int i = 0; i < MAX_CALLS; i++) {
        if (clock->begin[i]) cudaEventDestroy(clock->begin[i]);
        if (clock->end[i]) cudaEventDestroy(clock->end[i]);
    }
}

static bool record(Case *c, cudaEvent_t event) {
    return cuda_ok(cudaEventRecord(event, c->stream), "cudaEventRecord");
}

/* One call between its events; `issue_us` is the host's part of it. */
static bool enqueue(Case *c, Clock *clock, int which, bool ok, double *issue_us) {
    bool aligned = device_align(c); /* also where this rank has failed: the others wait for it */
    ok = ok && aligned && record(c, clock->begin[which]);
    double start = time_now_us();
    ok = ok && clock->call(clock->context, which);
    *issue_us = time_now_us() - start;
    return ok && record(c, clock->end[which]);
}

/* All calls of an iteration, back to back. */
static bool iterate(Case *c, Clock *clock, bool ok, double *issue_us) {
    world_barrier(c->world);
    bool held = device_hold(c);
    for (int i = 0; i < clock->count; i++)
        ok = enqueue(c, clock, i, ok, &issue_us[i]);
    bool finished = device_finish(c);
    return ok && held && finished;
}

static bool read_clock(const Clock *clock, int which, double *us) {
    float ms = 0;
    bool ok = cuda_ok(cudaEventElapsedTime(&ms, clock->begin[which], clock->end[which]),
                      "cudaEventElapsedTime");
    *us = (double)ms * 1e3;
    return ok;
}

/* times and issues are [call][iteration]. */
static bool sample(Case *c, Clock *clock, int64_t iterations, double *times, double *issues) {
    bool ok = world_all(c->world, clock_create(clock));
    if (!ok) return false;
    for (int64_t i = -c->options->warmup; i < iterations; i++) {
        double issue_us[MAX_CALLS];
        ok = iterate(c, clock, ok, issue_us);
        for (int which = 0; ok && i >= 0 && which < clock->count; which++) {
            issues[which * iterations + i] = issue_us[which];
            ok = read_clock(clock, which, &times[which * iterations + i]);
        }
    }
    return ok && was_on_time(c);
}

bool device_time_calls(Case *c, int64_t iterations, TimedCall call, void *context, int count,
                       Quantiles *out, double *issue_us) {
    Clock clock = {.call = call, .context = context, .count = count};
    Quantiles issued[MAX_CALLS];
    size_t total = (size_t)(count * iterations);
    double *times = bench_alloc(total, sizeof(double), "samples");
    double *issues = bench_alloc(total, sizeof(double), "samples");
    bool ok = world_all(c->world, times && issues) && sample(c, &clock, iterations, times, issues);
    ok = time_evaluate(c->world, ok, times, iterations, count, out) &&
         time_evaluate(c->world, ok, issues, iterations, count, issued);
    for (int i = 0; ok && issue_us && i < count; i++)
        issue_us[i] = issued[i].median_us;
    clock_destroy(&clock);
    free(times);
    free(issues);
    return ok;
}

static bool replay(void *context, int which) {
    return chains_run(context, which);
}

/* A kernel's first launch loads it: not while a graph is captured. */
static bool run_once(Case *c, TimedCall call, void *context, int count) {
    bool ok = true;
    for (int i = 0; ok && i < count; i++)
        ok = call(context, i);
    return world_all(c->world, ok);
}

bool device_time_chains(Case *c, TimedCall call, void *context, int count, Quantiles *out) {
    int64_t length = c->options->chain;
    if (!run_once(c, call, context, count)) return false;
    Chains *chains = chains_open(c, call, context, count, length);
    bool ok =
        chains && device_time_calls(c, c->options->iterations, replay, chains, count, out, NULL);
    chains_close(chains);
    if (ok) time_divide(out, count, length);
    return ok;
}

#endif
