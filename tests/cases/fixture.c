/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cases/fixture.h"

#include <strings.h>

#include "tests/oracle/quant.h"

static const char *const names[] = {
#define FIXTURE_NAME(constant, name, output) name,
    FIXTURE_TENSORS(FIXTURE_NAME)
#undef FIXTURE_NAME
};

static const char *const constants[] = {
#define FIXTURE_CONSTANT(constant, name, output) #constant,
    FIXTURE_TENSORS(FIXTURE_CONSTANT)
#undef FIXTURE_CONSTANT
};

static const int outputs[] = {
#define FIXTURE_OUTPUT(constant, name, output) output,
    FIXTURE_TENSORS(FIXTURE_OUTPUT)
#undef FIXTURE_OUTPUT
};

static const char *const op_names[] = {
    "ep_prepare",           "ep_dispatch",         "ep_combine",
    "ep_dispatch_backward", "ep_combine_backward", "ep_dispatch_send",
    "ep_dispatch_wait",     "ep_combine_send",     "ep_combine_wait"};

static Case changed_case(const char *changes) {
    return case_of("experts=4 top_k=2 spread=full alignment=4 weighted=1 scale_bytes=8 %s",
                   changes);
}

Case fixture_case(EpLayout layout) {
    Case c = changed_case("");
    c.layout = layout;
    return case_complete(c);
}

void fixture_open_on(Fixture *fixture, const EpBootstrap *bootstrap, const Case *c) {
    *fixture = (Fixture){.bootstrap = fixture->bootstrap, .world = world_new(c)};
    fixture->group = open_group(bootstrap, &fixture->world->c);
    fixture->handle = open_handle(fixture->group, &fixture->world->c);
    fixture->step = (Step){fixture->group, fixture->handle, fixture->world, bootstrap->rank, NULL};
    fixture_reset(fixture);
}

void fixture_open(Fixture *fixture, const Case *c) {
    fixture->bootstrap = (EpBootstrap)EP_BOOTSTRAP_INIT;
    REQUIRE_OK(ep_bootstrap_local(1, &fixture->bootstrap));
    fixture_open_on(fixture, &fixture->bootstrap, c);
}

Fixture *fixture_new(const char *changes) {
    Case c = case_complete(changed_case(changes));
    if (c.mode == EP_MODE_LATENCY) needs_latency();
    Fixture *fixture = calloc(1, sizeof(*fixture));
    fixture_open(fixture, &c);
    check_assert();
    return fixture;
}

Fixture *fixture_new_prepared(const char *changes) {
    Fixture *fixture = fixture_new(changes);
    CHECK_OK(fixture_call(fixture, OP_PREPARE));
    fixture_reset(fixture);
    return fixture;
}

void fixture_free(Fixture *fixture) {
    fixture_close(fixture);
    free(fixture);
}

static void free_images(Fixture *fixture) {
    for (int i = 0; i < NUM_ARGS; i++)
        if (fixture->image[i].base) image_free(&fixture->image[i]);
}

void fixture_close_on(Fixture *fixture) {
    free_images(fixture);
    ep_group_destroy(fixture->group);
    world_free(fixture->world);
}

void fixture_close(Fixture *fixture) {
    fixture_close_on(fixture);
    ep_bootstrap_destroy(&fixture->bootstrap);
}

static void set_plan(Fixture *fixture) {
    const Case *c = &fixture->world->c;
    const RankWorld *me = &fixture->world->rank[fixture->step.rank];
    EpTensor *t = fixture->tensor;
    t[TOPK_IDX] = ep_tensor_2d(NULL, c->index_type, me->rows, c->top_k);
    t[NUM_TOKENS] = ep_tensor_1d(NULL, EP_TYPE_INT32, 1);
    t[EXPERT_COUNTS] = ep_tensor_1d(NULL, EP_TYPE_INT32, me->num_experts);
    t[EXPERT_PADDED] = ep_tensor_1d(NULL, EP_TYPE_INT64, me->num_experts);
    t[EXPERT_OFFSETS] = ep_tensor_1d(NULL, EP_TYPE_INT32, me->num_experts + 1);
    t[TOTALS] = ep_tensor_1d(NULL, EP_TYPE_INT64, 3);
    t[RECV_ROWS] = t[DROPPED_SLOTS] = ep_tensor_1d(NULL, EP_TYPE_INT64, 1);
    t[NEEDED_ROWS] = ep_tensor_1d(NULL, EP_TYPE_INT32, 1);
    t[SOURCE_ROWS] = ep_tensor_1d(NULL, EP_TYPE_INT32, c->ranks);
    t[SOURCE_COUNTS] = ep_tensor_2d(NULL, EP_TYPE_INT32, me->num_experts, c->ranks);
}

