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

/* Returns a tensor shaped like grad_expert_out, of this type. */
static EpTensor rows_of(const DeviceStep *gpu, EpType type) {
    return step_rows(&gpu->step, NULL, type, gpu->c.hidden);
}

EpTensor device_step_weights(const DeviceStep *gpu) {
    if (!case_has_rows(&gpu->c)) return step_slot_weights(&gpu->step);
    return step_rows(&gpu->step, NULL, EP_TYPE_FP32, gpu->c.top_k);
}

static EpStatus issue_prepare(const DeviceStep *gpu) {
    const Case *c = &gpu->c;
    const RankWorld *me = device_step_rank(gpu);
    EpType type = c->index_type, other = type == EP_TYPE_INT64 ? EP_TYPE_INT32 : EP_TYPE_INT64;
    EpTensor index = device_step_from(gpu, ep_tensor_2d(NULL, type, me->rows, c->top_k), IN_INDEX);
    EpTensor count = device_step_from(gpu, ep_tensor_1d(NULL, type, 1), IN_COUNT);
    EpTensor counts = device_step_into(gpu, ep_tensor_1d(NULL, type, me->num_experts), OUT_COUNTS);
    EpTensor padded = device_step_into(gpu, ep_tensor_1d(NULL, other, me->num_experts), OUT_PADDED);
    EpTensor offsets =
        device_step_into(gpu, ep_tensor_1d(NULL, type, me->num_experts + 1), OUT_OFFSETS);
    EpTensor totals = device_step_into(gpu, ep_tensor_1d(NULL, other, 3), OUT_TOTALS);
    EpPlanTensors plan = EP_PLAN_TENSORS_INIT;
    plan.expert_counts = &counts, plan.expert_padded = &padded;
    plan.expert_offsets = &offsets, plan.totals = &totals;
    return ep_prepare(gpu->step.handle, gpu->step.plan, &index, c->counted ? &count : NULL,
                      gpu->stream, &plan);
}

/* The tensors of a dispatch, and which optional ones the case passes. */
typedef struct Passed {
    EpTensor tokens, weights, scales, recv_tokens, recv_weights, recv_scales, recv_index;
    int weighted, scaled, rescaled, indexed;
} Passed;

static Passed dispatched(const DeviceStep *gpu) {
    const Case *c = &gpu->c;
    const Step *step = &gpu->step;
    Passed p = {.weighted = c->weighted, .scaled = c->scale_bytes > 0};
    p.rescaled = case_scales(c) > 0, p.indexed = case_has_rows(c);
    p.tokens = device_step_from(gpu, step_tokens(step), IN_TOKENS);
    p.weights = device_step_from(gpu, step_weights(step), IN_WEIGHTS);
    p.scales = device_step_from(gpu, step_scales(step), IN_SCALES);
    p.recv_tokens = device_step_into(gpu, step_recv_tokens(step, NULL), OUT_TOKENS);
    p.recv_weights = device_step_into(gpu, device_step_weights(gpu), OUT_WEIGHTS);
    p.recv_scales = device_step_into(gpu, step_recv_scales(step, NULL), OUT_SCALES);
    p.recv_index = device_step_into(gpu, step_rows(step, NULL, c->index_type, c->top_k), OUT_INDEX);
    return p;
}

static EpStatus issue_dispatch(const DeviceStep *gpu) {
    Passed p = dispatched(gpu);
    return ep_dispatch(gpu->step.handle, gpu->step.plan, NULL, &p.tokens,
                       p.weighted ? &p.weights : NULL, p.scaled ? &p.scales : NULL, gpu->stream,
                       &p.recv_tokens, p.weighted ? &p.recv_weights : NULL,
                       p.rescaled ? &p.recv_scales : NULL, p.indexed ? &p.recv_index : NULL);
}

static EpStatus issue_dispatch_send(const DeviceStep *gpu) {
    Passed p = dispatched(gpu);
    return ep_dispatch_send(gpu->step.handle, gpu->step.plan, NULL, &p.tokens,
                            p.weighted ? &p.weights : NULL, p.scaled ? &p.scales : NULL,
                            gpu->stream);
}

