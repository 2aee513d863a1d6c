/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ep_combine, whole and in two phases, and ep_combine_backward: check the arguments, describe the
 * movement, hand it to the backend.
 */
#include "handles/operation.h"

/* ---- forward ------------------------------------------------------------------------------- */

/* Describe the inputs, which have been checked. slot_weights may be NULL. */
static EpGatherTensors describe_inputs(const EpTensor *expert_out, const EpTensor *slot_weights) {
    return (EpGatherTensors){.rows = expert_out->data,
                             .type = expert_out->type,
                             .row_bytes = ep_tensor_row_bytes(expert_out),
                             .row_elements = ep_tensor_row_elements(expert_out),
                             .weighs = slot_weights != NULL,
                             .slot_weights = slot_weights ? slot_weights->data : NULL};
}

EpStatus ep_combine(EpHandle *handle, const EpTensor *expert_out, const EpTensor *slot_weights,
                    EpStream stream, const EpTensor *out) {
    EpOperation o;
    EP_TRY(ep_operation_begin(&o, "ep_combine", handle));
    EP_TRY(ep_arg_summed_rows(&o, "expert_out", expert_out, "out", out));
    if (slot_weights) EP_TRY(ep_arg_slot_values(&o, "slot_weights", slot_weights));
    EpGather gather = {.op = &ep_op_combine, .stream = stream};
    gather.t = describe_inputs(expert_out, slot_weights);
    gather.t.out_rows = out->data, gather.t.out_num_rows = out->shape[0];
    return ep_run_gather(&o.call, handle, &gather);
}

EpStatus ep_combine_send(EpHandle *handle, const EpTensor *expert_out, const EpTensor *slot_weights,
                         EpStream stream) {
    EpOperation o;
    EP_TRY(ep_operation_begin_combine_send(&o, "ep_combine_send", handle));
    EP_TRY(ep_arg_slot_rows(&o, "expert_out", expert_out, -1, NULL));
    EP_TRY(ep_arg_summable(&o.call, "expert_out", expert_out));
    EP_TRY(ep_arg_token_bytes(&o, "expert_out", expert_out));
    if (slot_weights) EP_TRY(ep_arg_slot_values(&o, "slot_weights", slot_weights));
    EpGather gather = {.op = &ep_op_combine, .phase = EP_PHASE_SEND, .stream = stream};
    gather.t = describe_inputs(expert_out, slot_weights);
    gather.t.out_num_rows = o.step.num_rows;
    EP_TRY(ep_run_gather(&o.call, handle, &gather));
    EpPending *pending = &handle->pending;
    pending->kind = EP_PENDING_COMBINE;
    pending->step = o.step;
    pending->gather = gather;
    pending->gather.t.rows = NULL, pending->gather.t.slot_weights = NULL;
    return EP_OK;
}

EpStatus ep_combine_wait(EpHandle *handle, EpStream stream, const EpTensor *out) {
    EpOperation o;
    EP_TRY(ep_operation_begin_receive(&o, "ep_combine_wait", handle, EP_PENDING_COMBINE));
    EpGather gather = handle->pending.gather;
    EP_TRY(ep_arg_token_rows(&o, "out", out, gather.t.row_elements, "H"));
    EP_TRY(ep_arg_type(&o.call, "out", out, gather.t.type));
    EP_TRY(ep_arg_token_bytes(&o, "out", out));
    gather.phase = EP_PHASE_RECEIVE;
    gather.t.out_rows = out->data;
    gather.stream = stream;
    EP_TRY(ep_run_gather(&o.call, handle, &gather));
    handle->pending.kind = EP_PENDING_NONE;
    return EP_OK;
}

/* ---- backward ------------------------------------------------------------------------------ */

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
    /* The shorter tensor limits zero_tail. */
    int64_t capacity = ep_slot_capacity(handle, grad_expert_out);
    if (grad_slot_weights) capacity = ep_min(capacity, ep_slot_capacity(handle, grad_slot_weights));
    EpScatterTensors tensors = {.rows = grad_out->data,
                                .type = grad_out->type,
                                .source_row_bytes = ep_tensor_row_bytes(grad_out),
                                .row_bytes = ep_tensor_row_bytes(grad_out),
                                .row_elements = ep_tensor_row_elements(grad_out),
                                .weighs = slot_weights != NULL,
                                .slot_weights = slot_weights ? slot_weights->data : NULL,
                                .takes_dots = expert_out != NULL,
                                .slot_rows = expert_out ? expert_out->data : NULL,
                                .out_rows = grad_expert_out->data,
                                .out_weights = grad_slot_weights ? grad_slot_weights->data : NULL,
                                .out_capacity = capacity};
    EpScatter scatter = {.op = &ep_op_combine_backward, .t = tensors, .stream = stream};
    return ep_run_scatter(&o.call, handle, &scatter);
}
