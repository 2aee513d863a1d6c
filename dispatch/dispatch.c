/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ep_dispatch, whole and in two phases, and ep_dispatch_backward: check the arguments, describe the
 * movement, hand it to the backend.
 */
#include "handles/extras.h"
#include "handles/quantised.h"

typedef struct Inputs {
    const EpTensor *tokens, *topk_weights, *scales;
} Inputs;

typedef struct Outputs {
    const EpTensor *tokens, *topk_weights, *scales, *topk_idx;
} Outputs;

/* ---- inputs -------------------------------------------------------------------------------- */

static int has_quant(const EpOperation *o) {
    return ep_quant_format(o->handle->shape.quant).bits != 0;
}

/* Check and describe rows of any type that travel unchanged. */
static EpStatus describe_tokens(EpOperation *o, const EpTensor *tokens, EpScatterTensors *s) {
    EP_TRY(ep_arg_token_rows(o, "tokens", tokens, -1, NULL));
    EP_TRY(ep_arg_token_bytes(o, "tokens", tokens));
    s->rows = tokens->data;
    s->type = s->source_type = tokens->type;
    s->row_bytes = s->source_row_bytes = ep_tensor_row_bytes(tokens);
    s->row_elements = ep_tensor_row_elements(tokens);
    return EP_OK;
}

static EpStatus describe_weights(EpOperation *o, const EpTensor *weights, EpScatterTensors *s) {
    if (!weights) return EP_OK;
    EP_TRY(ep_arg_token_rows(o, "topk_weights", weights, o->step.info.top_k, "K"));
    EP_TRY(ep_arg_float(&o->call, "topk_weights", weights));
    s->carries_weights = 1;
    s->topk_weights = weights->data;
    return EP_OK;
}

static EpStatus describe_scales(EpOperation *o, const EpTensor *scales, EpScatterTensors *s) {
    if (!scales) return EP_OK;
    if (has_quant(o))
        return ep_refuse(&o->call, EP_ERR_UNSUPPORTED, "scales",
                         "expected NULL on a handle that quantises, got a tensor");
    if (!o->handle->group->config.max_scale_bytes)
        return ep_refuse(&o->call, EP_ERR_ROW_BYTES, "scales",
                         "expected NULL, since config.max_scale_bytes is 0, got a tensor");
    EP_TRY(ep_arg_token_rows(o, "scales", scales, -1, NULL));
    EP_TRY(
        ep_arg_row_bytes(&o->call, "scales", scales, 4, o->handle->group->config.max_scale_bytes));
    s->scales = scales->data;
    s->scale_map.count = ep_tensor_row_elements(scales);
    s->scale_type = scales->type;
    if (o->handle->shape.scale_order == EP_SCALES_SWIZZLED && ep_type_bytes(scales->type) != 1)
        return ep_refuse(&o->call, EP_ERR_TYPE, "scales",
                         "expected elements of one byte where scales are swizzled, got %s",
                         ep_type_name(scales->type));
    return EP_OK;
}

static EpStatus describe_inputs(EpOperation *o, const Inputs *in, EpScatter *scatter) {
    *scatter = (EpScatter){.op = &ep_op_dispatch};
    EpScatterTensors *s = &scatter->t;
    EP_TRY(describe_tokens(o, in->tokens, s));
    if (has_quant(o))
        EP_TRY(ep_describe_quantised(o, "tokens", in->tokens,
                                     ep_quant_format(o->handle->shape.quant), s));
    EP_TRY(describe_weights(o, in->topk_weights, s));
    EP_TRY(describe_scales(o, in->scales, s));
    ep_describe_scale_order(o, s);
    return EP_OK;
}

/* ---- outputs ------------------------------------------------------------------------------- */

static EpStatus describe_recv_tokens(EpOperation *o, const EpTensor *t, EpScatterTensors *s) {
    int64_t width = s->row_bytes / (int64_t)ep_type_bytes(s->type);
    EP_TRY(ep_arg_blocks(o, "recv_tokens", t));
    s->block_rows = o->block_rows;
    EP_TRY(ep_arg_slot_rows(o, "recv_tokens", t, width, "H"));
    EP_TRY(ep_arg_type(&o->call, "recv_tokens", t, s->type));
    EP_TRY(ep_arg_token_bytes(o, "recv_tokens", t));
    s->out_rows = t->data;
    s->out_capacity = ep_slot_capacity(o->handle, t);
    return EP_OK;
}

