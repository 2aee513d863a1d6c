/* SPDX-License-Identifier: Apache-2.0 */
/* Rank-major tensors whose blocks are shorter than max_tokens. */
#include "tests/cases/run.h"

#define LENGTH(array) (int)(sizeof(array) / sizeof((array)[0]))

static const Case shape = {.ranks = 3,
                           .experts = 7,
                           .top_k = 3,
                           .hidden = 48,
                           .max_tokens = 6,
                           .spare_tokens = 5,
                           .layout = EP_LAYOUT_RANK_MAJOR,
                           .masked_percent = 20,
                           .weighted = 1};

/* ---- all rows ------------------------------------------------------------------------------ */

static void run_tails(Case c) {
    static const EpTail tails[] = {EP_TAIL_KEEP, EP_TAIL_ZERO, EP_TAIL_IDS};
    for (int i = 0; i < 6; i++) {
        c.zero_tail = tails[i % 3], c.counted = i > 2, c.seed = (uint64_t)i;
        c.scale_bytes = i % 2 ? 8 : 0, c.named = i % 2, c.all_weights = i > 3;
        c.scale_order = i % 4 ? EP_SCALES_BY_ROW : EP_SCALES_BY_COLUMN;
        run_case_on_threads(&c);
    }
}

Test(dispatch_blocks, one_rank, .timeout = 120) {
    Case c = shape;
    c.ranks = 1;
    run_tails(c);
}
Test(dispatch_blocks, three_ranks, .timeout = 120) {
    run_tails(shape);
}
Test(dispatch_blocks, no_tokens, .timeout = 120) {
    Case c = shape;
    c.spread = SPREAD_NONE;
    run_tails(c);
}
Test(dispatch_blocks, full, .timeout = 120) {
    Case c = shape;
    c.spread = SPREAD_FULL, c.ranks = 2;
    run_tails(c);
}
Test(dispatch_blocks, nodes, .timeout = 120) {
    Case c = shape;
    c.ranks = 4;
    for (int r = 0; r < 4; r++)
        c.nodes[r] = "0110"[r];
    run_tails(c);
    setenv("LIBEP_NODE_CHUNK", "2", 1);
    run_tails(c);
}
Test(dispatch_blocks, quantised, .timeout = 120) {
    Case c = shape;
    c.quant = EP_QUANT_FP8, c.sum_quant = EP_QUANT_FP8, c.hidden = 272;
    run_tails(c);
}

/* ---- wrong sizes --------------------------------------------------------------------------- */

/* Tensors of one rank for a dispatch and a combine with blocks of `rows`. */
typedef struct Call {
    Step step;
    void *room;
    EpTensor topk_idx, tokens, recv, out;
} Call;

static void open_call(Call *call, const EpBootstrap *bootstrap, const World *world, int64_t rows) {
    const Case *c = &world->c;
    const RankWorld *me = &world->rank[bootstrap->rank];
    EpGroup *group = open_group(bootstrap, c);
    EpHandle *handle = open_handle(group, c);
    *call = (Call){.step = {group, handle, world, bootstrap->rank, NULL}};
    call->room = aligned_alloc(16, (size_t)(c->ranks * (c->max_tokens + c->spare_tokens + 1)) *
                                       case_row_bytes(c));
    call->topk_idx = ep_tensor_2d(me->index, EP_TYPE_INT64, me->rows, c->top_k);
    call->tokens = step_tokens(&call->step);
    call->recv = ep_tensor_3d(call->room, c->row_type, c->ranks, rows, c->hidden);
    call->out = ep_tensor_2d(call->room, c->row_type, me->rows, c->hidden);
}

static void close_call(Call *call) {
    ep_group_destroy(call->step.group);
    free(call->room);
}

static EpStatus prepare(Call *call) {
    return ep_prepare(call->step.handle, NULL, &call->topk_idx, NULL, NULL, NULL);
}

