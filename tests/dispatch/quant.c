/* SPDX-License-Identifier: Apache-2.0 */
/* Dispatch that quantises, and scales by column: every layout against the oracle, and refused
 * arguments. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/cases/fixture.h"
#include "tests/oracle/quant.h"

#define LENGTH(array) (int)(sizeof(array) / sizeof((array)[0]))

#define NEEDS_QUANT()                                                       \
    do {                                                                    \
        if (!TESTS_HAVE_QUANT) HOST_ONLY("this backend does not quantise"); \
    } while (0)

static void run_types(EpQuant quant, EpLayout layout, int ranks, const char *nodes) {
    static const int hiddens[] = {16, 48, 128, 400};
    for (int i = 0; i < LENGTH(hiddens); i++) {
        Case c = {.ranks = ranks,
                  .experts = 7,
                  .top_k = 3,
                  .hidden = hiddens[i],
                  .layout = layout,
                  .alignment = 4,
                  .row_type = (EpType)(1 + (i + ranks) % 3),
                  .quant = quant,
                  .scale_order = i % 2 ? EP_SCALES_BY_ROW : EP_SCALES_BY_COLUMN,
                  .masked_percent = 10,
                  .weighted = i % 2,
                  .spare_rows = 3,
                  .zero_tail = i > 1,
                  .seed = (uint64_t)(ranks * 100 + (int)quant * 10 + i)};
        snprintf(c.nodes, sizeof(c.nodes), "%s", nodes);
        run_case_on_threads(&c);
    }
}

#define GRID(name, quant)                                                                          \
    Test(dispatch_quant, name, .timeout = 120) {                                                   \
        NEEDS_QUANT();                                                                             \
        for (EpLayout layout = EP_LAYOUT_EXPERT_MAJOR; layout <= EP_LAYOUT_RANK_MAJOR; layout++) { \
            run_types(quant, layout, 1, "");                                                       \
            run_types(quant, layout, 2, "");                                                       \
            run_types(quant, layout, 4, "");                                                       \
        }                                                                                          \
    }

GRID(fp8, EP_QUANT_FP8)
GRID(fp8_ue8m0, EP_QUANT_FP8_UE8M0)
GRID(mxfp8, EP_QUANT_MXFP8)

/* Scales that the caller passes can be received by column, too. */
Test(dispatch_quant, carried_scales_by_column, .timeout = 120) {
    NEEDS_QUANT();
    for (EpLayout layout = EP_LAYOUT_EXPERT_MAJOR; layout <= EP_LAYOUT_RANK_MAJOR; layout++) {
        Case c = {.ranks = 3, .scale_bytes = 12, .spare_rows = 2, .zero_tail = 1, .weighted = 1};
        c.layout = layout, c.scale_order = EP_SCALES_BY_COLUMN, c.alignment = 4;
        run_case_on_threads(&c);
    }
}

/* Rows of other nodes are packed instead of staged, and arrive in many rounds. */
Test(dispatch_quant, two_nodes_and_a_tiny_stage, .timeout = 120) {
    setenv("LIBEP_STAGE_BYTES", "3000", 1);
    setenv("LIBEP_NODE_CHUNK", "3000", 1);
    for (EpQuant quant = EP_QUANT_FP8; quant <= EP_QUANT_MXFP8; quant++)
        run_types(quant, EP_LAYOUT_BATCHED, 4, "0110");
}

/* A group needs to allow only twice the bytes of the received row. These are the longest rows, and
 * some that end within a quantisation block. */
Test(dispatch_quant, longest_rows, .timeout = 120) {
    NEEDS_QUANT();
    static const struct {
        int hidden;
        EpType type;
    } rows[] = {{EP_MAX_ROW_BYTES / 2, EP_TYPE_BF16},
                {8208, EP_TYPE_BF16},
                {24592, EP_TYPE_FP16},
                {EP_MAX_ROW_BYTES / 4 - 16, EP_TYPE_FP32}};
    for (EpQuant quant = EP_QUANT_FP8; quant <= EP_QUANT_MXFP8; quant++)
        for (int i = 0; i < LENGTH(rows); i++) {
            Case c = {.ranks = 2, .max_tokens = 2, .weighted = 1, .quant = quant};
            c.hidden = rows[i].hidden, c.row_type = rows[i].type, c.sum_type = EP_TYPE_BF16;
            c.seed = (uint64_t)(4 * (int)quant + i), c.spread = SPREAD_FULL;
            run_case_on_threads(&c);
        }
}

static Case quant_case(EpLayout layout, EpQuant quant, EpScaleOrder order) {
    Case c = fixture_case(layout);
    c.hidden = 160, c.quant = quant, c.scale_order = order;
    return case_complete(c);
}

