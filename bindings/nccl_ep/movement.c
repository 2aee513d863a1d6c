/* SPDX-License-Identifier: Apache-2.0 */
/* Dispatch, combine, and the second phase of either. */
#include "bindings/nccl_ep/adapter.h"

/* Let the outputs of a pending operation be given to its second phase. */
static const EpTensor *keep(EpTensor *kept, const EpTensor *given) {
    if (given) *kept = *given;
    return given ? kept : NULL;
}

static int check_whole(const char *call, const struct ncclEpHandle *handle, int send_only) {
    if (handle->pending.kind != NEP_NOTHING)
        return nep_fail(call, NCCL_INVALID_USAGE,
                        "handle: expected ncclEpComplete first, got another operation");
    if (!send_only || nep_is_low_latency(handle->group)) return NCCL_SUCCESS;
    return nep_fail(
        call, NCCL_INVALID_USAGE,
        "config.send_only: expected 0 in high-throughput mode, whose operations have one "
        "phase, got %u",
        send_only);
}

static int check_pass(const char *call, const struct ncclEpHandle *handle, int pass) {
    int low_latency = nep_is_low_latency(handle->group);
    if (pass == NCCL_EP_FWD_PASS || (pass == NCCL_EP_BWD_PASS && !low_latency)) return NCCL_SUCCESS;
    return nep_fail(call, low_latency ? NCCL_INVALID_USAGE : NCCL_INVALID_ARGUMENT,
                    "config.pass_direction: expected %s, got %d",
                    low_latency ? "0 in low-latency mode, which has no backward pass" : "0 or 1",
                    pass);
}

/* ---- dispatch ------------------------------------------------------------------------------ */

/** A dispatch's tensors, as libep takes them. */
typedef struct Dispatch {
    EpTensor tensor[8], counts;
    const EpTensor *tokens, *weights, *scales;
    const EpTensor *recv_tokens, *recv_weights, *recv_scales, *recv_idx;
    EpPlanTensors out;
    ncclEpDispatchConfig_t config;
} Dispatch;

static int read_tensors(const char *call, ncclEpGroup_t group, const ncclEpDispatchInputs_t *in,
                        const ncclEpDispatchOutputs_t *out, Dispatch *d) {
    EpTensor *t = d->tensor;
    /* First what ranks must meet in the same order. */
    NEP_TRY(nep_tensor(call, group, "outputs.tokens", out->tokens, NEP_ROWS, t, &d->recv_tokens));
    NEP_TRY(nep_tensor(call, group, "inputs.tokens", in->tokens, NEP_PLAIN, t + 1, &d->tokens));
    NEP_TRY(nep_tensor(call, group, "inputs.topk_weights", in->topk_weights, NEP_PLAIN, t + 2,
                       &d->weights));
    NEP_TRY(nep_tensor(call, group, "inputs.scales", in->scales, NEP_PLAIN, t + 3, &d->scales));
    NEP_TRY(nep_tensor(call, group, "outputs.topk_weights", out->topk_weights, NEP_PLAIN, t + 4,
                       &d->recv_weights));
    NEP_TRY(
        nep_tensor(call, group, "outputs.scales", out->scales, NEP_PLAIN, t + 5, &d->recv_scales));
    return nep_tensor(call, group, "outputs.topk_idx", out->topk_idx, NEP_PLAIN, t + 6,
                      &d->recv_idx);
}

/* In low-latency mode dispatch delivers what ncclEpUpdateHandle delivers in the other. */
static int read_counters(const char *call, const struct ncclEpHandle *handle,
                         const ncclEpLayoutInfo_t *info, Dispatch *d) {
    ncclEpGroup_t group = handle->group;
    d->out = (EpPlanTensors)EP_PLAN_TENSORS_INIT;
    if (!nep_is_low_latency(group)) return NCCL_SUCCESS;
    if (handle->layout == NCCL_EP_LAYOUT_RANK_MAJOR)
        return nep_vector(call, group, "src_rank_counters", info->src_rank_counters, group->size,
                          &d->counts, &d->out.source_rows);
    return nep_vector(call, group, "expert_counters", info->expert_counters, group->num_local,
                      &d->counts, &d->out.expert_counts);
}

static int check_scales(const char *call, const Dispatch *d, const struct ncclEpHandle *handle) {
    int recipe = d->config.quant_recipe, low_latency = nep_is_low_latency(handle->group);
    int in = d->scales != NULL, out = d->recv_scales != NULL;
    if (recipe < NCCL_EP_DISP_QUANT_NONE || recipe > NCCL_EP_DISP_QUANT_DS_FP8E3M4)
        return nep_fail(call, NCCL_INVALID_ARGUMENT, "config.quant_recipe: expected 0 .. 2, got %d",
                        recipe);
    if (recipe == NCCL_EP_DISP_QUANT_DS_FP8E3M4 && !low_latency)
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "config.quant_recipe: expected NONE or QUANT_FWD in high-throughput mode, "
                        "got DS_FP8E3M4");
    if (recipe != NCCL_EP_DISP_QUANT_DS_FP8E3M4 && d->config.round_scales)
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "config.round_scales: expected 0 where dispatch makes no scales, got %u",
                        d->config.round_scales);
    int wants_in = recipe == NCCL_EP_DISP_QUANT_FWD, wants_out = recipe != NCCL_EP_DISP_QUANT_NONE;
    if (in == wants_in && out == wants_out) return NCCL_SUCCESS;
    return nep_fail(call, NCCL_INVALID_ARGUMENT,
                    "%s.scales: expected %s with quant_recipe %d, got %s",
                    in == wants_in ? "outputs" : "inputs",
                    (in == wants_in ? wants_out : wants_in) ? "a tensor" : "NULL", recipe,
                    (in == wants_in ? out : in) ? "a tensor" : "NULL");
}

