/* SPDX-License-Identifier: Apache-2.0 */
/* The calls of a step. */
#include "tests/cases/step.h"
#include "tests/oracle/quant.h"

static int gives(const Case *c, StepInput input) {
    const int left_out[INPUTS] = {[IN_COUNT] = !c->counted,
                                  [IN_WEIGHTS] = !c->weighted,
                                  [IN_SCALES] = !c->scale_bytes,
                                  [IN_GLOBAL_SCALE] = !quant_form(c->quant)->is_global,
                                  [IN_SLOT_WEIGHTS] = !c->weighted,
                                  [IN_COMBINE_WEIGHTS] = !c->weights_at_combine,
                                  [IN_GRAD_SLOT_WEIGHTS] = !c->weighted,
                                  [IN_BIAS0] = c->biases < 1,
                                  [IN_BIAS1] = c->biases < 2};
    return !left_out[input];
}

static EpPlanTensors plan_outputs(const EpTensor *const *a) {
    return (EpPlanTensors){sizeof(EpPlanTensors), a[OUT_COUNTS],      a[OUT_PADDED],
                           a[OUT_OFFSETS],        a[OUT_TOTALS],      a[OUT_SOURCES],
                           a[OUT_RECV_ROWS],      a[OUT_NEEDED_ROWS], a[OUT_DROPPED],
                           a[OUT_SOURCE_ROWS]};
}

/* Only a dispatch takes the scale, which a step has for all of its calls. */
static const EpTensor *scale_of(const EpTensor *const *a, StepOp op) {
    return op & (STEP_DISPATCH | STEP_DISPATCH_SEND) ? a[IN_GLOBAL_SCALE] : NULL;
}

static int any_extras(const Step *step, const EpTensor *const *a, StepOp op) {
    int any = a[IN_BIAS0] || a[IN_BIAS1] || scale_of(a, op) || step->block_rows || step->expected;
    any |= op == STEP_COMBINE_BACKWARD && a[OUT_GRAD_SCALES];
    for (int i = EXPERT_TOKENS; i < STEP_ARRAYS; i++)
        any |= a[i] != NULL;
    return any;
}

/* Make a call, with extras or without. */
#define CALL(call, ...) return x ? call##_with(__VA_ARGS__, x) : call(__VA_ARGS__)

static EpStatus make_call(const Step *step, const EpTensor *const *a, const EpPrepare *prepare,
                          StepOp op, EpStream stream, const EpExtras *x) {
    EpHandle *h = step->handle;
    const EpTensor *plan = step->plan;
    const EpPlanTensors numbers = plan_outputs(a);
    switch (op) {
    case STEP_PREPARE:
        CALL(ep_prepare, h, plan, a[IN_INDEX], a[IN_COUNT], stream, &numbers);
    case STEP_DISPATCH:
        CALL(ep_dispatch, h, plan, prepare, a[IN_TOKENS], a[IN_WEIGHTS], a[IN_SCALES], stream,
             a[OUT_TOKENS], a[OUT_WEIGHTS], a[OUT_SCALES], a[OUT_INDEX]);
    case STEP_COMBINE:
        CALL(ep_combine, h, plan, a[IN_EXPERT_OUT], a[IN_SLOT_WEIGHTS], a[IN_COMBINE_WEIGHTS],
             stream, a[OUT_SUMS]);
    case STEP_COMBINE_BACKWARD:
        CALL(ep_combine_backward, h, plan, a[IN_GRAD_OUT], a[IN_SLOT_WEIGHTS], a[IN_EXPERT_OUT],
             stream, a[OUT_GRAD_ROWS], a[OUT_GRAD_SLOTS]);
    case STEP_DISPATCH_BACKWARD:
        CALL(ep_dispatch_backward, h, plan, a[IN_EXPERT_OUT], a[IN_GRAD_SLOT_WEIGHTS], stream,
             a[OUT_GRAD_TOKENS], a[OUT_GRAD_WEIGHTS]);
    case STEP_DISPATCH_SEND:
        CALL(ep_dispatch_send, h, plan, NULL, a[IN_TOKENS], a[IN_WEIGHTS], a[IN_SCALES], stream);
    case STEP_DISPATCH_WAIT:
        CALL(ep_dispatch_wait, h, stream, a[OUT_TOKENS], a[OUT_WEIGHTS], a[OUT_SCALES],
             a[OUT_INDEX]);
    case STEP_COMBINE_SEND:
        CALL(ep_combine_send, h, plan, a[IN_EXPERT_OUT], a[IN_SLOT_WEIGHTS], a[IN_COMBINE_WEIGHTS],
             stream);
    default:
        CALL(ep_combine_wait, h, stream, a[OUT_SUMS]);
    }
}

