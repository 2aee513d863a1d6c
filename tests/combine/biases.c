/* SPDX-License-Identifier: Apache-2.0 */
/* Biases of combine and dispatch_backward: added last, in FP32, before the one rounding. */
#include "tests/cases/fixture.h"
#include "tests/harness/ranked.h"
#include "tests/oracle/number.h"

/* One and two biases in each layout, in all of its modes. */
#define BIASES                                                                \
    EACH_LAYOUT "biases=1,2 row_type=bf16|fp16|fp32 sum_type=bf16|fp16|fp32 " \
                "weighted=1|1|0|0 counted=0|1|0 "
#define BiasesTest(name, text) GridTest(combine_biases, name, BIASES, text)
BiasesTest(one_rank, "masked_percent=30");
BiasesTest(two_ranks, "ranks=2 top_k=4 hidden=1032 masked_percent=30");
CasesTest(combine_biases, many_ranks,
          run_grid(BIASES "ranks=%d experts=24 top_k=6 max_tokens=30", GPU_RANKS(8)));
/* A token without a slot has its biases alone. */
BiasesTest(no_slots, "ranks=2 routing=nobody");
BiasesTest(most_experts_of_a_token, "ranks=2 experts=64 top_k=32 hidden=64");
BiasesTest(quantised_sums, "ranks=2 top_k=4 hidden=1200 max_tokens=20 sum_quant=fp8");
BiasesTest(nodes, "ranks=4 nodes=0110 experts=12 top_k=5 max_tokens=25");
CasesTest(combine_biases, nodes_and_quantised_sums, setenv("LIBEP_NODE_CHUNK", "3000", 1);
          run_grid(BIASES "ranks=4 nodes=0011 experts=12 top_k=5 max_tokens=25 sum_quant=fp8"));

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
    char changes[160];
    snprintf(changes, sizeof(changes),
             "experts=1 top_k=1 max_tokens=1 hidden=%d row_type=%d sum_type=%d weighted=0 "
             "scale_bytes=0 alignment=1 mode=%d",
             HIDDEN, hand->type, hand->type, mode);
    Fixture *f = fixture_new(changes);
    f->arg[IN_COUNT] = f->arg[IN_WEIGHTS] = f->arg[IN_SCALES] = NULL;
    f->arg[OUT_WEIGHTS] = f->arg[OUT_SCALES] = f->arg[IN_SLOT_WEIGHTS] = NULL;
    CHECK_OK(fixture_call(f, STEP_PREPARE));
    if (mode == EP_MODE_LATENCY) CHECK_OK(fixture_call(f, STEP_DISPATCH));
    for (int i = 0; i < HIDDEN; i++) {
        number_set(f->tensor[IN_EXPERT_OUT].data, hand->type, i, hand->row);
        number_set(f->tensor[IN_BIAS0].data, hand->type, i, hand->bias0);
        number_set(f->tensor[IN_BIAS1].data, hand->type, i, hand->bias1);
    }
    f->arg[IN_BIAS0] = &f->tensor[IN_BIAS0], f->arg[IN_BIAS1] = &f->tensor[IN_BIAS1];
    CHECK_OK(fixture_call(f, STEP_COMBINE));
    for (int i = 0; i < HIDDEN; i++) {
        float got = number_get(f->tensor[OUT_SUMS].data, hand->type, i);
        CHECK(got == hand->out, "%g, not %g", (double)got, (double)hand->out);
    }
    fixture_free(f);
}

SoloTest(combine_biases, by_hand) {
    for (int i = 0; i < LENGTH(by_hand); i++) {
        check_by_hand(&by_hand[i], EP_MODE_THROUGHPUT);
        if (TESTS_HAVE_LATENCY) check_by_hand(&by_hand[i], EP_MODE_LATENCY);
    }
}

RefusalsTest(combine_biases, wrong_tensors, "biases", "");

FixtureTest(combine_biases, wrong_size_of_extras, "") {
    EpExtras extras = {.struct_size = 8};
    CHECK_OK(fixture_call(f, STEP_PREPARE));
    fixture_reset(f);
    CHECK_REFUSED(ep_combine_with(f->handle, NULL, f->arg[IN_EXPERT_OUT], NULL, NULL, NULL,
                                  f->arg[OUT_SUMS], &extras),
                  EP_ERR_STRUCT_SIZE, "extras", "got 8");
    fixture_check_untouched(f);
}