static void set_rows(Fixture *fixture) {
    const Case *c = &fixture->world->c;
    EpTensor *t = fixture->tensor;
    EpTensor rows = step_rows(&fixture->step, NULL, c->sum_type, c->hidden);
    EpTensor slots = step_slot_weights(&fixture->step), weights = slots;
    if (case_has_rows(c)) weights = step_rows(&fixture->step, NULL, EP_TYPE_FP32, c->top_k);
    t[RECV_TOKENS] = step_output(&fixture->step, OUT_TOKENS);
    t[RECV_TOPK_WEIGHTS] = t[GRAD_RECV_WEIGHTS] = weights;
    t[RECV_SCALES] = step_output(&fixture->step, OUT_SCALES);
    t[RECV_TOPK_IDX] = step_rows(&fixture->step, NULL, EP_TYPE_INT32, c->top_k);
    t[EXPERT_OUT] = t[GRAD_RECV_TOKENS] = t[GRAD_EXPERT_OUT] = rows;
    t[SLOT_WEIGHTS] = t[GRAD_SLOT_WEIGHTS] = slots;
}

static void set_tokens(Fixture *fixture) {
    EpTensor *t = fixture->tensor;
    t[TOKENS] = step_tokens(&fixture->step);
    t[TOPK_WEIGHTS] = t[COMBINE_WEIGHTS] = t[GRAD_TOPK_WEIGHTS] = step_weights(&fixture->step);
    t[SCALES] = step_scales(&fixture->step);
    t[GLOBAL_SCALE] = step_input(&fixture->step, IN_GLOBAL_SCALE);
    t[OUT] = t[GRAD_TOKENS] = t[GRAD_OUT] = t[BIAS0] = t[BIAS1] = step_grad_out(&fixture->step);
}

/* Fill in valid indices and the number of tokens. All other inputs may be any bytes. */
static void set_index(Fixture *fixture) {
    const Case *c = &fixture->world->c;
    const RankWorld *me = &fixture->world->rank[fixture->step.rank];
    int32_t *index = (int32_t *)fixture->tensor[TOPK_IDX].data;
    for (int64_t i = 0; i < (int64_t)me->rows * c->top_k; i++)
        index[i] = (int32_t)me->index[i];
    *(int32_t *)fixture->tensor[NUM_TOKENS].data = me->tokens;
    *(float *)fixture->tensor[GLOBAL_SCALE].data = me->global_scale;
}

void fixture_reset(Fixture *fixture) {
    free_images(fixture);
    set_plan(fixture);
    set_rows(fixture);
    set_tokens(fixture);
    for (int i = 0; i < NUM_ARGS; i++) {
        fixture->image[i] = image_new(step_bytes(fixture->tensor[i]), 16);
        fixture->tensor[i].data = fixture->image[i].data;
        fixture->arg[i] = &fixture->tensor[i];
    }
    if (!case_has_rows(&fixture->world->c)) fixture->arg[RECV_TOPK_IDX] = NULL;
    if (fixture->world->c.quant != EP_QUANT_NONE) fixture->arg[SCALES] = NULL;
    fixture->arg[fixture->world->c.weights_at_combine ? SLOT_WEIGHTS : COMBINE_WEIGHTS] = NULL;
    fixture->arg[BIAS0] = fixture->arg[BIAS1] = NULL;
    if (!quant_form(fixture->world->c.quant)->is_global) fixture->arg[GLOBAL_SCALE] = NULL;
    set_index(fixture);
}

