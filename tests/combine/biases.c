/* SPDX-License-Identifier: Apache-2.0 */
/* Biases of combine and dispatch_backward: added last, in FP32, before the one rounding. */
#include "tests/cases/fixture.h"
#include "tests/harness/ranked.h"
#include "tests/oracle/number.h"

#define LENGTH(array) (int)(sizeof(array) / sizeof((array)[0]))

/* Run a shape with one and two biases in each layout, in all of its modes. */
static void run_layouts(Case shape) {
    static const EpType types[] = {EP_TYPE_BF16, EP_TYPE_FP16, EP_TYPE_FP32};
    for (int i = 0; i < 8; i++) {
        Case c = shape;
        c.layout = (EpLayout)(1 + i / 2);
        c.biases = 1 + i % 2;
        c.row_type = c.sum_type = types[i % 3];
        c.weighted = i % 4 < 2;
        c.counted = i % 3 == 1;
        c.seed = (uint64_t)i;
        run_case_on_threads(&c);
    }
}

Test(combine_biases, one_rank, .timeout = 120) {
    run_layouts((Case){.masked_percent = 30});
}
Test(combine_biases, two_ranks, .timeout = 120) {
    run_layouts((Case){.ranks = 2, .top_k = 4, .hidden = 1032, .masked_percent = 30});
}
Test(combine_biases, many_ranks, .timeout = 120) {
    run_layouts((Case){.ranks = GPU_RANKS(8), .experts = 24, .top_k = 6, .max_tokens = 30});
}
/* A token without a slot has its biases alone. */
Test(combine_biases, no_slots, .timeout = 120) {
    run_layouts((Case){.ranks = 2, .routing = ROUTING_NOBODY});
}
Test(combine_biases, most_experts_of_a_token, .timeout = 120) {
    run_layouts((Case){.ranks = 2, .experts = 64, .top_k = 32, .hidden = 64});
}
Test(combine_biases, quantised_sums, .timeout = 120) {
    if (!TESTS_HAVE_QUANT) cr_skip_test("the backend does not quantise");
    run_layouts((Case){
        .ranks = 2, .top_k = 4, .hidden = 1200, .max_tokens = 20, .sum_quant = EP_QUANT_FP8});
}
Test(combine_biases, nodes, .timeout = 120) {
    run_layouts((Case){.ranks = 4, .nodes = "0110", .experts = 12, .top_k = 5, .max_tokens = 25});
}
Test(combine_biases, nodes_and_quantised_sums, .timeout = 120) {
    if (!TESTS_HAVE_QUANT) cr_skip_test("the backend does not quantise");
    setenv("LIBEP_NODE_CHUNK", "3000", 1);
    run_layouts((Case){.ranks = 4,
                       .nodes = "0011",
                       .experts = 12,
                       .top_k = 5,
                       .max_tokens = 25,
                       .sum_quant = EP_QUANT_FP8});
}

/* ---- by hand ------------------------------------------------------------------------------- */

/* One token, one slot, and what a sum of this row and two biases must be. */
typedef struct ByHand {
    EpType type;
    float row, bias0, bias1, out;
} ByHand;

static const ByHand by_hand[] = {
    /* One rounding: 256 + 1 + 1 is 258, though 256 + 1 in bf16 is 256. */
    {EP_TYPE_BF16, 256, 1, 1, 258},
    {EP_TYPE_FP16, 2048, 1, 1, 2050},
    /* In this order: 2^24 absorbs the 1 before -2^24 comes. */
    {EP_TYPE_FP32, 1, 0x1p24f, -0x1p24f, 0},
    {EP_TYPE_FP32, 0x1p24f, -0x1p24f, 1, 1},
};

