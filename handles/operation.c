/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/operation.h"

EpStatus ep_operation_begin(EpOperation *o, const char *name, const EpHandle *handle) {
    o->call = (EpCall){name, -1};
    o->handle = handle;
    return ep_handle_enter_prepared(&o->call, handle, &o->step);
}

/* Begin an operation without reading its plan. */
static EpStatus begin(EpOperation *o, const char *name, const EpHandle *handle) {
    o->call = (EpCall){name, -1};
    o->handle = handle;
    return ep_handle_enter(&o->call, handle);
}

EpStatus ep_operation_begin_dispatch(EpOperation *o, const char *name, const EpHandle *handle) {
    EP_TRY(begin(o, name, handle));
    if (!ep_handle_is_latency(handle)) return ep_handle_read(&o->call, handle, &o->step);
    o->step = ep_deferred_step(&handle->deferred);
    if (o->step.prepared) return EP_OK;
    return ep_refuse(&o->call, EP_ERR_NOT_PREPARED, "handle",
                     "expected a prepared handle, got one without a routing");
}

EpStatus ep_operation_begin_dispatch_send(EpOperation *o, const char *name,
                                          const EpHandle *handle) {
    EP_TRY(begin(o, name, handle));
    EP_TRY(ep_handle_check_phases(&o->call, handle));
    return ep_operation_begin_dispatch(o, name, handle);
}

EpStatus ep_operation_begin_combine_send(EpOperation *o, const char *name, const EpHandle *handle) {
    EP_TRY(begin(o, name, handle));
    EP_TRY(ep_handle_check_phases(&o->call, handle));
    return ep_handle_read(&o->call, handle, &o->step);
}

EpStatus ep_operation_begin_receive(EpOperation *o, const char *name, const EpHandle *handle,
                                    EpPendingKind kind) {
    o->call = (EpCall){name, -1};
    o->handle = handle;
    EP_TRY(ep_handle_enter_receive(&o->call, handle, kind));
    o->step = handle->pending.step;
    return EP_OK;
}

const EpRouting *ep_operation_routing(const EpOperation *o, EpStream stream, EpRouting *out) {
    if (!ep_handle_is_latency(o->handle)) return NULL;
    *out = o->handle->deferred.routing;
    out->stream = stream, out->call = o->call.name;
    return out;
}

EpStatus ep_operation_begin_backward(EpOperation *o, const char *name, const EpHandle *handle) {
    EP_TRY(begin(o, name, handle));
    if (!ep_handle_is_latency(handle)) return ep_handle_read(&o->call, handle, &o->step);
    return ep_refuse(&o->call, EP_ERR_UNSUPPORTED, "handle",
                     "expected one in throughput mode, since latency mode has no backward, got one "
                     "in latency mode");
}

/* ---- arguments ----------------------------------------------------------------------------- */

EpStatus ep_arg_reachable(const EpCall *call, const EpHandle *handle, EpCheck check,
                          const char *argument, const EpTensor *t) {
    const EpGroup *group = handle->group;
    if (!group->backend->check_pointer || group->settings.check != check) return EP_OK;
    if (!t || ep_tensor_is_empty(t)) return EP_OK;
    return group->backend->check_pointer(group, call, argument, t->data);
}

static EpStatus check_all(const EpOperation *o, const char *argument, const EpTensor *t) {
    return ep_arg_reachable(&o->call, o->handle, EP_CHECK_ALL, argument, t);
}

EpStatus ep_arg_token_rows(const EpOperation *o, const char *argument, const EpTensor *t,
                           int64_t columns, const char *what) {
    EP_TRY(ep_arg_tensor(&o->call, argument, t, 2));
    if (o->step.exact)
        EP_TRY(ep_arg_dim(&o->call, argument, t, 0, o->step.num_rows, "T"));
    else if (t->shape[0] < o->step.info.num_tokens)
        return ep_refuse(&o->call, EP_ERR_SHAPE, argument,
                         "expected at least num_tokens = %lld rows, got %lld",
                         (long long)o->step.info.num_tokens, (long long)t->shape[0]);
    if (columns >= 0) EP_TRY(ep_arg_dim(&o->call, argument, t, 1, columns, what));
    return check_all(o, argument, t);
}

/* Check dimension `dim`, the rows of a receive buffer. With a static capacity it must hold all of
 * it, since a step captured in a graph may fill it. With exact sizing it must hold this step. */
static EpStatus check_rows_in(const EpOperation *o, const char *argument, const EpTensor *t,
                              int dim) {
    const EpPlanShape *s = &o->handle->shape;
    if (s->layout == EP_LAYOUT_BATCHED) {
        EP_TRY(ep_arg_dim(&o->call, argument, t, 0, s->num_local, "local experts"));
        return ep_arg_dim(&o->call, argument, t, dim, s->rows_per_expert, "rows_per_expert");
    }
    if (!s->capacity && !o->step.known)
        return ep_refuse(&o->call, EP_ERR_NOT_PREPARED, argument,
                         "expected ep_prepare to have finished, since rows are sized exactly, got "
                         "it under way");
    int64_t needed = s->capacity ? s->capacity : o->step.info.recv_rows;
    if (t->shape[dim] >= needed) return EP_OK;
    return ep_refuse(&o->call, EP_ERR_BUFFER_SIZE, argument,
                     "expected at least %lld rows, got %lld", (long long)needed,
                     (long long)t->shape[dim]);
}