/* Call an operation that takes extras with those of the fixture. */
static EpStatus call_with(Fixture *fixture, Op op) {
    const EpTensor *const *a = fixture->arg;
    EpExtras extras = {sizeof(extras), a[BIAS0], a[BIAS1], a[GLOBAL_SCALE]};
    switch (op) {
    case OP_DISPATCH:
        return ep_dispatch_with(fixture->handle, fixture->plan, NULL, a[TOKENS], a[TOPK_WEIGHTS],
                                a[SCALES], NULL, a[RECV_TOKENS], a[RECV_TOPK_WEIGHTS],
                                a[RECV_SCALES], a[RECV_TOPK_IDX], &extras);
    case OP_DISPATCH_SEND:
        return ep_dispatch_send_with(fixture->handle, fixture->plan, NULL, a[TOKENS],
                                     a[TOPK_WEIGHTS], a[SCALES], NULL, &extras);
    case OP_COMBINE:
        return ep_combine_with(fixture->handle, fixture->plan, a[EXPERT_OUT], a[SLOT_WEIGHTS],
                               a[COMBINE_WEIGHTS], NULL, a[OUT], &extras);
    case OP_COMBINE_WAIT:
        return ep_combine_wait_with(fixture->handle, NULL, a[OUT], &extras);
    default:
        return ep_dispatch_backward_with(fixture->handle, fixture->plan, a[GRAD_RECV_TOKENS],
                                         a[GRAD_RECV_WEIGHTS], NULL, a[GRAD_TOKENS],
                                         a[GRAD_TOPK_WEIGHTS], &extras);
    }
}

EpStatus fixture_call(Fixture *fixture, Op op) {
    const EpTensor *const *a = fixture->arg;
    if (a[BIAS0] || a[BIAS1]) return call_with(fixture, op);
    if (a[GLOBAL_SCALE] && (op == OP_DISPATCH || op == OP_DISPATCH_SEND))
        return call_with(fixture, op);
    EpPlanTensors plan = {sizeof(plan),     a[EXPERT_COUNTS], a[EXPERT_PADDED], a[EXPERT_OFFSETS],
                          a[TOTALS],        a[SOURCE_COUNTS], a[RECV_ROWS],     a[NEEDED_ROWS],
                          a[DROPPED_SLOTS], a[SOURCE_ROWS]};
    switch (op) {
    case OP_PREPARE:
        return ep_prepare(fixture->handle, fixture->plan, a[TOPK_IDX], a[NUM_TOKENS], NULL, &plan);
    case OP_DISPATCH:
        return ep_dispatch(fixture->handle, fixture->plan, NULL, a[TOKENS], a[TOPK_WEIGHTS],
                           a[SCALES], NULL, a[RECV_TOKENS], a[RECV_TOPK_WEIGHTS], a[RECV_SCALES],
                           a[RECV_TOPK_IDX]);
    case OP_COMBINE:
        return ep_combine(fixture->handle, fixture->plan, a[EXPERT_OUT], a[SLOT_WEIGHTS],
                          a[COMBINE_WEIGHTS], NULL, a[OUT]);
    case OP_DISPATCH_BACKWARD:
        return ep_dispatch_backward(fixture->handle, fixture->plan, a[GRAD_RECV_TOKENS],
                                    a[GRAD_RECV_WEIGHTS], NULL, a[GRAD_TOKENS],
                                    a[GRAD_TOPK_WEIGHTS]);
    case OP_DISPATCH_SEND:
        return ep_dispatch_send(fixture->handle, fixture->plan, NULL, a[TOKENS], a[TOPK_WEIGHTS],
                                a[SCALES], NULL);
    case OP_DISPATCH_WAIT:
        return ep_dispatch_wait(fixture->handle, NULL, a[RECV_TOKENS], a[RECV_TOPK_WEIGHTS],
                                a[RECV_SCALES], a[RECV_TOPK_IDX]);
    case OP_COMBINE_SEND:
        return ep_combine_send(fixture->handle, fixture->plan, a[EXPERT_OUT], a[SLOT_WEIGHTS],
                               a[COMBINE_WEIGHTS], NULL);
    case OP_COMBINE_WAIT:
        return ep_combine_wait(fixture->handle, NULL, a[OUT]);
    default:
        return ep_combine_backward(fixture->handle, fixture->plan, a[GRAD_OUT], a[SLOT_WEIGHTS],
                                   a[EXPERT_OUT], NULL, a[GRAD_EXPERT_OUT], a[GRAD_SLOT_WEIGHTS]);
    }
}

