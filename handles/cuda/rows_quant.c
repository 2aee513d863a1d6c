/* SPDX-License-Identifier: Apache-2.0 */
/* ep_quantise_rows on the CUDA backend: one launch of quantise.cu. */
#include "handles/cuda/rows_quant.h"

#include <string.h>

#include "handles/cuda/quantise.h"
#include "runtime/cuda/cuda.h"

EpStatus ep_cuda_quantise_rows(const EpRowsQuant *q) {
    int transposed = q->form.transposed;
    EpQuantiseArgs args = {
        .format = q->format,
        .phase = EP_QUANT_WHOLE,
        .type = q->type,
        .tiles = q->form.blocks == EP_BLOCKS_TILES,
        .from = q->rows,
        .step = {q->size[1] * q->size[2], transposed ? 1 : q->size[2], transposed ? q->size[1] : 1},
        .out = q->out,
        .out_step = {ep_quant_bytes(q->format, q->size[1] * q->size[2]),
                     ep_quant_bytes(q->format, q->size[2])},
        .scales = q->scales,
        .count = q->num_rows,
        .counted = ep_rows_dim(q),
        .count_is_int64 = q->num_rows_type == EP_TYPE_INT64};
    memcpy(args.part, q->size, sizeof(args.part));
    memcpy(args.scale_step, q->scale_step, sizeof(args.scale_step));
    int blocks = ep_cuda(q->group)->device.blocks * EP_QUANT_BLOCKS_PER_SM;
    return ep_cuda_check(q->group, "quantising rows",
                         ep_cuda_launch_quantise(&args, blocks, q->stream));
}
