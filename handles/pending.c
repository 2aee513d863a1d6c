/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/handle.h"

/* ---- routing ------------------------------------------------------------------------------- */

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
    EpPlanTensors kept = EP_PLAN_TENSORS_INIT;
    kept.expert_counts = copy_tensor(out->expert_counts, &copy[0]);
    kept.expert_padded = copy_tensor(out->expert_padded, &copy[1]);
    kept.expert_offsets = copy_tensor(out->expert_offsets, &copy[2]);
    kept.totals = copy_tensor(out->totals, &copy[3]);
    kept.source_counts = copy_tensor(out->source_counts, &copy[4]);
    kept.recv_rows = copy_tensor(out->recv_rows, &copy[5]);
    kept.needed_rows = copy_tensor(out->needed_rows, &copy[6]);
    kept.dropped_slots = copy_tensor(out->dropped_slots, &copy[7]);
    kept.source_rows = copy_tensor(out->source_rows, &copy[8]);
    deferred->out = kept;
    deferred->routing.out = &deferred->out;
}

EpStep ep_routing_step(const EpRouting *routing) {
    EpStep step = {.prepared = 1, .info = EP_HANDLE_INFO_INIT};
    step.info.top_k = routing->top_k;
    step.num_rows = routing->num_rows;
    step.exact = 1;
    return step;
}

/* ---- pending operations -------------------------------------------------------------------- */

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

EpStatus ep_flight_find(const EpCall *call, EpHandle *handle, EpStream stream, EpInFlight *place) {
    EpGroup *group = handle->group;
    int32_t sets = group->latency_sets;
    *place = (EpInFlight){.is_captured = 0};
    if (group->backend->captures)
        EP_TRY(group->backend->captures(group, stream, &place->is_captured));
    const EpTurns *turns = &group->turns[place->is_captured];
    place->slot = (int32_t)(turns->sent % (uint32_t)sets);
    place->token = place->slot;
    if (place->is_captured) place->token = sets + (int32_t)(turns->sent % EP_CAPTURED_TOKENS);
    if (!turns->pending[place->slot]) return EP_OK;
    return ep_refuse(call, EP_ERR_ORDER, "handle",
                     "expected the operation sent %d send phases before to have been received, "
                     "since the group has %d sets of buffers (latency_sets), got it pending",
                     sets, sets);
}

void ep_flight_begin(EpHandle *handle, EpPendingKind kind, EpInFlight place) {
    EpTurns *turns = &handle->group->turns[place.is_captured];
    turns->pending[place.slot] = handle;
    turns->sent++;
    handle->pending.kind = kind;
    handle->pending.place = place;
}

void ep_flight_end(EpHandle *handle) {
    EpPending *pending = &handle->pending;
    if (pending->kind == EP_PENDING_NONE) return;
    handle->group->turns[pending->place.is_captured].pending[pending->place.slot] = NULL;
    pending->kind = EP_PENDING_NONE;
}
