/* SPDX-License-Identifier: Apache-2.0 */
/* Sums that travel as e4m3 with scales: every layout, type and length of rows against the oracle,
 * values by hand, ranks that disagree, refused rows. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/cases/fixture.h"
#include "tests/harness/ranked.h"
#include "tests/oracle/number.h"
#include "tests/oracle/quant.h"

#define LENGTH(array) (int)(sizeof(array) / sizeof((array)[0]))

#define NEEDS_QUANT()                                                       \
    do {                                                                    \
        if (!TESTS_HAVE_QUANT) HOST_ONLY("this backend does not quantise"); \
    } while (0)

/* ---- against the oracle -------------------------------------------------------------------- */

/* Rows end within a block, within a group of blocks, and behind one. */
static void run_rows(EpLayout layout, int ranks, const char *nodes) {
    static const int hiddens[] = {16, 48, 128, 400, 512, 528, 1296};
    for (int i = 0; i < LENGTH(hiddens); i++) {
        Case c = {.ranks = ranks,
                  .experts = 7,
                  .top_k = 3,
                  .hidden = hiddens[i],
                  .layout = layout,
                  .sum_type = (EpType)(1 + (i + ranks) % 3),
                  .sum_quant = EP_QUANT_FP8,
                  .quant = i % 3 ? EP_QUANT_NONE : EP_QUANT_MXFP8,
                  .masked_percent = 20,
                  .duplicates = i % 2,
                  .weighted = i % 2,
                  .weights_at_combine = i % 4 == 2,
                  .counted = i % 3 == 1,
                  .num_sms = i % 3 ? 0 : 2,
                  .seed = (uint64_t)(ranks * 100 + (int)layout * 10 + i)};
        snprintf(c.nodes, sizeof(c.nodes), "%s", nodes);
        run_case_on_threads(&c);
    }
}

#define GRID(name, layout)                          \
    Test(combine_quantised, name, .timeout = 120) { \
        NEEDS_QUANT();                              \
        run_rows(layout, 1, "");                    \
        run_rows(layout, 2, "");                    \
        run_rows(layout, 4, "");                    \
    }

GRID(expert_major, EP_LAYOUT_EXPERT_MAJOR)
GRID(flat, EP_LAYOUT_FLAT)
GRID(batched, EP_LAYOUT_BATCHED)
GRID(rank_major, EP_LAYOUT_RANK_MAJOR)

/* Each node's sum is quantised once more. Many rounds. */
Test(combine_quantised, several_nodes_and_a_tiny_stage, .timeout = 120) {
    setenv("LIBEP_STAGE_BYTES", "12000", 1);
    setenv("LIBEP_NODE_CHUNK", "12000", 1);
    for (EpLayout layout = EP_LAYOUT_EXPERT_MAJOR; layout <= EP_LAYOUT_BATCHED; layout++)
        run_rows(layout, 4, "0120");
}

/* Relays sum rows of several fragments. */
Test(combine_quantised, long_rows_on_nodes, .timeout = 120) {
    for (int type = EP_TYPE_BF16; type <= EP_TYPE_FP32; type++) {
        Case c = {.ranks = 4, .experts = 12, .top_k = 6, .hidden = 7168, .max_tokens = 5};
        c.sum_type = (EpType)type, c.weighted = type != EP_TYPE_FP16, c.spread = SPREAD_FULL;
        c.sum_quant = EP_QUANT_FP8, c.seed = (uint64_t)type;
        snprintf(c.nodes, sizeof(c.nodes), "0101");
        run_case_on_threads(&c);
    }
}

