/* SPDX-License-Identifier: Apache-2.0 */
/* Optional outputs of ep_combine_backward: gradients of rows alone, or of weights too. Gradients
 * that are quantised. */
#include <math.h>

#include "tests/cases/fixture.h"
#include "tests/harness/ranked.h"

enum { RANKS = 3 };

/* Weighted, but without gradients of weights: no dot products, so no expert_out either. Then one
 * rank requests them, the others do not. */
ThreadTest(combine_backward, without_weights, RANKS) {
    Case c = case_of("ranks=%d top_k=3 alignment=4 weighted=1 spare_rows=2", RANKS);
    Step step = open_step(bootstrap, &c);
    step_prepare(&step);
    step_combine_backward_rows(&step);
    if (bootstrap->rank == 1)
        step_combine_backward(&step);
    else
        step_combine_backward_rows(&step);
    close_step(&step);
}

/* Rows of many elements show rounding errors of the sum. */
Test(combine_backward, long_dot_products, .timeout = 120) {
    for (EpType type = EP_TYPE_BF16; type <= EP_TYPE_FP32; type++) {
        Case c = case_of("ranks=2 hidden=4096 max_tokens=6 weighted=1");
        c.row_type = c.sum_type = type;
        run_case_on_threads(&c);
    }
}

/* The longest rows, with products so small that a sum of ones rounds them away one by one. */
FixtureTest(combine_backward, worst_dot_product, "hidden=16384 row_type=fp32 sum_type=fp32") {
    enum { HIDDEN = EP_MAX_ROW_BYTES / 4, ONES = 64 };
    CHECK_OK(fixture_call(f, STEP_PREPARE));
    const RankWorld *me = f->world->rank;
    float *x = f->tensor[IN_EXPERT_OUT].data, *grad = f->tensor[IN_GRAD_OUT].data;
    for (int64_t i = 0; i < me->recv_rows * HIDDEN; i++)
        x[i] = i % HIDDEN < ONES ? 1 : 0x1p-24f;
    for (int64_t i = 0; i < (int64_t)me->rows * HIDDEN; i++)
        grad[i] = 1;
    CHECK_OK(fixture_call(f, STEP_COMBINE_BACKWARD));
    const float *got = f->tensor[OUT_GRAD_SLOTS].data;
    double exact = ONES + (HIDDEN - ONES) * 0x1p-24;
    for (int64_t row = 0; row < me->recv_rows; row++)
        if (me->row[row].kind == ROW_FILLED)
            CHECK(fabs(got[row] - exact) <= 1e-5 * exact, "row %lld: %.9g instead of %.9g",
                  (long long)row, (double)got[row], exact);
}

/* The product is rounded to float32 before it is rounded to bf16: here that makes a difference of
 * one unit in the last place. */
SoloTest(combine_backward, products_are_rounded_twice) {
    static const struct {
        uint32_t weight;
        uint16_t gradient, product, once;
    } cases[] = {{0x3eeaf796, 0x3f55, 0x3ec4, 0x3ec3},
                 {0x3ec58160, 0x3f3a, 0x3e90, 0x3e8f},
                 {0x3e8388a3, 0x3f23, 0x3e28, 0x3e27},
                 {0x3eb96cb6, 0x3f12, 0x3e54, 0x3e53}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        Fixture *f = fixture_new("");
        CHECK_OK(fixture_call(f, STEP_PREPARE));
        const RankWorld *me = f->world->rank;
        int hidden = f->world->c.hidden;
        uint32_t *weights = f->tensor[IN_SLOT_WEIGHTS].data;
        uint16_t *gradients = f->tensor[IN_GRAD_OUT].data;
        for (int64_t row = 0; row < me->recv_rows; row++)
            weights[row] = cases[i].weight;
        for (int64_t at = 0; at < me->rows * hidden; at++)
            gradients[at] = cases[i].gradient;
        CHECK_OK(fixture_call(f, STEP_COMBINE_BACKWARD));
        const uint16_t *got = f->tensor[OUT_GRAD_ROWS].data;
        for (int64_t at = 0; at < me->recv_rows * hidden; at++)
            if (me->row[at / hidden].kind == ROW_FILLED)
                CHECK(got[at] == cases[i].product, "case %zu: 0x%04x, rounded once it is 0x%04x", i,
                      got[at], cases[i].once);
        fixture_free(f);
    }
}

