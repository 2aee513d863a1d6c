/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_QUANTISE_H
#define EP_DISPATCH_QUANTISE_H

/**
 * Quantised rows in device memory, where scatter takes them from: the CUDA backend's workspace of a
 * handle that quantises.
 */

#include "handles/plan_cuda.h"
#include "runtime/quant.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Rows [rows, elements], then their scales, each row's on 16 bytes. */
typedef struct EpQuantised {
    int64_t scales;      /**< offset; the rows are at 0 */
    int64_t scale_bytes; /**< distance of the scales of one row from those of the next */
    int64_t bytes;
} EpQuantised;

static inline EpQuantised ep_quantised(EpQuant quant, int64_t rows, int64_t elements) {
    int64_t unit = ep_quant_scale_type(quant) == EP_TYPE_FP32 ? 4 : 1;
    EpQuantised q;
    q.scales = rows * elements;
    q.scale_bytes = ep_round_up(ep_quant_scales(quant, elements) * unit, 16);
    q.bytes = q.scales + rows * q.scale_bytes;
    return q;
}

typedef struct EpQuantiseArgs {
    EpCudaGroup group; /**< as the scatter has it that comes next */
    EpCudaPlan plan;
    EpQuant quant;
    int32_t type;     /**< of the tokens */
    int32_t elements; /**< of a row */
    int32_t num_rows; /**< most tokens that the plan may have */
    int64_t row_bytes;
    const char *rows;
    char *out; /**< as `to` says */
    EpQuantised to;
} EpQuantiseArgs;

/** As for the kernels of handles/plan_cuda.h. */
int ep_cuda_open_quantise(int shared_bytes);
int ep_cuda_launch_quantise(const EpQuantiseArgs *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif
