/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/device_step_layout.h"

EpTensor device_step_from(const DeviceStep *gpu, EpTensor tensor, StepInput input) {
    tensor.data = gpu->device + device_step_input_offset(&gpu->c, (int)input);
    return tensor;
}

EpTensor device_step_into(const DeviceStep *gpu, EpTensor tensor, StepOutput output) {
    tensor.data = gpu->device + device_step_inputs_size(&gpu->c) +
                  device_step_output_offset(&gpu->c, (int)output) +
                  (device_step_image(gpu, gpu->poison, output).data -
                   device_step_image(gpu, gpu->poison, output).base);
    return tensor;
}

EpTensor device_step_weights(const DeviceStep *gpu) {
    if (!case_has_rows(&gpu->c)) return step_slot_weights(&gpu->step);
    return step_rows(&gpu->step, NULL, EP_TYPE_FP32, gpu->c.top_k);
}

static EpStatus prepare(const DeviceStep *gpu) {
    const Case *c = &gpu->c;
    const RankWorld *me = device_step_rank(gpu);
    int64_t experts = me->num_experts;
    EpType type = c->index_type, other = type == EP_TYPE_INT64 ? EP_TYPE_INT32 : EP_TYPE_INT64;
    EpTensor index = device_step_from(gpu, ep_tensor_2d(NULL, type, me->rows, c->top_k), IN_INDEX);
    EpTensor count = device_step_from(gpu, ep_tensor_1d(NULL, type, 1), IN_COUNT);
    EpTensor counts = device_step_into(gpu, ep_tensor_1d(NULL, type, experts), OUT_COUNTS);
    EpTensor padded = device_step_into(gpu, ep_tensor_1d(NULL, other, experts), OUT_PADDED);
    EpTensor offsets = device_step_into(gpu, ep_tensor_1d(NULL, type, experts + 1), OUT_OFFSETS);
    EpTensor totals = device_step_into(gpu, ep_tensor_1d(NULL, other, 3), OUT_TOTALS);
    EpPlanTensors plan = EP_PLAN_TENSORS_INIT;
    plan.expert_counts = &counts, plan.expert_padded = &padded;
    plan.expert_offsets = &offsets, plan.totals = &totals;
    return ep_prepare(gpu->step.handle, gpu->step.plan, &index, c->counted ? &count : NULL,
                      gpu->stream, &plan);
}

/* The counters of a call, and space for what they refer to. */
typedef struct Counters {
    EpTensor experts, rows;
    EpExtras extras;
} Counters;

/* Phases count what they do themselves. */
static const EpExtras *counters_of(const DeviceStep *gpu, StepOp op, Counters *n) {
    int64_t local = device_step_rank(gpu)->num_experts, ranks = gpu->c.ranks;
    int combines = op == STEP_COMBINE || op == STEP_COMBINE_SEND;
    if (!gpu->counters) return NULL;
    n->extras = (EpExtras)EP_EXTRAS_INIT;
    n->experts = ep_tensor_1d(gpu->counters, EP_TYPE_INT64, local);
    n->rows = ep_tensor_1d(gpu->counters + local + combines * ranks, EP_TYPE_INT64, ranks);
    if (op == STEP_DISPATCH || op == STEP_DISPATCH_WAIT) n->extras.expert_tokens = &n->experts;
    if (op != STEP_DISPATCH_WAIT && op != STEP_COMBINE_WAIT) n->extras.peer_rows = &n->rows;
    return &n->extras;
}

/* A dispatch, or one of its phases. */
static EpStatus dispatch(const DeviceStep *gpu, StepOp op) {
    const Case *c = &gpu->c;
    const Step *s = &gpu->step;
    EpTensor tokens = device_step_from(gpu, step_tokens(s), IN_TOKENS);
    EpTensor weights = device_step_from(gpu, step_weights(s), IN_WEIGHTS);
    EpTensor scales = device_step_from(gpu, step_scales(s), IN_SCALES);
    EpTensor recv_tokens = device_step_into(gpu, step_recv_tokens(s, NULL), OUT_TOKENS);
    EpTensor recv_weights = device_step_into(gpu, device_step_weights(gpu), OUT_WEIGHTS);
    EpTensor recv_scales = device_step_into(gpu, step_recv_scales(s, NULL), OUT_SCALES);
    EpTensor ids = device_step_into(gpu, step_rows(s, NULL, c->index_type, c->top_k), OUT_INDEX);
    const EpTensor *given = c->weighted ? &weights : NULL,
                   *got = c->weighted ? &recv_weights : NULL;
    const EpTensor *scaled = c->scale_bytes > 0 ? &scales : NULL;
    const EpTensor *rescaled = case_scales(c) > 0 ? &recv_scales : NULL;
    const EpTensor *index = case_has_rows(c) ? &ids : NULL;
    Counters n;
    const EpExtras *extras = counters_of(gpu, op, &n);
    if (op == STEP_DISPATCH_SEND)
        return ep_dispatch_send_with(s->handle, s->plan, NULL, &tokens, given, scaled, gpu->stream,
                                     extras);
    if (op == STEP_DISPATCH_WAIT)
        return ep_dispatch_wait_with(s->handle, gpu->stream, &recv_tokens, got, rescaled, index,
                                     extras);
    return ep_dispatch_with(s->handle, s->plan, NULL, &tokens, given, scaled, gpu->stream,
                            &recv_tokens, got, rescaled, index, extras);
}

/* The extras of a call that sums, and space for what they refer to. */
typedef struct Biases {
    EpTensor tensor[2];
    EpExtras extras;
} Biases;

