/* SPDX-License-Identifier: Apache-2.0 */
/* ep_dispatch: check the arguments, then scatter. */
#include "handles/ops.h"

typedef struct Tensors {
    const EpTensor *tokens, *topk_weights, *scales;
    const EpTensor *recv_tokens, *recv_topk_weights, *recv_scales, *recv_topk_idx;
} Tensors;

static EpStatus check_tokens(const EpOperation *o, const Tensors *t) {
    EP_TRY(ep_arg_token_rows(o, "tokens", t->tokens, -1, NULL));
    EP_TRY(ep_arg_token_bytes(o, "tokens", t->tokens));
    EP_TRY(
        ep_arg_slot_rows(o, "recv_tokens", t->recv_tokens, ep_tensor_row_elements(t->tokens), "H"));
    EP_TRY(ep_arg_type(&o->call, "recv_tokens", t->recv_tokens, t->tokens->type));
    return ep_arg_token_bytes(o, "recv_tokens", t->recv_tokens);
}

static EpStatus check_weights(const EpOperation *o, const Tensors *t) {
    EP_TRY(
        ep_arg_pair(o, "recv_topk_weights", t->recv_topk_weights, "topk_weights", t->topk_weights));
    if (!t->topk_weights) return EP_OK;
    EP_TRY(ep_arg_token_rows(o, "topk_weights", t->topk_weights, o->step.info.top_k, "K"));
    EP_TRY(ep_arg_type(&o->call, "topk_weights", t->topk_weights, EP_TYPE_FP32));
    return ep_arg_slot_weights(o, "recv_topk_weights", t->recv_topk_weights);
}

static EpStatus check_scales(const EpOperation *o, const Tensors *t) {
    EP_TRY(ep_arg_pair(o, "recv_scales", t->recv_scales, "scales", t->scales));
    if (!t->scales) return EP_OK;
    int64_t most = o->handle->group->config.max_scale_bytes;
    EP_TRY(ep_arg_token_rows(o, "scales", t->scales, -1, NULL));
    EP_TRY(ep_arg_row_bytes(&o->call, "scales", t->scales, 4, most));
    EP_TRY(
        ep_arg_slot_rows(o, "recv_scales", t->recv_scales, ep_tensor_row_elements(t->scales), "S"));
    EP_TRY(ep_arg_type(&o->call, "recv_scales", t->recv_scales, t->scales->type));
    return ep_arg_row_bytes(&o->call, "recv_scales", t->recv_scales, 4, most);
}

static EpStatus check_idx(const EpOperation *o, const Tensors *t) {
    if (!t->recv_topk_idx) return EP_OK;
    if (o->handle->shape.layout != EP_LAYOUT_FLAT)
        return ep_refuse(&o->call, EP_ERR_UNSUPPORTED, "recv_topk_idx",
                         "expected NULL outside the flat layout, got a tensor");
    EP_TRY(ep_arg_slot_rows(o, "recv_topk_idx", t->recv_topk_idx, o->step.info.top_k, "K"));
    return ep_arg_index_type(&o->call, "recv_topk_idx", t->recv_topk_idx);
}

EpStatus ep_dispatch(EpHandle *handle, const EpTensor *tokens, const EpTensor *topk_weights,
                     const EpTensor *scales, EpStream stream, const EpTensor *recv_tokens,
                     const EpTensor *recv_topk_weights, const EpTensor *recv_scales,
                     const EpTensor *recv_topk_idx) {
    Tensors t = {tokens,      topk_weights, scales, recv_tokens, recv_topk_weights,
                 recv_scales, recv_topk_idx};
    EpOperation o;
    EP_TRY(ep_operation_begin_dispatch(&o, "ep_dispatch", handle));
    EP_TRY(check_tokens(&o, &t));
    EP_TRY(check_weights(&o, &t));
    EP_TRY(check_scales(&o, &t));
    EP_TRY(check_idx(&o, &t));
    EpScatter scatter = {.op = &ep_op_dispatch,
                         .rows = tokens->data,
                         .type = tokens->type,
                         .row_bytes = ep_tensor_row_bytes(tokens),
                         .row_elements = ep_tensor_row_elements(tokens),
                         .out_rows = recv_tokens->data,
                         .out_capacity = ep_slot_capacity(handle, recv_tokens),
                         .stream = stream};
    if (topk_weights) {
        scatter.carries_weights = 1;
        scatter.topk_weights = topk_weights->data, scatter.out_weights = recv_topk_weights->data;
    }
    if (scales) {
        scatter.scales = scales->data, scatter.out_scales = recv_scales->data;
        scatter.scale_bytes = ep_tensor_row_bytes(scales);
    }
    if (recv_topk_idx)
        scatter.out_idx = recv_topk_idx->data, scatter.idx_type = recv_topk_idx->type;
    EpRouting routing;
    if (ep_handle_is_latency(handle)) {
        routing = handle->recorded.routing;
        routing.stream = stream, routing.call = o.call.name;
        scatter.routing = &routing;
    }
    return ep_run_scatter(&o.call, handle, &scatter);
}