/* With little shared memory, as in some emulated tests, rows are cut into many fragments. With few
 * blocks each block has several rows under way. */
Test(combine_backward, rows_of_24_kib, .timeout = 120) {
    for (int ranks = 1; ranks <= RANKS; ranks += RANKS - 1) {
        Case c = case_of("ranks=%d top_k=8 max_tokens=%d weighted=1 row_type=fp32 sum_type=fp32 "
                         "hidden=6144",
                         ranks, 32 / ranks);
        run_case_on_threads(&c);
    }
}

SoloCall(combine_backward, tail_of_a_shorter_tensor,
         fixture_check_shorter_tail(STEP_COMBINE_BACKWARD, OUT_GRAD_SLOTS));

/* ---- quantised gradients ------------------------------------------------------------------- */

/* Every layout, type and format; rows that end within a block of elements, and zeroed tails. */
static void run_quantised(int ranks) {
    static const int hiddens[] = {16, 48, 400};
    for (EpQuant quant = EP_QUANT_FP8; quant <= EP_QUANT_FP8_POW2; quant++)
        for (int i = 0; i < 3 * LENGTH(hiddens); i++)
            run_grid(EACH_LAYOUT "ranks=%d experts=7 top_k=3 hidden=%d alignment=4 sum_type=%d "
                                 "grad_quant=%d scale_order=%d masked_percent=10 spare_rows=3 "
                                 "zero_tail=%d counters=%d seed=%d",
                     ranks, hiddens[i / 3], 1 + i % 3, quant, 1 + i % 2, i % 2, i % 4,
                     (int)quant * 10 + i);
}

CasesTest(combine_backward, quantised, run_quantised(1));
CasesTest(combine_backward, quantised_on_two_ranks, run_quantised(2));

/* Dispatch quantises in another format; tiles of scales that rows and columns do not fill. */
Test(combine_backward, quantised_beside_dispatch, .timeout = 120) {
    run_grid(EACH_LAYOUT "ranks=3 hidden=208 quant=nvfp4 grad_quant=mxfp8 alignment=128 "
                         "scale_order=swizzled max_tokens=140 routing=skewed");
    run_grid(EACH_LAYOUT "ranks=2 hidden=272 strange=1 row_type=fp32 grad_quant=fp8-pow2");
    run_grid(EACH_LAYOUT "ranks=2 hidden=24592 sum_type=fp16 max_tokens=2 grad_quant=fp8");
}

Test(combine_backward, quantised_on_two_nodes, .timeout = 120) {
    setenv("LIBEP_STAGE_BYTES", "3000", 1);
    setenv("LIBEP_NODE_CHUNK", "3000", 1);
    run_grid(EACH_LAYOUT
             "ranks=4 nodes=0110 experts=7 top_k=3 hidden=400 grad_quant=fp8 counters=1");
    run_grid(EACH_LAYOUT "ranks=4 nodes=0110 hidden=48 grad_quant=mxfp8 scale_order=by-column");
}

RefusalsTest(combine_backward, wrong_quantised_gradients, "quantised_gradients",
             "hidden=160 grad_quant=fp8");

/* FP8 and FP8_POW2 have rows and scales of the same sizes and types. */
ThreadTest(combine_backward, another_grad_quant, 2) {
    Case c = case_complete(
        case_of("ranks=2 hidden=64 grad_quant=%s", bootstrap->rank ? "fp8" : "fp8-pow2"));
    Fixture f = {0};
    set_on_ranks(bootstrap, "LIBEP_LOG_FILE", "/dev/null");
    fixture_open_on(&f, bootstrap, &c);
    CHECK_OK(fixture_call(&f, STEP_PREPARE));
    EpStatus status = fixture_call(&f, STEP_COMBINE_BACKWARD);
    if (TESTS_ON_GPU && status == EP_OK) status = ep_group_status(f.group, NULL);
    CHECK_REFUSED(status, EP_ERR_ORDER, "combine backward", TESTS_ON_GPU ? "" : "grad_quant");
    fixture_close_on(&f);
}