static const EpExtras *biases_of(const DeviceStep *gpu, Biases *b) {
    b->extras = (EpExtras)EP_EXTRAS_INIT;
    for (int i = 0; i < 2; i++)
        b->tensor[i] = device_step_from(gpu, step_bias(&gpu->step, i), (StepInput)(IN_BIAS0 + i));
    if (gpu->c.biases > 0) b->extras.bias0 = &b->tensor[0];
    if (gpu->c.biases > 1) b->extras.bias1 = &b->tensor[1];
    return &b->extras;
}

/* A combine, or one of its phases. */
static EpStatus combine(const DeviceStep *gpu, StepOp op) {
    const Step *s = &gpu->step;
    EpTensor rows = device_step_from(gpu, step_expert_out(s), IN_EXPERT_OUT);
    EpTensor slot_weights = device_step_from(gpu, step_slot_weights(s), IN_SLOT_WEIGHTS);
    EpTensor topk_weights = device_step_from(gpu, step_weights(s), IN_COMBINE_WEIGHTS);
    EpTensor out = device_step_into(gpu, step_grad_out(s), OUT_SUMS);
    const EpTensor *slots = gpu->c.weighted ? &slot_weights : NULL;
    const EpTensor *weights = gpu->c.weights_at_combine ? &topk_weights : NULL;
    Biases b;
    Counters n;
    const EpExtras *extras = biases_of(gpu, &b), *counted = counters_of(gpu, op, &n);
    if (op == STEP_COMBINE_SEND)
        return ep_combine_send_with(s->handle, s->plan, &rows, slots, weights, gpu->stream,
                                    counted);
    if (op == STEP_COMBINE && counted) b.extras.peer_rows = &n.rows;
    if (op == STEP_COMBINE_WAIT) return ep_combine_wait_with(s->handle, gpu->stream, &out, extras);
    return ep_combine_with(s->handle, s->plan, &rows, slots, weights, gpu->stream, &out, extras);
}

static EpStatus combine_backward(const DeviceStep *gpu) {
    int weighted = gpu->c.weighted;
    const Step *s = &gpu->step;
    EpTensor grad_out = device_step_from(gpu, step_grad_out(s), IN_GRAD_OUT);
    EpTensor weights = device_step_from(gpu, step_slot_weights(s), IN_SLOT_WEIGHTS);
    EpTensor expert_out = device_step_from(gpu, step_expert_out(s), IN_EXPERT_OUT);
    EpTensor rows = device_step_into(gpu, step_expert_out(s), OUT_GRAD_ROWS);
    EpTensor slots = device_step_into(gpu, step_slot_weights(s), OUT_GRAD_SLOTS);
    return ep_combine_backward(s->handle, s->plan, &grad_out, weighted ? &weights : NULL,
                               weighted ? &expert_out : NULL, gpu->stream, &rows,
                               weighted ? &slots : NULL);
}

static EpStatus dispatch_backward(const DeviceStep *gpu) {
    int weighted = gpu->c.weighted;
    const Step *s = &gpu->step;
    EpTensor rows = device_step_from(gpu, step_expert_out(s), IN_EXPERT_OUT);
    EpTensor slots = device_step_from(gpu, device_step_weights(gpu), IN_GRAD_SLOT_WEIGHTS);
    EpTensor tokens = device_step_into(gpu, step_grad_out(s), OUT_GRAD_TOKENS);
    EpTensor weights = device_step_into(gpu, step_weights(s), OUT_GRAD_WEIGHTS);
    Biases b;
    return ep_dispatch_backward_with(s->handle, s->plan, &rows, weighted ? &slots : NULL,
                                     gpu->stream, &tokens, weighted ? &weights : NULL,
                                     biases_of(gpu, &b));
}

EpStatus device_step_try(const DeviceStep *gpu, StepOp op) {
    if (op == STEP_PREPARE) return prepare(gpu);
    if (op == STEP_COMBINE_BACKWARD) return combine_backward(gpu);
    if (op == STEP_DISPATCH_BACKWARD) return dispatch_backward(gpu);
    int dispatches = STEP_DISPATCH | STEP_DISPATCH_SEND | STEP_DISPATCH_WAIT;
    return op & dispatches ? dispatch(gpu, op) : combine(gpu, op);
}

/* Overwrite inputs after their send phase, to show that they are not read any more. An index of
 * 0x77777777 would be reported as a routing error. */
static void spoil(DeviceStep *gpu, StepInput first, StepInput last) {
    size_t begin = device_step_input_offset(&gpu->c, (int)first);
    size_t end = device_step_input_offset(&gpu->c, (int)last + 1);
    CHECK_CUDA(cudaMemsetAsync(gpu->device + begin, 0x77, end - begin, gpu->stream));
    gpu->spoilt = 1;
}

static void issue(DeviceStep *gpu, StepOp op) {
    CHECK_OK(device_step_try(gpu, op));
    if (op == STEP_DISPATCH_SEND) spoil(gpu, IN_INDEX, IN_SCALES);
    if (op == STEP_COMBINE_SEND) spoil(gpu, IN_EXPERT_OUT, IN_COMBINE_WEIGHTS);
}

void device_step_issue(DeviceStep *gpu, unsigned ops) {
    for (unsigned op = STEP_PREPARE; op <= STEP_COMBINE_WAIT; op <<= 1)
        if (ops & op) issue(gpu, (StepOp)op);
    device_step_replayed(gpu, ops);
}

void device_step_replayed(DeviceStep *gpu, unsigned ops) {
    gpu->issued |= ops;
    gpu->spoilt |= (ops & STEP_SENDS) != 0;
}

unsigned device_step_all(const Case *c) {
    if (c->mode != EP_MODE_LATENCY) return STEP_ALL;
    return c->phases ? STEP_PHASES : STEP_FORWARD;
}
