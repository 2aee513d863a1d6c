/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/rig_map.h"

static EpTensor from(const Rig *rig, EpTensor tensor, RigInput input) {
    tensor.data = rig->device + rig_input_offset(&rig->c, (int)input);
    return tensor;
}

static EpTensor into(const Rig *rig, EpTensor tensor, RigOutput output) {
    tensor.data =
        rig->device + rig_inputs_size(&rig->c) + rig_output_offset(&rig->c, (int)output) +
        (rig_image(rig, rig->poison, output).data - rig_image(rig, rig->poison, output).base);
    return tensor;
}

/* Rows of a receive buffer of the caller's; and the shape of recv_topk_weights and its gradient. */
static EpTensor rows_of(const Rig *rig, EpType type) {
    return step_rows(&rig->step, NULL, type, rig->c.hidden);
}

static EpTensor weights_of(const Rig *rig) {
    if (rig->c.layout != EP_LAYOUT_FLAT) return step_slot_weights(&rig->step);
    return step_rows(&rig->step, NULL, EP_TYPE_FP32, rig->c.top_k);
}

static EpStatus issue_prepare(const Rig *rig) {
    const Case *c = &rig->c;
    const RankWorld *me = rig_rank(rig);
    EpType type = c->index_type, other = type == EP_TYPE_INT64 ? EP_TYPE_INT32 : EP_TYPE_INT64;
    EpTensor index = from(rig, ep_tensor_2d(NULL, type, me->rows, c->top_k), IN_INDEX);
    EpTensor count = from(rig, ep_tensor_1d(NULL, type, 1), IN_COUNT);
    EpTensor counts = into(rig, ep_tensor_1d(NULL, type, me->num_experts), OUT_COUNTS);
    EpTensor padded = into(rig, ep_tensor_1d(NULL, other, me->num_experts), OUT_PADDED);
    EpTensor offsets = into(rig, ep_tensor_1d(NULL, type, me->num_experts + 1), OUT_OFFSETS);
    EpTensor totals = into(rig, ep_tensor_1d(NULL, other, 3), OUT_TOTALS);
    EpPlanTensors plan = {sizeof(plan), &counts, &padded, &offsets, &totals, NULL};
    return ep_prepare(rig->step.handle, &index, c->counted ? &count : NULL, rig->stream, &plan);
}

static EpStatus issue_dispatch(const Rig *rig) {
    const Case *c = &rig->c;
    const Step *step = &rig->step;
    EpTensor tokens = from(rig, step_tokens(step), IN_TOKENS);
    EpTensor weights = from(rig, step_weights(step), IN_WEIGHTS);
    EpTensor scales = from(rig, step_scales(step), IN_SCALES);
    EpTensor recv_tokens = into(rig, step_recv_tokens(step, NULL), OUT_TOKENS);
    EpTensor recv_weights = into(rig, weights_of(rig), OUT_WEIGHTS);
    EpTensor recv_scales = into(rig, step_recv_scales(step, NULL), OUT_SCALES);
    EpTensor recv_index = into(rig, step_rows(step, NULL, c->index_type, c->top_k), OUT_INDEX);
    return ep_dispatch(step->handle, &tokens, c->weighted ? &weights : NULL,
                       c->scale_bytes ? &scales : NULL, rig->stream, &recv_tokens,
                       c->weighted ? &recv_weights : NULL, case_scales(c) ? &recv_scales : NULL,
                       c->layout == EP_LAYOUT_FLAT ? &recv_index : NULL);
}

static EpStatus issue_combine(const Rig *rig) {
    EpTensor rows = from(rig, step_expert_out(&rig->step), IN_EXPERT_OUT);
    EpTensor weights = from(rig, step_slot_weights(&rig->step), IN_SLOT_WEIGHTS);
    EpTensor out = into(rig, step_grad_out(&rig->step), OUT_SUMS);
    return ep_combine(rig->step.handle, &rows, rig->c.weighted ? &weights : NULL, rig->stream,
                      &out);
}

static EpStatus issue_combine_backward(const Rig *rig) {
    int weighted = rig->c.weighted;
    EpTensor grad_out = from(rig, step_grad_out(&rig->step), IN_GRAD_OUT);
    EpTensor weights = from(rig, step_slot_weights(&rig->step), IN_SLOT_WEIGHTS);
    EpTensor expert_out = from(rig, step_expert_out(&rig->step), IN_EXPERT_OUT);
    EpTensor rows = into(rig, rows_of(rig, rig->c.sum_type), OUT_GRAD_ROWS);
    EpTensor slots = into(rig, step_slot_weights(&rig->step), OUT_GRAD_SLOTS);
    return ep_combine_backward(rig->step.handle, &grad_out, weighted ? &weights : NULL,
                               weighted ? &expert_out : NULL, rig->stream, &rows,
                               weighted ? &slots : NULL);
}

static EpStatus issue_dispatch_backward(const Rig *rig) {
    int weighted = rig->c.weighted;
    EpTensor rows = from(rig, step_expert_out(&rig->step), IN_EXPERT_OUT);
    EpTensor slots = from(rig, weights_of(rig), IN_GRAD_SLOT_WEIGHTS);
    EpTensor tokens = into(rig, step_grad_out(&rig->step), OUT_GRAD_TOKENS);
    EpTensor weights = into(rig, step_weights(&rig->step), OUT_GRAD_WEIGHTS);
    return ep_dispatch_backward(rig->step.handle, &rows, weighted ? &slots : NULL, rig->stream,
                                &tokens, weighted ? &weights : NULL);
}

EpStatus rig_try(const Rig *rig, RigOp op) {
    switch (op) {
    case RIG_PREPARE:
        return issue_prepare(rig);
    case RIG_DISPATCH:
        return issue_dispatch(rig);
    case RIG_COMBINE:
        return issue_combine(rig);
    case RIG_COMBINE_BACKWARD:
        return issue_combine_backward(rig);
    default:
        return issue_dispatch_backward(rig);
    }
}

void rig_issue(Rig *rig, unsigned ops) {
    for (unsigned op = RIG_PREPARE; op <= RIG_DISPATCH_BACKWARD; op <<= 1)
        if (ops & op) CHECK_OK(rig_try(rig, (RigOp)op));
    rig_replayed(rig, ops);
}

void rig_replayed(Rig *rig, unsigned ops) {
    rig->issued |= ops;
}
