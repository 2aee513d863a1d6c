/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cases/fixture.h"

#include <strings.h>

#include "tests/oracle/quant.h"

/* In the order of StepOp. */
static const char *const op_names[] = {
    "ep_prepare",          "ep_dispatch",          "ep_combine",
    "ep_combine_backward", "ep_dispatch_backward", "ep_dispatch_send",
    "ep_dispatch_wait",    "ep_combine_send",      "ep_combine_wait"};

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
    if (c->named) open_plan(fixture->group, &fixture->world->c, &fixture->memory);
    if (c->named) fixture->step.plan = &fixture->memory;
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
    CHECK_OK(fixture_call(fixture, STEP_PREPARE));
    fixture_reset(fixture);
    return fixture;
}

void fixture_free(Fixture *fixture) {
    fixture_close(fixture);
    free(fixture);
}

static void free_images(Fixture *fixture) {
    for (int i = 0; i < STEP_ARRAYS; i++)
        if (fixture->image[i].base) image_free(&fixture->image[i]);
}

void fixture_close_on(Fixture *fixture) {
    free_images(fixture);
    ep_group_destroy(fixture->group);
    free(fixture->memory.data);
    world_free(fixture->world);
}

void fixture_close(Fixture *fixture) {
    fixture_close_on(fixture);
    ep_bootstrap_destroy(&fixture->bootstrap);
}

/* Valid indices and the number of tokens; all other inputs may be any bytes. */
void fixture_reset(Fixture *fixture) {
    const Case *c = &fixture->world->c;
    free_images(fixture);
    fixture->named = fixture->memory, fixture->plan = c->named ? &fixture->named : NULL;
    for (int i = 0; i < STEP_ARRAYS; i++) {
        EpTensor *t = &fixture->tensor[i];
        *t = i < INPUTS         ? step_input(&fixture->step, (StepInput)i)
             : i < STEP_OUTPUTS ? step_output(&fixture->step, (StepOutput)i)
                                : step_counter(&fixture->step, NULL, (StepCounter)i);
        if (i == IN_COUNT || i == OUT_NEEDED_ROWS || i == OUT_SOURCE_ROWS) t->type = EP_TYPE_INT32;
        if (i == OUT_RECV_ROWS || i == OUT_DROPPED) t->type = EP_TYPE_INT64;
        if (i == OUT_SOURCES || i == OUT_OFFSETS) t->type = EP_TYPE_INT32;
        if (i >= IN_BIAS0 && i <= IN_BIAS1) *t = step_grad_out(&fixture->step);
        if (i == IN_COMBINE_WEIGHTS) *t = step_weights(&fixture->step);
        fixture->image[i] = image_new(step_bytes(*t), 16);
        t->data = fixture->image[i].data;
        fixture->arg[i] = t;
    }
    step_fill(&fixture->step, IN_INDEX, fixture->tensor[IN_INDEX].data);
    step_fill(&fixture->step, IN_GLOBAL_SCALE, fixture->tensor[IN_GLOBAL_SCALE].data);
    *(int32_t *)fixture->tensor[IN_COUNT].data = step_mine(&fixture->step)->tokens;
    if (!case_has_rows(c)) fixture->arg[OUT_INDEX] = NULL;
    if (!c->scale_bytes) fixture->arg[IN_SCALES] = NULL;
    if (!case_scales(c)) fixture->arg[OUT_SCALES] = NULL;
    fixture->arg[c->weights_at_combine ? IN_SLOT_WEIGHTS : IN_COMBINE_WEIGHTS] = NULL;
    fixture->arg[IN_BIAS0] = fixture->arg[IN_BIAS1] = NULL;
    if (!quant_form(c->quant)->is_global) fixture->arg[IN_GLOBAL_SCALE] = NULL;
    if (quant_form(c->grad_quant)->bits)
        fixture->arg[IN_SLOT_WEIGHTS] = fixture->arg[IN_EXPERT_OUT] = fixture->arg[OUT_GRAD_SLOTS] =
            NULL;
    else
        fixture->arg[OUT_GRAD_SCALES] = NULL;
    for (int i = EXPERT_TOKENS; i < STEP_ARRAYS; i++)
        fixture->arg[i] = NULL;
    fixture->step.block_rows = fixture->step.expected = 0;
}

EpStatus fixture_call(Fixture *fixture, StepOp op) {
    Step step = fixture->step;
    step.handle = fixture->handle, step.plan = fixture->plan;
    return step_call_with(&step, fixture->arg, 0, op, NULL);
}

void fixture_begin(Fixture *fixture, StepOp send) {
    for (int output = OUT_COUNTS; output <= OUT_SOURCES; output++)
        fixture->arg[output] = NULL;
    fixture->arg[IN_COUNT] = NULL;
    if (send == STEP_DISPATCH_SEND) CHECK_OK(fixture_call(fixture, STEP_PREPARE));
    CHECK_OK(fixture_call(fixture, send));
}

void fixture_check_untouched(const Fixture *fixture) {
    for (int i = OUT_COUNTS; i < STEP_ARRAYS; i++)
        image_check_untouched(&fixture->image[i], step_array_name(i));
}

