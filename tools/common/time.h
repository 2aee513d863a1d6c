/* SPDX-License-Identifier: Apache-2.0 */
#ifndef COMMON_TIME_H
#define COMMON_TIME_H

/**
 * Timing with the host's clock: a barrier precedes each call, an iteration's time is the slowest
 * rank's, the results are quantiles over the iterations. device.h declares the same with the GPU's
 * clock.
 */

#include <stdbool.h>
#include <stdint.h>

#include "tools/common/world.h"

typedef struct Quantiles {
    double median_us, p99_us;
} Quantiles;

/** Run call number `which`. Returns false if it failed. */
typedef bool (*TimedCall)(void *context, int which);

/**
 * Collective. Run calls 0 .. count - 1 in order, `warmup` plus `iterations` times; out[i] is about
 * call i. After a failure a rank makes no more calls but still takes part in the barriers; the
 * result is then false on every rank.
 */
bool time_calls(World *world, int64_t warmup, int64_t iterations, TimedCall call, void *context,
                int count, Quantiles *out);

/** As time_calls, but the time of a call is what `clock`, if it is not NULL, says after it, in
 *  microseconds. */
bool time_calls_by(World *world, int64_t warmup, int64_t iterations, TimedCall call,
                   double (*clock)(void *context), void *context, int count, Quantiles *out);

/**
 * Collective. Quantiles of the slowest rank's times. samples[call][iteration] are this rank's and
 * are overwritten; `ok` says whether they are valid.
 */
bool time_evaluate(World *world, bool ok, double *samples, int64_t iterations, int count,
                   Quantiles *out);

/** Call number `which`, `length` times in a row. */
typedef struct Chain {
    TimedCall call;
    void *context;
    int which;
    int64_t length;
} Chain;

/**
 * Collective. All ranks begin a chain together; nothing comes between its calls. times[length] are
 * this rank's. False, with a message, if a call of this rank failed.
 */
bool time_chain(World *world, const Chain *chain, double *times);

/**
 * Collective. The quantiles of each rank's own `count` times, which are sorted, and of each the
 * median over the ranks; `ok` says whether they are valid.
 */
bool time_median_rank(World *world, bool ok, double *times, int64_t count, Quantiles *out);

/** Convert the times of `by` calls to times of one call. */
void time_divide(Quantiles *times, int count, int64_t by);

/** Now, on a monotonic clock. */
double time_now_us(void);

#endif
