/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_FLOOR_H
#define BENCH_FLOOR_H

#include "bench_case.h"
#include "bench_time.h"

/**
 * Collective: what a phase cannot beat by much. All ranks at once copy, with memcpy, the bytes the
 * phase must move: each its own slots, row by row, from one private buffer to another; for prepare
 * its own indices. out[phase] has the times. Overwrites slots_out.
 */
bool floor_measure(Case *c, Quantiles out[NUM_PHASES]);

#endif