static EpStatus describe_recv_weights(const EpOperation *o, const EpTensor *t,
                                      EpScatterTensors *s) {
    EP_TRY(ep_arg_pair(o, "recv_topk_weights", t, "topk_weights", s->carries_weights ? s : NULL));
    if (!t) return EP_OK;
    EP_TRY(ep_arg_slot_weights(o, "recv_topk_weights", t));
    s->out_weights = t->data;
    s->out_capacity = ep_min(s->out_capacity, ep_slot_capacity(o->handle, t));
    return EP_OK;
}

static EpStatus describe_recv_scales(const EpOperation *o, const EpTensor *t, EpScatterTensors *s) {
    const char *cause = has_quant(o) ? "the handle's quant" : "scales";
    return ep_describe_recv_scales(o, "recv_scales", t, cause, s);
}

static EpStatus describe_recv_idx(const EpOperation *o, const EpTensor *t, EpScatterTensors *s) {
    if (!t) return EP_OK;
    const EpHandle *handle = o->handle;
    if (!handle->shape.has_rows)
        return ep_refuse(&o->call, EP_ERR_UNSUPPORTED, "recv_topk_idx",
                         "expected NULL outside the %s layouts, got a tensor",
                         ep_layout_names(EP_SLOTS_OF_ROWS, " and ").text);
    EP_TRY(ep_arg_slot_rows(o, "recv_topk_idx", t, o->step.info.top_k, "K"));
    EP_TRY(ep_arg_index_type(&o->call, "recv_topk_idx", t));
    s->out_idx = t->data, s->idx_type = t->type;
    if (handle->shape.expert_ids == EP_IDS_GLOBAL)
        s->first_id = ep_placement_first(&handle->group->placement, handle->group->rank);
    s->out_capacity = ep_min(s->out_capacity, ep_slot_capacity(handle, t));
    return EP_OK;
}

/* Check and describe the outputs. The shortest one limits zero_tail (out_capacity). */
static EpStatus describe_outputs(EpOperation *o, const Outputs *out, EpScatterTensors *s) {
    EP_TRY(describe_recv_tokens(o, out->tokens, s));
    EP_TRY(describe_recv_weights(o, out->topk_weights, s));
    EP_TRY(describe_recv_scales(o, out->scales, s));
    EP_TRY(describe_recv_idx(o, out->topk_idx, s));
    s->num_slots = s->out_capacity;
    return EP_OK;
}

/* ---- forward ------------------------------------------------------------------------------- */

/** The routing of a dispatch in latency mode, or the numbers of the plan that one in throughput
 * mode publishes; and space for what it refers to. */
typedef struct Route {
    int publishes;
    EpPlanTensors tensors;
    EpRouting routing;
} Route;

static EpStatus find_numbers(const EpOperation *o, const EpPrepare *given, Route *route) {
    EpPrepare prepare = EP_PREPARE_INIT;
    route->publishes = given != NULL;
    if (!given) return EP_OK;
    EP_TRY(ep_read_struct(&o->call, "prepare", given, EP_FIRST_SIZE(EpPrepare, out), &prepare));
    return ep_numbers_describe(o, &prepare, &route->tensors, &route->routing);
}

/* Find the routing: the call's own, or that of the handle's last ep_prepare. */
static EpStatus find_routing(EpOperation *o, const EpPrepare *given, Route *route) {
    const EpDeferredRouting *deferred = &o->handle->deferred;
    EpPrepare prepare = EP_PREPARE_INIT;
    if (given) {
        EP_TRY(ep_read_struct(&o->call, "prepare", given, EP_FIRST_SIZE(EpPrepare, out), &prepare));
        return ep_routing_describe(o, &prepare, &route->tensors, &route->routing);
    }
    if (!deferred->given)
        return ep_refuse(&o->call, EP_ERR_NOT_PREPARED, "handle",
                         "expected a prepared handle, got one without a routing");
    if (o->plan.is_named && deferred->routing.top_k != ep_handle_top_k(o->handle))
        return ep_refuse(
            &o->call, EP_ERR_SHAPE, "plan",
            "expected NULL, since K of a named plan is %d (the handle's top_k, or the "
            "group's max_top_k) and ep_prepare was given %lld experts per token, got a "
            "tensor",
            ep_handle_top_k(o->handle), (long long)deferred->routing.top_k);
    route->routing = deferred->routing;
    route->routing.plan = o->plan;
    route->routing.call = o->call.name;
    return EP_OK;
}

