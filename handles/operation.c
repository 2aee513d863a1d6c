/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/operation.h"

/* ---- beginning ----------------------------------------------------------------------------- */

EpStatus ep_operation_begin_plan(EpOperation *o, const char *name, EpHandle *handle,
                                 const EpTensor *plan) {
    *o = (EpOperation){.call = {name, -1}, .handle = handle};
    EP_TRY(ep_handle_enter(&o->call, handle));
    return ep_handle_find_plan(&o->call, handle, plan, &o->plan);
}

EpStatus ep_operation_begin(EpOperation *o, const char *name, EpHandle *handle,
                            const EpTensor *plan) {
    EP_TRY(ep_operation_begin_plan(o, name, handle, plan));
    return ep_operation_read(o);
}

EpStatus ep_operation_read(EpOperation *o) {
    EP_TRY(ep_handle_read(&o->call, o->handle, o->plan, &o->step));
    if (!o->step.exact) o->step.num_rows = -1; /* the tensors have T rows, whatever topk_idx had */
    return EP_OK;
}

EpStatus ep_operation_begin_receive(EpOperation *o, const char *name, EpHandle *handle,
                                    EpPendingKind kind) {
    *o = (EpOperation){.call = {name, -1}, .handle = handle};
    EP_TRY(ep_handle_enter_receive(&o->call, handle, kind));
    o->step = handle->pending.step;
    return EP_OK;
}

EpStatus ep_operation_begin_backward(EpOperation *o, const char *name, EpHandle *handle,
                                     const EpTensor *plan) {
    EP_TRY(ep_operation_begin_plan(o, name, handle, plan));
    if (ep_handle_is_latency(handle))
        return ep_refuse(&o->call, EP_ERR_UNSUPPORTED, "handle",
                         "expected one in throughput mode, since latency mode has no backward, got "
                         "one in latency mode");
    return ep_operation_read(o);
}

/* ---- arguments ----------------------------------------------------------------------------- */

EpStatus ep_arg_memory(const EpCall *call, const EpGroup *group, const char *argument,
                       const EpTensor *t) {
    if (!group->backend->check_pointer || group->settings.check == EP_CHECK_NONE) return EP_OK;
    if (!t || ep_tensor_is_empty(t)) return EP_OK;
    return group->backend->check_pointer(group, call, argument, t->data);
}

EpStatus ep_arg_reachable(const EpCall *call, const EpHandle *handle, EpCheck check,
                          const char *argument, const EpTensor *t) {
    if (handle->group->settings.check != check) return EP_OK;
    return ep_arg_memory(call, handle->group, argument, t);
}

static EpStatus check_all(const EpOperation *o, const char *argument, const EpTensor *t) {
    return ep_arg_reachable(&o->call, o->handle, EP_CHECK_ALL, argument, t);
}

/* Where the plan does not fix T, or only a kernel reads the plan, the first tensor gives T. */
static EpStatus take_rows(EpOperation *o, const char *argument, const EpTensor *t) {
    int32_t most = o->handle->group->config.max_tokens;
    if (o->step.num_rows >= 0) return EP_OK;
    if (!o->step.exact && t->shape[0] < o->step.info.num_tokens)
        return ep_refuse(&o->call, EP_ERR_SHAPE, argument,
                         "expected at least num_tokens = %lld rows, got %lld",
                         (long long)o->step.info.num_tokens, (long long)t->shape[0]);
    if (t->shape[0] > most)
        return ep_refuse(&o->call, EP_ERR_TOKENS, argument,
                         "expected at most max_tokens = %d tokens, got %lld", most,
                         (long long)t->shape[0]);
    o->step.num_rows = t->shape[0];
    return EP_OK;
}

EpStatus ep_arg_token_rows(EpOperation *o, const char *argument, const EpTensor *t, int64_t columns,
                           const char *what) {
    EP_TRY(ep_arg_tensor(&o->call, argument, t, 2));
    EP_TRY(take_rows(o, argument, t));
    EP_TRY(ep_arg_dim(&o->call, argument, t, 0, o->step.num_rows, "T"));
    if (columns >= 0) EP_TRY(ep_arg_dim(&o->call, argument, t, 1, columns, what));
    return check_all(o, argument, t);
}

/* Receive tensors as blocks of a fixed number of rows. */
typedef struct RecvBlocks {
    int64_t count, rows; /* rows: of a block */
    const char *count_name, *rows_name;
} RecvBlocks;

static RecvBlocks recv_blocks(const EpOperation *o) {
    const EpPlanShape *s = &o->handle->shape;
    const EpLayoutFacts *layout = ep_layout_facts(s->layout);
    int by_source = ep_has_source_blocks(s);
    return (RecvBlocks){by_source ? s->num_ranks : s->num_local,
                        by_source ? o->block_rows : s->block_rows, layout->blocks, layout->rows};
}