/* Returns the number of dimensions up to that of the rows, this one included. */
static int32_t slot_dims(const EpOperation *o) {
    return o->handle->shape.layout == EP_LAYOUT_BATCHED ? 2 : 1;
}

/* Check the rows of a tensor whose rows are contiguous. */
static EpStatus check_rows(const EpOperation *o, const char *argument, const EpTensor *t) {
    return check_rows_in(o, argument, t, slot_dims(o) - 1);
}

EpStatus ep_arg_slot_rows(const EpOperation *o, const char *argument, const EpTensor *t,
                          int64_t columns, const char *what) {
    int32_t ndim = slot_dims(o) + 1;
    EP_TRY(ep_arg_tensor(&o->call, argument, t, ndim));
    EP_TRY(check_rows(o, argument, t));
    if (columns >= 0) EP_TRY(ep_arg_dim(&o->call, argument, t, ndim - 1, columns, what));
    return check_all(o, argument, t);
}

EpStatus ep_arg_slot_scales(const EpOperation *o, const char *argument, const EpTensor *t,
                            int64_t columns) {
    int32_t ndim = slot_dims(o) + 1;
    if (o->handle->shape.scale_order == EP_SCALES_BY_ROW)
        return ep_arg_slot_rows(o, argument, t, columns, "S");
    EP_TRY(ep_arg_tensor(&o->call, argument, t, ndim));
    EP_TRY(check_rows_in(o, argument, t, ndim - 1));
    EP_TRY(ep_arg_dim(&o->call, argument, t, ndim - 2, columns, "S"));
    return check_all(o, argument, t);
}

EpStatus ep_arg_slot_values(const EpOperation *o, const char *argument, const EpTensor *t) {
    EP_TRY(ep_arg_tensor(&o->call, argument, t, slot_dims(o)));
    EP_TRY(ep_arg_float(&o->call, argument, t));
    EP_TRY(check_rows(o, argument, t));
    return check_all(o, argument, t);
}

EpStatus ep_arg_slot_weights(const EpOperation *o, const char *argument, const EpTensor *t) {
    if (o->handle->shape.layout != EP_LAYOUT_FLAT) return ep_arg_slot_values(o, argument, t);
    EP_TRY(ep_arg_slot_rows(o, argument, t, o->step.info.top_k, "K"));
    return ep_arg_float(&o->call, argument, t);
}

EpStatus ep_arg_token_bytes(const EpOperation *o, const char *argument, const EpTensor *t) {
    int64_t most = o->handle->group->config.max_row_bytes;
    EP_TRY(ep_arg_row_bytes(&o->call, argument, t, 16, most));
    return ep_arg_reachable(&o->call, o->handle, EP_CHECK_ROWS, argument, t);
}

EpStatus ep_arg_summed_rows(const EpOperation *o, const char *slots_argument, const EpTensor *slots,
                            const char *tokens_argument, const EpTensor *tokens) {
    EP_TRY(ep_arg_token_rows(o, tokens_argument, tokens, -1, NULL));
    EP_TRY(ep_arg_summable(&o->call, tokens_argument, tokens));
    EP_TRY(ep_arg_token_bytes(o, tokens_argument, tokens));
    EP_TRY(ep_arg_slot_rows(o, slots_argument, slots, ep_tensor_row_elements(tokens), "H"));
    EP_TRY(ep_arg_type(&o->call, slots_argument, slots, tokens->type));
    return ep_arg_token_bytes(o, slots_argument, slots);
}

EpStatus ep_arg_pair(const EpOperation *o, const char *argument, const void *t, const char *cause,
                     const void *given) {
    if (!t == !given) return EP_OK;
    return ep_refuse(&o->call, EP_ERR_NULL, argument, "expected %s since %s is %s, got %s",
                     given ? "a tensor" : "NULL", cause, given ? "given" : "NULL",
                     given ? "NULL" : "a tensor");
}

int64_t ep_slot_capacity(const EpHandle *handle, const EpTensor *t) {
    return handle->shape.layout == EP_LAYOUT_BATCHED ? t->shape[0] * t->shape[1] : t->shape[0];
}

/* ---- running ------------------------------------------------------------------------------- */

EpStatus ep_run_prepare(const EpCall *call, EpHandle *handle, const EpRouting *routing) {
    int before = ep_group_enter(handle->group, call->name);
    EpStatus status = handle->group->backend->prepare(handle, routing);
    ep_group_leave(handle->group, before);
    return status;
}

EpStatus ep_run_scatter(const EpCall *call, EpHandle *handle, const EpScatter *scatter) {
    int before = ep_group_enter(handle->group, call->name);
    EpStatus status = handle->group->backend->scatter(handle, scatter);
    ep_group_leave(handle->group, before);
    if (status == EP_OK && scatter->routing) handle->deferred.pending = 0;
    return status;
}

EpStatus ep_run_gather(const EpCall *call, EpHandle *handle, const EpGather *gather) {
    int before = ep_group_enter(handle->group, call->name);
    EpStatus status = handle->group->backend->gather(handle, gather);
    ep_group_leave(handle->group, before);
    return status;
}
