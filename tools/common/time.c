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
