/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_CHECK_H
#define BENCH_CHECK_H

/** Compares every byte that a phase must or must not have written with what the contract says. */

#include <stdbool.h>
#include <stdint.h>

#include "tools/bench/case.h"

enum { CHECK_MESSAGE_BYTES = 256 };

typedef struct Check {
    const Case *c;
    const char *phase;
    int64_t wrong;                   /**< wrong elements so far */
    char first[CHECK_MESSAGE_BYTES]; /**< about the first wrong element, or "" */
    Pool pool;                       /**< of the scratch rows */
    float *total, *of_node, *partial, *term, *other;
    char *row, *scales, *poison;
} Check;

bool check_create(const Case *c, Check *out);
void check_destroy(Check *check);

/** Check the outputs of a phase that has just run on poisoned buffers. */
void check_phase(Check *check, PhaseId phase);

/** Check the baseline's outputs. Its combine sums in ascending k alone. */
void check_baseline_dispatch(Check *check);
void check_baseline_combine(Check *check);

/** Check [T, H] rows that are combine's sums up to rounding: each rank's sum is rounded once, and
 *  so is each sum of ranks, in any order. */
void check_near_sums(Check *check, const char *phase, const char *got);

/** The outputs of dispatch and combine_backward: rows of slots (check_rows.c). */
void check_dispatch(Check *check);
void check_combine_backward(Check *check);

/** Count the elements of `unit` bytes that differ between `got` and `want`. */
void check_bytes(Check *check, const char *what, int64_t row, const void *got, const void *want,
                 size_t bytes, size_t unit);
void check_float(Check *check, const char *what, int64_t row, const float *got, float want);

/** Bytes of an element of the rows. */
size_t check_unit(const Check *check);

#endif
