/* SPDX-License-Identifier: Apache-2.0 */
/* Combine adds in a defined order and rounds where the header says so, bit for bit. */
#include <math.h>

#include "tests/cases/run.h"
#include "tests/harness/ranked.h"
#include "tests/oracle/expect.h"
#include "tests/oracle/number.h"

/* Each type, with weights and without. */
#define SUMS "row_type=bf16,fp16,fp32 sum_type=bf16|bf16|fp16|fp16|fp32|fp32 weighted=0,1 "

GridTest(combine_sums, few_terms, SUMS, "ranks=2 top_k=2 hidden=104");
GridTest(combine_sums, many_terms_per_rank, SUMS, "ranks=2 experts=64 top_k=32 hidden=64");
CasesTest(combine_sums, many_ranks,
          run_grid(SUMS "ranks=%d experts=48 top_k=16 hidden=16", GPU_RANKS(12)));

/* Combine in a group of one rank and one expert, with one token per row of `rows`. */
static void combine_alone(const void *rows, EpType type, int64_t tokens, int64_t hidden,
                          const float *weights, void *out) {
    EpBootstrap bootstrap = EP_BOOTSTRAP_INIT;
    REQUIRE_OK(ep_bootstrap_local(1, &bootstrap));
    Case c = case_of("experts=1 top_k=1 max_tokens=%d hidden=%d row_type=%d sum_type=%d",
                     (int)tokens, (int)hidden, type, type);
    Step step = open_step(&bootstrap, &c);
    EpHandle *handle = step.handle;
    int32_t index[64] = {0};
    EpTensor topk_idx = ep_tensor_2d(index, EP_TYPE_INT32, tokens, 1);
    EpTensor expert_out = ep_tensor_2d(rows, type, tokens, hidden);
    EpTensor slot_weights = ep_tensor_1d(weights, EP_TYPE_FP32, tokens);
    EpTensor sums = ep_tensor_2d(out, type, tokens, hidden);
    CHECK_OK(ep_prepare(handle, NULL, &topk_idx, NULL, NULL, NULL));
    CHECK_OK(
        ep_combine(handle, NULL, &expert_out, weights ? &slot_weights : NULL, NULL, NULL, &sums));
    close_step(&step);
    ep_bootstrap_destroy(&bootstrap);
}

/* Every 16-bit pattern, summed with +0, gives itself, except that -0 becomes +0. NaN stays NaN. */
static void check_patterns(EpType type) {
    enum { TOKENS = 16, HIDDEN = 4096 };
    static _Alignas(16) uint16_t rows[TOKENS * HIDDEN], out[TOKENS * HIDDEN];
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        rows[i] = (uint16_t)i;
    combine_alone(rows, type, TOKENS, HIDDEN, NULL, out);
    for (int i = 0; i < TOKENS * HIDDEN; i++) {
        float value = number_get(rows, type, i);
        uint16_t expected = value == 0 ? 0 : rows[i];
        if (isnan(value))
            CHECK(isnan(number_get(out, type, i)), "NaN %04x became %04x", rows[i], out[i]);
        else
            CHECK(out[i] == expected, "%04x became %04x", rows[i], out[i]);
    }
}

SoloCall(combine_sums, every_bf16_pattern, check_patterns(EP_TYPE_BF16));
SoloCall(combine_sums, every_fp16_pattern, check_patterns(EP_TYPE_FP16));

/* Products between two numbers of the type, and ties, are rounded to nearest even. Extreme weights
 * reach subnormals, zeros, infinities and the numbers next to them. */
static void check_rounding(EpType type) {
    enum { TOKENS = 12, HIDDEN = 4096 };
    static const float weights[TOKENS] = {1.0f,  0.5f,   1.5f,      1.00390625f,
                                          3.0f,  -7.0f,  1e-5f,     65520.0f / 65504.0f,
                                          6e-8f, 2e-38f, 1.17e-38f, 3e38f};
    static _Alignas(16) uint16_t rows[TOKENS * HIDDEN], out[TOKENS * HIDDEN];
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        rows[i] = (uint16_t)(i * 16 + i / HIDDEN);
    combine_alone(rows, type, TOKENS, HIDDEN, weights, out);
    for (int i = 0; i < TOKENS * HIDDEN; i++) {
        uint16_t expected;
        float sum = fmaf(weights[i / HIDDEN], number_get(rows, type, i), 0.0f);
        if (isnan(sum)) continue;
        /* +0 + (-0) is +0 */
        number_set(&expected, type, 0, 0.0f + sum);
        CHECK(out[i] == expected, "%04x * %g became %04x, not %04x", rows[i],
              (double)weights[i / HIDDEN], out[i], expected);
    }
}

