/* SPDX-License-Identifier: Apache-2.0 */
/* Biases of combine and dispatch_backward: added last, in FP32, before the one rounding. */
#include "tests/cases/fixture.h"
#include "tests/harness/ranked.h"
#include "tests/oracle/number.h"

#define LENGTH(array) (int)(sizeof(array) / sizeof((array)[0]))

/* Run a shape with one and two biases in each layout, in all of its modes. */
static void run_all_layouts(Case shape) {
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
    run_all_layouts((Case){.masked_percent = 30});
}
Test(combine_biases, two_ranks, .timeout = 120) {
    run_all_layouts((Case){.ranks = 2, .top_k = 4, .hidden = 1032, .masked_percent = 30});
}
Test(combine_biases, many_ranks, .timeout = 120) {
    run_all_layouts((Case){.ranks = GPU_RANKS(8), .experts = 24, .top_k = 6, .max_tokens = 30});
}
/* A token without a slot has its biases alone. */
Test(combine_biases, no_slots, .timeout = 120) {
    run_all_layouts((Case){.ranks = 2, .routing = ROUTING_NOBODY});
}
Test(combine_biases, most_experts_of_a_token, .timeout = 120) {
    run_all_layouts((Case){.ranks = 2, .experts = 64, .top_k = 32, .hidden = 64});
}
Test(combine_biases, quantised_sums, .timeout = 120) {
    run_all_layouts((Case){
        .ranks = 2, .top_k = 4, .hidden = 1200, .max_tokens = 20, .sum_quant = EP_QUANT_FP8});
}
Test(combine_biases, nodes, .timeout = 120) {
    run_all_layouts(
        (Case){.ranks = 4, .nodes = "0110", .experts = 12, .top_k = 5, .max_tokens = 25});
}
Test(combine_biases, nodes_and_quantised_sums, .timeout = 120) {
    setenv("LIBEP_NODE_CHUNK", "3000", 1);
    run_all_layouts((Case){.ranks = 4,
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

static void check_wrong(Fixture *fixture, Op op, Arg arg, EpTensor wrong, EpStatus status,
                        const char *sentence) {
    fixture_reset(fixture);
    fixture->arg[arg] = &wrong;
    CHECK_REFUSED(fixture_call(fixture, op), status, arg == BIAS0 ? "bias0" : "bias1", sentence);
    fixture_check_untouched(fixture);
}

static void check_all_wrong(Fixture *fixture, Op op) {
    const EpTensor right = fixture->tensor[BIAS0];
    const Arg args[] = {BIAS0, BIAS1};
    for (int i = 0; i < 2; i++) {
        EpTensor size = right, type = right, rows = right, width = right;
        size.struct_size = 8, type.type = EP_TYPE_FP32, rows.shape[0]--, width.shape[1] = 16;
        check_wrong(fixture, op, args[i], size, EP_ERR_STRUCT_SIZE, "got 8");
        check_wrong(fixture, op, args[i], type, EP_ERR_TYPE, "expected bf16, got fp32");
        check_wrong(fixture, op, args[i], rows, EP_ERR_SHAPE, "T = 9 in dimension 0, got 8");
        check_wrong(fixture, op, args[i], width, EP_ERR_SHAPE, "H = 24 in dimension 1, got 16");
        EpTensor flat = right, none = right;
        flat.ndim = 1, none.data = NULL;
        check_wrong(fixture, op, args[i], flat, EP_ERR_NDIM, "expected 2 dimensions, got 1");
        check_wrong(fixture, op, args[i], none, EP_ERR_NULL, "expected data, got NULL");
    }
}

SoloTest(combine_biases, wrong_tensors) {
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    fixture_open(&fixture, &c);
    fixture.arg[NUM_TOKENS] = NULL;
    CHECK_OK(fixture_call(&fixture, OP_PREPARE));
    check_all_wrong(&fixture, OP_COMBINE);
    check_all_wrong(&fixture, OP_DISPATCH_BACKWARD);
    fixture_close(&fixture);
}

SoloTest(combine_biases, wrong_tensors_of_a_receive_phase) {
    if (!TESTS_HAVE_LATENCY) return;
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    c.mode = EP_MODE_LATENCY, c = case_complete(c);
    fixture_open(&fixture, &c);
    fixture.arg[NUM_TOKENS] = NULL;
    CHECK_OK(fixture_call(&fixture, OP_PREPARE));
    CHECK_OK(fixture_call(&fixture, OP_DISPATCH));
    fixture_begin(&fixture, OP_COMBINE_SEND);
    check_all_wrong(&fixture, OP_COMBINE_WAIT);
    fixture_reset(&fixture);
    CHECK_OK(fixture_call(&fixture, OP_COMBINE_WAIT));
    fixture_close(&fixture);
}

SoloTest(combine_biases, wrong_size_of_extras) {
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    EpExtras extras = EP_EXTRAS_INIT;
    fixture_open(&fixture, &c);
    CHECK_OK(fixture_call(&fixture, OP_PREPARE));
    fixture_reset(&fixture);
    extras.struct_size = 8;
    CHECK_REFUSED(ep_combine_with(fixture.handle, NULL, fixture.arg[EXPERT_OUT], NULL, NULL, NULL,
                                  fixture.arg[OUT], &extras),
                  EP_ERR_STRUCT_SIZE, "extras", "got 8");
    fixture_check_untouched(&fixture);
    fixture_close(&fixture);
}