/* Begin a dispatch: in latency mode it makes its plan, in throughput mode it reads one. */
static EpStatus begin_dispatch(EpOperation *o, const char *name, EpHandle *handle,
                               const EpTensor *plan, const EpPrepare *prepare, Route *route) {
    EP_TRY(ep_operation_begin_plan(o, name, handle, plan));
    if (!ep_handle_is_latency(handle)) {
        EP_TRY(ep_operation_read(o));
        return find_numbers(o, prepare, route);
    }
    route->publishes = 0;
    EP_TRY(find_routing(o, prepare, route));
    o->step = ep_routing_step(&route->routing);
    return EP_OK;
}

/* Give the movement its stream and, in latency mode, its routing. */
static void set_routing(const EpOperation *o, Route *route, EpStream stream, EpScatter *scatter) {
    scatter->stream = route->routing.stream = stream;
    route->routing.block_rows = scatter->t.block_rows;
    scatter->routing = ep_handle_is_latency(o->handle) ? &route->routing : NULL;
}

/* Read the extras of a dispatch or one of its phases, and describe them: its statistics, where it
 * takes rows, their global scale, and where it delivers them, their blocks' words. recv_tokens:
 * NULL in the send phase. */
static EpStatus describe_extras(const EpOperation *o, const EpExtras *given, unsigned takes,
                                const EpTensor *recv_tokens, EpScatter *scatter) {
    EpExtras extras;
    EP_TRY(ep_extras_read(o, given, takes | EP_TAKES_WAITS, &extras));
    if (takes & EP_TAKES_GLOBAL_SCALE) EP_TRY(ep_extras_global_scale(o, &extras, &scatter->t));
    if (recv_tokens)
        EP_TRY(ep_extras_blocks(o, &extras, EP_TAKES_READY, recv_tokens, &scatter->t.ready));
    return ep_extras_statistics(o, &extras, ep_scatter_row_bytes(&scatter->t, o->step.info.top_k),
                                &scatter->stats);
}

static EpStatus dispatch(const char *name, EpHandle *handle, const EpTensor *plan,
                         const EpPrepare *prepare, const Inputs *in, EpStream stream,
                         const Outputs *out, const EpExtras *extras) {
    EpOperation o;
    EpScatter scatter;
    Route route;
    EP_TRY(begin_dispatch(&o, name, handle, plan, prepare, &route));
    EP_TRY(describe_inputs(&o, in, &scatter));
    EP_TRY(describe_outputs(&o, out, &scatter.t));
    const unsigned takes =
        EP_TAKES_EXPERTS | EP_TAKES_ROWS | EP_TAKES_GLOBAL_SCALE | EP_TAKES_READY;
    EP_TRY(describe_extras(&o, extras, takes, out->tokens, &scatter));
    set_routing(&o, &route, stream, &scatter);
    /* The numbers come before any word of a block, and else behind the rows, which do not wait. */
    int is_first = route.publishes && scatter.t.ready.words;
    if (is_first) EP_TRY(ep_run_publish(&o, &route.routing));
    EP_TRY(ep_run_scatter(&o, &scatter));
    return route.publishes && !is_first ? ep_run_publish(&o, &route.routing) : EP_OK;
}

EpStatus ep_dispatch(EpHandle *handle, const EpTensor *plan, const EpPrepare *prepare,
                     const EpTensor *tokens, const EpTensor *topk_weights, const EpTensor *scales,
                     EpStream stream, const EpTensor *recv_tokens,
                     const EpTensor *recv_topk_weights, const EpTensor *recv_scales,
                     const EpTensor *recv_topk_idx) {
    const Inputs in = {tokens, topk_weights, scales};
    const Outputs out = {recv_tokens, recv_topk_weights, recv_scales, recv_topk_idx};
    return dispatch("ep_dispatch", handle, plan, prepare, &in, stream, &out, NULL);
}

