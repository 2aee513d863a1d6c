/* SPDX-License-Identifier: Apache-2.0 */
/* ep_combine in two halves. */
#include "combine/arguments.h"

static EpStatus describe_sent(const EpOperation *o, const EpTensor *expert_out,
                              const EpTensor *slot_weights, EpGather *g) {
    EP_TRY(ep_arg_slot_rows(o, "expert_out", expert_out, -1, NULL));
    EP_TRY(ep_arg_summable(&o->call, "expert_out", expert_out));
    EP_TRY(ep_arg_token_bytes(o, "expert_out", expert_out));
    if (slot_weights) EP_TRY(ep_arg_slot_values(o, "slot_weights", slot_weights));
    *g = ep_combine_describe(expert_out, slot_weights);
    g->half = EP_SEND_HALF, g->out_num_rows = o->step.num_rows;
    return EP_OK;
}

EpStatus ep_combine_send(EpHandle *handle, const EpTensor *expert_out, const EpTensor *slot_weights,
                         EpStream stream) {
    EpOperation o;
    EpGather gather;
    EP_TRY(ep_operation_begin_combine_send(&o, "ep_combine_send", handle));
    EP_TRY(describe_sent(&o, expert_out, slot_weights, &gather));
    gather.stream = stream;
    EP_TRY(ep_run_gather(&o.call, handle, &gather));
    EpFlight *flight = &handle->flight;
    flight->what = EP_FLYING_COMBINE;
    flight->step = o.step;
    flight->gather = gather;
    flight->gather.rows = NULL, flight->gather.slot_weights = NULL;
    return EP_OK;
}

EpStatus ep_combine_wait(EpHandle *handle, EpStream stream, const EpTensor *out) {
    EpOperation o;
    EP_TRY(ep_operation_begin_wait(&o, "ep_combine_wait", handle, EP_FLYING_COMBINE));
    EpGather gather = handle->flight.gather;
    EP_TRY(ep_arg_token_rows(&o, "out", out, gather.row_elements, "H"));
    EP_TRY(ep_arg_type(&o.call, "out", out, gather.type));
    EP_TRY(ep_arg_token_bytes(&o, "out", out));
    gather.half = EP_WAIT_HALF;
    gather.out_rows = out->data;
    gather.stream = stream;
    EP_TRY(ep_run_gather(&o.call, handle, &gather));
    handle->flight.what = EP_FLYING_NOTHING;
    return EP_OK;
}
