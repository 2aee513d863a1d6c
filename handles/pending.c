/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/pending.h"

static const EpTensor *copy_tensor(const EpTensor *given, EpTensor *copy) {
    if (!given) return NULL;
    *copy = *given;
    return copy;
}

void ep_routing_defer(EpDeferredRouting *deferred, const EpRouting *routing) {
    const EpPlanTensors *out = routing->out;
    deferred->given = deferred->pending = 1;
    deferred->routing = *routing;
    if (!out) return;
    EpTensor *copy = deferred->tensor;
    deferred->out = (EpPlanTensors)EP_PLAN_TENSORS_INIT;
    deferred->out.expert_counts = copy_tensor(out->expert_counts, &copy[0]);
    deferred->out.expert_padded = copy_tensor(out->expert_padded, &copy[1]);
    deferred->out.expert_offsets = copy_tensor(out->expert_offsets, &copy[2]);
    deferred->out.totals = copy_tensor(out->totals, &copy[3]);
    deferred->out.source_counts = copy_tensor(out->source_counts, &copy[4]);
    deferred->out.recv_rows = copy_tensor(out->recv_rows, &copy[5]);
    deferred->out.needed_rows = copy_tensor(out->needed_rows, &copy[6]);
    deferred->out.dropped_slots = copy_tensor(out->dropped_slots, &copy[7]);
    deferred->out.source_rows = copy_tensor(out->source_rows, &copy[8]);
    deferred->routing.out = &deferred->out;
}

EpStep ep_deferred_step(const EpDeferredRouting *deferred) {
    EpStep step = {.prepared = deferred->given, .info = EP_HANDLE_INFO_INIT};
    step.info.top_k = deferred->routing.top_k;
    step.num_rows = deferred->routing.num_rows;
    step.exact = 1;
    return step;
}

static const char *const names[] = {"", "ep_dispatch", "ep_combine"};

EpStatus ep_pending_check(const EpCall *call, const EpPending *pending, EpPendingKind expected) {
    if (pending->kind == expected) return EP_OK;
    if (pending->kind == EP_PENDING_NONE)
        return ep_refuse(call, EP_ERR_ORDER, "handle", "expected %s_send before it, got none",
                         names[expected]);
    return ep_refuse(call, EP_ERR_ORDER, "handle",
                     "expected %s_wait next, since %s_send has begun, got another call",
                     names[pending->kind], names[pending->kind]);
}
