/* SPDX-License-Identifier: Apache-2.0 */
/* ep_quantise_rows on the host backend: block by block, on the calling thread. */
#include "handles/host/rows_quant.h"

#include "runtime/host/rowmath.h"
#include "runtime/layout.h"
#include "runtime/quant.h"

/* Returns how many rows of a slab are there. */
static int64_t rows_of(const EpRowsQuant *q, int64_t slab) {
    int64_t most = q->size[ep_rows_dim(q)];
    if (!q->num_rows) return most;
    int64_t given = q->num_rows_type == EP_TYPE_INT64 ? ((const int64_t *)q->num_rows)[slab]
                                                      : ((const int32_t *)q->num_rows)[slab];
    return ep_max(0, ep_min(given, most));
}

static void quantise_block(const EpRowsQuant *q, int64_t slab, int64_t i, int64_t j,
                           const int64_t end[3]) {
    int64_t row = i * q->block[1], column = j * q->block[2], each = q->size[1] * q->size[2];
    int transposed = q->form.transposed;
    EpQuantBlock block = {.type = q->type,
                          .rows = ep_min(q->block[1], end[1] - row),
                          .columns = ep_min(q->block[2], end[2] - column),
                          .row_step = transposed ? 1 : q->size[2],
                          .step = transposed ? q->size[1] : 1,
                          .out = q->out +
                                 ep_quant_bytes(q->format, slab * each + row * q->size[2] + column),
                          .out_step = ep_quant_bytes(q->format, q->size[2])};
    int64_t at = slab * each + row * block.row_step + column * block.step;
    block.from = (const char *)q->rows + at * (int64_t)ep_type_bytes(q->type);
    EpQuantScale scale = ep_quant_scale(q->format, ep_block_amax(&block));
    ep_block_convert(q->format, &block, scale.inverse);
    ep_store_scale(q->format, q->scales,
                   slab * q->scale_step[0] + i * q->scale_step[1] + j * q->scale_step[2],
                   scale.stored);
}

EpStatus ep_host_quantise_rows(const EpRowsQuant *q) {
    for (int64_t slab = 0; slab < q->size[0]; slab++) {
        int64_t end[3] = {0, q->size[1], q->size[2]};
        end[ep_rows_dim(q)] = rows_of(q, slab);
        for (int64_t i = 0; i * q->block[1] < end[1]; i++)
            for (int64_t j = 0; j * q->block[2] < end[2]; j++)
                quantise_block(q, slab, i, j, end);
    }
    return EP_OK;
}
