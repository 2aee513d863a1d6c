/* SPDX-License-Identifier: Apache-2.0 */
/* The calls of a step. */
#include "tests/cases/step.h"

/* The tensors of one call. The library may keep their data pointers, but no other part of them. */
typedef struct Arguments {
    const Step *step;
    const StepMemory *memory;
    EpTensor in[INPUTS], out[STEP_OUTPUTS], counter[STEP_COUNTERS];
    EpExtras extras;
} Arguments;

static int gives(const Case *c, StepInput input) {
    const int left_out[INPUTS] = {[IN_COUNT] = !c->counted,
                                  [IN_WEIGHTS] = !c->weighted,
                                  [IN_SCALES] = !c->scale_bytes,
                                  [IN_SLOT_WEIGHTS] = !c->weighted,
                                  [IN_COMBINE_WEIGHTS] = !c->weights_at_combine,
                                  [IN_GRAD_SLOT_WEIGHTS] = !c->weighted,
                                  [IN_BIAS0] = c->biases < 1,
                                  [IN_BIAS1] = c->biases < 2};
    return !left_out[input];
}

static const EpTensor *in(Arguments *a, StepInput input) {
    if (!gives(&a->step->world->c, input)) return NULL;
    a->in[input] = step_input(a->step, input);
    a->in[input].data = a->memory->in[input];
    return &a->in[input];
}

static const EpTensor *out(Arguments *a, StepOutput output) {
    if (!case_asks(&a->step->world->c, output) || !a->memory->out[output]) return NULL;
    a->out[output] = step_output(a->step, output);
    a->out[output].data = a->memory->out[output];
    return &a->out[output];
}

static EpPlanTensors plan_outputs(Arguments *a) {
    return (EpPlanTensors){.struct_size = sizeof(EpPlanTensors),
                           .expert_counts = out(a, OUT_COUNTS),
                           .expert_padded = out(a, OUT_PADDED),
                           .expert_offsets = out(a, OUT_OFFSETS),
                           .totals = out(a, OUT_TOTALS),
                           .source_counts = out(a, OUT_SOURCES),
                           .recv_rows = out(a, OUT_RECV_ROWS),
                           .needed_rows = out(a, OUT_NEEDED_ROWS),
                           .dropped_slots = out(a, OUT_DROPPED),
                           .source_rows = out(a, OUT_SOURCE_ROWS)};
}

/* Fill in the counters of a call, and the biases of one that sums. Returns NULL where there are
 * none. One bias is either member. */
static const EpExtras *extras(Arguments *a, StepOp op) {
    const Case *c = &a->step->world->c;
    const unsigned sums = STEP_COMBINE | STEP_COMBINE_WAIT | STEP_DISPATCH_BACKWARD;
    a->extras = (EpExtras)EP_EXTRAS_INIT;
    int counters = step_counters(a->step, op, a->memory->counters, a->counter, &a->extras);
    int biases = op & sums ? c->biases : 0;
    if (biases) a->extras.bias0 = in(a, IN_BIAS0), a->extras.bias1 = in(a, IN_BIAS1);
    if (biases == 1 && c->seed % 2) a->extras.bias1 = a->extras.bias0, a->extras.bias0 = NULL;
    return counters || biases ? &a->extras : NULL;
}

static EpStatus prepare(Arguments *a, EpStream stream) {
    EpHandle *handle = a->step->handle;
    EpPlanTensors numbers = plan_outputs(a);
    const EpTensor *plan = a->step->plan, *index = in(a, IN_INDEX), *count = in(a, IN_COUNT);
    const EpExtras *more = extras(a, STEP_PREPARE);
    if (!index->shape[0]) a->in[IN_INDEX].data = NULL;
    EpStatus status = more ? ep_prepare_with(handle, plan, index, count, stream, &numbers, more)
                           : ep_prepare(handle, plan, index, count, stream, &numbers);
    memset(&numbers, 0x77, sizeof(numbers));
    return status;
}

static EpStatus dispatch_send(Arguments *a, EpStream stream) {
    EpHandle *handle = a->step->handle;
    const EpTensor *plan = a->step->plan, *tokens = in(a, IN_TOKENS), *weights = in(a, IN_WEIGHTS);
    const EpTensor *scales = in(a, IN_SCALES);
    const EpExtras *more = extras(a, STEP_DISPATCH_SEND);
    if (!more) return ep_dispatch_send(handle, plan, NULL, tokens, weights, scales, stream);
    return ep_dispatch_send_with(handle, plan, NULL, tokens, weights, scales, stream, more);
}

static EpStatus dispatch_wait(Arguments *a, EpStream stream) {
    EpHandle *handle = a->step->handle;
    const EpTensor *tokens = out(a, OUT_TOKENS), *weights = out(a, OUT_WEIGHTS);
    const EpTensor *scales = out(a, OUT_SCALES), *index = out(a, OUT_INDEX);
    const EpExtras *more = extras(a, STEP_DISPATCH_WAIT);
    if (!more) return ep_dispatch_wait(handle, stream, tokens, weights, scales, index);
    return ep_dispatch_wait_with(handle, stream, tokens, weights, scales, index, more);
}