EpStatus ep_dispatch_with(EpHandle *handle, const EpTensor *plan, const EpPrepare *prepare,
                          const EpTensor *tokens, const EpTensor *topk_weights,
                          const EpTensor *scales, EpStream stream, const EpTensor *recv_tokens,
                          const EpTensor *recv_topk_weights, const EpTensor *recv_scales,
                          const EpTensor *recv_topk_idx, const EpExtras *extras) {
    const Inputs in = {tokens, topk_weights, scales};
    const Outputs out = {recv_tokens, recv_topk_weights, recv_scales, recv_topk_idx};
    return dispatch("ep_dispatch_with", handle, plan, prepare, &in, stream, &out, extras);
}

static EpStatus dispatch_send(const char *name, EpHandle *handle, const EpTensor *plan,
                              const EpPrepare *prepare, const Inputs *in, EpStream stream,
                              const EpExtras *extras) {
    EpOperation o;
    EpScatter scatter;
    Route route;
    EP_TRY(ep_operation_begin_plan(&o, name, handle, plan));
    EP_TRY(ep_handle_check_phases(&o.call, handle));
    EP_TRY(find_routing(&o, prepare, &route));
    route.routing.op = &ep_op_route_send;
    o.step = ep_routing_step(&route.routing);
    EP_TRY(describe_inputs(&o, in, &scatter));
    EP_TRY(describe_extras(&o, extras, EP_TAKES_ROWS | EP_TAKES_GLOBAL_SCALE, NULL, &scatter));
    scatter.phase = EP_PHASE_SEND;
    set_routing(&o, &route, stream, &scatter);
    return ep_run_scatter(&o, &scatter);
}

EpStatus ep_dispatch_send(EpHandle *handle, const EpTensor *plan, const EpPrepare *prepare,
                          const EpTensor *tokens, const EpTensor *topk_weights,
                          const EpTensor *scales, EpStream stream) {
    const Inputs in = {tokens, topk_weights, scales};
    return dispatch_send("ep_dispatch_send", handle, plan, prepare, &in, stream, NULL);
}

EpStatus ep_dispatch_send_with(EpHandle *handle, const EpTensor *plan, const EpPrepare *prepare,
                               const EpTensor *tokens, const EpTensor *topk_weights,
                               const EpTensor *scales, EpStream stream, const EpExtras *extras) {
    const Inputs in = {tokens, topk_weights, scales};
    return dispatch_send("ep_dispatch_send_with", handle, plan, prepare, &in, stream, extras);
}

static EpStatus dispatch_wait(const char *name, EpHandle *handle, EpStream stream,
                              const Outputs *out, const EpExtras *extras) {
    EpOperation o;
    EP_TRY(ep_operation_begin_receive(&o, name, handle, EP_PENDING_DISPATCH));
    EpScatter scatter = handle->pending.scatter;
    EP_TRY(describe_outputs(&o, out, &scatter.t));
    EP_TRY(describe_extras(&o, extras, EP_TAKES_EXPERTS | EP_TAKES_READY, out->tokens, &scatter));
    scatter.phase = EP_PHASE_RECEIVE;
    scatter.stream = stream;
    return ep_run_scatter(&o, &scatter);
}

EpStatus ep_dispatch_wait(EpHandle *handle, EpStream stream, const EpTensor *recv_tokens,
                          const EpTensor *recv_topk_weights, const EpTensor *recv_scales,
                          const EpTensor *recv_topk_idx) {
    const Outputs out = {recv_tokens, recv_topk_weights, recv_scales, recv_topk_idx};
    return dispatch_wait("ep_dispatch_wait", handle, stream, &out, NULL);
}

EpStatus ep_dispatch_wait_with(EpHandle *handle, EpStream stream, const EpTensor *recv_tokens,
                               const EpTensor *recv_topk_weights, const EpTensor *recv_scales,
                               const EpTensor *recv_topk_idx, const EpExtras *extras) {
    const Outputs out = {recv_tokens, recv_topk_weights, recv_scales, recv_topk_idx};
    return dispatch_wait("ep_dispatch_wait_with", handle, stream, &out, extras);
}

