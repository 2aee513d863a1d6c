/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_HOST_ROWMATH_H
#define EP_RUNTIME_HOST_ROWMATH_H

/**
 * Arithmetic and copying of whole rows: the inner loops of the host backend. rowmath.c is plain C,
 * compiled once per instruction set; ep_rowmath() picks the best for this CPU. All give the same
 * bits: every element results from correctly rounded operations in a fixed order, and the dot
 * product has a fixed number of chains.
 */

#include <stdint.h>

#include "ep/ep.h"
#include "runtime/quant.h"

/**
 * One term of a sum. Terms come in runs; a run is summed on its own from +0 and then added to the
 * total, which also starts from +0. `run` says which terms begin a run, and whether that run's sum
 * is rounded to the rows' type, or quantised, before it is added.
 */
typedef enum EpRun {
    EP_RUN_GOES_ON,
    EP_RUN_BEGINS,
    EP_RUN_BEGINS_ROUNDED,
    EP_RUN_BEGINS_QUANTISED
} EpRun;

typedef struct EpTerm {
    const void *row;
    float weight;
    EpRun run;
    const float *scales; /**< NULL, or the row is quantised as EP_SUM_QUANT, and the weight is 1 */
} EpTerm;

typedef struct EpRowMath {
    const char *name;
    /** out[i] = round(sum over runs of (fmaf chain over the run's terms)), where some runs are
     *  rounded too; zeros if count is 0. */
    void (*sum)(EpType type, void *out, int64_t n, const EpTerm *terms, int count);
    /** The same sum, quantised as EP_SUM_QUANT in place of rounded. Terms are of `type`. */
    void (*sum_quantised)(EpType type, uint8_t *out, float *scales, int64_t n, const EpTerm *terms,
                          int count);
    /** The same sum, rounded to the type `out_type`: BF16, FP16 or FP32. `accumulate`: what out[i]
     * holds is added to the sum before it is rounded. */
    void (*reduce)(EpType type, const EpTerm *terms, int count, EpType out_type, int accumulate,
                   void *out, int64_t n);
    /** out[i] = round(sum[i] + bias[0][i] + bias[1][i] ...), with `count` biases of `type`. */
    void (*finish)(EpType type, void *out, const float *sum, const void *const *bias, int count,
                   int64_t n);
    /** out[i] = round(weight * row[i]) */
    void (*scale)(EpType type, void *out, const void *row, float weight, int64_t n);
    /** Returns the sum of a[i] * b[i], in 64 interleaved chains of fmaf. Chains restart every 4096
     *  elements; each adds its parts up, and the 64 totals are folded pairwise at the end. */
    float (*dot)(EpType type, const void *a, const void *b, int64_t n);
} EpRowMath;

/** Returns the functions for the best instruction set of this CPU. */
const EpRowMath *ep_rowmath(void);

/** Copy a row, past the caches if `stream`: for output too large to be read from cache afterwards.
 *  Addresses and bytes are multiples of 16. Call ep_stream_fence after the last one. */
void ep_row_copy(void *out, const void *row, size_t bytes, int stream);
void ep_row_zero(void *out, size_t bytes, int stream);
void ep_stream_fence(void);

/** Quantise a row of `n` elements of BF16, FP16 or FP32 into ep_quant_bytes(format, n) bytes of
 *  codes and ep_quant_scales(format, n) scales. `global`: of EP_SCALE_GLOBAL, else not used. */
void ep_quantise(EpQuantFormat format, float global, EpType type, const void *row, int64_t n,
                 uint8_t *out, void *scales);

/** Elements that share a scale: element (i, j) is from[i * row_step + j * step], and row i of their
 *  codes begins at out[i * out_step]. */
typedef struct EpQuantBlock {
    EpType type; /**< BF16, FP16 or FP32 */
    const void *from;
    int64_t rows, columns, row_step, step;
    uint8_t *out;
    int64_t out_step; /**< bytes */
} EpQuantBlock;

/** Returns the bits of the block's amax, at least EP_QUANT_LEAST_BITS. */
uint32_t ep_block_amax(const EpQuantBlock *block);
void ep_block_convert(EpQuantFormat format, const EpQuantBlock *block, float inverse);
void ep_store_scale(EpQuantFormat format, void *scales, int64_t at, uint32_t stored);

#endif
