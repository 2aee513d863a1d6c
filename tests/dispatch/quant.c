/* SPDX-License-Identifier: Apache-2.0 */
/* Dispatch that quantises, and scales by column: every layout against the oracle, and refused
 * arguments. */
#include <math.h>

#include "tests/cases/fixture.h"
#include "tests/oracle/quant.h"

static void run_types(EpQuant quant, EpLayout layout, int ranks, const char *more) {
    static const int hiddens[] = {16, 48, 128, 400};
    Case cases[LENGTH(hiddens)];
    for (int i = 0; i < LENGTH(hiddens); i++) {
        cases[i] = case_of("ranks=%d experts=7 top_k=3 hidden=%d alignment=4 row_type=%d quant=%d "
                           "scale_order=%d masked_percent=10 weighted=%d spare_rows=3 zero_tail=%d "
                           "seed=%d %s",
                           ranks, hiddens[i], 1 + (i + ranks) % 3, quant, i % 2 ? 1 : 2, i % 2,
                           i > 1, ranks * 100 + (int)quant * 10 + i, more);
        cases[i].layout = layout;
    }
    run_cases_on_threads(cases, LENGTH(hiddens));
}

#define GRID(name, quant)                                                                        \
    Test(dispatch_quant, name, .timeout = 120) {                                                 \
        for (EpLayout layout = EP_LAYOUT_EXPERT_MAJOR; layout <= EP_LAYOUT_RANK_MAJOR; layout++) \
            for (int ranks = 1; ranks <= 4; ranks *= 2)                                          \
                run_types(quant, layout, ranks, "");                                             \
    }

GRID(fp8, EP_QUANT_FP8)
GRID(fp8_ue8m0, EP_QUANT_FP8_UE8M0)
GRID(mxfp8, EP_QUANT_MXFP8)
GRID(nvfp4, EP_QUANT_NVFP4)

/* Tiles of scales: slabs of several, with rows and columns that do not fill them. */
Test(dispatch_quant, swizzled, .timeout = 120) {
    const char *tiles = "scale_order=swizzled alignment=128 max_tokens=140 routing=skewed";
    for (EpLayout layout = EP_LAYOUT_EXPERT_MAJOR; layout <= EP_LAYOUT_RANK_MAJOR; layout++)
        for (int ranks = 1; ranks <= 2; ranks++) {
            run_types(EP_QUANT_NVFP4, layout, ranks, tiles);
            run_types(EP_QUANT_MXFP8, layout, ranks, tiles);
        }
    run_types(EP_QUANT_NVFP4, EP_LAYOUT_BATCHED, 2, "scale_order=swizzled alignment=1");
}

/* Scales that the caller passes can be received by column, too. */
LayoutsTest(dispatch_quant, carried_scales_by_column,
            "ranks=3 scale_bytes=12 spare_rows=2 zero_tail=zero weighted=1 scale_order=by-column "
            "alignment=4");
LayoutsTest(dispatch_quant, carried_scales_swizzled,
            "ranks=3 scale_bytes=12 spare_rows=2 zero_tail=zero weighted=1 scale_order=swizzled "
            "alignment=128 max_tokens=70");

/* Rows of other nodes are packed instead of staged, and arrive in many rounds. */
Test(dispatch_quant, two_nodes_and_a_tiny_stage, .timeout = 120) {
    setenv("LIBEP_STAGE_BYTES", "3000", 1);
    setenv("LIBEP_NODE_CHUNK", "3000", 1);
    for (EpQuant quant = EP_QUANT_FP8; quant <= EP_QUANT_NVFP4; quant++)
        run_types(quant, EP_LAYOUT_BATCHED, 4, "nodes=0110");
    run_types(EP_QUANT_NVFP4, EP_LAYOUT_FLAT, 4, "nodes=0110 scale_order=swizzled");
}

/* A group needs to allow only twice the bytes of the received row. These are the longest rows, and
 * some that end within a quantisation block. */
Test(dispatch_quant, longest_rows, .timeout = 120) {
    static const char *const rows[] = {"hidden=32768 row_type=bf16", "hidden=8208 row_type=bf16",
                                       "hidden=24592 row_type=fp16", "hidden=16368 row_type=fp32"};
    for (int i = 0; i < LENGTH(rows) * 5; i++) {
        Case c = case_of("ranks=2 max_tokens=2 weighted=1 spread=full quant=%d seed=%d %s",
                         EP_QUANT_FP8 + i / 4, 8 + i, rows[i % 4]);
        run_case_on_threads(&c);
    }
}

/* Returns test value `i` for rounding to e4m3, of both signs: each code, the midpoint to the next
 * code and its neighbours, then infinity, NaN and tiny numbers. */
static float boundary(int i) {
    static const float strange[] = {INFINITY, NAN, 1e-40f, 1e-30f, 0x1p-10f, 0x1.000002p-10f};
    int code = i / 8, last = code > 0x7d;
    float here = (float)quant_decode((uint8_t)(last ? 0x7e : code)), value = here;
    float mid = last ? here : (here + (float)quant_decode((uint8_t)(code + 1))) / 2;
    if (code > 0x7e)
        value = strange[(i / 2 - 0x7f * 4) % LENGTH(strange)];
    else if (i / 2 % 4)
        value = i / 2 % 4 == 1 ? mid : nextafterf(mid, i / 2 % 4 == 2 ? 0 : last ? here : 600);
    return i % 2 ? copysignf(value, -1) : value;
}

