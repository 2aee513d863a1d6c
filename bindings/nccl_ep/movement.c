/* SPDX-License-Identifier: Apache-2.0 */
/* Dispatch, combine, and the second phase of either. */
#include "bindings/nccl_ep/adapter.h"

/* Let the outputs of a pending operation be given to its second phase. */
static const EpTensor *keep(EpTensor *kept, const EpTensor *given) {
    if (given) *kept = *given;
    return given ? kept : NULL;
}

/* ---- checks -------------------------------------------------------------------------------- */

/* What holds for dispatch and combine alike. Nothing of libep has been called yet. */
static int check_call(const char *call, const struct ncclEpHandle *handle, unsigned send_only,
                      int pass) {
    int low_latency = nep_is_low_latency(handle->group);
    NEP_TRY(nep_check_open(call, handle));
    if (handle->pending.kind != NEP_NOTHING)
        return nep_fail(call, NCCL_INVALID_USAGE,
                        "handle: expected ncclEpComplete first, got another operation");
    if (send_only && !low_latency)
        return nep_fail(call, NCCL_INVALID_USAGE,
                        "config.send_only: expected 0 in high-throughput mode, whose operations "
                        "have one phase, got %u",
                        send_only);
    if (pass == NCCL_EP_FWD_PASS || (pass == NCCL_EP_BWD_PASS && !low_latency)) return NCCL_SUCCESS;
    return nep_fail(call, low_latency ? NCCL_INVALID_USAGE : NCCL_INVALID_ARGUMENT,
                    "config.pass_direction: expected %s, got %d",
                    low_latency ? "0 in low-latency mode, which has no backward pass" : "0 or 1",
                    pass);
}

/* Check the tokens' number of rows, if ncclEpUpdateHandle was called on this handle. Otherwise the
 * plan has it, which a kernel reads. */
static int check_tokens(const char *call, const struct ncclEpHandle *handle, const char *name,
                        const EpTensor *t) {
    int64_t rows = handle->topk_idx.shape[0];
    if (!t || !handle->has_routing || t->shape[0] == rows) return NCCL_SUCCESS;
    return nep_fail(call, NCCL_INVALID_ARGUMENT,
                    "%s: expected %lld rows, as topk_idx had, got %lld", name, (long long)rows,
                    (long long)t->shape[0]);
}

/* Tensors of the same receive rows: all of them have rows, or none does. A kernel would find the
 * difference, and fail the group. */
static int check_empty(const char *call, const char *name, const EpTensor *t,
                       const EpTensor *tokens) {
    if (!t || !tokens || !t->shape[0] == !tokens->shape[0]) return NCCL_SUCCESS;
    return nep_fail(
        call, NCCL_INVALID_ARGUMENT, "%s: expected %s, as the tokens have %lld, got %lld", name,
        tokens->shape[0] ? "rows" : "no rows", (long long)tokens->shape[0], (long long)t->shape[0]);
}

/* With exact sizes: the rows that the plan fills, if the host knows them. */
static int check_room(const char *call, const struct ncclEpHandle *handle, const char *name,
                      const EpTensor *t) {
    int64_t rows = nep_known_rows(handle);
    if (!t || t->shape[0] >= rows) return NCCL_SUCCESS;
    return nep_fail(call, NCCL_INVALID_ARGUMENT,
                    "%s: expected at least %lld rows (recv_total_counter), got %lld", name,
                    (long long)rows, (long long)t->shape[0]);
}

/* ---- dispatch ------------------------------------------------------------------------------ */

/** A dispatch's tensors, as libep takes them. */
typedef struct Dispatch {
    EpTensor tensor[7];
    const EpTensor *tokens, *weights, *scales;
    const EpTensor *recv_tokens, *recv_weights, *recv_scales, *recv_idx;
    NepNumbers numbers;
    ncclEpDispatchConfig_t config;
} Dispatch;