EpStatus ep_arg_blocks(EpOperation *o, const char *argument, const EpTensor *t) {
    const EpPlanShape *s = &o->handle->shape;
    if (!ep_has_source_blocks(s)) return EP_OK;
    EP_TRY(ep_arg_tensor(&o->call, argument, t, 3));
    int64_t rows = t->shape[1];
    int64_t least = ep_max(1, o->step.num_rows);
    if (rows < least || rows > s->max_tokens)
        return ep_refuse(&o->call, EP_ERR_SHAPE, argument,
                         "expected room for T = %lld to max_tokens = %d rows of each source in "
                         "dimension 1, got %lld",
                         (long long)least, s->max_tokens, (long long)rows);
    o->block_rows = rows;
    return EP_OK;
}

/* Check dimension `dim`, the rows of a receive buffer. With a static capacity it must hold all of
 * it, since a step captured in a graph may fill it. With exact sizing it must hold this step. */
static EpStatus check_rows_in(const EpOperation *o, const char *argument, const EpTensor *t,
                              int dim) {
    const EpPlanShape *s = &o->handle->shape;
    if (s->is_fixed) {
        RecvBlocks blocks = recv_blocks(o);
        EP_TRY(ep_arg_dim(&o->call, argument, t, 0, blocks.count, blocks.count_name));
        return ep_arg_dim(&o->call, argument, t, dim, blocks.rows, blocks.rows_name);
    }
    if (!s->capacity && o->step.checked_later) return EP_OK;
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
    return o->handle->shape.is_fixed ? 2 : 1;
}

/* Check the tiles of swizzled scales, which are whole. */
static EpStatus check_tiles(const EpOperation *o, const char *argument, const EpTensor *t,
                            int64_t columns) {
    const EpPlanShape *s = &o->handle->shape;
    int row_dim = t->ndim - 2;
    EP_TRY(ep_arg_dim(&o->call, argument, t, t->ndim - 1, ep_round_up(columns, EP_TILE_SCALES),
                      "S, rounded up to a multiple of 4"));
    if (s->is_fixed) {
        RecvBlocks blocks = recv_blocks(o);
        EP_TRY(ep_arg_dim(&o->call, argument, t, 0, blocks.count, blocks.count_name));
        return ep_arg_dim(&o->call, argument, t, row_dim, ep_round_up(blocks.rows, EP_TILE_ROWS),
                          "rows, rounded up to a multiple of 128");
    }
    if (t->shape[row_dim] % EP_TILE_ROWS)
        return ep_refuse(&o->call, EP_ERR_SHAPE, argument,
                         "expected a multiple of %d rows where scales are swizzled, got %lld",
                         EP_TILE_ROWS, (long long)t->shape[row_dim]);
    return check_rows_in(o, argument, t, row_dim);
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
    if (o->handle->shape.scale_order == EP_SCALES_SWIZZLED) {
        EP_TRY(check_tiles(o, argument, t, columns));
        return check_all(o, argument, t);
    }
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
    if (!o->handle->shape.has_rows) return ep_arg_slot_values(o, argument, t);
    EP_TRY(ep_arg_slot_rows(o, argument, t, o->step.info.top_k, "K"));
    return ep_arg_float(&o->call, argument, t);
}

EpStatus ep_arg_token_bytes(const EpOperation *o, const char *argument, const EpTensor *t) {
    int64_t most = o->handle->group->config.max_row_bytes;
    EP_TRY(ep_arg_row_bytes(&o->call, argument, t, 16, most));
    return ep_arg_reachable(&o->call, o->handle, EP_CHECK_ROWS, argument, t);
}

EpStatus ep_arg_summed_rows(EpOperation *o, const char *slots_argument, const EpTensor *slots,
                            const char *tokens_argument, const EpTensor *tokens) {
    EP_TRY(ep_arg_token_rows(o, tokens_argument, tokens, -1, NULL));
    EP_TRY(ep_arg_summable(&o->call, tokens_argument, tokens));
    EP_TRY(ep_arg_token_bytes(o, tokens_argument, tokens));
    EP_TRY(ep_arg_blocks(o, slots_argument, slots));
    EP_TRY(ep_arg_slot_rows(o, slots_argument, slots, ep_tensor_row_elements(tokens), "H"));
    EP_TRY(ep_arg_type(&o->call, slots_argument, slots, tokens->type));
    return ep_arg_token_bytes(o, slots_argument, slots);
}

EpStatus ep_arg_sum_elements(const EpOperation *o, const char *argument, const EpTensor *t) {
    int64_t elements = ep_tensor_row_elements(t);
    EpQuantFormat format = ep_quant_format(o->handle->shape.sum_quant);
    if (!format.bits || elements % ep_quant_unit(format) == 0) return EP_OK;
    return ep_refuse(&o->call, EP_ERR_ROW_BYTES, argument,
                     "expected a multiple of %d elements where sums are quantised (sum_quant), got "
                     "%lld",
                     ep_quant_unit(format), (long long)elements);
}

EpStatus ep_arg_pair(const EpOperation *o, const char *argument, const void *t, const char *cause,
                     const void *given) {
    if (!t == !given) return EP_OK;
    return ep_refuse(&o->call, EP_ERR_NULL, argument, "expected %s since %s is %s, got %s",
                     given ? "a tensor" : "NULL", cause, given ? "given" : "NULL",
                     given ? "NULL" : "a tensor");
}