static EpStatus issue_dispatch_wait(const DeviceStep *gpu) {
    Passed p = dispatched(gpu);
    return ep_dispatch_wait(gpu->step.handle, gpu->stream, &p.recv_tokens,
                            p.weighted ? &p.recv_weights : NULL, p.rescaled ? &p.recv_scales : NULL,
                            p.indexed ? &p.recv_index : NULL);
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

static EpStatus issue_combine(const DeviceStep *gpu) {
    EpTensor rows = device_step_from(gpu, step_expert_out(&gpu->step), IN_EXPERT_OUT);
    EpTensor slots = device_step_from(gpu, step_slot_weights(&gpu->step), IN_SLOT_WEIGHTS);
    EpTensor weights = device_step_from(gpu, step_weights(&gpu->step), IN_COMBINE_WEIGHTS);
    EpTensor out = device_step_into(gpu, step_grad_out(&gpu->step), OUT_SUMS);
    Biases b;
    return ep_combine_with(gpu->step.handle, gpu->step.plan, &rows, gpu->c.weighted ? &slots : NULL,
                           gpu->c.weights_at_combine ? &weights : NULL, gpu->stream, &out,
                           biases_of(gpu, &b));
}

static EpStatus issue_combine_send(const DeviceStep *gpu) {
    EpTensor rows = device_step_from(gpu, step_expert_out(&gpu->step), IN_EXPERT_OUT);
    EpTensor slots = device_step_from(gpu, step_slot_weights(&gpu->step), IN_SLOT_WEIGHTS);
    EpTensor weights = device_step_from(gpu, step_weights(&gpu->step), IN_COMBINE_WEIGHTS);
    return ep_combine_send(gpu->step.handle, gpu->step.plan, &rows, gpu->c.weighted ? &slots : NULL,
                           gpu->c.weights_at_combine ? &weights : NULL, gpu->stream);
}

static EpStatus issue_combine_wait(const DeviceStep *gpu) {
    EpTensor out = device_step_into(gpu, step_grad_out(&gpu->step), OUT_SUMS);
    Biases b;
    return ep_combine_wait_with(gpu->step.handle, gpu->stream, &out, biases_of(gpu, &b));
}

static EpStatus issue_combine_backward(const DeviceStep *gpu) {
    int weighted = gpu->c.weighted;
    EpTensor grad_out = device_step_from(gpu, step_grad_out(&gpu->step), IN_GRAD_OUT);
    EpTensor weights = device_step_from(gpu, step_slot_weights(&gpu->step), IN_SLOT_WEIGHTS);
    EpTensor expert_out = device_step_from(gpu, step_expert_out(&gpu->step), IN_EXPERT_OUT);
    EpTensor rows = device_step_into(gpu, rows_of(gpu, gpu->c.sum_type), OUT_GRAD_ROWS);
    EpTensor slots = device_step_into(gpu, step_slot_weights(&gpu->step), OUT_GRAD_SLOTS);
    return ep_combine_backward(gpu->step.handle, gpu->step.plan, &grad_out,
                               weighted ? &weights : NULL, weighted ? &expert_out : NULL,
                               gpu->stream, &rows, weighted ? &slots : NULL);
}

static EpStatus issue_dispatch_backward(const DeviceStep *gpu) {
    int weighted = gpu->c.weighted;
    EpTensor rows = device_step_from(gpu, step_expert_out(&gpu->step), IN_EXPERT_OUT);
    EpTensor slots = device_step_from(gpu, device_step_weights(gpu), IN_GRAD_SLOT_WEIGHTS);
    EpTensor tokens = device_step_into(gpu, step_grad_out(&gpu->step), OUT_GRAD_TOKENS);
    EpTensor weights = device_step_into(gpu, step_weights(&gpu->step), OUT_GRAD_WEIGHTS);
    Biases b;
    return ep_dispatch_backward_with(gpu->step.handle, gpu->step.plan, &rows,
                                     weighted ? &slots : NULL, gpu->stream, &tokens,
                                     weighted ? &weights : NULL, biases_of(gpu, &b));
}

EpStatus device_step_try(const DeviceStep *gpu, StepOp op) {
    switch (op) {
    case STEP_PREPARE:
        return issue_prepare(gpu);
    case STEP_DISPATCH:
        return issue_dispatch(gpu);
    case STEP_COMBINE:
        return issue_combine(gpu);
    case STEP_COMBINE_BACKWARD:
        return issue_combine_backward(gpu);
    case STEP_DISPATCH_BACKWARD:
        return issue_dispatch_backward(gpu);
    case STEP_DISPATCH_SEND:
        return issue_dispatch_send(gpu);
    case STEP_DISPATCH_WAIT:
        return issue_dispatch_wait(gpu);
    case STEP_COMBINE_SEND:
        return issue_combine_send(gpu);
    default:
        return issue_combine_wait(gpu);
    }
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
