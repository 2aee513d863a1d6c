/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ep_combine, whole and in two phases, and ep_combine_backward: check the arguments, describe the
 * movement, hand it to the backend.
 */
#include "handles/extras.h"
#include "handles/quantised.h"

/* ---- forward ------------------------------------------------------------------------------- */

/* Describe the inputs, which have been checked. Both weights may be NULL. */
static EpGatherTensors describe_inputs(const EpOperation *o, const EpTensor *expert_out,
                                       const EpTensor *slot_weights, const EpTensor *topk_weights) {
    const EpHandle *handle = o->handle;
    int64_t slots = ep_slot_capacity(handle, expert_out);
    if (slot_weights) slots = ep_min(slots, ep_slot_capacity(handle, slot_weights));
    return (EpGatherTensors){.rows = expert_out->data,
                             .num_slots = slots,
                             .block_rows = o->block_rows,
                             .type = expert_out->type,
                             .row_bytes = ep_tensor_row_bytes(expert_out),
                             .row_elements = ep_tensor_row_elements(expert_out),
                             .format = ep_quant_format(handle->shape.sum_quant),
                             .by_entry = handle->shape.by_entry,
                             .carries_values = handle->shape.by_entry && slot_weights,
                             .slot_values = slot_weights ? slot_weights->data : NULL,
                             .weighs = slot_weights || topk_weights,
                             .weighs_entries = topk_weights != NULL,
                             .slot_weights = slot_weights ? slot_weights->data : NULL,
                             .topk_weights = topk_weights ? topk_weights->data : NULL};
}

/* Check the weights at the token's rank. A row with one slot stands for several k, which
 * its expert side has weighted and added before. Sums by entry are made at the token's rank, where
 * these weights are. */
static EpStatus check_topk_weights(EpOperation *o, const EpTensor *slot_weights,
                                   const EpTensor *topk_weights) {
    if (!ep_handle_is_latency(o->handle) && !o->handle->shape.by_entry)
        return ep_refuse(&o->call, EP_ERR_UNSUPPORTED, "topk_weights",
                         "expected NULL in throughput mode, where dispatch takes them, unless sums "
                         "are by entry (EpGroupConfig.sums), got a tensor");
    if (o->handle->shape.has_rows)
        return ep_refuse(&o->call, EP_ERR_UNSUPPORTED, "topk_weights",
                         "expected NULL in the %s layouts, where a row stands for several experts, "
                         "got a tensor",
                         ep_layout_names(EP_SLOTS_OF_ROWS, " and ").text);
    if (slot_weights)
        return ep_refuse(&o->call, EP_ERR_NULL, "topk_weights",
                         "expected NULL since slot_weights is given, got a tensor");
    EP_TRY(ep_arg_token_rows(o, "topk_weights", topk_weights, o->step.info.top_k, "K"));
    return ep_arg_float(&o->call, "topk_weights", topk_weights);
}

/* Check both kinds of weights; either may be NULL. */
static EpStatus check_weights(EpOperation *o, const EpTensor *slot_weights,
                              const EpTensor *topk_weights) {
    if (slot_weights) EP_TRY(ep_arg_slot_values(o, "slot_weights", slot_weights));
    return topk_weights ? check_topk_weights(o, slot_weights, topk_weights) : EP_OK;
}

/* Describe the statistics of what sends or receives sums. */
static EpStatus describe_statistics(const EpOperation *o, const EpExtras *extras,
                                    EpGather *gather) {
    int64_t row_bytes = ep_gather_row_bytes(&gather->t, o->step.info.top_k);
    return ep_extras_statistics(o, extras, row_bytes, &gather->stats);
}

/* Combine, under the name of the public call. */
static EpStatus combine(const char *name, EpHandle *handle, const EpTensor *plan,
                        const EpTensor *expert_out, const EpTensor *slot_weights,
                        const EpTensor *topk_weights, EpStream stream, const EpTensor *out,
                        const EpExtras *given) {
    EpOperation o;
    EpExtras extras;
    EP_TRY(ep_operation_begin(&o, name, handle, plan));
    EP_TRY(ep_extras_read(&o, given, EP_TAKES_BIAS | EP_TAKES_ROWS | EP_TAKES_WAITS | EP_TAKES_DONE,
                          &extras));
    EP_TRY(ep_arg_summed_rows(&o, "expert_out", expert_out, "out", out));
    EP_TRY(ep_arg_sum_elements(&o, "expert_out", expert_out));
    EP_TRY(check_weights(&o, slot_weights, topk_weights));
    EpGather gather = {.op = &ep_op_combine, .stream = stream};
    gather.t = describe_inputs(&o, expert_out, slot_weights, topk_weights);
    gather.t.out_rows = out->data, gather.t.out_num_rows = out->shape[0];
    EP_TRY(ep_extras_bias(&o, &extras, out, &gather.t));
    EP_TRY(ep_extras_blocks(&o, &extras, EP_TAKES_DONE, expert_out, &gather.t.done));
    EP_TRY(describe_statistics(&o, &extras, &gather));
    return ep_run_gather(&o, &gather);
}