/* ---- backward ------------------------------------------------------------------------------ */

static EpStatus check_weights(EpOperation *o, const EpTensor *grad_slot_weights,
                              const EpTensor *grad_topk_weights) {
    EP_TRY(ep_arg_pair(o, "grad_topk_weights", grad_topk_weights, "grad_slot_weights",
                       grad_slot_weights));
    if (!grad_slot_weights) return EP_OK;
    EP_TRY(ep_arg_slot_weights(o, "grad_slot_weights", grad_slot_weights));
    EP_TRY(ep_arg_token_rows(o, "grad_topk_weights", grad_topk_weights, o->step.info.top_k, "K"));
    return ep_arg_float(&o->call, "grad_topk_weights", grad_topk_weights);
}

static EpStatus dispatch_backward(const char *name, EpHandle *handle, const EpTensor *plan,
                                  const EpTensor *grad_recv_tokens,
                                  const EpTensor *grad_slot_weights, EpStream stream,
                                  const EpTensor *grad_tokens, const EpTensor *grad_topk_weights,
                                  const EpExtras *given) {
    EpOperation o;
    EpExtras extras;
    EP_TRY(ep_operation_begin_backward(&o, name, handle, plan));
    EP_TRY(ep_extras_read(&o, given, EP_TAKES_BIAS | EP_TAKES_ROWS | EP_TAKES_WAITS, &extras));
    EP_TRY(
        ep_arg_summed_rows(&o, "grad_recv_tokens", grad_recv_tokens, "grad_tokens", grad_tokens));
    EP_TRY(ep_arg_sum_elements(&o, "grad_recv_tokens", grad_recv_tokens));
    EP_TRY(check_weights(&o, grad_slot_weights, grad_topk_weights));
    int64_t slots = ep_slot_capacity(handle, grad_recv_tokens);
    if (grad_slot_weights) slots = ep_min(slots, ep_slot_capacity(handle, grad_slot_weights));
    EpGatherTensors tensors = {.rows = grad_recv_tokens->data,
                               .num_slots = slots,
                               .block_rows = o.block_rows,
                               .type = grad_recv_tokens->type,
                               .row_bytes = ep_tensor_row_bytes(grad_recv_tokens),
                               .row_elements = ep_tensor_row_elements(grad_recv_tokens),
                               .format = ep_quant_format(handle->shape.sum_quant),
                               .by_entry = handle->shape.by_entry,
                               .carries_values = grad_slot_weights != NULL,
                               .slot_values = grad_slot_weights ? grad_slot_weights->data : NULL,
                               .out_rows = grad_tokens->data,
                               .out_num_rows = grad_tokens->shape[0],
                               .out_values = grad_topk_weights ? grad_topk_weights->data : NULL};
    EpGather gather = {.op = &ep_op_dispatch_backward, .t = tensors, .stream = stream};
    EP_TRY(ep_extras_bias(&o, &extras, grad_tokens, &gather.t));
    EP_TRY(ep_extras_statistics(&o, &extras, ep_gather_row_bytes(&gather.t, o.step.info.top_k),
                                &gather.stats));
    return ep_run_gather(&o, &gather);
}

EpStatus ep_dispatch_backward(EpHandle *handle, const EpTensor *plan,
                              const EpTensor *grad_recv_tokens, const EpTensor *grad_slot_weights,
                              EpStream stream, const EpTensor *grad_tokens,
                              const EpTensor *grad_topk_weights) {
    return dispatch_backward("ep_dispatch_backward", handle, plan, grad_recv_tokens,
                             grad_slot_weights, stream, grad_tokens, grad_topk_weights, NULL);
}

EpStatus ep_dispatch_backward_with(EpHandle *handle, const EpTensor *plan,
                                   const EpTensor *grad_recv_tokens,
                                   const EpTensor *grad_slot_weights, EpStream stream,
                                   const EpTensor *grad_tokens, const EpTensor *grad_topk_weights,
                                   const EpExtras *extras) {
    return dispatch_backward("ep_dispatch_backward_with", handle, plan, grad_recv_tokens,
                             grad_slot_weights, stream, grad_tokens, grad_topk_weights, extras);
}
