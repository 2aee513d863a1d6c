/* SPDX-License-Identifier: Apache-2.0 */
/* Dispatch that quantises, and scales by column: every layout against the oracle, and refused
 * arguments. */
#include <math.h>

#include "tests/cases/fixture.h"
#include "tests/oracle/quant.h"

#define TYPES                                                                            \
    "experts=7 top_k=3 alignment=4 masked_percent=10 spare_rows=3 hidden=16,48,128,400 " \
    "row_type=bf16|fp16|fp32|fp32|bf16|fp16 weighted=0|1|1|0 zero_tail=keep|keep|zero "
#define BY_ROW_AND_COLUMN TYPES "scale_order=by-column|by-row "
#define QuantTest(name, quant) \
    GridTest(dispatch_quant, name, BY_ROW_AND_COLUMN, "ranks=1,2,4 " EACH_LAYOUT quant)
QuantTest(fp8, "quant=fp8");
QuantTest(fp8_ue8m0, "quant=fp8-ue8m0");
QuantTest(mxfp8, "quant=mxfp8");
QuantTest(nvfp4, "quant=nvfp4");

/* Tiles of scales: slabs of several, with rows and columns that do not fill them. */
#define TILES TYPES "scale_order=swizzled alignment=128 max_tokens=140 routing=skewed "
GridTest(dispatch_quant, swizzled, TILES, "ranks=1,2 quant=nvfp4,mxfp8 " EACH_LAYOUT,
         "ranks=2 quant=nvfp4 layout=batched alignment=1 max_tokens=9 routing=uniform");

/* Scales that the caller passes can be received by column, too. */
GridTest(dispatch_quant, carried_scales,
         EACH_LAYOUT "ranks=3 scale_bytes=12 spare_rows=2 zero_tail=zero weighted=1",
         "scale_order=by-column alignment=4", "scale_order=swizzled alignment=128 max_tokens=70");

/* Rows of other nodes are packed instead of staged, and arrive in many rounds. */
Test(dispatch_quant, two_nodes_and_a_tiny_stage, .timeout = 120) {
    setenv("LIBEP_STAGE_BYTES", "3000", 1);
    setenv("LIBEP_NODE_CHUNK", "3000", 1);
    run_grid(BY_ROW_AND_COLUMN "ranks=4 nodes=0110 layout=batched "
                               "quant=fp8,fp8-ue8m0,mxfp8,nvfp4");
    run_grid(BY_ROW_AND_COLUMN "ranks=4 nodes=0110 layout=rank-major quant=fp8-pow2");
    run_grid(TYPES "ranks=4 nodes=0110 layout=flat quant=nvfp4 scale_order=swizzled");
}

/* A group needs to allow only twice the bytes of the received row. These are the longest rows, and
 * some that end within a quantisation block. */
GridTest(dispatch_quant, longest_rows,
         "ranks=2 max_tokens=2 weighted=1 spread=full quant=fp8,fp8-ue8m0,mxfp8,fp8-pow2,nvfp4",
         "hidden=32768|8208 row_type=bf16", "hidden=24592 row_type=fp16",
         "hidden=16368 row_type=fp32");

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
