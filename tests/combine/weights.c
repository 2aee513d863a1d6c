/* SPDX-License-Identifier: Apache-2.0 */
/* Weights that latency mode's combine gets at the tokens' ranks. The weights of entries without a
 * slot are NaN in all cases. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/cases/fixture.h"

#define LENGTH(array) (int)(sizeof(array) / sizeof((array)[0]))

/* ---- sums ---- */

static const EpLayout layouts[] = {EP_LAYOUT_EXPERT_MAJOR, EP_LAYOUT_BATCHED};

/* Run both layouts, whole and in phases. */
static void run_layouts(Case c) {
    c.mode = EP_MODE_LATENCY, c.weights_at_combine = 1;
    for (int i = 0; i < 4; i++) {
        c.layout = layouts[i / 2], c.phases = i % 2;
        run_case_on_threads(&c);
        c.seed++;
    }
}

Test(combine_weights, few_terms, .timeout = 120) {
    NEEDS_LATENCY();
    static const EpType types[] = {EP_TYPE_BF16, EP_TYPE_FP16, EP_TYPE_FP32};
    for (int i = 0; i < 3; i++)
        run_layouts((Case){.ranks = 2, .hidden = 104, .max_tokens = 37, .sum_type = types[i]});
}

/* K around the floats that one line of a GPU's buffers holds, up to EP_MAX_TOP_K. */
Test(combine_weights, many_terms, .timeout = 240) {
    NEEDS_LATENCY();
    static const int top_k[] = {1, 7, 27, 28, 29, EP_MAX_TOP_K};
    for (int i = 0; i < LENGTH(top_k); i++)
        run_layouts((Case){.ranks = 3,
                           .experts = 64,
                           .top_k = top_k[i],
                           .hidden = 16,
                           .max_tokens = 19,
                           .masked_percent = 5,
                           .seed = (uint64_t)(10 * i)});
}

Test(combine_weights, many_ranks, .timeout = 240) {
    NEEDS_LATENCY();
    run_layouts((Case){.ranks = GPU_RANKS(9), .experts = 40, .top_k = 11, .hidden = 48});
}

/* Masked, invalid, repeated and lost entries, tokens beyond num_tokens. */
Test(combine_weights, dead_entries, .timeout = 240) {
    NEEDS_LATENCY();
    for (int merged = 0; merged < 2; merged++)
        run_layouts((Case){.ranks = 3,
                           .experts = 7,
                           .top_k = 5,
                           .hidden = 32,
                           .max_tokens = 21,
                           .masked_percent = 20,
                           .invalid_percent = 5,
                           .duplicates = 1,
                           .merged = merged,
                           .alignment = 4,
                           .capacity = 70,
                           .rows_per_expert = 24,
                           .overflow = EP_OVERFLOW_DROP,
                           .counted = 1,
                           .spare_rows = 3,
                           .seed = (uint64_t)(100 * merged)});
}

/* Ranks without tokens, without experts, and alone. */
Test(combine_weights, idle_ranks, .timeout = 240) {
    NEEDS_LATENCY();
    static const Spread spreads[] = {SPREAD_HOLE, SPREAD_ALONE, SPREAD_NONE, SPREAD_FULL};
    for (int i = 0; i < LENGTH(spreads); i++) {
        Case c = {.ranks = 3, .experts = 2 + 4 * (i % 2), .spread = spreads[i], .max_tokens = 35};
        c.routing = i == 3 ? ROUTING_ONE_RANK : ROUTING_UNIFORM, c.seed = (uint64_t)(10 * i);
        run_layouts(c);
    }
    run_layouts((Case){.ranks = 1, .experts = 5, .top_k = 3, .max_tokens = 40});
    run_layouts((Case){.ranks = 2, .routing = ROUTING_NOBODY});
}

/* Stages so small that tokens travel in many rounds, and K floats take more of them than a row. */
Test(combine_weights, many_rounds, .timeout = 240) {
    HOST_ONLY("no LIBEP_STAGE_BYTES on GPUs");
    setenv("LIBEP_STAGE_BYTES", "3000", 1);
    run_layouts((Case){.ranks = 3, .experts = 64, .top_k = 32, .hidden = 16, .max_tokens = 50});
    run_layouts((Case){.ranks = 4, .experts = 9, .top_k = 3, .hidden = 200, .max_tokens = 50});
    run_layouts((Case){
        .ranks = 4, .nodes = "0110", .experts = 64, .top_k = 32, .hidden = 16, .max_tokens = 50});
}

