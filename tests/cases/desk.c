/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cases/desk.h"

#include <string.h>

static const char *const names[] = {
#define DESK_NAME(constant, name, output) name,
    DESK_TENSORS(DESK_NAME)
#undef DESK_NAME
};

static const int outputs[] = {
#define DESK_OUTPUT(constant, name, output) output,
    DESK_TENSORS(DESK_OUTPUT)
#undef DESK_OUTPUT
};

static const char *const op_names[] = {
    "ep_prepare",           "ep_dispatch",         "ep_combine",
    "ep_dispatch_backward", "ep_combine_backward", "ep_dispatch_send",
    "ep_dispatch_wait",     "ep_combine_send",     "ep_combine_wait"};

Case desk_case(EpLayout layout) {
    return case_complete((Case){.experts = 4,
                                .top_k = 2,
                                .spread = SPREAD_FULL,
                                .layout = layout,
                                .alignment = 4,
                                .weighted = 1,
                                .scale_bytes = 8});
}

void desk_open(Desk *desk, const Case *c) {
    memset(desk, 0, sizeof(*desk));
    desk->world = world_new(c);
    REQUIRE_OK(ep_bootstrap_local(1, &desk->bootstrap));
    desk->group = open_group(&desk->bootstrap, &desk->world->c);
    REQUIRE(desk->group, "no group");
    desk->handle = open_handle(desk->group, &desk->world->c);
    desk->step = (Step){desk->group, desk->handle, desk->world, 0};
    desk_reset(desk);
}

void desk_open_prepared(Desk *desk, const Case *c) {
    desk_open(desk, c);
    CHECK_OK(desk_call(desk, OP_PREPARE));
    desk_reset(desk);
}

static void free_images(Desk *desk) {
    for (int i = 0; i < NUM_ARGS; i++)
        if (desk->image[i].base) image_free(&desk->image[i]);
}

void desk_close(Desk *desk) {
    free_images(desk);
    ep_group_destroy(desk->group);
    ep_bootstrap_destroy(&desk->bootstrap);
    world_free(desk->world);
}

static size_t tensor_bytes(const EpTensor *t) {
    size_t bytes = ep_type_bytes(t->type);
    for (int i = 0; i < t->ndim; i++)
        bytes *= (size_t)t->shape[i];
    return bytes;
}

static void lay_plan(Desk *desk) {
    const Case *c = &desk->world->c;
    const RankWorld *me = desk->world->rank;
    EpTensor *t = desk->tensor;
    t[TOPK_IDX] = ep_tensor_2d(NULL, c->index_type, me->rows, c->top_k);
    t[NUM_TOKENS] = ep_tensor_1d(NULL, EP_TYPE_INT32, 1);
    t[EXPERT_COUNTS] = ep_tensor_1d(NULL, EP_TYPE_INT32, me->num_experts);
    t[EXPERT_PADDED] = ep_tensor_1d(NULL, EP_TYPE_INT64, me->num_experts);
    t[EXPERT_OFFSETS] = ep_tensor_1d(NULL, EP_TYPE_INT32, me->num_experts + 1);
    t[TOTALS] = ep_tensor_1d(NULL, EP_TYPE_INT64, 3);
    t[SOURCE_COUNTS] = ep_tensor_2d(NULL, EP_TYPE_INT32, me->num_experts, c->ranks);
}

static void lay_rows(Desk *desk) {
    const Case *c = &desk->world->c;
    EpTensor *t = desk->tensor;
    EpTensor rows = step_rows(&desk->step, NULL, c->sum_type, c->hidden);
    EpTensor slots = step_slot_weights(&desk->step), weights = slots;
    if (c->layout == EP_LAYOUT_FLAT) weights = step_rows(&desk->step, NULL, EP_TYPE_FP32, c->top_k);
    t[RECV_TOKENS] = step_recv_tokens(&desk->step, NULL);
    t[RECV_TOPK_WEIGHTS] = t[GRAD_RECV_WEIGHTS] = weights;
    t[RECV_SCALES] = step_recv_scales(&desk->step, NULL);
    t[RECV_TOPK_IDX] = step_rows(&desk->step, NULL, EP_TYPE_INT32, c->top_k);
    t[EXPERT_OUT] = t[GRAD_RECV_TOKENS] = t[GRAD_EXPERT_OUT] = rows;
    t[SLOT_WEIGHTS] = t[GRAD_SLOT_WEIGHTS] = slots;
}

