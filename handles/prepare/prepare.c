/* SPDX-License-Identifier: Apache-2.0 */
/* ep_prepare: check the arguments, then call the backend or, in latency mode, defer the routing. */
#include "handles/extras.h"

/* K of a named plan is the handle's, since calls that only read the plan must know it. */
static EpStatus check_topk_idx(const EpOperation *o, const EpTensor *t) {
    const EpCall *call = &o->call;
    const EpHandle *handle = o->handle;
    const EpGroupConfig *config = &handle->group->config;
    EP_TRY(ep_arg_tensor(call, "topk_idx", t, 2));
    EP_TRY(ep_arg_index_type(call, "topk_idx", t));
    if (t->shape[0] > config->max_tokens)
        return ep_refuse(call, EP_ERR_TOKENS, "topk_idx",
                         "expected at most max_tokens = %d tokens, got %lld", config->max_tokens,
                         (long long)t->shape[0]);
    if (t->shape[1] < 1 || t->shape[1] > handle->shape.max_top_k)
        return ep_refuse(call, EP_ERR_TOP_K, "topk_idx",
                         "expected 1 .. %d experts per token, got %lld", handle->shape.max_top_k,
                         (long long)t->shape[1]);
    if (handle->top_k != EP_DEFAULT)
        EP_TRY(ep_arg_dim(call, "topk_idx", t, 1, handle->top_k, "the handle's top_k"));
    else if (o->plan.is_named)
        EP_TRY(ep_arg_dim(call, "topk_idx", t, 1, handle->shape.max_top_k,
                          "K (the group's max_top_k, since the handle has no top_k)"));
    return EP_OK;
}

/* The backend checks the value, which may lie in device memory. */
static EpStatus check_num_tokens(const EpCall *call, const EpTensor *t) {
    if (!t) return EP_OK;
    EP_TRY(ep_arg_tensor(call, "num_tokens", t, 1));
    EP_TRY(ep_arg_index_type(call, "num_tokens", t));
    return ep_arg_dim(call, "num_tokens", t, 0, 1, "size");
}

static EpStatus check_vector(const EpCall *call, const char *argument, const EpTensor *t,
                             int64_t count) {
    if (!t) return EP_OK;
    EP_TRY(ep_arg_tensor(call, argument, t, 1));
    EP_TRY(ep_arg_index_type(call, argument, t));
    return ep_arg_dim(call, argument, t, 0, count, "size");
}

static EpStatus check_source_counts(const EpCall *call, const EpHandle *handle, const EpTensor *t) {
    const char *argument = "out.source_counts";
    if (!t) return EP_OK;
    if (!(handle->group->backend->offers & EP_OFFERS_SOURCE_COUNTS))
        return ep_refuse(call, EP_ERR_UNSUPPORTED, argument,
                         "expected NULL, since this backend does not count by source yet, got a "
                         "tensor");
    EP_TRY(ep_arg_tensor(call, argument, t, 2));
    EP_TRY(ep_arg_index_type(call, argument, t));
    EP_TRY(ep_arg_dim(call, argument, t, 0, handle->shape.num_local, "local experts"));
    return ep_arg_dim(call, argument, t, 1, handle->shape.num_ranks, "ranks");
}

/* Copy and check the caller's struct, which may have the size of an earlier version. NULL: none. */
static EpStatus read_out(const EpCall *call, const EpHandle *handle, const EpPlanTensors *given,
                         EpPlanTensors *out) {
    int64_t local = handle->shape.num_local;
    *out = (EpPlanTensors)EP_PLAN_TENSORS_INIT;
    if (!given) return EP_OK;
    EP_TRY(ep_read_struct(call, "out", given, EP_FIRST_SIZE(EpPlanTensors, totals), out));
    EP_TRY(check_vector(call, "out.expert_counts", out->expert_counts, local));
    EP_TRY(check_vector(call, "out.expert_padded", out->expert_padded, local));
    const EpTensor *offsets = out->expert_offsets;
    int lacks_end = offsets && offsets->ndim == 1 && offsets->shape[0] == local;
    EP_TRY(check_vector(call, "out.expert_offsets", offsets, local + !lacks_end));
    EP_TRY(check_vector(call, "out.recv_rows", out->recv_rows, 1));
    EP_TRY(check_vector(call, "out.needed_rows", out->needed_rows, 1));
    EP_TRY(check_vector(call, "out.dropped_slots", out->dropped_slots, 1));
    EP_TRY(check_vector(call, "out.source_rows", out->source_rows, handle->shape.num_ranks));
    EP_TRY(check_vector(call, "out.totals", out->totals, 3));
    return check_source_counts(call, handle, out->source_counts);
}