/* The same bytes as with weights that dispatch has delivered. */
static void compare_with_slots(const EpBootstrap *bootstrap, EpLayout layout) {
    Case c = {.ranks = bootstrap->size, .top_k = 4, .max_tokens = 33, .spread = SPREAD_FULL};
    c.experts = 3 * c.ranks, c.hidden = 64, c.layout = layout, c.mode = EP_MODE_LATENCY;
    c.weighted = 1, c = case_complete(c);
    World *world = world_new(&c);
    EpGroup *group = open_group(bootstrap, &c);
    EpHandle *handle = group ? open_handle(group, &c) : NULL;
    REQUIRE(handle, "no handle");
    Step step = {group, handle, world, bootstrap->rank, NULL};
    step_dispatch(&step);
    const RankWorld *me = &world->rank[bootstrap->rank];
    size_t bytes = (size_t)me->rows * case_sum_bytes(&c);
    /* What dispatch delivers has been checked: set the same weights by slot. */
    for (int64_t row = 0; row < me->buffer_rows; row++)
        if (me->row[row].kind == ROW_FILLED)
            me->slot_weight[row] =
                world->rank[me->row[row].source]
                    .weight[(int64_t)me->row[row].token * c.top_k + me->row[row].k];
    Image by_slot = image_new(bytes, 16), by_entry = image_new(bytes, 16);
    EpTensor rows = step_expert_out(&step), slots = step_slot_weights(&step);
    EpTensor weights = step_weights(&step), out = step_grad_out(&step);
    out.data = by_slot.data;
    CHECK_OK(ep_combine(handle, NULL, &rows, &slots, NULL, NULL, &out));
    out.data = by_entry.data;
    CHECK_OK(ep_combine(handle, NULL, &rows, NULL, &weights, NULL, &out));
    image_check_equal(&by_entry, &by_slot, case_sum_bytes(&c), "out");
    image_free(&by_slot);
    image_free(&by_entry);
    ep_group_destroy(group);
    world_free(world);
}

ThreadTest(combine_weights, as_delivered_by_dispatch, 3) {
    NEEDS_LATENCY();
    for (int i = 0; i < LENGTH(layouts); i++)
        compare_with_slots(bootstrap, layouts[i]);
}

/* ---- refusals ---- */

static void fixture_open_weights(Fixture *fixture, EpLayout layout) {
    Case c = fixture_case(layout);
    c.mode = EP_MODE_LATENCY, c.weights_at_combine = 1;
    c = case_complete(c);
    fixture_open(fixture, &c);
}

static const Wrong wrong_tensors[] = {
    {OP_COMBINE, COMBINE_WEIGHTS, SPOIL_TYPE, EP_TYPE_BF16, EP_ERR_TYPE, {"fp32", "bf16"}},
    {OP_COMBINE, COMBINE_WEIGHTS, SPOIL_NDIM, 1, EP_ERR_NDIM, {"2", "got 1"}},
    {OP_COMBINE, COMBINE_WEIGHTS, SPOIL_SIZE, 8, EP_ERR_STRUCT_SIZE, {"got 8"}},
    {OP_COMBINE, COMBINE_WEIGHTS, SPOIL_SHAPE0, 8, EP_ERR_SHAPE, {"9", "8"}},
    {OP_COMBINE, COMBINE_WEIGHTS, SPOIL_SHAPE0, -1, EP_ERR_RANGE, {"-1"}},
    {OP_COMBINE, COMBINE_WEIGHTS, SPOIL_SHAPE1, 3, EP_ERR_SHAPE, {"K = 2", "3"}},
    {OP_COMBINE, COMBINE_WEIGHTS, SPOIL_SHIFT, 2, EP_ERR_ADDRESS, {"multiple of 4"}},
    {OP_COMBINE, COMBINE_WEIGHTS, SPOIL_DATA, 0, EP_ERR_NULL, {"data"}},
    {OP_COMBINE_SEND, COMBINE_WEIGHTS, SPOIL_TYPE, EP_TYPE_INT32, EP_ERR_TYPE, {"fp32"}},
    {OP_COMBINE_SEND, COMBINE_WEIGHTS, SPOIL_NDIM, 3, EP_ERR_NDIM, {"2", "got 3"}},
    {OP_COMBINE_SEND, COMBINE_WEIGHTS, SPOIL_SHAPE0, 10, EP_ERR_SHAPE, {"9", "10"}},
    {OP_COMBINE_SEND, COMBINE_WEIGHTS, SPOIL_SHAPE1, 1, EP_ERR_SHAPE, {"K = 2", "1"}},
    {OP_COMBINE_SEND, COMBINE_WEIGHTS, SPOIL_SHIFT, 1, EP_ERR_ADDRESS, {"multiple of 4"}},
    {OP_COMBINE_SEND, COMBINE_WEIGHTS, SPOIL_DATA, 0, EP_ERR_NULL, {"data"}},
    {OP_COMBINE_WAIT, OUT, SPOIL_SHAPE0, 8, EP_ERR_SHAPE, {"9", "8"}},
};