/* The longest rows, which kernels cut into fragments, and some that end within one. */
Test(combine_quantised, longest_rows, .timeout = 120) {
    NEEDS_QUANT();
    static const struct {
        int hidden, top_k;
        EpType type;
    } rows[] = {{EP_MAX_ROW_BYTES / 2, 2, EP_TYPE_BF16},
                {24592, 6, EP_TYPE_FP16},
                {7168, 8, EP_TYPE_BF16},
                {EP_MAX_ROW_BYTES / 4 - 16, 5, EP_TYPE_FP32},
                {4112, 32, EP_TYPE_FP32}};
    for (int i = 0; i < LENGTH(rows); i++) {
        Case c = {.ranks = 2, .experts = 40, .max_tokens = 3, .weighted = 1};
        c.hidden = rows[i].hidden, c.sum_type = rows[i].type, c.top_k = rows[i].top_k;
        c.row_type = EP_TYPE_UINT8, c.spread = SPREAD_FULL, c.sum_quant = EP_QUANT_FP8;
        c.seed = (uint64_t)i;
        run_case_on_threads(&c);
    }
}

Test(combine_quantised, many_terms, .timeout = 120) {
    NEEDS_QUANT();
    Case c = {.ranks = GPU_RANKS(12), .experts = 64, .top_k = 32, .hidden = 272, .weighted = 1};
    c.sum_quant = EP_QUANT_FP8, c.spread = SPREAD_FULL;
    run_case_on_threads(&c);
}

/* Rows beyond the capacity have no slots: their sums are quantised zeros. */
Test(combine_quantised, lost_slots, .timeout = 120) {
    NEEDS_QUANT();
    for (EpLayout layout = EP_LAYOUT_EXPERT_MAJOR; layout <= EP_LAYOUT_FLAT; layout++) {
        Case c = {.ranks = 3, .experts = 6, .top_k = 4, .hidden = 160, .capacity = 11};
        c.layout = layout, c.overflow = EP_OVERFLOW_DROP, c.spread = SPREAD_FULL;
        c.sum_quant = EP_QUANT_FP8;
        run_case_on_threads(&c);
    }
}

/* ---- by hand ------------------------------------------------------------------------------- */

/* A token of each rank goes to the experts of both ranks; rows of 128 elements, two alike. In each
 * block the largest element is 448, so the scale is 1. */
typedef struct ByHand {
    float own, other, sum; /* of FP32 rows */
} ByHand;

static const ByHand by_hand[] = {
    {0, 448, 448},                     /* the block's largest */
    {0x1.0624dep0f, 0, 0x1.0624dep0f}, /* this rank's own sum is not rounded */
    {0, 1.0625f, 1},                   /* a tie between 1 and 1.125: to even */
    {0, 1.1875f, 1.25f},               /* a tie between 1.125 and 1.25 */
    {0.5f, 1.0626f, 1.625f},           /* rounded before it is added */
    {0, 0x1p-10f, 0},                  /* half of the least e4m3 */
    {0, 0x1.8p-9f, 0x1p-8f},           /* a tie between subnormals */
    {1, -3.3f, -2.25f},
    {0, INFINITY, 448}, /* saturates */
    {0, -INFINITY, -448},
    {2, NAN, NAN},
};

static void fill_rows(float *rows, int own) {
    for (int i = 0; i < 2 * 128; i++) {
        const ByHand *hand = &by_hand[i % 128 < LENGTH(by_hand) ? i % 128 : 0];
        rows[i] = own == i / 128 ? hand->own : hand->other;
    }
}

static void check_sums(const float *sums) {
    for (int i = 0; i < 128; i++) {
        float expected = by_hand[i < LENGTH(by_hand) ? i : 0].sum;
        if (isnan(expected))
            CHECK(isnan(sums[i]), "element %d: %a is no NaN", i, (double)sums[i]);
        else
            CHECK(sums[i] == expected, "element %d: %a, not %a", i, (double)sums[i],
                  (double)expected);
    }
}