/* Check that the backend reaches all tensors. topk_idx with LIBEP_CHECK=rows, too. */
static EpStatus check_reach(const EpCall *call, const EpHandle *h, const EpTensor *topk_idx,
                            const EpTensor *num_tokens, const EpPlanTensors *out) {
    const EpCheck all = EP_CHECK_ALL;
    EP_TRY(ep_arg_reachable(call, h, EP_CHECK_ROWS, "topk_idx", topk_idx));
    EP_TRY(ep_arg_reachable(call, h, all, "topk_idx", topk_idx));
    EP_TRY(ep_arg_reachable(call, h, all, "num_tokens", num_tokens));
    EP_TRY(ep_arg_reachable(call, h, all, "out.source_counts", out->source_counts));
    EP_TRY(ep_arg_reachable(call, h, all, "out.expert_counts", out->expert_counts));
    EP_TRY(ep_arg_reachable(call, h, all, "out.expert_padded", out->expert_padded));
    EP_TRY(ep_arg_reachable(call, h, all, "out.expert_offsets", out->expert_offsets));
    EP_TRY(ep_arg_reachable(call, h, all, "out.recv_rows", out->recv_rows));
    EP_TRY(ep_arg_reachable(call, h, all, "out.needed_rows", out->needed_rows));
    EP_TRY(ep_arg_reachable(call, h, all, "out.dropped_slots", out->dropped_slots));
    EP_TRY(ep_arg_reachable(call, h, all, "out.source_rows", out->source_rows));
    return ep_arg_reachable(call, h, all, "out.totals", out->totals);
}

EpStatus ep_routing_describe(const EpOperation *o, const EpPrepare *given, EpPlanTensors *tensors,
                             EpRouting *routing) {
    const EpCall *call = &o->call;
    const EpHandle *handle = o->handle;
    const EpTensor *topk_idx = given->topk_idx, *num_tokens = given->num_tokens;
    EP_TRY(check_topk_idx(o, topk_idx));
    EP_TRY(check_num_tokens(call, num_tokens));
    EP_TRY(read_out(call, handle, given->out, tensors));
    EP_TRY(check_reach(call, handle, topk_idx, num_tokens, tensors));
    *routing = (EpRouting){.plan = o->plan,
                           .topk_idx = topk_idx->data,
                           .idx_type = topk_idx->type,
                           .num_rows = topk_idx->shape[0],
                           .top_k = topk_idx->shape[1],
                           .num_tokens = num_tokens ? num_tokens->data : NULL,
                           .num_tokens_type = num_tokens ? num_tokens->type : EP_TYPE_INT64,
                           .out = tensors,
                           .op = ep_handle_is_latency(handle) ? &ep_op_route : &ep_op_prepare,
                           .call = call->name};
    return EP_OK;
}

static EpStatus refuse_source(const EpCall *call, const char *argument, const EpTensor *t) {
    if (!t) return EP_OK;
    return ep_refuse(call, EP_ERR_UNSUPPORTED, argument,
                     "expected NULL in a dispatch, since a plan does not hold counts by source, "
                     "got a tensor");
}

EpStatus ep_numbers_describe(const EpOperation *o, const EpPrepare *given, EpPlanTensors *tensors,
                             EpRouting *routing) {
    const EpCall *call = &o->call;
    if (given->topk_idx || given->num_tokens)
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "prepare",
                         "expected outputs alone in throughput mode, where ep_prepare makes the "
                         "plan, got a routing");
    EP_TRY(read_out(call, o->handle, given->out, tensors));
    EP_TRY(refuse_source(call, "out.source_counts", tensors->source_counts));
    EP_TRY(refuse_source(call, "out.source_rows", tensors->source_rows));
    EP_TRY(check_reach(call, o->handle, NULL, NULL, tensors));
    *routing = (EpRouting){.plan = o->plan, .top_k = o->step.info.top_k, .out = tensors};
    return EP_OK;
}

/* Only throughput mode waits here. */
static EpStatus prepare(const char *name, EpHandle *handle, const EpTensor *plan,
                        const EpPrepare *given, EpStream stream, const EpExtras *given_extras) {
    EpOperation o;
    EpPlanTensors tensors;
    EpRouting routing;
    EpExtras extras;
    EP_TRY(ep_operation_begin_plan(&o, name, handle, plan));
    unsigned takes = ep_handle_is_latency(handle) ? 0 : EP_TAKES_WAITS;
    EP_TRY(ep_extras_read(&o, given_extras, takes, &extras));
    EP_TRY(ep_routing_describe(&o, given, &tensors, &routing));
    EP_TRY(ep_extras_statistics(&o, &extras, 0, &routing.stats));
    routing.stream = stream;
    if (!ep_handle_is_latency(handle)) return ep_run_prepare(&o, &routing);
    ep_routing_defer(&handle->deferred, &routing);
    ep_group_accept(handle->group);
    return EP_OK;
}

EpStatus ep_prepare(EpHandle *handle, const EpTensor *plan, const EpTensor *topk_idx,
                    const EpTensor *num_tokens, EpStream stream, const EpPlanTensors *out) {
    const EpPrepare given = {sizeof(given), topk_idx, num_tokens, out};
    return prepare("ep_prepare", handle, plan, &given, stream, NULL);
}

EpStatus ep_prepare_with(EpHandle *handle, const EpTensor *plan, const EpTensor *topk_idx,
                         const EpTensor *num_tokens, EpStream stream, const EpPlanTensors *out,
                         const EpExtras *extras) {
    const EpPrepare given = {sizeof(given), topk_idx, num_tokens, out};
    return prepare("ep_prepare_with", handle, plan, &given, stream, extras);
}