static void lay_tokens(Desk *desk) {
    EpTensor *t = desk->tensor;
    t[TOKENS] = step_tokens(&desk->step);
    t[TOPK_WEIGHTS] = t[GRAD_TOPK_WEIGHTS] = step_weights(&desk->step);
    t[SCALES] = step_scales(&desk->step);
    t[OUT] = t[GRAD_TOKENS] = t[GRAD_OUT] = step_grad_out(&desk->step);
}

/* Indices that are indices; all other inputs may be any bytes. */
static void lay_index(Desk *desk) {
    const Case *c = &desk->world->c;
    const RankWorld *me = desk->world->rank;
    int32_t *index = (int32_t *)desk->tensor[TOPK_IDX].data;
    for (int64_t i = 0; i < (int64_t)me->rows * c->top_k; i++)
        index[i] = (int32_t)me->index[i];
    *(int32_t *)desk->tensor[NUM_TOKENS].data = me->tokens;
}

void desk_reset(Desk *desk) {
    free_images(desk);
    lay_plan(desk);
    lay_rows(desk);
    lay_tokens(desk);
    for (int i = 0; i < NUM_ARGS; i++) {
        desk->image[i] = image_new(tensor_bytes(&desk->tensor[i]), 16);
        desk->tensor[i].data = desk->image[i].data;
        desk->arg[i] = &desk->tensor[i];
    }
    if (desk->world->c.layout != EP_LAYOUT_FLAT) desk->arg[RECV_TOPK_IDX] = NULL;
    if (desk->world->c.quant != EP_QUANT_NONE) desk->arg[SCALES] = NULL;
    if (!TESTS_HAVE_SOURCE_COUNTS) desk->arg[SOURCE_COUNTS] = NULL;
    lay_index(desk);
}

EpStatus desk_call(Desk *desk, Op op) {
    const EpTensor *const *a = desk->arg;
    EpPlanTensors plan = {sizeof(plan),      a[EXPERT_COUNTS], a[EXPERT_PADDED],
                          a[EXPERT_OFFSETS], a[TOTALS],        a[SOURCE_COUNTS]};
    switch (op) {
    case OP_PREPARE:
        return ep_prepare(desk->handle, a[TOPK_IDX], a[NUM_TOKENS], NULL, &plan);
    case OP_DISPATCH:
        return ep_dispatch(desk->handle, a[TOKENS], a[TOPK_WEIGHTS], a[SCALES], NULL,
                           a[RECV_TOKENS], a[RECV_TOPK_WEIGHTS], a[RECV_SCALES], a[RECV_TOPK_IDX]);
    case OP_COMBINE:
        return ep_combine(desk->handle, a[EXPERT_OUT], a[SLOT_WEIGHTS], NULL, a[OUT]);
    case OP_DISPATCH_BACKWARD:
        return ep_dispatch_backward(desk->handle, a[GRAD_RECV_TOKENS], a[GRAD_RECV_WEIGHTS], NULL,
                                    a[GRAD_TOKENS], a[GRAD_TOPK_WEIGHTS]);
    case OP_DISPATCH_SEND:
        return ep_dispatch_send(desk->handle, a[TOKENS], a[TOPK_WEIGHTS], a[SCALES], NULL);
    case OP_DISPATCH_WAIT:
        return ep_dispatch_wait(desk->handle, NULL, a[RECV_TOKENS], a[RECV_TOPK_WEIGHTS],
                                a[RECV_SCALES], a[RECV_TOPK_IDX]);
    case OP_COMBINE_SEND:
        return ep_combine_send(desk->handle, a[EXPERT_OUT], a[SLOT_WEIGHTS], NULL);
    case OP_COMBINE_WAIT:
        return ep_combine_wait(desk->handle, NULL, a[OUT]);
    default:
        return ep_combine_backward(desk->handle, a[GRAD_OUT], a[SLOT_WEIGHTS], a[EXPERT_OUT], NULL,
                                   a[GRAD_EXPERT_OUT], a[GRAD_SLOT_WEIGHTS]);
    }
}

void desk_take_off(Desk *desk, Op half) {
    static const Arg plan[] = {EXPERT_COUNTS, EXPERT_PADDED, EXPERT_OFFSETS, TOTALS, SOURCE_COUNTS};
    for (int i = 0; i < 5; i++)
        desk->arg[plan[i]] = NULL;
    desk->arg[NUM_TOKENS] = NULL;
    if (half == OP_DISPATCH_SEND) CHECK_OK(desk_call(desk, OP_PREPARE));
    CHECK_OK(desk_call(desk, half));
}