EpStatus step_call_with(const Step *step, const EpTensor *const a[STEP_ARRAYS], int again,
                        StepOp op, EpStream stream) {
    int has_words = a[READY_WORDS] || a[DONE_WORDS];
    EpPlanTensors numbers = plan_outputs(a);
    EpPrepare prepare = EP_PREPARE_INIT;
    EpExtras x = {sizeof(x),       a[IN_BIAS0],
                  a[IN_BIAS1],     a[EXPERT_TOKENS],
                  a[PEER_ROWS],    a[PEER_BYTES],
                  a[PEER_WAIT],    a[LONGEST_WAIT],
                  scale_of(a, op), a[READY_WORDS],
                  a[DONE_WORDS],   step->block_rows,
                  step->expected,  op == STEP_COMBINE_BACKWARD ? a[OUT_GRAD_SCALES] : NULL};
    if (!x.block_rows && has_words) x.block_rows = step->world->c.block_rows;
    if (!x.expected && a[DONE_WORDS]) x.expected = 1;
    prepare.out = &numbers;
    return make_call(step, a, again ? &prepare : NULL, op, stream,
                     any_extras(step, a, op) ? &x : NULL);
}

/* One bias is either member. The library may keep data pointers, but no other part of tensors. */
EpStatus step_call(const Step *step, const StepMemory *memory, StepOp op, EpStream stream) {
    const Case *c = &step->world->c;
    const unsigned sums = STEP_COMBINE | STEP_COMBINE_WAIT | STEP_DISPATCH_BACKWARD;
    EpTensor tensor[STEP_ARRAYS];
    const EpTensor *given[STEP_ARRAYS] = {NULL};
    for (StepInput i = 0; i < INPUTS; i++) {
        tensor[i] = step_input(step, i), tensor[i].data = memory->in[i];
        if (gives(c, i)) given[i] = &tensor[i];
    }
    for (StepOutput i = OUT_COUNTS; i < STEP_OUTPUTS; i++) {
        tensor[i] = step_output(step, i), tensor[i].data = memory->out[i];
        if (memory->out[i] && case_asks(c, i)) given[i] = &tensor[i];
    }
    for (StepCounter i = EXPERT_TOKENS; i < STEP_ARRAYS; i++) {
        tensor[i] = step_counter(step, memory->counters, i);
        if (memory->counters && step_counts(step, op, i)) given[i] = &tensor[i];
    }
    if (!(op & sums)) given[IN_BIAS0] = given[IN_BIAS1] = NULL;
    if (!tensor[IN_INDEX].shape[0]) tensor[IN_INDEX].data = NULL;
    if (c->biases == 1 && c->seed % 2) given[IN_BIAS1] = given[IN_BIAS0], given[IN_BIAS0] = NULL;
    if (op == STEP_COMBINE_BACKWARD && !given[OUT_GRAD_SLOTS]) given[IN_EXPERT_OUT] = NULL;
    EpStatus status = step_call_with(step, given, memory->numbers_again, op, stream);
    memset(tensor, 0x77, sizeof(tensor));
    return status;
}
