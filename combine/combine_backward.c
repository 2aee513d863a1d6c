/* SPDX-License-Identifier: Apache-2.0 */
/* ep_combine_backward: check the arguments, then scatter. */
#include "handles/ops.h"

static EpStatus check_weights(const EpOperation *o, const EpTensor *slot_weights,
                              const EpTensor *expert_out, const EpTensor *grad_out,
                              const EpTensor *grad_slot_weights) {
    if (slot_weights) EP_TRY(ep_arg_slot_values(o, "slot_weights", slot_weights));
    EP_TRY(ep_arg_pair(o, "expert_out", expert_out, "grad_slot_weights", grad_slot_weights));
    if (!expert_out) return EP_OK;
    EP_TRY(ep_arg_slot_rows(o, "expert_out", expert_out, ep_tensor_row_elements(grad_out), "H"));
    EP_TRY(ep_arg_type(&o->call, "expert_out", expert_out, grad_out->type));
    EP_TRY(ep_arg_token_bytes(o, "expert_out", expert_out));
    return ep_arg_slot_values(o, "grad_slot_weights", grad_slot_weights);
}

EpStatus ep_combine_backward(EpHandle *handle, const EpTensor *grad_out,
                             const EpTensor *slot_weights, const EpTensor *expert_out,
                             EpStream stream, const EpTensor *grad_expert_out,
                             const EpTensor *grad_slot_weights) {
    EpOperation o;
    EP_TRY(ep_operation_begin_backward(&o, "ep_combine_backward", handle));
    EP_TRY(ep_arg_summed_rows(&o, "grad_expert_out", grad_expert_out, "grad_out", grad_out));
    EP_TRY(check_weights(&o, slot_weights, expert_out, grad_out, grad_slot_weights));
    int64_t capacity = ep_slot_capacity(handle, grad_expert_out);
    if (grad_slot_weights) capacity = ep_min(capacity, ep_slot_capacity(handle, grad_slot_weights));
    EpScatter scatter = {.op = &ep_op_combine_backward,
                         .rows = grad_out->data,
                         .type = grad_out->type,
                         .row_bytes = ep_tensor_row_bytes(grad_out),
                         .row_elements = ep_tensor_row_elements(grad_out),
                         .weighs = slot_weights != NULL,
                         .slot_weights = slot_weights ? slot_weights->data : NULL,
                         .takes_dots = expert_out != NULL,
                         .slot_rows = expert_out ? expert_out->data : NULL,
                         .out_rows = grad_expert_out->data,
                         .out_weights = grad_slot_weights ? grad_slot_weights->data : NULL,
                         .out_capacity = capacity, /* the tail is as long as the shorter of both */
                         .stream = stream};
    return ep_run_scatter(&o.call, handle, &scatter);
}