EpStatus ep_combine(EpHandle *handle, const EpTensor *plan, const EpTensor *expert_out,
                    const EpTensor *slot_weights, const EpTensor *topk_weights, EpStream stream,
                    const EpTensor *out) {
    return combine("ep_combine", handle, plan, expert_out, slot_weights, topk_weights, stream, out,
                   NULL);
}

EpStatus ep_combine_with(EpHandle *handle, const EpTensor *plan, const EpTensor *expert_out,
                         const EpTensor *slot_weights, const EpTensor *topk_weights,
                         EpStream stream, const EpTensor *out, const EpExtras *extras) {
    return combine("ep_combine_with", handle, plan, expert_out, slot_weights, topk_weights, stream,
                   out, extras);
}

/* A named plan does not say to the host how many rows `out` will have: the kernel finds it. */
static EpStatus combine_send(const char *name, EpHandle *handle, const EpTensor *plan,
                             const EpTensor *expert_out, const EpTensor *slot_weights,
                             const EpTensor *topk_weights, EpStream stream, const EpExtras *given) {
    EpOperation o;
    EpExtras extras;
    EP_TRY(ep_operation_begin_plan(&o, name, handle, plan));
    EP_TRY(ep_handle_check_phases(&o.call, handle));
    EP_TRY(ep_handle_read(&o.call, handle, o.plan, &o.step));
    EP_TRY(ep_extras_read(&o, given, EP_TAKES_ROWS | EP_TAKES_WAITS | EP_TAKES_DONE, &extras));
    EP_TRY(ep_arg_blocks(&o, "expert_out", expert_out));
    EP_TRY(ep_arg_slot_rows(&o, "expert_out", expert_out, -1, NULL));
    EP_TRY(ep_arg_summable(&o.call, "expert_out", expert_out));
    EP_TRY(ep_arg_token_bytes(&o, "expert_out", expert_out));
    EP_TRY(ep_arg_sum_elements(&o, "expert_out", expert_out));
    EP_TRY(check_weights(&o, slot_weights, topk_weights));
    EpGather gather = {.op = &ep_op_combine_send, .phase = EP_PHASE_SEND, .stream = stream};
    gather.t = describe_inputs(&o, expert_out, slot_weights, topk_weights);
    gather.t.out_num_rows = o.step.num_rows;
    EP_TRY(ep_extras_blocks(&o, &extras, EP_TAKES_DONE, expert_out, &gather.t.done));
    EP_TRY(describe_statistics(&o, &extras, &gather));
    return ep_run_gather(&o, &gather);
}

EpStatus ep_combine_send(EpHandle *handle, const EpTensor *plan, const EpTensor *expert_out,
                         const EpTensor *slot_weights, const EpTensor *topk_weights,
                         EpStream stream) {
    return combine_send("ep_combine_send", handle, plan, expert_out, slot_weights, topk_weights,
                        stream, NULL);
}

EpStatus ep_combine_send_with(EpHandle *handle, const EpTensor *plan, const EpTensor *expert_out,
                              const EpTensor *slot_weights, const EpTensor *topk_weights,
                              EpStream stream, const EpExtras *extras) {
    return combine_send("ep_combine_send_with", handle, plan, expert_out, slot_weights,
                        topk_weights, stream, extras);
}

/* Where the send phase did not know T, its tensors may have had too few rows for each source. */
static EpStatus check_sent_blocks(const EpOperation *o, const EpTensor *out,
                                  const EpGatherTensors *t) {
    if (!ep_has_source_blocks(&o->handle->shape) || out->shape[0] <= t->block_rows) return EP_OK;
    return ep_refuse(&o->call, EP_ERR_SHAPE, "out",
                     "expected at most %lld tokens, since expert_out had as many rows for each "
                     "source, got %lld",
                     (long long)t->block_rows, (long long)out->shape[0]);
}