SoloTest(combine_weights, wrong_tensors) {
    NEEDS_LATENCY();
    for (int i = 0; i < LENGTH(layouts); i++) {
        Fixture fixture;
        fixture_open_weights(&fixture, layouts[i]);
        fixture_check_wrong(&fixture, wrong_tensors, LENGTH(wrong_tensors));
        fixture_close(&fixture);
    }
}

/* Check that both calls refuse topk_weights, and that a step goes on without them. */
static void check_refuses(Fixture *fixture, EpStatus status, const char *part) {
    CHECK_REFUSED(fixture_call(fixture, OP_COMBINE), status, "rank 0: ep_combine: topk_weights",
                  "expected NULL", part, "got a tensor");
    if (fixture->world->c.mode == EP_MODE_LATENCY)
        CHECK_REFUSED(fixture_call(fixture, OP_COMBINE_SEND), status,
                      "rank 0: ep_combine_send: topk_weights", "expected NULL", part,
                      "got a tensor");
    fixture_check_untouched(fixture);
    step_all(&fixture->step);
}

/* Open a prepared fixture whose combines get topk_weights, though the case does not. */
static void fixture_open_wrong(Fixture *fixture, EpMode mode, EpLayout layout) {
    Case c = fixture_case(layout);
    c.mode = mode, c = case_complete(c);
    fixture_open(fixture, &c);
    step_prepare(&fixture->step);
    if (mode == EP_MODE_LATENCY) step_dispatch(&fixture->step);
    fixture->arg[COMBINE_WEIGHTS] = &fixture->tensor[COMBINE_WEIGHTS];
}

SoloTest(combine_weights, both_kinds) {
    NEEDS_LATENCY();
    Fixture fixture;
    fixture_open_wrong(&fixture, EP_MODE_LATENCY, EP_LAYOUT_BATCHED);
    check_refuses(&fixture, EP_ERR_NULL, "since slot_weights is given");
    fixture_close(&fixture);
}

SoloTest(combine_weights, rows_of_several_experts) {
    static const EpLayout others[] = {EP_LAYOUT_FLAT, EP_LAYOUT_RANK_MAJOR};
    NEEDS_LATENCY();
    for (int i = 0; i < LENGTH(others); i++) {
        Fixture fixture;
        fixture_open_wrong(&fixture, EP_MODE_LATENCY, others[i]);
        fixture.arg[SLOT_WEIGHTS] = NULL;
        check_refuses(&fixture, EP_ERR_UNSUPPORTED, "in the flat and rank-major layouts");
        fixture_close(&fixture);
    }
}

SoloTest(combine_weights, throughput_mode) {
    Fixture fixture;
    fixture_open_wrong(&fixture, EP_MODE_THROUGHPUT, EP_LAYOUT_EXPERT_MAJOR);
    fixture.arg[SLOT_WEIGHTS] = NULL;
    check_refuses(&fixture, EP_ERR_UNSUPPORTED, "in throughput mode");
    fixture_close(&fixture);
}

/* A rank without tokens may pass no data. */
SoloTest(combine_weights, no_tokens) {
    NEEDS_LATENCY();
    Case c = fixture_case(EP_LAYOUT_BATCHED);
    c.mode = EP_MODE_LATENCY, c.weights_at_combine = 1, c.spread = SPREAD_NONE;
    c = case_complete(c);
    Fixture fixture;
    fixture_open(&fixture, &c);
    step_dispatch(&fixture.step);
    fixture.tensor[COMBINE_WEIGHTS].data = NULL;
    CHECK_OK(fixture_call(&fixture, OP_COMBINE));
    CHECK_OK(fixture_call(&fixture, OP_COMBINE_SEND));
    CHECK_OK(fixture_call(&fixture, OP_COMBINE_WAIT));
    fixture_close(&fixture);
}
