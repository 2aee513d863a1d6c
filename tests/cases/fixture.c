/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cases/fixture.h"

#include <string.h>

static const char *const names[] = {
#define FIXTURE_NAME(constant, name, output) name,
    FIXTURE_TENSORS(FIXTURE_NAME)
#undef FIXTURE_NAME
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

Case fixture_case(EpLayout layout) {
    return case_complete((Case){.experts = 4,
                                .top_k = 2,
                                .spread = SPREAD_FULL,
                                .layout = layout,
                                .alignment = 4,
                                .weighted = 1,
                                .scale_bytes = 8});
}

void fixture_open_on(Fixture *fixture, const EpBootstrap *bootstrap, const Case *c) {
    *fixture = (Fixture){.bootstrap = fixture->bootstrap, .world = world_new(c)};
    fixture->group = open_group(bootstrap, &fixture->world->c);
    REQUIRE(fixture->group, "no group");
    fixture->handle = open_handle(fixture->group, &fixture->world->c);
    fixture->step = (Step){fixture->group, fixture->handle, fixture->world, bootstrap->rank, NULL};
    fixture_reset(fixture);
}

void fixture_open(Fixture *fixture, const Case *c) {
    fixture->bootstrap = (EpBootstrap)EP_BOOTSTRAP_INIT;
    REQUIRE_OK(ep_bootstrap_local(1, &fixture->bootstrap));
    fixture_open_on(fixture, &fixture->bootstrap, c);
}

void fixture_open_prepared(Fixture *fixture, const Case *c) {
    fixture_open(fixture, c);
    CHECK_OK(fixture_call(fixture, OP_PREPARE));
    fixture_reset(fixture);
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

static size_t tensor_bytes(const EpTensor *t) {
    size_t bytes = ep_type_bytes(t->type);
    for (int i = 0; i < t->ndim; i++)
        bytes *= (size_t)t->shape[i];
    return bytes;
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
    t[RECV_TOKENS] = step_recv_tokens(&fixture->step, NULL);
    t[RECV_TOPK_WEIGHTS] = t[GRAD_RECV_WEIGHTS] = weights;
    t[RECV_SCALES] = step_recv_scales(&fixture->step, NULL);
    t[RECV_TOPK_IDX] = step_rows(&fixture->step, NULL, EP_TYPE_INT32, c->top_k);
    t[EXPERT_OUT] = t[GRAD_RECV_TOKENS] = t[GRAD_EXPERT_OUT] = rows;
    t[SLOT_WEIGHTS] = t[GRAD_SLOT_WEIGHTS] = slots;
}

static void set_tokens(Fixture *fixture) {
    EpTensor *t = fixture->tensor;
    t[TOKENS] = step_tokens(&fixture->step);
    t[TOPK_WEIGHTS] = t[COMBINE_WEIGHTS] = t[GRAD_TOPK_WEIGHTS] = step_weights(&fixture->step);
    t[SCALES] = step_scales(&fixture->step);
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
}

void fixture_reset(Fixture *fixture) {
    free_images(fixture);
    set_plan(fixture);
    set_rows(fixture);
    set_tokens(fixture);
    for (int i = 0; i < NUM_ARGS; i++) {
        fixture->image[i] = image_new(tensor_bytes(&fixture->tensor[i]), 16);
        fixture->tensor[i].data = fixture->image[i].data;
        fixture->arg[i] = &fixture->tensor[i];
    }
    if (!case_has_rows(&fixture->world->c)) fixture->arg[RECV_TOPK_IDX] = NULL;
    if (fixture->world->c.quant != EP_QUANT_NONE) fixture->arg[SCALES] = NULL;
    fixture->arg[fixture->world->c.weights_at_combine ? SLOT_WEIGHTS : COMBINE_WEIGHTS] = NULL;
    fixture->arg[BIAS0] = fixture->arg[BIAS1] = NULL;
    if (!TESTS_HAVE_SOURCE_COUNTS) fixture->arg[SOURCE_COUNTS] = NULL;
    set_index(fixture);
}

/* Call an operation that takes extras with those of the fixture. */
static EpStatus call_with(Fixture *fixture, Op op) {
    const EpTensor *const *a = fixture->arg;
    EpExtras extras = {sizeof(extras), a[BIAS0], a[BIAS1]};
    switch (op) {
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

static void apply_spoil(Fixture *fixture, const Wrong *wrong) {
    EpTensor *tensor = &fixture->tensor[wrong->arg];
    fixture->arg[wrong->arg] = wrong->spoil == SPOIL_ABSENT ? NULL : tensor;
    if (wrong->spoil == SPOIL_DATA) tensor->data = NULL;
    if (wrong->spoil == SPOIL_SHIFT) tensor->data = (char *)tensor->data + wrong->value;
    if (wrong->spoil == SPOIL_SIZE) tensor->struct_size = (size_t)wrong->value;
    if (wrong->spoil == SPOIL_TYPE) tensor->type = (EpType)wrong->value;
    if (wrong->spoil == SPOIL_NDIM) tensor->ndim = (int32_t)wrong->value;
    if (wrong->spoil >= SPOIL_SHAPE0) tensor->shape[wrong->spoil - SPOIL_SHAPE0] = wrong->value;
}

static void check_wrong(Fixture *fixture, const Wrong *wrong) {
    check_note("%s, %s spoilt %d with %lld", op_names[wrong->op], names[wrong->arg],
               (int)wrong->spoil, (long long)wrong->value);
    fixture_reset(fixture);
    if (wrong->op == OP_DISPATCH_WAIT) fixture_begin(fixture, OP_DISPATCH_SEND);
    if (wrong->op == OP_COMBINE_WAIT) fixture_begin(fixture, OP_COMBINE_SEND);
    apply_spoil(fixture, wrong);
    const char *const *parts = wrong->parts;
    const char *const all[] = {
        "rank 0", op_names[wrong->op],        names[wrong->arg],
        parts[0], parts[0] ? parts[1] : NULL, parts[0] && parts[1] ? parts[2] : NULL,
        NULL};
    check_refused(fixture_call(fixture, wrong->op), wrong->status, all, __FILE__, __LINE__,
                  op_names[wrong->op]);
    fixture_check_untouched(fixture);
    if (wrong->op != OP_DISPATCH_WAIT && wrong->op != OP_COMBINE_WAIT) return;
    fixture_reset(fixture);
    CHECK_OK(fixture_call(fixture, wrong->op));
}

/* Returns whether the fixture's mode has the operation. */
static int is_in_mode(const Fixture *fixture, Op op) {
    int latency = fixture->world->c.mode == EP_MODE_LATENCY;
    if (op == OP_DISPATCH_BACKWARD || op == OP_COMBINE_BACKWARD) return !latency;
    return latency || op < OP_DISPATCH_SEND;
}

void fixture_check_table(Case c, const Wrong *table, int n) {
    for (EpMode mode = EP_MODE_THROUGHPUT; mode <= EP_MODE_LATENCY; mode++) {
        Fixture fixture;
        if (mode == EP_MODE_LATENCY && !TESTS_HAVE_LATENCY) return;
        c.mode = mode;
        fixture_open(&fixture, &c);
        fixture_check_wrong(&fixture, table, n);
        fixture_close(&fixture);
    }
}

void fixture_check_wrong(Fixture *fixture, const Wrong *table, int n) {
    fixture_reset(fixture);
    /* num_tokens would allow input tensors of more rows. */
    fixture->arg[NUM_TOKENS] = NULL;
    CHECK_OK(fixture_call(fixture, OP_PREPARE));
    int latency = fixture->world->c.mode == EP_MODE_LATENCY;
    if (latency) CHECK_OK(fixture_call(fixture, OP_DISPATCH));
    for (int i = 0; i < n; i++)
        if (is_in_mode(fixture, table[i].op)) check_wrong(fixture, &table[i]);
    check_note("after all refusals");
    step_all(&fixture->step);
}

void fixture_check_shorter_tail(Op op, Arg arg) {
    enum { CAPACITY = 77, WIDTH = 4 };
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    c.capacity = CAPACITY, c.spare_rows = 5, c.zero_tail = 1;
    fixture_open(&fixture, &c);
    CHECK_OK(fixture_call(&fixture, OP_PREPARE));
    fixture.tensor[arg].shape[0] = CAPACITY;
    CHECK_OK(fixture_call(&fixture, op));
    Image *got = &fixture.image[arg], expected = image_new(got->bytes, 16);
    memcpy(expected.data, got->data, (size_t)CAPACITY * WIDTH);
    image_check_equal(got, &expected, WIDTH, "the shorter output and what follows it");
    image_free(&expected);
    fixture_close(&fixture);
}