static void check_by_hand(const ByHand *hand, EpMode mode) {
    enum { HIDDEN = 8 };
    Fixture fixture;
    Case c = case_complete((Case){.experts = 1,
                                  .top_k = 1,
                                  .max_tokens = 1,
                                  .spread = SPREAD_FULL,
                                  .hidden = HIDDEN,
                                  .row_type = hand->type,
                                  .sum_type = hand->type,
                                  .mode = mode});
    fixture_open(&fixture, &c);
    fixture.arg[NUM_TOKENS] = fixture.arg[TOPK_WEIGHTS] = fixture.arg[SCALES] = NULL;
    fixture.arg[RECV_TOPK_WEIGHTS] = fixture.arg[RECV_SCALES] = fixture.arg[SLOT_WEIGHTS] = NULL;
    CHECK_OK(fixture_call(&fixture, OP_PREPARE));
    if (mode == EP_MODE_LATENCY) CHECK_OK(fixture_call(&fixture, OP_DISPATCH));
    for (int i = 0; i < HIDDEN; i++) {
        number_set(fixture.tensor[EXPERT_OUT].data, hand->type, i, hand->row);
        number_set(fixture.tensor[BIAS0].data, hand->type, i, hand->bias0);
        number_set(fixture.tensor[BIAS1].data, hand->type, i, hand->bias1);
    }
    fixture.arg[BIAS0] = &fixture.tensor[BIAS0], fixture.arg[BIAS1] = &fixture.tensor[BIAS1];
    CHECK_OK(fixture_call(&fixture, OP_COMBINE));
    for (int i = 0; i < HIDDEN; i++) {
        float got = number_get(fixture.tensor[OUT].data, hand->type, i);
        CHECK(got == hand->out, "%g, not %g", (double)got, (double)hand->out);
    }
    fixture_close(&fixture);
}

SoloTest(combine_biases, by_hand) {
    for (int i = 0; i < LENGTH(by_hand); i++) {
        check_by_hand(&by_hand[i], EP_MODE_THROUGHPUT);
        if (TESTS_HAVE_LATENCY) check_by_hand(&by_hand[i], EP_MODE_LATENCY);
    }
}

/* ---- wrong arguments ----------------------------------------------------------------------- */

static const Wrong wrong_tensors[] = {
    {OP_COMBINE, BIAS0, SPOIL_DATA, 0, EP_ERR_NULL, {0}},
    {OP_COMBINE, BIAS0, SPOIL_SIZE, 8, EP_ERR_STRUCT_SIZE, {"got 8"}},
    {OP_COMBINE, BIAS0, SPOIL_NDIM, 3, EP_ERR_NDIM, {"2", "got 3"}},
    {OP_COMBINE, BIAS0, SPOIL_TYPE, EP_TYPE_FP32, EP_ERR_TYPE, {"bf16", "fp32"}},
    {OP_COMBINE, BIAS0, SPOIL_SHAPE0, 8, EP_ERR_SHAPE, {"9", "8"}},
    {OP_COMBINE, BIAS1, SPOIL_SHAPE1, 16, EP_ERR_SHAPE, {"24", "16"}},
    {OP_COMBINE, BIAS1, SPOIL_SHIFT, 8, EP_ERR_ADDRESS, {"16"}},
    {OP_COMBINE_WAIT, BIAS0, SPOIL_TYPE, EP_TYPE_FP16, EP_ERR_TYPE, {0}},
    {OP_COMBINE_WAIT, BIAS1, SPOIL_SHAPE0, 10, EP_ERR_SHAPE, {"9", "10"}},
    {OP_DISPATCH_BACKWARD, BIAS0, SPOIL_SHAPE0, 10, EP_ERR_SHAPE, {"9", "10"}},
    {OP_DISPATCH_BACKWARD, BIAS1, SPOIL_TYPE, EP_TYPE_UINT8, EP_ERR_TYPE, {0}},
};

SoloTest(combine_biases, wrong_tensors) {
    fixture_check_table(fixture_case(EP_LAYOUT_EXPERT_MAJOR), wrong_tensors, LENGTH(wrong_tensors));
}

SoloTest(combine_biases, wrong_size_of_extras) {
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    EpExtras extras = EP_EXTRAS_INIT;
    fixture_open_prepared(&fixture, &c);
    extras.struct_size = 8;
    CHECK_REFUSED(ep_combine_with(fixture.handle, NULL, fixture.arg[EXPERT_OUT], NULL, NULL, NULL,
                                  fixture.arg[OUT], &extras),
                  EP_ERR_STRUCT_SIZE, "extras", "got 8");
    fixture_check_untouched(&fixture);
    fixture_close(&fixture);
}