/* Returns the final status of a call: on GPUs a kernel finds the error. */
static EpStatus outcome(const Call *call, EpStatus status) {
    return status == EP_OK && TESTS_ON_GPU ? ep_group_status(call->step.group, NULL) : status;
}

static EpStatus dispatch(Call *call) {
    return outcome(call, ep_dispatch(call->step.handle, NULL, NULL, &call->tokens, NULL, NULL, NULL,
                                     &call->recv, NULL, NULL, NULL));
}

static World *world_of(EpMode mode, int ranks, Spread spread) {
    Case c = shape;
    c.mode = mode, c.ranks = ranks, c.spread = spread, c.weighted = 0;
    c.index_type = EP_TYPE_INT64;
    return world_new(&c);
}

/* Fewer rows than T, or more than max_tokens, are refused. Then a right call works. */
static void check_limits(const EpBootstrap *bootstrap, EpMode mode) {
    World *world = world_of(mode, 1, SPREAD_FULL);
    Call call;
    open_call(&call, bootstrap, world, 6);
    CHECK_OK(prepare(&call));
    call.recv.shape[1] = 5;
    CHECK_REFUSED(dispatch(&call), EP_ERR_SHAPE, "recv_tokens", "T = 6", "max_tokens = 11",
                  "got 5");
    call.recv.shape[1] = 12;
    CHECK_REFUSED(dispatch(&call), EP_ERR_SHAPE, "recv_tokens", "max_tokens = 11", "got 12");
    call.recv.shape[1] = 6;
    CHECK_OK(dispatch(&call));
    call.recv.shape[1] = 5;
    CHECK_REFUSED(ep_combine(call.step.handle, NULL, &call.recv, NULL, NULL, NULL, &call.out),
                  EP_ERR_SHAPE, "expert_out", "T = 6", "got 5");
    close_call(&call);
    world_free(world);
}

ThreadTest(dispatch_blocks, limits, 1) {
    check_limits(bootstrap, EP_MODE_THROUGHPUT);
    if (TESTS_HAVE_LATENCY) check_limits(bootstrap, EP_MODE_LATENCY);
}

/* Ranks with tensors of different sizes fail the group. */
static void check_difference(const EpBootstrap *bootstrap, EpMode mode) {
    World *world = world_of(mode, 2, SPREAD_FULL);
    Call call;
    open_call(&call, bootstrap, world, 6 + bootstrap->rank);
    CHECK_OK(prepare(&call));
    EpStatus status = dispatch(&call);
    CHECK(status == EP_ERR_ORDER || status == EP_ERR_MISMATCH, "%s", ep_status_string(status));
    close_call(&call);
    world_free(world);
}

RankTest(dispatch_blocks, different_sizes, 2, check_difference(bootstrap, EP_MODE_THROUGHPUT));
ThreadTest(dispatch_blocks, different_sizes_in_latency_mode, 2) {
    if (TESTS_HAVE_LATENCY) check_difference(bootstrap, EP_MODE_LATENCY);
}

/* In two phases a rank's receive tensors are its own, but must hold the tokens of its peers. */
ThreadTest(dispatch_blocks, too_short_for_a_peer, 2) {
    if (!TESTS_HAVE_LATENCY) return;
    World *world = world_of(EP_MODE_LATENCY, 2, SPREAD_ALONE);
    Call call;
    open_call(&call, bootstrap, world, bootstrap->rank ? 7 : 5);
    CHECK_OK(prepare(&call));
    CHECK_OK(ep_dispatch_send(call.step.handle, NULL, NULL, &call.tokens, NULL, NULL, NULL));
    EpStatus status =
        outcome(&call, ep_dispatch_wait(call.step.handle, NULL, &call.recv, NULL, NULL, NULL));
    if (bootstrap->rank)
        CHECK_OK(status);
    else
        CHECK_REFUSED(status, EP_ERR_SHAPE, "room for 6 rows of each source", "room for 5");
    bootstrap->barrier(bootstrap->context, 60);
    close_call(&call);
    world_free(world);
}