void fixture_check_guards(const Fixture *fixture) {
    for (int i = 0; i < STEP_ARRAYS; i++)
        image_check_guards(&fixture->image[i], step_array_name(i));
}

/* ---- refusals ---- */

static StepOp op_of(const char *call) {
    int op = 0;
    while (strcmp(op_names[op], call))
        op++;
    return (StepOp)(1 << op);
}

static void reset_for(void *context, const char *call) {
    fixture_reset(context);
    if (op_of(call) == STEP_DISPATCH_WAIT) fixture_begin(context, STEP_DISPATCH_SEND);
    if (op_of(call) == STEP_COMBINE_WAIT) fixture_begin(context, STEP_COMBINE_SEND);
}

/* Changes name arrays as sentences do, but for these. */
static Part find_argument(void *context, const char *call, const char *name) {
    static const struct {
        const char *name, *said;
        int array;
    } others[] = {{"combine_weights", "topk_weights", IN_COMBINE_WEIGHTS},
                  {"grad_recv_tokens", "grad_recv_tokens", IN_EXPERT_OUT},
                  {"grad_recv_weights", "grad_slot_weights", IN_GRAD_SLOT_WEIGHTS},
                  {"grad_slot_weights", "grad_slot_weights", OUT_GRAD_SLOTS},
                  {"global_scale", "extras.global_scale", IN_GLOBAL_SCALE},
                  {"grad_scales", "extras.grad_scales", OUT_GRAD_SCALES},
                  {"bias0", "extras.bias0", IN_BIAS0},
                  {"bias1", "extras.bias1", IN_BIAS1},
                  {"expert_tokens", "extras.expert_tokens", EXPERT_TOKENS},
                  {"peer_rows", "extras.peer_rows", PEER_ROWS},
                  {"peer_bytes", "extras.peer_bytes", PEER_BYTES},
                  {"peer_wait", "extras.peer_wait_ns", PEER_WAIT},
                  {"longest_wait", "extras.peer_longest_wait_ns", LONGEST_WAIT},
                  {"ready", "extras.ready", READY_WORDS},
                  {"done", "extras.done", DONE_WORDS}};
    static const TextField step_fields[] = {TEXT_FIELD(Step, block_rows, NULL),
                                            TEXT_FIELD(Step, expected, NULL)};
    Fixture *fixture = context;
    int array = 0;
    (void)call;
    if (!*name) return PART(step_fields, &fixture->step);
    if (!strcmp(name, "plan")) return part_tensor(&fixture->named, &fixture->plan, name);
    for (int i = 0; i < LENGTH(others); i++)
        if (!strcmp(others[i].name, name))
            return part_tensor(&fixture->tensor[others[i].array], &fixture->arg[others[i].array],
                               others[i].said);
    while (array < STEP_ARRAYS && strcmp(step_array_name(array), name))
        array++;
    cr_assert(array < STEP_ARRAYS, "no argument %s", name);
    return part_tensor(&fixture->tensor[array], &fixture->arg[array], name);
}

static EpStatus call_by_name(void *context, const char *call) {
    return fixture_call(context, op_of(call));
}

static void check_after(void *context, const char *call) {
    StepOp op = op_of(call);
    fixture_check_untouched(context);
    if (op != STEP_DISPATCH_WAIT && op != STEP_COMBINE_WAIT) return;
    fixture_reset(context);
    CHECK_OK(fixture_call(context, op));
}

static int is_in_mode(void *context, const char *call) {
    const Fixture *fixture = context;
    StepOp op = op_of(call);
    int latency = fixture->world->c.mode == EP_MODE_LATENCY;
    if (op == STEP_DISPATCH_BACKWARD || op == STEP_COMBINE_BACKWARD) return !latency;
    return latency || op < STEP_DISPATCH_SEND;
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
    fixture.arg[IN_COUNT] = NULL;
    CHECK_OK(fixture_call(&fixture, STEP_PREPARE));
    if (mode == EP_MODE_LATENCY) CHECK_OK(fixture_call(&fixture, STEP_DISPATCH));
    check_refusals(group, &subject, &fixture);
    check_note("after all refusals");
    fixture.step.block_rows = fixture.step.expected = 0;
    step_all(&fixture.step);
    fixture_close(&fixture);
}

void fixture_check_refusals(const char *group, const char *changes) {
    Case c = changed_case(changes);
    if (c.mode != EP_MODE_LATENCY) check_in_mode(group, c, EP_MODE_THROUGHPUT);
    if (TESTS_HAVE_LATENCY) check_in_mode(group, c, EP_MODE_LATENCY);
}

void fixture_check_shorter_tail(StepOp op, StepOutput arg) {
    enum { CAPACITY = 77, WIDTH = 4 };
    Fixture *f = fixture_new("capacity=77 spare_rows=5 zero_tail=zero");
    CHECK_OK(fixture_call(f, STEP_PREPARE));
    f->tensor[arg].shape[0] = CAPACITY;
    CHECK_OK(fixture_call(f, op));
    Image *got = &f->image[arg], expected = image_new(got->bytes, 16);
    memcpy(expected.data, got->data, (size_t)CAPACITY * WIDTH);
    image_check_equal(got, &expected, WIDTH, "the shorter output and what follows it");
    image_free(&expected);
    fixture_free(f);
}
