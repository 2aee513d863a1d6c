/* SPDX-License-Identifier: Apache-2.0 */
/* ep_combine: check the arguments, then gather. */
#include "handles/ops.h"

EpStatus ep_combine(EpHandle *handle, const EpTensor *expert_out, const EpTensor *slot_weights,
                    EpStream stream, const EpTensor *out) {
    EpOperation o;
    EP_TRY(ep_operation_begin(&o, "ep_combine", handle));
    EP_TRY(ep_arg_summed_rows(&o, "expert_out", expert_out, "out", out));
    if (slot_weights) EP_TRY(ep_arg_slot_values(&o, "slot_weights", slot_weights));
    EpGather gather = {.op = &ep_op_combine,
                       .rows = expert_out->data,
                       .type = expert_out->type,
                       .row_bytes = ep_tensor_row_bytes(expert_out),
                       .row_elements = ep_tensor_row_elements(expert_out),
                       .weighs = slot_weights != NULL,
                       .slot_weights = slot_weights ? slot_weights->data : NULL,
                       .out_rows = out->data,
                       .out_num_rows = out->shape[0],
                       .stream = stream};
    return ep_run_gather(&o.call, handle, &gather);
}