void desk_check_untouched(const Desk *desk) {
    for (int i = 0; i < NUM_ARGS; i++)
        if (outputs[i]) image_check_untouched(&desk->image[i], names[i]);
}

static void spoil(Desk *desk, const Wrong *wrong) {
    EpTensor *tensor = &desk->tensor[wrong->arg];
    desk->arg[wrong->arg] = wrong->spoil == SPOIL_ABSENT ? NULL : tensor;
    if (wrong->spoil == SPOIL_DATA) tensor->data = NULL;
    if (wrong->spoil == SPOIL_SHIFT) tensor->data = (char *)tensor->data + wrong->value;
    if (wrong->spoil == SPOIL_SIZE) tensor->struct_size = (size_t)wrong->value;
    if (wrong->spoil == SPOIL_TYPE) tensor->type = (EpType)wrong->value;
    if (wrong->spoil == SPOIL_NDIM) tensor->ndim = (int32_t)wrong->value;
    if (wrong->spoil >= SPOIL_SHAPE0) tensor->shape[wrong->spoil - SPOIL_SHAPE0] = wrong->value;
}

static void check_wrong(Desk *desk, const Wrong *wrong) {
    check_note("%s, %s spoilt %d with %lld", op_names[wrong->op], names[wrong->arg],
               (int)wrong->spoil, (long long)wrong->value);
    desk_reset(desk);
    if (wrong->op == OP_DISPATCH_WAIT) desk_take_off(desk, OP_DISPATCH_SEND);
    if (wrong->op == OP_COMBINE_WAIT) desk_take_off(desk, OP_COMBINE_SEND);
    spoil(desk, wrong);
    const char *const *parts = wrong->parts;
    const char *const all[] = {
        "rank 0", op_names[wrong->op],        names[wrong->arg],
        parts[0], parts[0] ? parts[1] : NULL, parts[0] && parts[1] ? parts[2] : NULL,
        NULL};
    check_refused(desk_call(desk, wrong->op), wrong->status, all, __FILE__, __LINE__,
                  op_names[wrong->op]);
    desk_check_untouched(desk);
    if (wrong->op != OP_DISPATCH_WAIT && wrong->op != OP_COMBINE_WAIT) return;
    desk_reset(desk);
    CHECK_OK(desk_call(desk, wrong->op));
}

/* Whether the calls of a table are there in this mode. */
static int is_there(const Desk *desk, Op op) {
    int latency = desk->world->c.mode == EP_MODE_LATENCY;
    if (op == OP_DISPATCH_BACKWARD || op == OP_COMBINE_BACKWARD) return !latency;
    return latency || op < OP_DISPATCH_SEND;
}

void desk_check_table(Case c, const Wrong *table, int n) {
    for (EpMode mode = EP_MODE_THROUGHPUT; mode <= EP_MODE_LATENCY; mode++) {
        Desk desk;
        if (mode == EP_MODE_LATENCY && !TESTS_HAVE_LATENCY) return;
        c.mode = mode;
        desk_open(&desk, &c);
        desk_check_wrong(&desk, table, n);
        desk_close(&desk);
    }
}

void desk_check_wrong(Desk *desk, const Wrong *table, int n) {
    desk_reset(desk);
    /* Without num_tokens, which would allow input tensors of more rows. */
    desk->arg[NUM_TOKENS] = NULL;
    CHECK_OK(desk_call(desk, OP_PREPARE));
    int latency = desk->world->c.mode == EP_MODE_LATENCY;
    if (latency) CHECK_OK(desk_call(desk, OP_DISPATCH));
    for (int i = 0; i < n; i++)
        if (is_there(desk, table[i].op)) check_wrong(desk, &table[i]);
    check_note("after all refusals");
    step_all(&desk->step);
}

void desk_check_shorter_tail(Op op, Arg arg) {
    enum { CAPACITY = 77, WIDTH = 4 };
    Desk desk;
    Case c = desk_case(EP_LAYOUT_EXPERT_MAJOR);
    c.capacity = CAPACITY, c.spare_rows = 5, c.zero_tail = 1;
    desk_open(&desk, &c);
    CHECK_OK(desk_call(&desk, OP_PREPARE));
    desk.tensor[arg].shape[0] = CAPACITY;
    CHECK_OK(desk_call(&desk, op));
    Image *got = &desk.image[arg], expected = image_new(got->bytes, 16);
    memcpy(expected.data, got->data, (size_t)CAPACITY * WIDTH);
    image_check_equal(got, &expected, WIDTH, "the shorter output and what follows it");
    image_free(&expected);
    desk_close(&desk);
}