/* Make a plan; in latency mode a dispatch makes it. Slot r holds rank r's token. */
static void make_plan(EpHandle *handle, EpMode mode) {
    int32_t index[2] = {1, 0};
    _Alignas(16) float token[128] = {0}, received[2 * 128];
    EpTensor topk_idx = ep_tensor_2d(index, EP_TYPE_INT32, 1, 2);
    EpTensor tokens = ep_tensor_2d(token, EP_TYPE_FP32, 1, 128);
    EpTensor recv = ep_tensor_2d(received, EP_TYPE_FP32, 2, 128);
    CHECK_OK(ep_prepare(handle, NULL, &topk_idx, NULL, NULL, NULL));
    if (mode == EP_MODE_LATENCY)
        CHECK_OK(
            ep_dispatch(handle, NULL, NULL, &tokens, NULL, NULL, NULL, &recv, NULL, NULL, NULL));
}

static void sum_by_hand(const EpBootstrap *bootstrap, EpMode mode) {
    Case c = case_complete((Case){.ranks = 2,
                                  .experts = 2,
                                  .hidden = 128,
                                  .max_tokens = 1,
                                  .mode = mode,
                                  .capacity = 2,
                                  .row_type = EP_TYPE_FP32,
                                  .sum_type = EP_TYPE_FP32,
                                  .sum_quant = EP_QUANT_FP8});
    EpGroup *group = open_group(bootstrap, &c);
    EpHandle *handle = group ? open_handle(group, &c) : NULL;
    REQUIRE(handle, "no handle");
    _Alignas(16) float rows[2 * 128], sums[128];
    fill_rows(rows, bootstrap->rank);
    EpTensor expert_out = ep_tensor_2d(rows, EP_TYPE_FP32, 2, 128);
    EpTensor out = ep_tensor_2d(sums, EP_TYPE_FP32, 1, 128);
    make_plan(handle, mode);
    for (int backward = 0; backward < 1 + (mode == EP_MODE_THROUGHPUT); backward++) {
        memset(sums, 0x77, sizeof(sums));
        if (backward)
            CHECK_OK(ep_dispatch_backward(handle, NULL, &expert_out, NULL, NULL, &out, NULL));
        else
            CHECK_OK(ep_combine(handle, NULL, &expert_out, NULL, NULL, NULL, &out));
        check_sums(sums);
    }
    ep_group_destroy(group);
}

ThreadTest(combine_quantised, by_hand, 2) {
    NEEDS_QUANT();
    sum_by_hand(bootstrap, EP_MODE_THROUGHPUT);
}

ThreadTest(combine_quantised, by_hand_in_latency_mode, 2) {
    NEEDS_LATENCY();
    NEEDS_QUANT();
    sum_by_hand(bootstrap, EP_MODE_LATENCY);
}

/* ---- handles that differ ------------------------------------------------------------------- */

/* Handles of either kind use one plan: what travels is no part of it. */
ThreadTest(combine_quantised, one_plan_for_both, 3) {
    NEEDS_QUANT();
    Case c = case_complete((Case){.ranks = 3, .hidden = 144, .top_k = 4, .spread = SPREAD_FULL});
    Case quantised = c;
    quantised.sum_quant = EP_QUANT_FP8;
    EpGroup *group = open_group(bootstrap, &c);
    EpHandle *plain = group ? open_handle(group, &c) : NULL;
    EpHandle *packed = group ? open_handle(group, &quantised) : NULL;
    REQUIRE(plain && packed, "no handles");
    World *world = world_new(&c), *packed_world = world_new(&quantised);
    EpTensor plan;
    CHECK_OK(ep_handle_plan(packed, &plan));
    Step first = {group, packed, packed_world, bootstrap->rank, NULL};
    Step second = {group, plain, world, bootstrap->rank, &plan};
    step_prepare(&first);
    step_combine(&first);
    step_dispatch_backward(&second);
    step_combine(&second);
    step_dispatch_backward(&first);
    world_free(world), world_free(packed_world);
    ep_group_destroy(group);
}

