/* SPDX-License-Identifier: Apache-2.0 */
/* Sums that travel as e4m3 with scales: every layout, type and length of rows against the oracle,
 * values by hand, ranks that disagree, refused rows. */
#include <math.h>

#include "tests/cases/fixture.h"
#include "tests/harness/ranked.h"
#include "tests/oracle/number.h"
#include "tests/oracle/quant.h"

/* ---- against the oracle -------------------------------------------------------------------- */

/* Rows end within a block, within a group of blocks, and behind one. */
#define ROWS                                                                               \
    "experts=7 top_k=3 sum_quant=fp8 masked_percent=20 hidden=16,48,128,400,512,528,1296 " \
    "sum_type=bf16|fp16|fp32|fp32|bf16|fp16 quant=mxfp8|none|none duplicates=0|1 "         \
    "weighted=0|1 weights_at_combine=0|0|1|0 counted=0|1|0 num_sms=2|0|0 "
#define RowsTest(name, layout) GridTest(combine_quantised, name, ROWS, "ranks=1,2,4 layout=" layout)
RowsTest(expert_major, "expert-major");
RowsTest(flat, "flat");
RowsTest(batched, "batched");
RowsTest(rank_major, "rank-major");

/* Each node's sum is quantised once more. Many rounds. */
Test(combine_quantised, several_nodes_and_a_tiny_stage, .timeout = 120) {
    setenv("LIBEP_STAGE_BYTES", "12000", 1);
    setenv("LIBEP_NODE_CHUNK", "12000", 1);
    run_grid(ROWS "ranks=4 nodes=0120 layout=expert-major,flat,batched");
}

#define QuantisedTest(name, ...) \
    GridTest(combine_quantised, name, "sum_quant=fp8 spread=full", __VA_ARGS__)

/* Relays sum rows of several fragments. */
QuantisedTest(long_rows_on_nodes, "ranks=4 nodes=0101 experts=12 top_k=6 hidden=7168 max_tokens=5 "
                                  "sum_type=bf16|fp16|fp32 weighted=1|0");

/* The longest rows, which kernels cut into fragments, and some that end within one. */
#define LONG "ranks=2 experts=40 max_tokens=3 weighted=1 row_type=uint8 "
QuantisedTest(longest_rows, LONG "hidden=32768 top_k=2 sum_type=bf16",
              LONG "hidden=24592 top_k=6 sum_type=fp16", LONG "hidden=7168 top_k=8 sum_type=bf16",
              LONG "hidden=16368 top_k=5 sum_type=fp32");
/* GPUs with 99 KB have too little shared memory for these. */
CasesTest(combine_quantised, most_shared_memory, setenv("LIBEP_SHARED_BYTES", "163K", 1);
          run_grid(LONG "sum_quant=fp8 spread=full hidden=4112 top_k=32 sum_type=fp32"));

/* Rows beyond the capacity have no slots: their sums are quantised zeros. */
#define LOST "ranks=3 experts=6 top_k=4 hidden=160 capacity=11 overflow=drop "
QuantisedTest(lost_slots, LOST "layout=expert-major,flat");

CasesTest(combine_quantised, many_terms,
          run_grid("ranks=%d experts=64 top_k=32 hidden=272 weighted=1 sum_quant=fp8 spread=full",
                   GPU_RANKS(12)));

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
    Case c = case_of("ranks=2 experts=2 hidden=128 max_tokens=1 mode=%d capacity=2 row_type=fp32 "
                     "sum_type=fp32 sum_quant=fp8",
                     mode);
    Step step = open_step(bootstrap, &c);
    EpHandle *handle = step.handle;
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
    close_step(&step);
}

RankTest(combine_quantised, by_hand, 2, sum_by_hand(bootstrap, EP_MODE_THROUGHPUT));

LatencyTest(combine_quantised, by_hand_in_latency_mode, 2, sum_by_hand(bootstrap, EP_MODE_LATENCY));

/* ---- handles that differ ------------------------------------------------------------------- */

/* Handles of either kind use one plan: what travels is no part of it. */
ThreadTest(combine_quantised, one_plan_for_both, 3) {
    Case c = case_complete(case_of("ranks=3 hidden=144 top_k=4 spread=full"));
    Case quantised = c;
    quantised.sum_quant = EP_QUANT_FP8;
    EpGroup *group = open_group(bootstrap, &c);
    EpHandle *plain = open_handle(group, &c);
    EpHandle *packed = open_handle(group, &quantised);
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
    Case c = case_of("ranks=2 hidden=1024 mode=%d capacity=60 spread=full sum_quant=%s", mode,
                     bootstrap->rank ? "none" : "fp8");
    Step step = open_step(bootstrap, &c);
    step_prepare(&step);
    step_dispatch(&step);
    static _Thread_local _Alignas(16) uint16_t sums[9 * 1024];
    EpTensor expert_out = step_expert_out(&step);
    EpTensor out = ep_tensor_2d(sums, EP_TYPE_BF16, 9, 1024);
    EpStatus status = ep_combine(step.handle, NULL, &expert_out, NULL, NULL, NULL, &out);
    if (TESTS_ON_GPU && status == EP_OK) status = ep_group_status(step.group, NULL);
    CHECK_REFUSED(status, EP_ERR_ORDER, "combine", TESTS_ON_GPU ? "" : "sum_quant");
    close_step(&step);
}

RankTest(combine_quantised, ranks_disagree, 2, disagree(bootstrap, EP_MODE_THROUGHPUT));

LatencyTest(combine_quantised, ranks_disagree_in_latency_mode, 2,
            disagree(bootstrap, EP_MODE_LATENCY));

/* ---- refusals ------------------------------------------------------------------------------ */

RefusalsTest(combine_quantised, row_lengths, "sum_quant", "layout=batched hidden=32 sum_quant=fp8");