/* ---- every rounding ---- */

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
SoloTest(dispatch_quant, every_rounding) {
    NEEDS_QUANT();
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    c.hidden = 128, c.row_type = EP_TYPE_FP32, c.quant = EP_QUANT_FP8;
    Fixture fixture;
    fixture_open(&fixture, &c);
    const RankWorld *me = fixture.world->rank;
    float *x = fixture.tensor[TOKENS].data;
    for (int64_t i = 0; i < (int64_t)me->rows * 128; i++)
        x[i] = i % 128 ? boundary((int)(i / 128 * 127 + i % 128 - 1)) : 448;
    CHECK(me->rows * 127 >= 0x7f * 8 + 12, "only %d tokens", me->rows);
    CHECK_OK(fixture_call(&fixture, OP_PREPARE));
    CHECK_OK(fixture_call(&fixture, OP_DISPATCH));
    const uint8_t *got = fixture.tensor[RECV_TOKENS].data;
    for (int64_t i = 0; i < me->recv_rows * 128; i++) {
        if (me->row[i / 128].kind != ROW_FILLED) continue;
        float value = x[me->row[i / 128].token * 128 + i % 128];
        CHECK(got[i] == quant_encode((double)value), "%a: 0x%02x instead of 0x%02x", (double)value,
              got[i], quant_encode((double)value));
    }
    fixture_close(&fixture);
}

/* ---- memory ---- */

SoloTest(dispatch_quant, costs_what_it_says) {
    NEEDS_QUANT();
    Fixture fixture;
    Case c = quant_case(EP_LAYOUT_EXPERT_MAJOR, EP_QUANT_FP8, EP_SCALES_BY_ROW);
    fixture_open(&fixture, &c);
    EpHandleConfig config = EP_HANDLE_CONFIG_INIT;
    EpHandleCost plain = EP_HANDLE_COST_INIT, cost = plain;
    EpGroupInfo before = EP_GROUP_INFO_INIT, during = before, after = before;
    EpHandle *handle = NULL;
    CHECK_OK(ep_handle_cost(fixture.group, &config, &plain));
    config.quant = EP_QUANT_FP8;
    CHECK_OK(ep_handle_cost(fixture.group, &config, &cost));
    CHECK(plain.buffer_bytes == 0, "%lld bytes without", (long long)plain.buffer_bytes);
    CHECK(cost.buffer_bytes == 0, "%lld bytes", (long long)cost.buffer_bytes);
    CHECK_OK(ep_group_query(fixture.group, &before));
    REQUIRE_OK(ep_handle_create(fixture.group, &config, &handle));
    CHECK_OK(ep_group_query(fixture.group, &during));
    ep_handle_destroy(handle);
    REQUIRE_OK(ep_handle_create(fixture.group, &config, &handle));
    CHECK_OK(ep_group_query(fixture.group, &after));
    CHECK(during.library_bytes - before.library_bytes == cost.plan_bytes, "%lld bytes more",
          (long long)(during.library_bytes - before.library_bytes));
    CHECK(after.library_bytes == during.library_bytes, "%lld bytes more",
          (long long)(after.library_bytes - during.library_bytes));
    fixture_close(&fixture);
}

/* ---- refusals ---- */

static const Wrong wrong_fp8[] = {
    {OP_DISPATCH, TOKENS, SPOIL_TYPE, EP_TYPE_INT32, EP_ERR_ROW_BYTES, {"got 640"}},
    {OP_DISPATCH, TOKENS, SPOIL_TYPE, EP_TYPE_FP8_E4M3, EP_ERR_TYPE, {"bf16", "fp8_e4m3"}},
    {OP_DISPATCH, TOKENS, SPOIL_SHAPE1, 152, EP_ERR_ROW_BYTES, {"16 elements", "got 152"}},
    {OP_DISPATCH, RECV_TOKENS, SPOIL_TYPE, EP_TYPE_BF16, EP_ERR_TYPE, {"fp8_e4m3", "got bf16"}},
    {OP_DISPATCH, RECV_TOKENS, SPOIL_SHAPE1, 144, EP_ERR_SHAPE, {"160", "144"}},
    {OP_DISPATCH, RECV_SCALES, SPOIL_ABSENT, 0, EP_ERR_NULL, {"quant"}},
    {OP_DISPATCH, RECV_SCALES, SPOIL_DATA, 0, EP_ERR_NULL, {0}},
    {OP_DISPATCH, RECV_SCALES, SPOIL_TYPE, EP_TYPE_UINT8, EP_ERR_TYPE, {"fp32", "uint8"}},
    {OP_DISPATCH, RECV_SCALES, SPOIL_SHAPE1, 1, EP_ERR_SHAPE, {"S = 2", "got 1"}},
    {OP_DISPATCH, RECV_SCALES, SPOIL_SHAPE0, 2, EP_ERR_BUFFER_SIZE, {"got 2"}},
    {OP_DISPATCH, RECV_SCALES, SPOIL_SHIFT, 2, EP_ERR_ADDRESS, {"4"}},
};

SoloTest(dispatch_quant, wrong_tensors_of_fp8) {
    NEEDS_QUANT();
    fixture_check_table(quant_case(EP_LAYOUT_EXPERT_MAJOR, EP_QUANT_FP8, EP_SCALES_BY_ROW),
                        wrong_fp8, LENGTH(wrong_fp8));
}

