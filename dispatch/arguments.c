/* SPDX-License-Identifier: Apache-2.0 */
#include "dispatch/arguments.h"

#include "runtime/quant.h"

/* ---- what is sent -------------------------------------------------------------------------- */

static int quantises(const EpOperation *o) {
    return o->handle->shape.quant != EP_QUANT_NONE;
}

/* The tokens as they are: rows of any type, carried. */
static EpStatus describe_tokens(const EpOperation *o, const EpTensor *tokens, EpScatter *s) {
    EP_TRY(ep_arg_token_rows(o, "tokens", tokens, -1, NULL));
    EP_TRY(ep_arg_token_bytes(o, "tokens", tokens));
    s->rows = tokens->data;
    s->type = s->source_type = tokens->type;
    s->row_bytes = s->source_row_bytes = ep_tensor_row_bytes(tokens);
    s->row_elements = ep_tensor_row_elements(tokens);
    return EP_OK;
}

/* What becomes of them where they are quantised. */
static EpStatus describe_quantised(const EpOperation *o, const EpTensor *tokens, EpScatter *s) {
    EpQuant quant = o->handle->shape.quant;
    EP_TRY(ep_arg_summable(&o->call, "tokens", tokens));
    if (s->row_elements % 16)
        return ep_refuse(&o->call, EP_ERR_ROW_BYTES, "tokens",
                         "expected a multiple of 16 elements where rows are quantised, got %lld",
                         (long long)s->row_elements);
    s->quant = quant;
    s->type = EP_TYPE_FP8_E4M3;
    s->row_bytes = s->row_elements;
    s->scale_map.count = ep_quant_scales(quant, s->row_elements);
    s->scale_type = ep_quant_scale_type(quant);
    return EP_OK;
}

static EpStatus describe_weights(const EpOperation *o, const EpTensor *weights, EpScatter *s) {
    if (!weights) return EP_OK;
    EP_TRY(ep_arg_token_rows(o, "topk_weights", weights, o->step.info.top_k, "K"));
    EP_TRY(ep_arg_float(&o->call, "topk_weights", weights));
    s->carries_weights = 1;
    s->topk_weights = weights->data;
    return EP_OK;
}

static EpStatus describe_scales(const EpOperation *o, const EpTensor *scales, EpScatter *s) {
    if (!scales) return EP_OK;
    if (quantises(o))
        return ep_refuse(&o->call, EP_ERR_UNSUPPORTED, "scales",
                         "expected NULL on a handle that quantises, got a tensor");
    if (!o->handle->group->config.max_scale_bytes)
        return ep_refuse(&o->call, EP_ERR_ROW_BYTES, "scales",
                         "expected NULL, since config.max_scale_bytes is 0, got a tensor");
    EP_TRY(ep_arg_token_rows(o, "scales", scales, -1, NULL));
    EP_TRY(
        ep_arg_row_bytes(&o->call, "scales", scales, 4, o->handle->group->config.max_scale_bytes));
    s->scales = scales->data;
    s->scale_map.count = ep_tensor_row_elements(scales);
    s->scale_type = scales->type;
    return EP_OK;
}

EpStatus ep_dispatch_describe_sent(const EpOperation *o, const EpSent *sent, EpScatter *s) {
    *s = (EpScatter){.op = &ep_op_dispatch, .quant = EP_QUANT_NONE};
    EP_TRY(describe_tokens(o, sent->tokens, s));
    if (quantises(o)) EP_TRY(describe_quantised(o, sent->tokens, s));
    EP_TRY(describe_weights(o, sent->topk_weights, s));
    EP_TRY(describe_scales(o, sent->scales, s));
    s->scale_map.element_bytes = (int32_t)ep_type_bytes(s->scale_type);
    s->scale_map.by_column = o->handle->shape.scale_order == EP_SCALES_BY_COLUMN;
    s->scale_bytes = s->scale_map.count * s->scale_map.element_bytes;
    return EP_OK;
}

/* ---- what is received ---------------------------------------------------------------------- */

static EpStatus place_tokens(const EpOperation *o, const EpTensor *t, EpScatter *s) {
    EP_TRY(ep_arg_slot_rows(o, "recv_tokens", t, s->row_elements, "H"));
    EP_TRY(ep_arg_type(&o->call, "recv_tokens", t, s->type));
    EP_TRY(ep_arg_token_bytes(o, "recv_tokens", t));
    s->out_rows = t->data;
    s->out_capacity = ep_slot_capacity(o->handle, t);
    return EP_OK;
}

static EpStatus place_weights(const EpOperation *o, const EpTensor *t, EpScatter *s) {
    EP_TRY(ep_arg_pair(o, "recv_topk_weights", t, "topk_weights", s->carries_weights ? s : NULL));
    if (!t) return EP_OK;
    EP_TRY(ep_arg_slot_weights(o, "recv_topk_weights", t));
    s->out_weights = t->data;
    s->out_capacity = ep_min(s->out_capacity, ep_slot_capacity(o->handle, t));
    return EP_OK;
}

static EpStatus place_scales(const EpOperation *o, const EpTensor *t, EpScatter *s) {
    const char *cause = quantises(o) ? "the handle's quant" : "scales";
    EP_TRY(ep_arg_pair(o, "recv_scales", t, cause, s->scale_bytes ? s : NULL));
    if (!t) return EP_OK;
    EP_TRY(ep_arg_slot_scales(o, "recv_scales", t, s->scale_map.count));
    EP_TRY(ep_arg_type(&o->call, "recv_scales", t, s->scale_type));
    EP_TRY(ep_arg_alignment(&o->call, "recv_scales", t, 4));
    s->out_scales = t->data;
    int by_column = s->scale_map.by_column;
    s->scale_map.slab_rows = by_column ? t->shape[t->ndim - 1] : 0;
    int64_t rows = by_column && t->ndim == 2 ? t->shape[1] : ep_slot_capacity(o->handle, t);
    if (t->ndim == 2) s->out_capacity = ep_min(s->out_capacity, rows);
    return EP_OK;
}

static EpStatus place_idx(const EpOperation *o, const EpTensor *t, EpScatter *s) {
    if (!t) return EP_OK;
    if (o->handle->shape.layout != EP_LAYOUT_FLAT)
        return ep_refuse(&o->call, EP_ERR_UNSUPPORTED, "recv_topk_idx",
                         "expected NULL outside the flat layout, got a tensor");
    EP_TRY(ep_arg_slot_rows(o, "recv_topk_idx", t, o->step.info.top_k, "K"));
    EP_TRY(ep_arg_index_type(&o->call, "recv_topk_idx", t));
    s->out_idx = t->data, s->idx_type = t->type;
    s->out_capacity = ep_min(s->out_capacity, ep_slot_capacity(o->handle, t));
    return EP_OK;
}

/* The tail that may be zeroed is as long as the shortest of the tensors. */
EpStatus ep_dispatch_describe_received(const EpOperation *o, const EpReceived *received,
                                       EpScatter *s) {
    EP_TRY(place_tokens(o, received->tokens, s));
    EP_TRY(place_weights(o, received->topk_weights, s));
    EP_TRY(place_scales(o, received->scales, s));
    return place_idx(o, received->topk_idx, s);
}
