/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_TIME_H
#define BENCH_TIME_H

/** Timing: a barrier before each call, the slowest rank's time per iteration, then its quantiles.
 */

#include <stdbool.h>
#include <stdint.h>

#include "bench_world.h"

typedef struct Quantiles {
    double median_us, p99_us;
} Quantiles;

/** Run call number `which`; false if it failed. */
typedef bool (*TimedCall)(void *context, int which);

/**
 * Collective. `warmup` plus `iterations` times through calls 0 .. count - 1, in this order; out[i]
 * is about call i. After a failure a rank calls no more, but stays in step; false everywhere.
 */
bool time_calls(World *world, int64_t warmup, int64_t iterations, TimedCall call, void *context,
                int count, Quantiles *out);

/** The last part of it: samples[call][iteration] of this rank, overwritten; `ok`: whether it has
 *  them. */
bool time_evaluate(World *world, bool ok, double *samples, int64_t iterations, int count,
                   Quantiles *out);

/** Times of `by` calls become those of one. */
void time_divide(Quantiles *times, int count, int64_t by);

/** Of a clock that only goes forward. */
double time_now_us(void);

#endif
