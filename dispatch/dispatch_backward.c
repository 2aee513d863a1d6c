/* SPDX-License-Identifier: Apache-2.0 */
/* ep_dispatch_backward: check the arguments, then gather. */
#include "handles/ops.h"

static EpStatus check_weights(const EpOperation *o, const EpTensor *grad_slot_weights,
                              const EpTensor *grad_tokens, const EpTensor *grad_topk_weights) {
    EP_TRY(ep_arg_pair(o, "grad_topk_weights", grad_topk_weights, "grad_slot_weights",
                       grad_slot_weights));
    if (!grad_slot_weights) return EP_OK;
    EP_TRY(ep_arg_slot_weights(o, "grad_slot_weights", grad_slot_weights));
    EP_TRY(ep_arg_token_rows(o, "grad_topk_weights", grad_topk_weights, o->step.info.top_k, "K"));
    EP_TRY(ep_arg_dim(&o->call, "grad_topk_weights", grad_topk_weights, 0, grad_tokens->shape[0],
                      "rows of grad_tokens"));
    return ep_arg_float(&o->call, "grad_topk_weights", grad_topk_weights);
}

EpStatus ep_dispatch_backward(EpHandle *handle, const EpTensor *grad_recv_tokens,
                              const EpTensor *grad_slot_weights, EpStream stream,
                              const EpTensor *grad_tokens, const EpTensor *grad_topk_weights) {
    EpOperation o;
    EP_TRY(ep_operation_begin_backward(&o, "ep_dispatch_backward", handle));
    EP_TRY(
        ep_arg_summed_rows(&o, "grad_recv_tokens", grad_recv_tokens, "grad_tokens", grad_tokens));
    EP_TRY(check_weights(&o, grad_slot_weights, grad_tokens, grad_topk_weights));
    EpGather gather = {.op = &ep_op_dispatch_backward,
                       .rows = grad_recv_tokens->data,
                       .type = grad_recv_tokens->type,
                       .row_bytes = ep_tensor_row_bytes(grad_recv_tokens),
                       .row_elements = ep_tensor_row_elements(grad_recv_tokens),
                       .carries_values = grad_slot_weights != NULL,
                       .slot_values = grad_slot_weights ? grad_slot_weights->data : NULL,
                       .out_rows = grad_tokens->data,
                       .out_num_rows = grad_tokens->shape[0],
                       .out_values = grad_topk_weights ? grad_topk_weights->data : NULL,
                       .stream = stream};
    return ep_run_gather(&o.call, handle, &gather);
}