static int check_scales(const char *call, const struct ncclEpHandle *handle,
                        const ncclEpDispatchConfig_t *config, int in, int out) {
    int recipe = config->quant_recipe, low_latency = nep_is_low_latency(handle->group);
    if (recipe < NCCL_EP_DISP_QUANT_NONE || recipe > NCCL_EP_DISP_QUANT_DS_FP8E3M4)
        return nep_fail(call, NCCL_INVALID_ARGUMENT, "config.quant_recipe: expected 0 .. 2, got %d",
                        recipe);
    if (recipe == NCCL_EP_DISP_QUANT_DS_FP8E3M4 && !low_latency)
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "config.quant_recipe: expected NONE or QUANT_FWD in high-throughput mode, "
                        "got DS_FP8E3M4");
    if (recipe != NCCL_EP_DISP_QUANT_DS_FP8E3M4 && config->round_scales)
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "config.round_scales: expected 0 where dispatch makes no scales, got %u",
                        config->round_scales);
    int wants_in = recipe == NCCL_EP_DISP_QUANT_FWD, wants_out = recipe != NCCL_EP_DISP_QUANT_NONE;
    if (in == wants_in && out == wants_out) return NCCL_SUCCESS;
    return nep_fail(call, NCCL_INVALID_ARGUMENT,
                    "%s.scales: expected %s with quant_recipe %d, got %s",
                    in == wants_in ? "outputs" : "inputs",
                    (in == wants_in ? wants_out : wants_in) ? "a tensor" : "NULL", recipe,
                    (in == wants_in ? out : in) ? "a tensor" : "NULL");
}

static int refuse(const char *call, const char *name, const char *where,
                  const ncclEpTensor_t *given) {
    if (!given) return NCCL_SUCCESS;
    return nep_fail(call, NCCL_INVALID_ARGUMENT, "%s: expected NULL in the %s, got a tensor", name,
                    where);
}

/* Weights that come in are delivered, and only those. */
static int check_pair(const char *call, const ncclEpTensor_t *in, const ncclEpTensor_t *out) {
    if (!in == !out) return NCCL_SUCCESS;
    return nep_fail(call, NCCL_INVALID_ARGUMENT,
                    "outputs.topk_weights: expected %s inputs.topk_weights, got %s",
                    in ? "a tensor with" : "NULL without", out ? "a tensor" : "NULL");
}

static int check_metadata(const char *call, const struct ncclEpHandle *handle,
                          const ncclEpDispatchInputs_t *in, const ncclEpDispatchOutputs_t *out,
                          int pass) {
    static const char backward[] = "backward pass", slabs[] = "expert-major layout";
    int is_backward = pass == NCCL_EP_BWD_PASS;
    if (is_backward) NEP_TRY(refuse(call, "inputs.topk_weights", backward, in->topk_weights));
    if (is_backward) NEP_TRY(refuse(call, "outputs.topk_weights", backward, out->topk_weights));
    if (is_backward) NEP_TRY(refuse(call, "outputs.topk_idx", backward, out->topk_idx));
    if (handle->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR)
        NEP_TRY(refuse(call, "outputs.topk_idx", slabs, out->topk_idx));
    return check_pair(call, in->topk_weights, out->topk_weights);
}

static int read_tensors(const char *call, ncclEpGroup_t group, const ncclEpDispatchInputs_t *in,
                        const ncclEpDispatchOutputs_t *out, Dispatch *d) {
    EpTensor *t = d->tensor;
    NEP_TRY(nep_tensor(call, group, "inputs.tokens", in->tokens, NEP_PLAIN, t + 1, &d->tokens));
    NEP_TRY(nep_tensor(call, group, "inputs.topk_weights", in->topk_weights, NEP_PLAIN, t + 2,
                       &d->weights));
    NEP_TRY(nep_tensor(call, group, "inputs.scales", in->scales, NEP_PLAIN, t + 3, &d->scales));
    NEP_TRY(nep_tensor(call, group, "outputs.topk_weights", out->topk_weights, NEP_PLAIN, t + 4,
                       &d->recv_weights));
    NEP_TRY(
        nep_tensor(call, group, "outputs.scales", out->scales, NEP_PLAIN, t + 5, &d->recv_scales));
    NEP_TRY(
        nep_tensor(call, group, "outputs.topk_idx", out->topk_idx, NEP_PLAIN, t + 6, &d->recv_idx));
    /* Last, since it may adopt a window. */
    return nep_tensor(call, group, "outputs.tokens", out->tokens, NEP_ROWS, t, &d->recv_tokens);
}

