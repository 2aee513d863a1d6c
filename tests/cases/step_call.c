/* SPDX-License-Identifier: Apache-2.0 */
/* The calls of a step. */
#include "tests/cases/step.h"
#include "tests/oracle/quant.h"

/* The tensors of one call. The library may keep their data pointers, but no other part of them. */
typedef struct Arguments {
    const Step *step;
    const StepMemory *memory;
    EpTensor in[INPUTS], out[STEP_OUTPUTS];
} Arguments;

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

static EpStatus prepare(Arguments *a, EpStream stream) {
    EpPlanTensors plan = plan_outputs(a);
    const EpTensor *index = in(a, IN_INDEX);
    if (!index->shape[0]) a->in[IN_INDEX].data = NULL;
    EpStatus status =
        ep_prepare(a->step->handle, a->step->plan, index, in(a, IN_COUNT), stream, &plan);
    memset(&plan, 0x77, sizeof(plan));
    return status;
}

static EpStatus dispatch(Arguments *a, StepOp op, EpStream stream) {
    EpHandle *handle = a->step->handle;
    const EpTensor *plan = a->step->plan, *tokens = in(a, IN_TOKENS), *weights = in(a, IN_WEIGHTS);
    const EpTensor *scales = in(a, IN_SCALES);
    EpPlanTensors numbers = plan_outputs(a);
    EpPrepare again = EP_PREPARE_INIT;
    again.out = &numbers;
    EpExtras extras = EP_EXTRAS_INIT;
    extras.global_scale = op == STEP_DISPATCH_WAIT ? NULL : in(a, IN_GLOBAL_SCALE);
    if (op == STEP_DISPATCH_SEND && !extras.global_scale)
        return ep_dispatch_send(handle, plan, NULL, tokens, weights, scales, stream);
    if (op == STEP_DISPATCH_SEND)
        return ep_dispatch_send_with(handle, plan, NULL, tokens, weights, scales, stream, &extras);
    if (op == STEP_DISPATCH_WAIT)
        return ep_dispatch_wait(handle, stream, out(a, OUT_TOKENS), out(a, OUT_WEIGHTS),
                                out(a, OUT_SCALES), out(a, OUT_INDEX));
    return ep_dispatch_with(handle, plan, a->memory->numbers_again ? &again : NULL, tokens, weights,
                            scales, stream, out(a, OUT_TOKENS), out(a, OUT_WEIGHTS),
                            out(a, OUT_SCALES), out(a, OUT_INDEX),
                            extras.global_scale ? &extras : NULL);
}

/* Fill in the biases of a call that sums. Returns NULL where there are none. One bias is either
 * member. */
static const EpExtras *biases(Arguments *a, EpExtras *extras) {
    const Case *c = &a->step->world->c;
    *extras = (EpExtras)EP_EXTRAS_INIT;
    if (!c->biases) return NULL;
    extras->bias0 = in(a, IN_BIAS0), extras->bias1 = in(a, IN_BIAS1);
    if (c->biases == 1 && c->seed % 2) extras->bias1 = extras->bias0, extras->bias0 = NULL;
    return extras;
}

static EpStatus combine(Arguments *a, StepOp op, EpStream stream) {
    EpHandle *handle = a->step->handle;
    const EpTensor *plan = a->step->plan, *rows = in(a, IN_EXPERT_OUT), *sums = out(a, OUT_SUMS);
    const EpTensor *slots = in(a, IN_SLOT_WEIGHTS), *weights = in(a, IN_COMBINE_WEIGHTS);
    EpExtras more;
    const EpExtras *extras = biases(a, &more);
    if (op == STEP_COMBINE_SEND) return ep_combine_send(handle, plan, rows, slots, weights, stream);
    if (op == STEP_COMBINE_WAIT)
        return extras ? ep_combine_wait_with(handle, stream, sums, extras)
                      : ep_combine_wait(handle, stream, sums);
    if (!extras) return ep_combine(handle, plan, rows, slots, weights, stream, sums);
    return ep_combine_with(handle, plan, rows, slots, weights, stream, sums, extras);
}

static EpStatus combine_backward(Arguments *a, EpStream stream) {
    const EpTensor *slots = out(a, OUT_GRAD_SLOTS);
    return ep_combine_backward(a->step->handle, a->step->plan, in(a, IN_GRAD_OUT),
                               in(a, IN_SLOT_WEIGHTS), slots ? in(a, IN_EXPERT_OUT) : NULL, stream,
                               out(a, OUT_GRAD_ROWS), slots);
}

static EpStatus dispatch_backward(Arguments *a, EpStream stream) {
    EpHandle *handle = a->step->handle;
    const EpTensor *plan = a->step->plan, *rows = in(a, IN_EXPERT_OUT);
    const EpTensor *slots = in(a, IN_GRAD_SLOT_WEIGHTS), *tokens = out(a, OUT_GRAD_TOKENS);
    const EpTensor *weights = out(a, OUT_GRAD_WEIGHTS);
    EpExtras more;
    const EpExtras *extras = biases(a, &more);
    if (!extras) return ep_dispatch_backward(handle, plan, rows, slots, stream, tokens, weights);
    return ep_dispatch_backward_with(handle, plan, rows, slots, stream, tokens, weights, extras);
}

static EpStatus call(Arguments *a, StepOp op, EpStream stream) {
    if (op == STEP_PREPARE) return prepare(a, stream);
    if (op == STEP_COMBINE_BACKWARD) return combine_backward(a, stream);
    if (op == STEP_DISPATCH_BACKWARD) return dispatch_backward(a, stream);
    int dispatches = STEP_DISPATCH | STEP_DISPATCH_PHASES;
    return op & dispatches ? dispatch(a, op, stream) : combine(a, op, stream);
}

EpStatus step_call(const Step *step, const StepMemory *memory, StepOp op, EpStream stream) {
    Arguments a = {.step = step, .memory = memory};
    EpStatus status = call(&a, op, stream);
    memset(&a, 0x77, sizeof(a));
    return status;
}