/* Rows whose largest element is 448 have a scale of 1, so each element is sent as its own code. */
FixtureTest(dispatch_quant, every_rounding, "hidden=128 row_type=fp32 quant=fp8") {
    const RankWorld *me = f->world->rank;
    float *x = f->tensor[IN_TOKENS].data;
    for (int64_t i = 0; i < (int64_t)me->rows * 128; i++)
        x[i] = i % 128 ? boundary((int)(i / 128 * 127 + i % 128 - 1)) : 448;
    CHECK(me->rows * 127 >= 0x7f * 8 + 12, "only %d tokens", me->rows);
    CHECK_OK(fixture_call(f, STEP_PREPARE));
    CHECK_OK(fixture_call(f, STEP_DISPATCH));
    const uint8_t *got = f->tensor[OUT_TOKENS].data;
    for (int64_t i = 0; i < me->recv_rows * 128; i++) {
        if (me->row[i / 128].kind != ROW_FILLED) continue;
        float value = x[me->row[i / 128].token * 128 + i % 128];
        CHECK(got[i] == quant_encode((double)value), "%a: 0x%02x instead of 0x%02x", (double)value,
              got[i], quant_encode((double)value));
    }
}

/* A dispatch that quantises takes no memory of its own. */
FixtureTest(dispatch_quant, costs_no_buffers, "hidden=160 quant=fp8") {
    EpHandleConfig config = case_handle_config(&f->world->c);
    EpHandleCost cost = EP_HANDLE_COST_INIT;
    CHECK_OK(ep_handle_cost(f->group, &config, &cost));
    CHECK(cost.buffer_bytes == 0, "%lld bytes", (long long)cost.buffer_bytes);
}

RefusalsTest(dispatch_quant, wrong_tensors_of_fp8, "quant_fp8", "hidden=160 quant=fp8");
RefusalsTest(dispatch_quant, wrong_tensors_of_mxfp8_by_column, "quant_mxfp8_by_column",
             "hidden=160 layout=flat quant=mxfp8 scale_order=by-column");
RefusalsTest(dispatch_quant, wrong_tensors_of_batched_by_column, "quant_batched_by_column",
             "hidden=160 layout=batched quant=fp8-ue8m0 scale_order=by-column");
RefusalsTest(dispatch_quant, wrong_tensors_of_rank_major_by_column, "quant_rank_major_by_column",
             "hidden=160 layout=rank-major quant=fp8-ue8m0 scale_order=by-column");
RefusalsTest(dispatch_quant, wrong_tensors_of_nvfp4, "quant_nvfp4", "hidden=160 quant=nvfp4");
RefusalsTest(dispatch_quant, wrong_swizzled_tensors, "quant_swizzled",
             "hidden=160 quant=nvfp4 scale_order=swizzled alignment=128");
RefusalsTest(dispatch_quant, wrong_swizzled_slabs, "quant_swizzled_slabs",
             "hidden=160 layout=batched quant=nvfp4 scale_order=swizzled");
RefusalsTest(dispatch_quant, wrong_carried_scales, "scales_swizzled",
             "scale_order=swizzled alignment=128");

/* The host backend reads the global scale before the call takes part, a GPU when it runs. A rank
 * that gives a wrong one corrects it on the host, for which the others wait. */
static void give_wrong_scale(Fixture *f, int is_wrong, float value) {
    float *scale = f->tensor[IN_GLOBAL_SCALE].data;
    for (int output = OUT_COUNTS; output <= OUT_SOURCES; output++)
        f->arg[output] = NULL;
    CHECK_OK(fixture_call(f, STEP_PREPARE));
    if (is_wrong) *scale = value;
    EpStatus status = fixture_call(f, STEP_DISPATCH);
    if (TESTS_ON_GPU && status == EP_OK) status = ep_group_status(f->group, NULL);
    if (!is_wrong) {
        CHECK(status == (TESTS_ON_GPU ? EP_ERR_PEER : EP_OK), "%s", ep_last_error());
        return;
    }
    CHECK_REFUSED(status, EP_ERR_RANGE, "dispatch", "extras.global_scale", "from 2^-64 to 2^64");
    fixture_check_untouched(f);
    *scale = 1;
    if (!TESTS_ON_GPU) CHECK_OK(fixture_call(f, STEP_DISPATCH));
}

SoloTest(dispatch_quant, global_scales_that_are_none) {
    static const float values[] = {0, -1, NAN, INFINITY, 1e-30f, 1e30f};
    be_quiet();
    for (int i = 0; i < 2 * LENGTH(values); i++) {
        if (i % 2 && !TESTS_HAVE_LATENCY) continue;
        Fixture *f =
            fixture_new(i % 2 ? "hidden=64 quant=nvfp4 mode=latency" : "hidden=64 quant=nvfp4");
        give_wrong_scale(f, 1, values[i / 2]);
        fixture_free(f);
    }
}

ThreadTest(dispatch_quant, global_scale_of_one_rank, 2) {
    Case c = case_complete(case_of("ranks=2 hidden=64 quant=nvfp4"));
    Fixture f = {0};
    be_quiet();
    fixture_open_on(&f, bootstrap, &c);
    give_wrong_scale(&f, bootstrap->rank, NAN);
    fixture_close_on(&f);
}