static int check_metadata(const char *call, const Dispatch *d, const struct ncclEpHandle *handle) {
    int is_backward = d->config.pass_direction == NCCL_EP_BWD_PASS;
    int has_ids = handle->layout != NCCL_EP_LAYOUT_EXPERT_MAJOR;
    if (is_backward && (d->weights || d->recv_weights || d->recv_idx))
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "topk_weights, topk_idx: expected NULL in the backward pass, got a tensor");
    if (d->recv_idx && !has_ids)
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "outputs.topk_idx: expected NULL in the expert-major layout, got a tensor");
    return NCCL_SUCCESS;
}

static int read_dispatch(const char *call, ncclEpHandle_t handle, const ncclEpLayoutInfo_t *info,
                         const ncclEpDispatchInputs_t *in, const ncclEpDispatchOutputs_t *out,
                         Dispatch *d) {
    int global = info->recv_topk_idx_kind == NCCL_EP_EXPERT_ID_GLOBAL;
    int has_ids = handle->layout != NCCL_EP_LAYOUT_EXPERT_MAJOR;
    NEP_TRY(read_tensors(call, handle->group, in, out, d));
    NEP_TRY(read_counters(call, handle, info, d));
    NEP_TRY(check_whole(call, handle, (int)d->config.send_only));
    NEP_TRY(check_pass(call, handle, d->config.pass_direction));
    NEP_TRY(check_scales(call, d, handle));
    NEP_TRY(check_metadata(call, d, handle));
    EpQuant quant = d->config.quant_recipe != NCCL_EP_DISP_QUANT_DS_FP8E3M4 ? EP_QUANT_NONE
                    : d->config.round_scales                                ? EP_QUANT_FP8_POW2
                                                                            : EP_QUANT_FP8;
    return nep_select(call, handle, quant, global && has_ids ? EP_IDS_GLOBAL : EP_IDS_LOCAL);
}

/* Begin a dispatch that ncclEpComplete ends. */
static EpStatus send(ncclEpHandle_t handle, const Dispatch *d, const EpPrepare *routing,
                     void *stream) {
    NepPending *p = &handle->pending;
    EpStatus status = ep_dispatch_send(handle->ep, &handle->plan, routing, d->tokens, d->weights,
                                       d->scales, stream);
    if (status != EP_OK) return status;
    keep(&p->tokens, d->recv_tokens);
    p->has_weights = keep(&p->weights, d->recv_weights) != NULL;
    p->has_scales = keep(&p->scales, d->recv_scales) != NULL;
    p->has_idx = keep(&p->idx, d->recv_idx) != NULL;
    p->kind = NEP_DISPATCH;
    return EP_OK;
}

int ncclEpDispatch(ncclEpHandle_t handle, const ncclEpDispatchInputs_t *inputs,
                   const ncclEpDispatchOutputs_t *outputs, const ncclEpLayoutInfo_t *layout_info,
                   const ncclEpDispatchConfig_t *config, void *stream) {
    const char *call = "ncclEpDispatch";
    ncclEpDispatchInputs_t in;
    ncclEpDispatchOutputs_t out;
    ncclEpLayoutInfo_t info;
    Dispatch d;
    NEP_TRY(nep_check_handle(call, handle));
    NEP_TRY(NEP_READ(call, inputs, 0, NCCL_EP_DISPATCH_INPUTS_V1, &in));
    NEP_TRY(NEP_READ(call, outputs, 0, NCCL_EP_DISPATCH_OUTPUTS_V1, &out));
    NEP_TRY(NEP_READ(call, layout_info, 1, NCCL_EP_LAYOUT_INFO_V1, &info));
    NEP_TRY(NEP_READ(call, config, 1, NCCL_EP_DISPATCH_CONFIG_V1, &d.config));
    NEP_TRY(read_dispatch(call, handle, &info, &in, &out, &d));
    int low_latency = nep_is_low_latency(handle->group);
    if (low_latency && !handle->has_routing)
        return nep_fail(call, NCCL_INVALID_USAGE,
                        "handle: expected ncclEpUpdateHandle first, got none");
    EpPrepare routing = EP_PREPARE_INIT;
    routing.topk_idx = &handle->topk_idx, routing.out = &d.out;
    EpStatus status = d.config.send_only
                          ? send(handle, &d, &routing, stream)
                          : ep_dispatch(handle->ep, &handle->plan, low_latency ? &routing : NULL,
                                        d.tokens, d.weights, d.scales, stream, d.recv_tokens,
                                        d.recv_weights, d.recv_scales, d.recv_idx);
    return nep_report(call, handle->group, nep_result(call, status));
}

