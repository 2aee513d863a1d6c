/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_ROWMATH_H
#define EP_RUNTIME_ROWMATH_H

/**
 * Arithmetic and copying of whole rows: the inner loops of the host backend. rowmath.c is plain C
 * that is compiled once per instruction set; ep_rowmath() picks the best for this CPU. The bits do
 * not depend on the choice: every element is computed by correctly rounded operations in a fixed
 * order, and the lanes of the dot product are fixed, too.
 */

#include <stdint.h>

#include "ep/ep.h"

/**
 * One term of a sum. Terms come in runs; a run is summed on its own from +0 and then added to the
 * total, which also starts from +0. `first` marks the first term of a run.
 */
typedef struct EpTerm {
    const void *row;
    float weight;
    int32_t first;
} EpTerm;

typedef struct EpRowMath {
    const char *name;
    /** out[i] = round(sum over runs of (fmaf chain over the run's terms)); count 0 gives zeros. */
    void (*sum)(EpType type, void *out, int64_t n, const EpTerm *terms, int count);
    /** out[i] = round(weight * row[i]) */
    void (*scale)(EpType type, void *out, const void *row, float weight, int64_t n);
    /** Sum of a[i] * b[i] in 64 interleaved chains of fmaf, each anew for every 4096 elements and
     *  added to those before, folded pairwise at the end. */
    float (*dot)(EpType type, const void *a, const void *b, int64_t n);
} EpRowMath;

const EpRowMath *ep_rowmath(void);

/** Copy past the caches where `stream`: for output too large to be read from cache afterwards.
 *  Addresses and bytes are multiples of 16. Follow the last one with ep_stream_fence. */
void ep_row_copy(void *out, const void *row, size_t bytes, int stream);
void ep_row_zero(void *out, size_t bytes, int stream);
void ep_stream_fence(void);

#endif