static int check_rows(const char *call, const struct ncclEpHandle *handle, const Dispatch *d) {
    NEP_TRY(check_tokens(call, handle, "inputs.tokens", d->tokens));
    if (nep_is_low_latency(handle->group)) return NCCL_SUCCESS;
    NEP_TRY(check_room(call, handle, "outputs.tokens", d->recv_tokens));
    NEP_TRY(check_empty(call, "outputs.topk_weights", d->recv_weights, d->recv_tokens));
    NEP_TRY(check_empty(call, "outputs.scales", d->recv_scales, d->recv_tokens));
    return check_empty(call, "outputs.topk_idx", d->recv_idx, d->recv_tokens);
}

static NepReader reader_of(const struct ncclEpHandle *handle, const ncclEpLayoutInfo_t *info,
                           const ncclEpDispatchConfig_t *config) {
    const struct ncclEpGroup *group = handle->group;
    int is_global = info->recv_topk_idx_kind == NCCL_EP_EXPERT_ID_GLOBAL &&
                    handle->layout != NCCL_EP_LAYOUT_EXPERT_MAJOR;
    NepReader reader = handle->reader;
    reader.quant = config->quant_recipe != NCCL_EP_DISP_QUANT_DS_FP8E3M4 ? EP_QUANT_NONE
                   : config->round_scales                                ? EP_QUANT_FP8_POW2
                                                                         : EP_QUANT_FP8;
    reader.ids = is_global ? EP_IDS_GLOBAL : EP_IDS_LOCAL;
    reader.num_sms = nep_num_sms(group, group->config.dispatch_num_sms);
    return reader;
}

static int read_dispatch(const char *call, ncclEpHandle_t handle, const ncclEpLayoutInfo_t *info,
                         const ncclEpDispatchInputs_t *in, const ncclEpDispatchOutputs_t *out,
                         Dispatch *d) {
    NEP_TRY(check_call(call, handle, d->config.send_only, d->config.pass_direction));
    if (nep_is_low_latency(handle->group) && !handle->has_routing)
        return nep_fail(call, NCCL_INVALID_USAGE,
                        "handle: expected ncclEpUpdateHandle first, got none");
    NEP_TRY(check_scales(call, handle, &d->config, in->scales != NULL, out->scales != NULL));
    NEP_TRY(check_metadata(call, handle, in, out, d->config.pass_direction));
    NEP_TRY(nep_numbers(call, handle, info, &d->numbers));
    NEP_TRY(read_tensors(call, handle->group, in, out, d));
    NEP_TRY(check_rows(call, handle, d));
    return nep_select(call, handle, reader_of(handle, info, &d->config));
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
    int routes = nep_is_low_latency(handle->group);
    EpPrepare prepare = EP_PREPARE_INIT;
    prepare.topk_idx = routes ? &handle->topk_idx : NULL, prepare.out = &d.numbers.out;
    EpStatus status =
        d.config.send_only
            ? send(handle, &d, &prepare, stream)
            : ep_dispatch(handle->ep, &handle->plan, routes || d.numbers.count ? &prepare : NULL,
                          d.tokens, d.weights, d.scales, stream, d.recv_tokens, d.recv_weights,
                          d.recv_scales, d.recv_idx);
    return nep_report(call, handle->group, nep_result(call, status));
}

/* ---- combine ------------------------------------------------------------------------------- */

/** A combine's tensors, as libep takes them. */
typedef struct Combine {
    EpTensor tensor[4];
    const EpTensor *tokens, *in_weights, *out, *out_weights;
    ncclEpCombineConfig_t config;
} Combine;