/* ---- combine ------------------------------------------------------------------------------- */

/** A combine's tensors, as libep takes them. */
typedef struct Combine {
    EpTensor tensor[4];
    const EpTensor *tokens, *in_weights, *out, *out_weights;
    ncclEpCombineConfig_t config;
} Combine;

static int read_combine(const char *call, ncclEpHandle_t handle, const ncclEpCombineInputs_t *in,
                        const ncclEpCombineOutputs_t *out, Combine *c) {
    ncclEpGroup_t group = handle->group;
    EpTensor *t = c->tensor;
    NEP_TRY(nep_tensor(call, group, "inputs.tokens", in->tokens, NEP_PLAIN, t, &c->tokens));
    NEP_TRY(nep_tensor(call, group, "inputs.topk_weights", in->topk_weights, NEP_PLAIN, t + 1,
                       &c->in_weights));
    NEP_TRY(nep_tensor(call, group, "outputs.tokens", out->tokens, NEP_PLAIN, t + 2, &c->out));
    NEP_TRY(nep_tensor(call, group, "outputs.topk_weights", out->topk_weights, NEP_PLAIN, t + 3,
                       &c->out_weights));
    NEP_TRY(check_whole(call, handle, (int)c->config.send_only));
    NEP_TRY(check_pass(call, handle, c->config.pass_direction));
    if (c->config.quant_recipe != NCCL_EP_COMB_QUANT_NONE || in->scales)
        return nep_fail(
            call, NCCL_INVALID_USAGE,
            "config.quant_recipe: expected NONE and no scales, since libep sends sums in "
            "their own type, got %d",
            c->config.quant_recipe);
    if (c->in_weights && c->config.pass_direction == NCCL_EP_FWD_PASS)
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "inputs.topk_weights: expected NULL in the forward pass, got a tensor");
    return nep_select(call, handle, handle->quant, handle->ids);
}

/* Weights at the token's rank stand among the outputs. */
static EpStatus combine(ncclEpHandle_t handle, const Combine *c, void *stream) {
    int weighs = nep_is_low_latency(handle->group) && handle->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR;
    const EpTensor *weights = weighs ? c->out_weights : NULL;
    if (c->config.pass_direction == NCCL_EP_BWD_PASS)
        return ep_dispatch_backward(handle->ep, &handle->plan, c->tokens, c->in_weights, stream,
                                    c->out, c->out_weights);
    if (!c->config.send_only)
        return ep_combine(handle->ep, &handle->plan, c->tokens, NULL, weights, stream, c->out);
    EpStatus status = ep_combine_send(handle->ep, &handle->plan, c->tokens, NULL, weights, stream);
    if (status != EP_OK) return status;
    keep(&handle->pending.tokens, c->out);
    handle->pending.kind = NEP_COMBINE;
    return EP_OK;
}

int ncclEpCombine(ncclEpHandle_t handle, const ncclEpCombineInputs_t *inputs,
                  const ncclEpCombineOutputs_t *outputs, const ncclEpCombineConfig_t *config,
                  void *stream) {
    const char *call = "ncclEpCombine";
    ncclEpCombineInputs_t in;
    ncclEpCombineOutputs_t out;
    Combine c;
    NEP_TRY(nep_check_handle(call, handle));
    NEP_TRY(NEP_READ(call, inputs, 0, NCCL_EP_COMBINE_INPUTS_V1, &in));
    NEP_TRY(NEP_READ(call, outputs, 0, NCCL_EP_COMBINE_OUTPUTS_V1, &out));
    NEP_TRY(NEP_READ(call, config, 1, NCCL_EP_COMBINE_CONFIG_V1, &c.config));
    NEP_TRY(read_combine(call, handle, &in, &out, &c));
    return nep_report(call, handle->group, nep_result(call, combine(handle, &c, stream)));
}

/* ---- the second phase ---------------------------------------------------------------------- */

/* Without a first phase there is nothing to do, and that is no error. A second phase that was
 * refused may be called again. */
int ncclEpComplete(ncclEpHandle_t handle, const ncclEpCompleteConfig_t *config, void *stream) {
    const char *call = "ncclEpComplete";
    ncclEpCompleteConfig_t read;
    NEP_TRY(nep_check_handle(call, handle));
    NEP_TRY(NEP_READ(call, config, 1, sizeof(read), &read));
    NepPending *p = &handle->pending;
    EpStatus status = EP_OK;
    if (p->kind == NEP_DISPATCH)
        status =
            ep_dispatch_wait(handle->ep, stream, &p->tokens, p->has_weights ? &p->weights : NULL,
                             p->has_scales ? &p->scales : NULL, p->has_idx ? &p->idx : NULL);
    else if (p->kind == NEP_COMBINE)
        status = ep_combine_wait(handle->ep, stream, &p->tokens);
    if (status == EP_OK) p->kind = NEP_NOTHING;
    return nep_report(call, handle->group, nep_result(call, status));
}