static EpStatus combine_wait(const char *name, EpHandle *handle, EpStream stream,
                             const EpTensor *out, const EpExtras *given) {
    EpOperation o;
    EpExtras extras;
    EP_TRY(ep_operation_begin_receive(&o, name, handle, EP_PENDING_COMBINE));
    EP_TRY(ep_extras_read(&o, given, EP_TAKES_BIAS | EP_TAKES_WAITS, &extras));
    EpGather gather = handle->pending.gather;
    EP_TRY(ep_arg_token_rows(&o, "out", out, gather.t.row_elements, "H"));
    EP_TRY(ep_arg_type(&o.call, "out", out, gather.t.type));
    EP_TRY(ep_arg_token_bytes(&o, "out", out));
    EP_TRY(check_sent_blocks(&o, out, &gather.t));
    EP_TRY(ep_extras_bias(&o, &extras, out, &gather.t));
    EP_TRY(describe_statistics(&o, &extras, &gather));
    gather.phase = EP_PHASE_RECEIVE;
    gather.t.out_rows = out->data, gather.t.out_num_rows = out->shape[0];
    gather.num_rows = out->shape[0];
    gather.stream = stream;
    return ep_run_gather(&o, &gather);
}

EpStatus ep_combine_wait(EpHandle *handle, EpStream stream, const EpTensor *out) {
    return combine_wait("ep_combine_wait", handle, stream, out, NULL);
}

EpStatus ep_combine_wait_with(EpHandle *handle, EpStream stream, const EpTensor *out,
                              const EpExtras *extras) {
    return combine_wait("ep_combine_wait_with", handle, stream, out, extras);
}

/* ---- backward ------------------------------------------------------------------------------ */

/** The tensors of a combine_backward. */
typedef struct Gradients {
    const EpTensor *out, *slot_weights, *expert_out;    /**< inputs */
    const EpTensor *rows, *of_slot_weights, *of_scales; /**< outputs */
} Gradients;

static EpStatus check_gradients(const EpOperation *o, const Gradients *g) {
    if (g->slot_weights) EP_TRY(ep_arg_slot_values(o, "slot_weights", g->slot_weights));
    EP_TRY(ep_arg_pair(o, "expert_out", g->expert_out, "grad_slot_weights", g->of_slot_weights));
    if (!g->expert_out) return EP_OK;
    EP_TRY(ep_arg_slot_rows(o, "expert_out", g->expert_out, ep_tensor_row_elements(g->out), "H"));
    EP_TRY(ep_arg_type(&o->call, "expert_out", g->expert_out, g->out->type));
    EP_TRY(ep_arg_token_bytes(o, "expert_out", g->expert_out));
    return ep_arg_slot_values(o, "grad_slot_weights", g->of_slot_weights);
}

/* Rows are quantised before they travel, and weights would multiply them after that. */
static EpStatus check_unweighted(const EpOperation *o, const Gradients *g) {
    const struct {
        const char *name;
        const EpTensor *t;
    } weighted[] = {{"slot_weights", g->slot_weights},
                    {"expert_out", g->expert_out},
                    {"grad_slot_weights", g->of_slot_weights}};
    for (int i = 0; i < 3; i++)
        if (weighted[i].t)
            return ep_refuse(&o->call, EP_ERR_UNSUPPORTED, weighted[i].name,
                             "expected NULL on a handle with a grad_quant, which is for the "
                             "derivative of unweighted combines, got a tensor");
    return EP_OK;
}

/* Check and describe rows that are quantised. `s` describes grad_out as it is. */
static EpStatus describe_quantised(EpOperation *o, const Gradients *g, EpScatterTensors *s) {
    EP_TRY(ep_arg_token_rows(o, "grad_out", g->out, -1, NULL));
    EP_TRY(ep_arg_token_bytes(o, "grad_out", g->out));
    EP_TRY(check_unweighted(o, g));
    EP_TRY(ep_describe_quantised(o, "grad_out", g->out, ep_quant_format(o->handle->grad_quant), s));
    ep_describe_scale_order(o, s);
    EP_TRY(ep_arg_blocks(o, "grad_expert_out", g->rows));
    EP_TRY(ep_arg_slot_rows(o, "grad_expert_out", g->rows, s->row_elements, "H"));
    EP_TRY(ep_arg_type(&o->call, "grad_expert_out", g->rows, s->type));
    return ep_arg_token_bytes(o, "grad_expert_out", g->rows);
}