static int check_sums(const char *call, const ncclEpCombineInputs_t *in, int recipe) {
    if (recipe < NCCL_EP_COMB_QUANT_NONE || recipe > NCCL_EP_COMB_QUANT_MXFP8)
        return nep_fail(call, NCCL_INVALID_ARGUMENT, "config.quant_recipe: expected 0 .. 2, got %d",
                        recipe);
    if (recipe == NCCL_EP_COMB_QUANT_NVFP4)
        return nep_fail(call, NCCL_INVALID_USAGE,
                        "config.quant_recipe: expected NONE or MXFP8, since libep's sums do not "
                        "travel in fp4, got NVFP4");
    if (!in->scales) return NCCL_SUCCESS;
    return nep_fail(call, NCCL_INVALID_ARGUMENT,
                    "inputs.scales: expected NULL with quant_recipe %d, got a tensor", recipe);
}

/* In a forward pass of high throughput callers may leave a tensor that the backward pass is to
 * write, as NCCL EP's own benchmark does. In the rank-major layout the caller weights rows before,
 * and weights would have no effect. */
static int check_weights(const char *call, const struct ncclEpHandle *handle,
                         const ncclEpCombineInputs_t *in, const ncclEpCombineOutputs_t *out,
                         int pass) {
    if (handle->layout == NCCL_EP_LAYOUT_RANK_MAJOR)
        NEP_TRY(refuse(call, "outputs.topk_weights", "rank-major layout", out->topk_weights));
    if (pass == NCCL_EP_BWD_PASS) return check_pair(call, in->topk_weights, out->topk_weights);
    return refuse(call, "inputs.topk_weights", "forward pass", in->topk_weights);
}

static int read_sums(const char *call, ncclEpGroup_t group, const ncclEpCombineInputs_t *in,
                     const ncclEpCombineOutputs_t *out, Combine *c) {
    EpTensor *t = c->tensor;
    NEP_TRY(nep_tensor(call, group, "inputs.tokens", in->tokens, NEP_PLAIN, t, &c->tokens));
    NEP_TRY(nep_tensor(call, group, "inputs.topk_weights", in->topk_weights, NEP_PLAIN, t + 1,
                       &c->in_weights));
    NEP_TRY(nep_tensor(call, group, "outputs.tokens", out->tokens, NEP_PLAIN, t + 2, &c->out));
    return nep_tensor(call, group, "outputs.topk_weights", out->topk_weights, NEP_PLAIN, t + 3,
                      &c->out_weights);
}

/* Sums that travel in fp8 have libep's one form. */
static int read_combine(const char *call, ncclEpHandle_t handle, const ncclEpCombineInputs_t *in,
                        const ncclEpCombineOutputs_t *out, Combine *c) {
    ncclEpGroup_t group = handle->group;
    NepReader reader = handle->reader;
    NEP_TRY(check_call(call, handle, c->config.send_only, c->config.pass_direction));
    NEP_TRY(check_sums(call, in, c->config.quant_recipe));
    NEP_TRY(check_weights(call, handle, in, out, c->config.pass_direction));
    NEP_TRY(read_sums(call, group, in, out, c));
    NEP_TRY(check_tokens(call, handle, "outputs.tokens", c->out));
    NEP_TRY(check_room(call, handle, "inputs.tokens", c->tokens));
    NEP_TRY(check_empty(call, "inputs.topk_weights", c->in_weights, c->tokens));
    reader.sum_quant =
        c->config.quant_recipe == NCCL_EP_COMB_QUANT_MXFP8 ? EP_QUANT_FP8 : EP_QUANT_NONE;
    reader.num_sms = nep_num_sms(group, group->config.combine_num_sms);
    return nep_select(call, handle, reader);
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
 * refused may be called again, unless ncclEpMaskClean has dropped the operation. */
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
    int is_dropped = status == EP_ERR_ORDER && handle->group->has_masks;
    if (status == EP_OK || is_dropped) p->kind = NEP_NOTHING;
    return nep_report(call, handle->group, nep_result(call, status));
}