static const Wrong wrong_mxfp8[] = {
    {OP_DISPATCH, RECV_SCALES, SPOIL_TYPE, EP_TYPE_FP32, EP_ERR_TYPE, {"uint8", "fp32"}},
    {OP_DISPATCH, RECV_SCALES, SPOIL_SHAPE0, 4, EP_ERR_SHAPE, {"S = 5", "got 4"}},
    {OP_DISPATCH, RECV_SCALES, SPOIL_SHAPE1, 2, EP_ERR_BUFFER_SIZE, {"got 2"}},
    {OP_DISPATCH, RECV_SCALES, SPOIL_NDIM, 3, EP_ERR_NDIM, {"2", "got 3"}},
};

SoloTest(dispatch_quant, wrong_tensors_of_mxfp8_by_column) {
    NEEDS_QUANT();
    fixture_check_table(quant_case(EP_LAYOUT_FLAT, EP_QUANT_MXFP8, EP_SCALES_BY_COLUMN),
                        wrong_mxfp8, LENGTH(wrong_mxfp8));
}

static const Wrong wrong_batched[] = {
    {OP_DISPATCH, RECV_SCALES, SPOIL_SHAPE0, 3, EP_ERR_SHAPE, {"4", "got 3"}},
    {OP_DISPATCH, RECV_SCALES, SPOIL_SHAPE1, 12, EP_ERR_SHAPE, {"S = 2", "got 12"}},
    {OP_DISPATCH, RECV_SCALES, SPOIL_SHAPE2, 2, EP_ERR_SHAPE, {"12", "got 2"}},
    {OP_DISPATCH, RECV_SCALES, SPOIL_NDIM, 2, EP_ERR_NDIM, {"3", "got 2"}},
};

SoloTest(dispatch_quant, wrong_tensors_of_batched_by_column) {
    NEEDS_QUANT();
    fixture_check_table(quant_case(EP_LAYOUT_BATCHED, EP_QUANT_FP8_UE8M0, EP_SCALES_BY_COLUMN),
                        wrong_batched, LENGTH(wrong_batched));
}

static const Wrong wrong_rank_major[] = {
    {OP_DISPATCH, RECV_SCALES, SPOIL_SHAPE0, 3, EP_ERR_SHAPE, {"ranks = 1", "got 3"}},
    {OP_DISPATCH, RECV_SCALES, SPOIL_SHAPE1, 9, EP_ERR_SHAPE, {"S = 2", "got 9"}},
    {OP_DISPATCH, RECV_SCALES, SPOIL_SHAPE2, 2, EP_ERR_SHAPE, {"rows of a source = 9", "got 2"}},
    {OP_DISPATCH, RECV_SCALES, SPOIL_NDIM, 2, EP_ERR_NDIM, {"3", "got 2"}},
};

SoloTest(dispatch_quant, wrong_tensors_of_rank_major_by_column) {
    NEEDS_QUANT();
    fixture_check_table(quant_case(EP_LAYOUT_RANK_MAJOR, EP_QUANT_FP8_UE8M0, EP_SCALES_BY_COLUMN),
                        wrong_rank_major, LENGTH(wrong_rank_major));
}

/* A dispatch that quantises refuses scales of the caller. */
SoloTest(dispatch_quant, scales_on_top) {
    NEEDS_QUANT();
    Fixture fixture;
    Case c = quant_case(EP_LAYOUT_EXPERT_MAJOR, EP_QUANT_FP8, EP_SCALES_BY_ROW);
    fixture_open(&fixture, &c);
    CHECK_OK(fixture_call(&fixture, OP_PREPARE));
    fixture.arg[SCALES] = fixture.arg[TOPK_WEIGHTS];
    CHECK_REFUSED(fixture_call(&fixture, OP_DISPATCH), EP_ERR_UNSUPPORTED, "ep_dispatch", "scales",
                  "quantises");
    fixture_close(&fixture);
}

/* A backend that does not quantise refuses it. */
SoloTest(dispatch_quant, refused_where_it_is_not) {
    if (TESTS_HAVE_QUANT) return;
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    fixture_open(&fixture, &c);
    EpHandleConfig config = EP_HANDLE_CONFIG_INIT;
    EpHandle *handle = NULL;
    config.quant = EP_QUANT_FP8;
    CHECK_REFUSED(ep_handle_create(fixture.group, &config, &handle), EP_ERR_UNSUPPORTED,
                  "config.quant", "EP_QUANT_NONE");
    config.quant = EP_QUANT_NONE, config.scale_order = EP_SCALES_BY_COLUMN;
    CHECK_REFUSED(ep_handle_create(fixture.group, &config, &handle), EP_ERR_UNSUPPORTED,
                  "config.scale_order", "EP_SCALES_BY_ROW");
    CHECK(handle == NULL, "a handle was made");
    fixture_close(&fixture);
}