/* Rank 1 sends its sums as they are. */
static void disagree(const EpBootstrap *bootstrap, EpMode mode) {
    set_on_ranks(bootstrap, "LIBEP_LOG_FILE", "/dev/null");
    Case c = case_complete(
        (Case){.ranks = 2, .hidden = 1024, .mode = mode, .capacity = 60, .spread = SPREAD_FULL});
    World *world = world_new(&c);
    if (bootstrap->rank == 0) c.sum_quant = EP_QUANT_FP8;
    EpGroup *group = open_group(bootstrap, &c);
    EpHandle *handle = group ? open_handle(group, &c) : NULL;
    REQUIRE(handle, "no handle");
    Step step = {group, handle, world, bootstrap->rank, NULL};
    step_prepare(&step);
    step_dispatch(&step);
    static _Thread_local _Alignas(16) uint16_t sums[9 * 1024];
    EpTensor expert_out = step_expert_out(&step);
    EpTensor out = ep_tensor_2d(sums, EP_TYPE_BF16, 9, 1024);
    EpStatus status = ep_combine(handle, NULL, &expert_out, NULL, NULL, NULL, &out);
    if (TESTS_ON_GPU && status == EP_OK) status = ep_group_status(group, NULL);
    CHECK_REFUSED(status, EP_ERR_ORDER, "combine", TESTS_ON_GPU ? "" : "sum_quant");
    world_free(world);
    ep_group_destroy(group);
}

ThreadTest(combine_quantised, ranks_disagree, 2) {
    NEEDS_QUANT();
    disagree(bootstrap, EP_MODE_THROUGHPUT);
}

ThreadTest(combine_quantised, ranks_disagree_in_latency_mode, 2) {
    NEEDS_LATENCY();
    NEEDS_QUANT();
    disagree(bootstrap, EP_MODE_LATENCY);
}

/* ---- refusals ------------------------------------------------------------------------------ */

/* Rows of 16-byte units that are not units of 16 elements, in each call that sums. */
SoloTest(combine_quantised, row_lengths) {
    NEEDS_QUANT();
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    c.hidden = 32, c.sum_quant = EP_QUANT_FP8;
    Fixture fixture;
    fixture_open_prepared(&fixture, &c);
    static const Arg rows[] = {EXPERT_OUT, OUT, GRAD_RECV_TOKENS, GRAD_TOKENS};
    for (int i = 0; i < LENGTH(rows); i++)
        fixture.tensor[rows[i]].shape[1] = 24;
    CHECK_REFUSED(fixture_call(&fixture, OP_COMBINE), EP_ERR_ROW_BYTES, "ep_combine", "expert_out",
                  "multiple of 16 elements", "sum_quant", "got 24");
    CHECK_REFUSED(fixture_call(&fixture, OP_DISPATCH_BACKWARD), EP_ERR_ROW_BYTES,
                  "ep_dispatch_backward", "grad_recv_tokens", "multiple of 16 elements", "got 24");
    fixture_check_untouched(&fixture);
    fixture_close(&fixture);
}

SoloTest(combine_quantised, row_lengths_of_a_send_phase) {
    NEEDS_QUANT();
    Case c = fixture_case(EP_LAYOUT_BATCHED);
    c.hidden = 32, c.sum_quant = EP_QUANT_FP8, c.mode = EP_MODE_LATENCY;
    c = case_complete(c);
    Fixture fixture;
    fixture_open(&fixture, &c);
    CHECK_OK(fixture_call(&fixture, OP_PREPARE));
    CHECK_OK(fixture_call(&fixture, OP_DISPATCH));
    fixture_reset(&fixture);
    fixture.tensor[EXPERT_OUT].shape[2] = 24;
    CHECK_REFUSED(fixture_call(&fixture, OP_COMBINE_SEND), EP_ERR_ROW_BYTES, "ep_combine_send",
                  "expert_out", "multiple of 16 elements", "got 24");
    fixture_check_untouched(&fixture);
    fixture_close(&fixture);
}