static EpStatus dispatch(Arguments *a, EpStream stream) {
    EpHandle *handle = a->step->handle;
    const EpTensor *plan = a->step->plan, *tokens = in(a, IN_TOKENS), *weights = in(a, IN_WEIGHTS);
    const EpTensor *scales = in(a, IN_SCALES), *got = out(a, OUT_TOKENS);
    const EpTensor *got_weights = out(a, OUT_WEIGHTS), *got_scales = out(a, OUT_SCALES);
    const EpTensor *index = out(a, OUT_INDEX);
    EpPlanTensors numbers = plan_outputs(a);
    EpPrepare again = EP_PREPARE_INIT, *given = a->memory->numbers_again ? &again : NULL;
    again.out = &numbers;
    const EpExtras *more = extras(a, STEP_DISPATCH);
    if (!more)
        return ep_dispatch(handle, plan, given, tokens, weights, scales, stream, got, got_weights,
                           got_scales, index);
    return ep_dispatch_with(handle, plan, given, tokens, weights, scales, stream, got, got_weights,
                            got_scales, index, more);
}

static EpStatus combine_send(Arguments *a, EpStream stream) {
    EpHandle *handle = a->step->handle;
    const EpTensor *plan = a->step->plan, *rows = in(a, IN_EXPERT_OUT);
    const EpTensor *slots = in(a, IN_SLOT_WEIGHTS), *weights = in(a, IN_COMBINE_WEIGHTS);
    const EpExtras *more = extras(a, STEP_COMBINE_SEND);
    if (!more) return ep_combine_send(handle, plan, rows, slots, weights, stream);
    return ep_combine_send_with(handle, plan, rows, slots, weights, stream, more);
}

static EpStatus combine_wait(Arguments *a, EpStream stream) {
    EpHandle *handle = a->step->handle;
    const EpTensor *sums = out(a, OUT_SUMS);
    const EpExtras *more = extras(a, STEP_COMBINE_WAIT);
    return more ? ep_combine_wait_with(handle, stream, sums, more)
                : ep_combine_wait(handle, stream, sums);
}

static EpStatus combine(Arguments *a, EpStream stream) {
    EpHandle *handle = a->step->handle;
    const EpTensor *plan = a->step->plan, *rows = in(a, IN_EXPERT_OUT), *sums = out(a, OUT_SUMS);
    const EpTensor *slots = in(a, IN_SLOT_WEIGHTS), *weights = in(a, IN_COMBINE_WEIGHTS);
    const EpExtras *more = extras(a, STEP_COMBINE);
    if (!more) return ep_combine(handle, plan, rows, slots, weights, stream, sums);
    return ep_combine_with(handle, plan, rows, slots, weights, stream, sums, more);
}

static EpStatus combine_backward(Arguments *a, EpStream stream) {
    EpHandle *handle = a->step->handle;
    const EpTensor *plan = a->step->plan, *grad = in(a, IN_GRAD_OUT),
                   *slots = in(a, IN_SLOT_WEIGHTS);
    const EpTensor *grad_rows = out(a, OUT_GRAD_ROWS), *grad_slots = out(a, OUT_GRAD_SLOTS);
    const EpTensor *rows = grad_slots ? in(a, IN_EXPERT_OUT) : NULL;
    const EpExtras *more = extras(a, STEP_COMBINE_BACKWARD);
    if (!more)
        return ep_combine_backward(handle, plan, grad, slots, rows, stream, grad_rows, grad_slots);
    return ep_combine_backward_with(handle, plan, grad, slots, rows, stream, grad_rows, grad_slots,
                                    more);
}

static EpStatus dispatch_backward(Arguments *a, EpStream stream) {
    EpHandle *handle = a->step->handle;
    const EpTensor *plan = a->step->plan, *rows = in(a, IN_EXPERT_OUT);
    const EpTensor *slots = in(a, IN_GRAD_SLOT_WEIGHTS), *tokens = out(a, OUT_GRAD_TOKENS);
    const EpTensor *weights = out(a, OUT_GRAD_WEIGHTS);
    const EpExtras *more = extras(a, STEP_DISPATCH_BACKWARD);
    if (!more) return ep_dispatch_backward(handle, plan, rows, slots, stream, tokens, weights);
    return ep_dispatch_backward_with(handle, plan, rows, slots, stream, tokens, weights, more);
}

static EpStatus call(Arguments *a, StepOp op, EpStream stream) {
    switch (op) {
    case STEP_PREPARE:
        return prepare(a, stream);
    case STEP_DISPATCH:
        return dispatch(a, stream);
    case STEP_DISPATCH_SEND:
        return dispatch_send(a, stream);
    case STEP_DISPATCH_WAIT:
        return dispatch_wait(a, stream);
    case STEP_COMBINE:
        return combine(a, stream);
    case STEP_COMBINE_SEND:
        return combine_send(a, stream);
    case STEP_COMBINE_WAIT:
        return combine_wait(a, stream);
    case STEP_COMBINE_BACKWARD:
        return combine_backward(a, stream);
    default:
        return dispatch_backward(a, stream);
    }
}

EpStatus step_call(const Step *step, const StepMemory *memory, StepOp op, EpStream stream) {
    Arguments a = {.step = step, .memory = memory};
    EpStatus status = call(&a, op, stream);
    memset(&a, 0x77, sizeof(a));
    return status;
}
