/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/quantised.h"

EpStatus ep_describe_quantised(const EpOperation *o, const char *argument, const EpTensor *t,
                               EpQuantFormat format, EpScatterTensors *s) {
    int32_t unit = ep_quant_unit(format);
    EP_TRY(ep_arg_summable(&o->call, argument, t));
    if (s->row_elements % unit)
        return ep_refuse(&o->call, EP_ERR_ROW_BYTES, argument,
                         "expected a multiple of %d elements where rows are quantised, got %lld",
                         unit, (long long)s->row_elements);
    s->format = format;
    s->type = format.type;
    s->row_bytes = ep_quant_bytes(format, s->row_elements);
    s->scale_map.count = ep_quant_scales(format, s->row_elements);
    s->scale_type = ep_quant_scale_type(format);
    return EP_OK;
}

void ep_describe_scale_order(const EpOperation *o, EpScatterTensors *s) {
    s->scale_map.element_bytes = (int32_t)ep_type_bytes(s->scale_type);
    s->scale_map.by_column = o->handle->shape.scale_order == EP_SCALES_BY_COLUMN;
    s->scale_map.swizzled = o->handle->shape.scale_order == EP_SCALES_SWIZZLED;
    s->scale_bytes = s->scale_map.count * s->scale_map.element_bytes;
}

EpStatus ep_describe_recv_scales(const EpOperation *o, const char *argument, const EpTensor *t,
                                 const char *cause, EpScatterTensors *s) {
    EP_TRY(ep_arg_pair(o, argument, t, cause, s->scale_bytes ? s : NULL));
    if (!t) return EP_OK;
    EP_TRY(ep_arg_slot_scales(o, argument, t, s->scale_map.count));
    EP_TRY(ep_arg_type(&o->call, argument, t, s->scale_type));
    EP_TRY(ep_arg_alignment(&o->call, argument, t, 4));
    s->out_scales = t->data;
    int64_t rows = t->shape[t->ndim - (s->scale_map.by_column ? 1 : 2)];
    if (t->ndim == 2) s->out_capacity = ep_min(s->out_capacity, rows);
    /* Tensors of tiles may have more rows than their blocks. */
    int64_t block = s->block_rows ? s->block_rows : o->handle->shape.block_rows;
    s->scale_map.slab_rows = t->ndim == 2 ? rows : block;
    return EP_OK;
}