SoloCall(combine_sums, rounding_to_bf16, check_rounding(EP_TYPE_BF16));
SoloCall(combine_sums, rounding_to_fp16, check_rounding(EP_TYPE_FP16));

/* ---- several nodes ------------------------------------------------------------------------ */

/* Returns how many bytes of a rank's sums would differ if all ranks were on one node. */
static int64_t count_differences(Case c, int rank) {
    World *nodes = world_new(&c);
    memset(c.nodes, 0, sizeof(c.nodes));
    World *one = world_new(&c);
    size_t bytes = (size_t)nodes->rank[rank].rows * case_sum_bytes(&nodes->c);
    Image a = image_new(bytes, 16), b = image_new(bytes, 16);
    expect_combine(nodes, rank, &a);
    expect_combine(one, rank, &b);
    int64_t differ = 0;
    for (size_t i = 0; i < bytes; i++)
        differ += a.data[i] != b.data[i];
    image_free(&a), image_free(&b);
    world_free(nodes), world_free(one);
    return differ;
}

/* In each type, with weights and without, the sums depend on the nodes: of the oracle, and so of
 * the library. */
static void run_nodes(const char *layout) {
    static Case cases[6];
    char text[256];
    snprintf(text, sizeof(text),
             SUMS "ranks=6 nodes=120210 experts=23 top_k=9 max_tokens=25 masked_percent=20 "
                  "hidden=312 spread=full layout=%s",
             layout);
    for (int i = 0; i < cases_of(cases, LENGTH(cases), text); i++)
        for (int rank = 0; rank < cases[i].ranks; rank++)
            CHECK(count_differences(cases[i], rank) > 100, "rank %d, case %d", rank, i);
    run_grid("%s", text);
}

CasesTest(combine_sums, nodes_expert_major, run_nodes("expert-major"));
CasesTest(combine_sums, nodes_flat, run_nodes("flat"));
CasesTest(combine_sums, nodes_batched, run_nodes("batched"));

/* A token of one rank on two nodes: the partial sum of each rank, NAN where it has no slot, and
 * what the order of summation makes of them. */
typedef struct ByHand {
    EpType type;
    float part[4], sum[4]; /* sum[r]: of a token of rank r */
} ByHand;

/* On one node: in ascending rank order 2^24 absorbs the 1; any other order keeps it. */
static const ByHand on_one_node[] = {
    {EP_TYPE_FP32, {0x1p24f, 1, -0x1p24f, NAN}, {0, 0, 0, 0}},
};

/* Nodes are {0, 2} and {1, 3}. */
static const ByHand by_hand[] = {
    /* for rank 0: (1 + 1) at rank 1's place, 2^24 + 2 - 2^24. For rank 1: rank 0's node first:
     * 2^24 - 2^24 = 0, and its own node's ranks one by one. */
    {EP_TYPE_FP32, {0x1p24f, 1, -0x1p24f, 1}, {2, 2, 2, 2}},
    /* for rank 0: 2^24 absorbs 1/2 + 1/2. For rank 1: 0 + 1/2 + 1/2 */
    {EP_TYPE_FP32, {0x1p24f, 0.5f, -0x1p24f, 0.5f}, {0, 1, 0, 1}},
    /* node {1, 3} stands at rank 1 though only rank 3 has a slot: 2^24 absorbs the 1. For ranks 1
     * and 3 it comes last. */
    {EP_TYPE_FP32, {0x1p24f, NAN, -0x1p24f, 1}, {0, 1, 0, 1}},
    /* 256 + 1 is rounded to 256 between 257's neighbours, then again with the other node's 1. For
     * ranks 1 and 3: 1 + 256 + 1 = 258, rounded once. */
    {EP_TYPE_BF16, {1, 256, NAN, 1}, {256, 258, 256, 258}},
    {EP_TYPE_FP16, {1, 2048, NAN, 1}, {2048, 2050, 2048, 2050}},
    /* The node's sum overflows though the total would not. */
    {EP_TYPE_FP16, {-65504, 65504, NAN, 65504}, {INFINITY, 65504, INFINITY, 65504}},
};

