/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_EP_QUANT_H
#define EP_EP_QUANT_H

/**
 * Quantising receive rows: activations and gradients between the experts' GEMMs, to e4m3 bytes and
 * scales as grouped GEMMs read them. Dispatch quantises tokens by itself (EpHandleConfig.quant);
 * this is for what the experts compute. The arithmetic is the same: docs/semantics.md.
 *
 *     EpRowsForm form = EP_ROWS_FORM_INIT;
 *     form.quant = EP_QUANT_FP8;
 *     ep_quantise_rows(group, &form, &rows, &recv_rows, stream, &out, &scales);
 *
 * For the gradient of a weight, a GEMM sums over the rows of an expert. Matrix units read fp8 along
 * the dimension that is summed over: so that GEMM takes the rows `transposed`, in blocks along
 * them.
 */

#include "ep/ep.h"

#ifdef __cplusplus
extern "C" {
#endif

/** The elements that share a scale. */
typedef enum EpBlocks {
    EP_BLOCKS_ROWS = 1, /**< 128 along the last dimension of the result; 32 with MXFP8 */
    EP_BLOCKS_TILES = 2 /**< 128 x 128 of its last two dimensions; not with MXFP8 */
} EpBlocks;

typedef struct EpRowsForm {
    size_t struct_size;
    EpQuant quant; /**< not NONE, not NVFP4 */
    EpBlocks blocks;
    int32_t transposed;       /**< 1: the last two dimensions are swapped in the result */
    EpScaleOrder scale_order; /**< BY_COLUMN: the last two dimensions of the scales are swapped; not
                                   SWIZZLED */
} EpRowsForm;

#define EP_ROWS_FORM_INIT \
    { sizeof(EpRowsForm), EP_QUANT_FP8, EP_BLOCKS_ROWS, 0, EP_SCALES_BY_ROW }

/**
 * Quantise rows. Local: no rank waits for another one. Allocates nothing, and can be captured.
 *
 * group     chooses the backend and the device
 * rows      [N, H]: slabs one after the other, as in the expert-major layout; or [L, P, H]: a slab
 *           of P rows for each expert, as in the batched layout. BF16, FP16 or FP32.
 * num_rows  INT32 or INT64, in memory that the backend reaches: how many rows are there, [1] for
 *           [N, H] (the output recv_rows of ep_prepare), or [L] for [L, P, H] (expert_counts).
 *           Other rows are not read, and what they would become is not written. NULL: all.
 * out       FP8_E4M3: the shape of rows; transposed: [H, N] or [L, H, P]
 * scales    FP32 or UINT8 (UE8M0), on 4 bytes. With B = 128, or 32 for MXFP8:
 *           rows: [N, ceil(H/B)]; tiles: [ceil(N/B), ceil(H/B)]; transposed: [H, ceil(N/B)], tiles
 *           [ceil(H/B), ceil(N/B)]; before them L, and P for N, where rows have three dimensions;
 *           the last two swapped with EP_SCALES_BY_COLUMN
 *
 * Where blocks run over several rows (transposed, tiles), none may have rows of two experts:
 * EP_ERR_ALIGNMENT unless the group's alignment, or P, is a multiple of B.
 */
EpStatus ep_quantise_rows(EpGroup *group, const EpRowsForm *form, const EpTensor *rows,
                          const EpTensor *num_rows, EpStream stream, const EpTensor *out,
                          const EpTensor *scales);

#ifdef __cplusplus
}
#endif

#endif