int64_t ep_slot_capacity(const EpHandle *handle, const EpTensor *t) {
    return handle->shape.is_fixed ? t->shape[0] * t->shape[1] : t->shape[0];
}

/* ---- running ------------------------------------------------------------------------------- */

static int start(const EpOperation *o, int64_t tokens) {
    const EpHandle *handle = o->handle;
    return ep_group_start(handle->group, &(EpActivity){o->call.name, "handle", handle->id, tokens});
}

/* Call a function of the backend on its device and in a profiler range. */
static EpStatus run_routing(const EpOperation *o, const EpRouting *routing,
                            EpStatus (*function)(EpHandle *, const EpRouting *)) {
    int before = start(o, routing->num_rows);
    EpStatus status = function(o->handle, routing);
    ep_group_stop(o->handle->group, before, status);
    return status;
}

EpStatus ep_run_prepare(const EpOperation *o, const EpRouting *routing) {
    return run_routing(o, routing, o->handle->group->backend->prepare);
}

EpStatus ep_run_publish(const EpOperation *o, const EpRouting *routing) {
    return run_routing(o, routing, o->handle->group->backend->publish);
}

/* Find the operation's place among the sets of latency mode. */
static EpStatus find_place(const EpOperation *o, EpPhase phase, EpStream stream,
                           EpInFlight *place) {
    if (!ep_handle_is_latency(o->handle)) return EP_OK;
    *place = o->handle->pending.place;
    return phase == EP_PHASE_RECEIVE ? EP_OK : ep_flight_find(&o->call, o->handle, stream, place);
}

/* Note what an issued phase means for the handle. */
static void note_phase(const EpOperation *o, EpPhase phase, EpPendingKind kind, EpInFlight place) {
    if (phase == EP_PHASE_SEND) {
        o->handle->pending.step = o->step;
        ep_flight_begin(o->handle, kind, place);
    }
    if (phase == EP_PHASE_RECEIVE) ep_flight_end(o->handle);
}

/* Keep a send phase's description without its inputs, which may be gone when rows are received. */
static void keep_scatter(EpPending *pending, const EpScatter *scatter) {
    pending->scatter = *scatter;
    pending->scatter.t.rows = pending->scatter.t.scales = NULL;
    pending->scatter.t.topk_weights = pending->scatter.t.global_scale = NULL;
    ep_routing_defer(&pending->routing, scatter->routing);
    pending->scatter.routing = &pending->routing.routing;
}

EpStatus ep_run_scatter(const EpOperation *o, EpScatter *scatter) {
    EpHandle *handle = o->handle;
    if (scatter->phase != EP_PHASE_RECEIVE) {
        scatter->plan = o->plan;
        scatter->top_k = o->step.info.top_k, scatter->num_rows = o->step.num_rows;
    }
    EP_TRY(find_place(o, scatter->phase, scatter->stream, &scatter->place));
    int before = start(o, scatter->num_rows);
    EpStatus status = handle->group->backend->scatter(handle, scatter);
    ep_group_stop(handle->group, before, status);
    if (status != EP_OK) return status;
    if (scatter->routing && !scatter->plan.is_named) handle->deferred.pending = 0;
    if (scatter->phase == EP_PHASE_SEND) keep_scatter(&handle->pending, scatter);
    note_phase(o, scatter->phase, EP_PENDING_DISPATCH, scatter->place);
    return EP_OK;
}

EpStatus ep_run_gather(const EpOperation *o, EpGather *gather) {
    EpHandle *handle = o->handle;
    if (gather->phase != EP_PHASE_RECEIVE) {
        gather->plan = o->plan;
        gather->top_k = o->step.info.top_k, gather->num_rows = o->step.num_rows;
    }
    EP_TRY(find_place(o, gather->phase, gather->stream, &gather->place));
    int before = start(o, gather->num_rows);
    EpStatus status = handle->group->backend->gather(handle, gather);
    ep_group_stop(handle->group, before, status);
    if (status != EP_OK) return status;
    if (gather->phase == EP_PHASE_SEND) {
        handle->pending.gather = *gather;
        handle->pending.gather.t.rows = NULL, handle->pending.gather.t.slot_weights = NULL;
        handle->pending.gather.t.topk_weights = NULL;
        handle->pending.gather.t.done.words = NULL;
    }
    note_phase(o, gather->phase, EP_PENDING_COMBINE, gather->place);
    return EP_OK;
}

EpStatus ep_refuse_cuts(EpGroup *group) {
    EpFinding finding = EP_FINDING_INIT;
    if (ep_mask_is_empty(&group->cut)) return EP_OK;
    int32_t r = ep_mask_lowest(&group->cut);
    finding.status = EP_ERR_TIMEOUT, finding.rank = group->rank, finding.peer = r;
    finding.count = 1;
    ep_fail(EP_ERR_TIMEOUT,
            "rank %d: throughput mode: expected no rank that latency mode has cut, got rank %d",
            group->rank, r);
    return ep_group_suspend(group, &finding);
}
