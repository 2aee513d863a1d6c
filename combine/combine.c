/* SPDX-License-Identifier: Apache-2.0 */
/* ep_combine: check the arguments, then gather. */
#include "combine/arguments.h"

EpStatus ep_combine(EpHandle *handle, const EpTensor *expert_out, const EpTensor *slot_weights,
                    EpStream stream, const EpTensor *out) {
    EpOperation o;
    EP_TRY(ep_operation_begin(&o, "ep_combine", handle));
    EP_TRY(ep_arg_summed_rows(&o, "expert_out", expert_out, "out", out));
    if (slot_weights) EP_TRY(ep_arg_slot_values(&o, "slot_weights", slot_weights));
    EpGather gather = ep_combine_describe(expert_out, slot_weights);
    gather.out_rows = out->data, gather.out_num_rows = out->shape[0];
    gather.stream = stream;
    return ep_run_gather(&o.call, handle, &gather);
}
