/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_CHECK_H
#define BENCH_CHECK_H

/** Compares every byte that a phase wrote, or must not have written, with what the contract says.
 */

#include <stdbool.h>
#include <stdint.h>

#include "bench_case.h"

enum { CHECK_SENTENCE_BYTES = 256 };

typedef struct Check {
    const Case *c;
    const char *phase;
    int64_t wrong;                    /**< elements found wrong so far */
    char first[CHECK_SENTENCE_BYTES]; /**< about the first of them, or "" */
    /* rows to work on */
    float *total, *partial, *term, *other;
    char *row, *scales, *poison;
} Check;

bool check_create(const Case *c, Check *out);
void check_destroy(Check *check);

/** Look at the outputs of a phase that has just run on poisoned buffers. */
void check_phase(Check *check, PhaseId phase);

/** The same for the baseline: its dispatch, and its combine, which sums in ascending k alone. */
void check_baseline_dispatch(Check *check);
void check_baseline_combine(Check *check);

/** One check for each phase. */
void check_prepare(Check *check);
void check_dispatch(Check *check);
void check_combine(Check *check);
void check_combine_backward(Check *check);
void check_dispatch_backward(Check *check);

/** Count what differs between `got` and `want`, element by element of `unit` bytes. */
void check_bytes(Check *check, const char *what, int64_t row, const void *got, const void *want,
                 size_t bytes, size_t unit);
void check_float(Check *check, const char *what, int64_t row, const float *got, float want);
void check_int(Check *check, const char *what, int64_t row, int64_t got, int64_t want);

/** Count one wrong element. */
void check_note(Check *check, const char *what, int64_t row, size_t column, unsigned long long want,
                unsigned long long got);

/** Bytes of an element of the rows. */
size_t check_unit(const Check *check);

#endif