void fixture_begin(Fixture *fixture, Op send) {
    for (int output = EXPERT_COUNTS; output <= SOURCE_ROWS; output++)
        fixture->arg[output] = NULL;
    fixture->arg[NUM_TOKENS] = NULL;
    if (send == OP_DISPATCH_SEND) CHECK_OK(fixture_call(fixture, OP_PREPARE));
    CHECK_OK(fixture_call(fixture, send));
}

void fixture_check_untouched(const Fixture *fixture) {
    for (int i = 0; i < NUM_ARGS; i++)
        if (outputs[i]) image_check_untouched(&fixture->image[i], names[i]);
}

void fixture_check_guards(const Fixture *fixture) {
    for (int i = 0; i < NUM_ARGS; i++)
        image_check_guards(&fixture->image[i], names[i]);
}

/* ---- refusals ---- */

static Op op_of(const char *call) {
    Op op = OP_PREPARE;
    while (strcmp(op_names[op], call))
        op++;
    return op;
}

static void reset_for(void *context, const char *call) {
    fixture_reset(context);
    if (op_of(call) == OP_DISPATCH_WAIT) fixture_begin(context, OP_DISPATCH_SEND);
    if (op_of(call) == OP_COMBINE_WAIT) fixture_begin(context, OP_COMBINE_SEND);
}

static Part find_argument(void *context, const char *call, const char *name) {
    Fixture *fixture = context;
    int arg = 0;
    (void)call;
    while (arg < NUM_ARGS && strcasecmp(constants[arg], name))
        arg++;
    cr_assert(arg < NUM_ARGS, "no argument %s", name);
    return part_tensor(&fixture->tensor[arg], &fixture->arg[arg], names[arg]);
}

static EpStatus call_by_name(void *context, const char *call) {
    return fixture_call(context, op_of(call));
}

static void check_after(void *context, const char *call) {
    Op op = op_of(call);
    fixture_check_untouched(context);
    if (op != OP_DISPATCH_WAIT && op != OP_COMBINE_WAIT) return;
    fixture_reset(context);
    CHECK_OK(fixture_call(context, op));
}

static int is_in_mode(void *context, const char *call) {
    const Fixture *fixture = context;
    Op op = op_of(call);
    int latency = fixture->world->c.mode == EP_MODE_LATENCY;
    if (op == OP_DISPATCH_BACKWARD || op == OP_COMBINE_BACKWARD) return !latency;
    return latency || op < OP_DISPATCH_SEND;
}

static void check_in_mode(const char *group, Case c, EpMode mode) {
    static const Subject subject = {.reset = reset_for,
                                    .find = find_argument,
                                    .call = call_by_name,
                                    .check = check_after,
                                    .has = is_in_mode};
    Fixture fixture;
    c.mode = mode, c = case_complete(c);
    fixture_open(&fixture, &c);
    /* num_tokens would allow input tensors of more rows. */
    fixture.arg[NUM_TOKENS] = NULL;
    CHECK_OK(fixture_call(&fixture, OP_PREPARE));
    if (mode == EP_MODE_LATENCY) CHECK_OK(fixture_call(&fixture, OP_DISPATCH));
    check_refusals(group, &subject, &fixture);
    check_note("after all refusals");
    step_all(&fixture.step);
    fixture_close(&fixture);
}

void fixture_check_refusals(const char *group, const char *changes) {
    Case c = changed_case(changes);
    if (c.mode != EP_MODE_LATENCY) check_in_mode(group, c, EP_MODE_THROUGHPUT);
    if (TESTS_HAVE_LATENCY) check_in_mode(group, c, EP_MODE_LATENCY);
}

void fixture_check_shorter_tail(Op op, Arg arg) {
    enum { CAPACITY = 77, WIDTH = 4 };
    Fixture *f = fixture_new("capacity=77 spare_rows=5 zero_tail=zero");
    CHECK_OK(fixture_call(f, OP_PREPARE));
    f->tensor[arg].shape[0] = CAPACITY;
    CHECK_OK(fixture_call(f, op));
    Image *got = &f->image[arg], expected = image_new(got->bytes, 16);
    memcpy(expected.data, got->data, (size_t)CAPACITY * WIDTH);
    image_check_equal(got, &expected, WIDTH, "the shorter output and what follows it");
    image_free(&expected);
    fixture_free(f);
}