/* Check the tensors and describe them. The shortest output limits zero_tail. */
static EpStatus describe_gradients(EpOperation *o, const Gradients *g, EpScatterTensors *s) {
    EP_TRY(ep_arg_tensor(&o->call, "grad_out", g->out, 2));
    *s = (EpScatterTensors){.rows = g->out->data,
                            .type = g->out->type,
                            .source_type = g->out->type,
                            .source_row_bytes = ep_tensor_row_bytes(g->out),
                            .row_bytes = ep_tensor_row_bytes(g->out),
                            .row_elements = ep_tensor_row_elements(g->out)};
    if (ep_quant_format(o->handle->grad_quant).bits)
        EP_TRY(describe_quantised(o, g, s));
    else
        EP_TRY(ep_arg_summed_rows(o, "grad_expert_out", g->rows, "grad_out", g->out));
    EP_TRY(check_gradients(o, g));
    s->weighs = g->slot_weights != NULL, s->takes_dots = g->expert_out != NULL;
    s->slot_weights = g->slot_weights ? g->slot_weights->data : NULL;
    s->slot_rows = g->expert_out ? g->expert_out->data : NULL;
    s->out_rows = g->rows->data;
    s->out_weights = g->of_slot_weights ? g->of_slot_weights->data : NULL;
    s->block_rows = o->block_rows;
    s->out_capacity = ep_slot_capacity(o->handle, g->rows);
    if (g->of_slot_weights)
        s->out_capacity = ep_min(s->out_capacity, ep_slot_capacity(o->handle, g->of_slot_weights));
    EP_TRY(ep_describe_recv_scales(o, "extras.grad_scales", g->of_scales, "the handle's grad_quant",
                                   s));
    s->num_slots = s->out_capacity;
    if (g->slot_weights)
        s->num_slots = ep_min(s->num_slots, ep_slot_capacity(o->handle, g->slot_weights));
    if (g->expert_out)
        s->num_slots = ep_min(s->num_slots, ep_slot_capacity(o->handle, g->expert_out));
    return EP_OK;
}

static EpStatus combine_backward(const char *name, EpHandle *handle, const EpTensor *plan,
                                 const EpTensor *grad_out, const EpTensor *slot_weights,
                                 const EpTensor *expert_out, EpStream stream,
                                 const EpTensor *grad_expert_out, const EpTensor *grad_slot_weights,
                                 const EpExtras *given) {
    EpOperation o;
    EpExtras extras;
    EP_TRY(ep_operation_begin_backward(&o, name, handle, plan));
    EP_TRY(
        ep_extras_read(&o, given, EP_TAKES_ROWS | EP_TAKES_WAITS | EP_TAKES_GRAD_SCALES, &extras));
    const Gradients g = {grad_out,        slot_weights,      expert_out,
                         grad_expert_out, grad_slot_weights, extras.grad_scales};
    EpScatter scatter = {
        .op = &ep_op_combine_backward, .grad_quant = handle->grad_quant, .stream = stream};
    EP_TRY(describe_gradients(&o, &g, &scatter.t));
    EP_TRY(ep_extras_statistics(&o, &extras, ep_scatter_row_bytes(&scatter.t, o.step.info.top_k),
                                &scatter.stats));
    return ep_run_scatter(&o, &scatter);
}

EpStatus ep_combine_backward(EpHandle *handle, const EpTensor *plan, const EpTensor *grad_out,
                             const EpTensor *slot_weights, const EpTensor *expert_out,
                             EpStream stream, const EpTensor *grad_expert_out,
                             const EpTensor *grad_slot_weights) {
    return combine_backward("ep_combine_backward", handle, plan, grad_out, slot_weights, expert_out,
                            stream, grad_expert_out, grad_slot_weights, NULL);
}

EpStatus ep_combine_backward_with(EpHandle *handle, const EpTensor *plan, const EpTensor *grad_out,
                                  const EpTensor *slot_weights, const EpTensor *expert_out,
                                  EpStream stream, const EpTensor *grad_expert_out,
                                  const EpTensor *grad_slot_weights, const EpExtras *extras) {
    return combine_backward("ep_combine_backward_with", handle, plan, grad_out, slot_weights,
                            expert_out, stream, grad_expert_out, grad_slot_weights, extras);
}
