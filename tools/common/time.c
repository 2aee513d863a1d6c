/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/common/time.h"

#include <stdlib.h>
#include <time.h>

#include "tools/common/util.h"

double time_now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median and nearest-rank 99th percentile, which is the maximum of fewer than 100 samples. */
static Quantiles quantiles(double *samples, int64_t count) {
    qsort(samples, (size_t)count, sizeof(double), compare_doubles);
    double median = (samples[(count - 1) / 2] + samples[count / 2]) / 2;
    return (Quantiles){median, samples[(99 * count + 99) / 100 - 1]};
}

/* samples[call][iteration] are of this rank. */
static bool sample(World *world, int64_t warmup, int64_t iterations, TimedCall call,
                   double (*clock)(void *context), void *context, int count, double *samples) {
    bool ok = true;
    for (int64_t i = -warmup; i < iterations; i++) {
        for (int which = 0; which < count; which++) {
            world_barrier(world);
            double start = time_now_us();
            ok = ok && call(context, which);
            double took = clock ? clock(context) : time_now_us() - start;
            if (i >= 0) samples[which * iterations + i] = took;
        }
    }
    return ok;
}

bool time_evaluate(World *world, bool ok, double *samples, int64_t iterations, int count,
                   Quantiles *out) {
    ok = world_all(world, ok) && world_max_double(world, samples, (size_t)(count * iterations));
    for (int which = 0; ok && which < count; which++)
        out[which] = quantiles(samples + which * iterations, iterations);
    return ok;
}

void time_divide(Quantiles *times, int count, int64_t by) {
    for (int i = 0; i < count; i++) {
        times[i].median_us /= (double)by;
        times[i].p99_us /= (double)by;
    }
}

bool time_calls(World *world, int64_t warmup, int64_t iterations, TimedCall call, void *context,
                int count, Quantiles *out) {
    return time_calls_by(world, warmup, iterations, call, NULL, context, count, out);
}

bool time_calls_by(World *world, int64_t warmup, int64_t iterations, TimedCall call,
                   double (*clock)(void *context), void *context, int count, Quantiles *out) {
    double *samples = bench_alloc((size_t)(count * iterations), sizeof(double), "samples");
    if (!world_all(world, samples != NULL)) {
        free(samples);
        return false;
    }
    bool ok = sample(world, warmup, iterations, call, clock, context, count, samples);
    ok = time_evaluate(world, ok, samples, iterations, count, out);
    free(samples);
    return ok;
}

bool time_chain(World *world, const Chain *chain, double *times) {
    bool ok = true;
    world_barrier(world);
    double start = time_now_us();
    for (int64_t i = 0; ok && i < chain->length; i++) {
        ok = chain->call(chain->context, chain->which);
        double now = time_now_us();
        times[i] = now - start;
        start = now;
    }
    return ok;
}

bool time_median_rank(World *world, bool ok, double *times, int64_t count, Quantiles *out) {
    const size_t ranks = (size_t)world->size;
    double *all = bench_alloc(3 * ranks, sizeof(double), "samples");
    if (!world_all(world, ok && all)) {
        free(all);
        return false;
    }
    const Quantiles mine = quantiles(times, count);
    double *const medians = all + 2 * ranks;
    ok = world_allgather(world, &mine, all, sizeof(mine));
    for (int part = 0; ok && part < 2; part++) {
        for (size_t r = 0; r < ranks; r++)
            medians[r] = all[2 * r + (size_t)part];
        *(part ? &out->p99_us : &out->median_us) = quantiles(medians, world->size).median_us;
    }
    free(all);
    return ok;
}