static void check_by_hand(const EpBootstrap *bootstrap, const ByHand *hand) {
    Case c = case_of("ranks=4 experts=4 top_k=4 hidden=8 row_type=%d sum_type=%d", hand->type,
                     hand->type);
    Step step = open_step(bootstrap, &c);
    EpHandle *handle = step.handle;
    int32_t index[4] = {3, 1, 0, 2};
    _Alignas(16) float rows[32], out[8];
    for (int k = 0; k < 4; k++)
        if (isnan(hand->part[index[k]])) index[k] = -1;
    for (int i = 0; i < 32; i++)
        number_set(rows, hand->type, i, hand->part[bootstrap->rank]);
    EpTensor topk_idx = ep_tensor_2d(index, EP_TYPE_INT32, 1, 4);
    EpTensor expert_out = ep_tensor_2d(rows, hand->type, 4, 8);
    EpTensor sums = ep_tensor_2d(out, hand->type, 1, 8);
    CHECK_OK(ep_prepare(handle, NULL, &topk_idx, NULL, NULL, NULL));
    for (int backward = 0; backward < 2; backward++) {
        memset(out, 0xff, sizeof(out));
        CHECK_OK(backward ? ep_dispatch_backward(handle, NULL, &expert_out, NULL, NULL, &sums, NULL)
                          : ep_combine(handle, NULL, &expert_out, NULL, NULL, NULL, &sums));
        for (int h = 0; h < 8; h++)
            CHECK(number_get(out, hand->type, h) == hand->sum[bootstrap->rank],
                  "rank 0 has %g, rank %d: %g", (double)hand->part[0], bootstrap->rank,
                  (double)number_get(out, hand->type, h));
    }
    close_step(&step);
}

ThreadTest(combine_sums, nodes_by_hand, 4) {
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "0,1,0,1");
    for (int i = 0; i < LENGTH(by_hand); i++)
        check_by_hand(bootstrap, &by_hand[i]);
}

ThreadTest(combine_sums, ranks_ascending, 4) {
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "1");
    check_by_hand(bootstrap, &on_one_node[0]);
}

/* ---- on one rank --------------------------------------------------------------------------- */

/* The experts of one rank are added in ascending k, not in the order of their slots. The weighted
 * term is fused: the 2^-24 of x * x is lost if the product is rounded first. */
SoloTest(combine_sums, k_ascending_and_fused) {
    EpBootstrap bootstrap = EP_BOOTSTRAP_INIT;
    REQUIRE_OK(ep_bootstrap_local(1, &bootstrap));
    Case c = case_of("experts=3 top_k=3 hidden=4 row_type=fp32 sum_type=fp32");
    Step step = open_step(&bootstrap, &c);
    EpHandle *handle = step.handle;
    int32_t index[3] = {2, 0, 1};
    float x = 1.0f + 0x1p-12f, weights[3] = {x, -1.0f, -1.0f};
    _Alignas(16) float rows[12], out[4];
    /* k = 0: -1 (expert 2); k = 1: x * x (expert 0); k = 2: -2^-11 (expert 1) */
    for (int h = 0; h < 4; h++)
        rows[h] = x, rows[4 + h] = 0x1p-11f, rows[8 + h] = 1.0f;
    EpTensor topk_idx = ep_tensor_2d(index, EP_TYPE_INT32, 1, 3);
    EpTensor expert_out = ep_tensor_2d(rows, EP_TYPE_FP32, 3, 4);
    EpTensor slot_weights = ep_tensor_1d(weights, EP_TYPE_FP32, 3);
    EpTensor sums = ep_tensor_2d(out, EP_TYPE_FP32, 1, 4);
    CHECK_OK(ep_prepare(handle, NULL, &topk_idx, NULL, NULL, NULL));
    CHECK_OK(ep_combine(handle, NULL, &expert_out, &slot_weights, NULL, NULL, &sums));
    for (int h = 0; h < 4; h++)
        CHECK(out[h] == 0x1p-24f, "%a", (double)out[h]);
    close_step(&step);
    ep_bootstrap_destroy(&bootstrap);
}

/* A NaN or an infinity of one token stays with that token. */
SoloTest(combine_sums, nan_and_infinity_stay_in_their_token) {
    _Alignas(16) float rows[12] = {NAN, NAN, NAN, NAN, 1, 2, 3, 4, INFINITY, -INFINITY, 1, 1};
    _Alignas(16) float out[12];
    combine_alone(rows, EP_TYPE_FP32, 3, 4, NULL, out);
    for (int h = 0; h < 4; h++)
        CHECK(isnan(out[h]), "%g", (double)out[h]);
    CHECK(memcmp(out + 4, rows + 4, 32) == 0, "a neighbour was touched");
}

/* Dispatch and combine in types of different sizes. */
GridTest(combine_sums, other_type_than_dispatch, "ranks=2 hidden=32 weighted=1",
         "row_type=fp8_e4m3|fp32|bf16 sum_type=bf16|bf16|fp32");
