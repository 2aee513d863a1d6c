/* SPDX-License-Identifier: Apache-2.0 */
/* Wrong arguments of ep_prepare and of the calls that create handles. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "tests/cases/fixture.h"

#define LENGTH(array) (int)(sizeof(array) / sizeof((array)[0]))

static const Wrong wrong_tensors[] = {
    {OP_PREPARE, TOPK_IDX, SPOIL_ABSENT, 0, EP_ERR_NULL, {0}},
    {OP_PREPARE, TOPK_IDX, SPOIL_DATA, 0, EP_ERR_NULL, {0}},
    {OP_PREPARE, TOPK_IDX, SPOIL_SIZE, 0, EP_ERR_STRUCT_SIZE, {"got 0"}},
    {OP_PREPARE, TOPK_IDX, SPOIL_NDIM, 1, EP_ERR_NDIM, {"2", "got 1"}},
    {OP_PREPARE, TOPK_IDX, SPOIL_TYPE, EP_TYPE_FP32, EP_ERR_TYPE, {0}},
    {OP_PREPARE, TOPK_IDX, SPOIL_SHAPE0, -9, EP_ERR_RANGE, {"-9"}},
    {OP_PREPARE, TOPK_IDX, SPOIL_SHAPE1, -2, EP_ERR_RANGE, {"-2"}},
    {OP_PREPARE, TOPK_IDX, SPOIL_SHAPE0, 10, EP_ERR_TOKENS, {"9", "got 10"}},
    {OP_PREPARE, TOPK_IDX, SPOIL_SHAPE1, 3, EP_ERR_TOP_K, {"2", "got 3"}},
    {OP_PREPARE, TOPK_IDX, SPOIL_SHAPE1, 0, EP_ERR_TOP_K, {"got 0"}},
    {OP_PREPARE, TOPK_IDX, SPOIL_SHIFT, 2, EP_ERR_ADDRESS, {"multiple of"}},
    {OP_PREPARE, NUM_TOKENS, SPOIL_SHIFT, 1, EP_ERR_ADDRESS, {"multiple of"}},
    {OP_PREPARE, EXPERT_COUNTS, SPOIL_SHIFT, 2, EP_ERR_ADDRESS, {"multiple of"}},
    {OP_PREPARE, NUM_TOKENS, SPOIL_DATA, 0, EP_ERR_NULL, {0}},
    {OP_PREPARE, NUM_TOKENS, SPOIL_TYPE, EP_TYPE_UINT8, EP_ERR_TYPE, {0}},
    {OP_PREPARE, NUM_TOKENS, SPOIL_NDIM, 2, EP_ERR_NDIM, {"1", "got 2"}},
    {OP_PREPARE, NUM_TOKENS, SPOIL_SHAPE0, 2, EP_ERR_SHAPE, {"1", "2"}},
    {OP_PREPARE, EXPERT_COUNTS, SPOIL_TYPE, EP_TYPE_FP32, EP_ERR_TYPE, {0}},
    {OP_PREPARE, EXPERT_COUNTS, SPOIL_SHAPE0, 3, EP_ERR_SHAPE, {"4", "3"}},
    {OP_PREPARE, EXPERT_PADDED, SPOIL_NDIM, 2, EP_ERR_NDIM, {"1", "got 2"}},
    {OP_PREPARE, EXPERT_PADDED, SPOIL_SIZE, 1, EP_ERR_STRUCT_SIZE, {"got 1"}},
    {OP_PREPARE, EXPERT_OFFSETS, SPOIL_SHAPE0, 3, EP_ERR_SHAPE, {"5", "3"}},
    {OP_PREPARE, EXPERT_OFFSETS, SPOIL_SHAPE0, 6, EP_ERR_SHAPE, {"5", "6"}},
    {OP_PREPARE, EXPERT_OFFSETS, SPOIL_DATA, 0, EP_ERR_NULL, {0}},
    {OP_PREPARE, TOTALS, SPOIL_SHAPE0, 2, EP_ERR_SHAPE, {"3", "2"}},
    {OP_PREPARE, RECV_ROWS, SPOIL_SHAPE0, 2, EP_ERR_SHAPE, {"1", "2"}},
    {OP_PREPARE, RECV_ROWS, SPOIL_DATA, 0, EP_ERR_NULL, {0}},
    {OP_PREPARE, NEEDED_ROWS, SPOIL_TYPE, EP_TYPE_FP32, EP_ERR_TYPE, {0}},
    {OP_PREPARE, NEEDED_ROWS, SPOIL_SHIFT, 2, EP_ERR_ADDRESS, {"multiple of"}},
    {OP_PREPARE, DROPPED_SLOTS, SPOIL_NDIM, 2, EP_ERR_NDIM, {"1", "got 2"}},
    {OP_PREPARE, DROPPED_SLOTS, SPOIL_SIZE, 1, EP_ERR_STRUCT_SIZE, {"got 1"}},
    {OP_PREPARE, SOURCE_ROWS, SPOIL_SHAPE0, 2, EP_ERR_SHAPE, {"1", "2"}},
    {OP_PREPARE, SOURCE_ROWS, SPOIL_SHIFT, 2, EP_ERR_ADDRESS, {"multiple of"}},
};

/* Empty tensors are not read, so their addresses do not matter. */
SoloTest(handles_arguments, empty_tensors_lie_anywhere) {
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    fixture_open(&fixture, &c);
    fixture.tensor[TOPK_IDX].shape[0] = 0;
    fixture.tensor[TOPK_IDX].data = (char *)fixture.tensor[TOPK_IDX].data + 1;
    fixture.arg[NUM_TOKENS] = NULL;
    CHECK_OK(fixture_call(&fixture, OP_PREPARE));
    fixture_close(&fixture);
}

static const Wrong wrong_source_counts[] = {
    {OP_PREPARE, SOURCE_COUNTS, SPOIL_DATA, 0, EP_ERR_NULL, {0}},
    {OP_PREPARE, SOURCE_COUNTS, SPOIL_TYPE, EP_TYPE_FP32, EP_ERR_TYPE, {0}},
    {OP_PREPARE, SOURCE_COUNTS, SPOIL_NDIM, 1, EP_ERR_NDIM, {"2", "got 1"}},
    {OP_PREPARE, SOURCE_COUNTS, SPOIL_SHAPE0, 3, EP_ERR_SHAPE, {"local experts = 4", "got 3"}},
    {OP_PREPARE, SOURCE_COUNTS, SPOIL_SHAPE1, 2, EP_ERR_SHAPE, {"ranks = 1", "got 2"}},
};

SoloTest(handles_arguments, wrong_source_counts) {
    static const Wrong unsupported[] = {
        {OP_PREPARE, SOURCE_COUNTS, SPOIL_NDIM, 2, EP_ERR_UNSUPPORTED, {"NULL", "by source"}},
    };
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    if (TESTS_HAVE_SOURCE_COUNTS)
        fixture_check_table(c, wrong_source_counts, LENGTH(wrong_source_counts));
    else
        fixture_check_table(c, unsupported, 1);
}

/* A program compiled before source_counts was added passes a smaller struct. */
SoloTest(handles_arguments, plan_of_an_earlier_version) {
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    fixture_open(&fixture, &c);
    EpPlanTensors plan = EP_PLAN_TENSORS_INIT;
    plan.struct_size = offsetof(EpPlanTensors, source_counts);
    plan.totals = fixture.arg[TOTALS];
    memset(&plan.source_counts, 0x77, sizeof(plan.source_counts));
    CHECK_OK(ep_prepare(fixture.handle, NULL, fixture.arg[TOPK_IDX], NULL, NULL, &plan));
    const int64_t *totals = fixture.tensor[TOTALS].data;
    CHECK(totals[0] == fixture.world->rank->recv_rows, "%lld rows", (long long)totals[0]);
    fixture_close(&fixture);
}

/* Every size from the first version's to today's is accepted; fields past it are neither read nor
 * written. */
SoloTest(handles_arguments, structs_of_all_versions) {
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    fixture_open(&fixture, &c);
    for (size_t size = offsetof(EpHandleConfig, mode); size < sizeof(EpHandleConfig); size += 4) {
        EpHandleConfig config = EP_HANDLE_CONFIG_INIT;
        size_t bytes = 0;
        config.struct_size = size;
        memset((char *)&config + size, 0x77, sizeof(config) - size);
        check_note("config of %zu bytes", size);
        CHECK_OK(ep_handle_memory(fixture.group, &config, &bytes));
    }
    step_prepare(&fixture.step);
    for (size_t size = offsetof(EpHandleInfo, mode); size <= sizeof(EpHandleInfo); size++) {
        union {
            EpHandleInfo info;
            unsigned char byte[sizeof(EpHandleInfo)];
        } out;
        memset(&out, 0x77, sizeof(out));
        out.info.struct_size = size;
        CHECK_OK(ep_handle_info(fixture.handle, &out.info));
        CHECK(out.info.struct_size == size && out.info.num_tokens == 9, "%zu: not filled in", size);
        for (size_t i = size; i < sizeof(out); i++)
            CHECK(out.byte[i] == 0x77, "size %zu: byte %zu was written", size, i);
    }
    fixture_close(&fixture);
}

SoloTest(handles_arguments, wrong_tensors) {
    fixture_check_table(fixture_case(EP_LAYOUT_EXPERT_MAJOR), wrong_tensors, LENGTH(wrong_tensors));
}

/* A refused prepare keeps the plan of the step before. */
SoloTest(handles_arguments, refused_prepare_keeps_the_plan) {
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    fixture_open(&fixture, &c);
    step_prepare(&fixture.step);
    fixture.tensor[TOPK_IDX].shape[0] = 10;
    CHECK_STATUS(fixture_call(&fixture, OP_PREPARE), EP_ERR_TOKENS);
    step_move(&fixture.step);
    fixture_close(&fixture);
}

/* The host does not read device memory, so kernels clamp the number of tokens to the rows of
 * topk_idx. */
static void check_clamped(Fixture *fixture, int64_t tokens) {
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    CHECK_OK(fixture_call(fixture, OP_PREPARE));
    CHECK_OK(ep_handle_info(fixture->handle, &info));
    CHECK(info.num_tokens == tokens, "%lld tokens instead of %lld", (long long)info.num_tokens,
          (long long)tokens);
}

SoloTest(handles_arguments, number_of_tokens_out_of_range) {
    static const int32_t wrong[] = {-1, 10, INT32_MIN};
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    fixture_open(&fixture, &c);
    for (int i = 0; i < LENGTH(wrong); i++) {
        *(int32_t *)fixture.tensor[NUM_TOKENS].data = wrong[i];
        if (TESTS_ON_GPU) {
            check_clamped(&fixture, wrong[i] < 0 ? 0 : 9);
            continue;
        }
        CHECK_REFUSED(fixture_call(&fixture, OP_PREPARE), EP_ERR_RANGE, "num_tokens", "9");
        fixture_check_untouched(&fixture);
    }
    *(int32_t *)fixture.tensor[NUM_TOKENS].data = 9;
    CHECK_OK(fixture_call(&fixture, OP_PREPARE));
    fixture_close(&fixture);
}

SoloTest(handles_arguments, plan_of_unknown_size) {
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    fixture_open(&fixture, &c);
    EpPlanTensors plan = EP_PLAN_TENSORS_INIT;
    static const size_t sizes[] = {0, 3, 100000};
    for (int i = 0; i < LENGTH(sizes); i++) {
        plan.struct_size = sizes[i];
        CHECK_REFUSED(ep_prepare(fixture.handle, NULL, fixture.arg[TOPK_IDX], NULL, NULL, &plan),
                      EP_ERR_STRUCT_SIZE, "out");
    }
    CHECK_OK(ep_prepare(fixture.handle, NULL, fixture.arg[TOPK_IDX], NULL, NULL, NULL));
    fixture_close(&fixture);
}

SoloTest(handles_arguments, no_handle) {
    EpTensor tensor = ep_tensor_2d(NULL, EP_TYPE_INT32, 0, 2);
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    CHECK_REFUSED(ep_prepare(NULL, NULL, &tensor, NULL, NULL, NULL), EP_ERR_NULL, "handle");
    CHECK_REFUSED(
        ep_dispatch(NULL, NULL, NULL, &tensor, NULL, NULL, NULL, &tensor, NULL, NULL, NULL),
        EP_ERR_NULL, "handle");
    CHECK_REFUSED(ep_combine(NULL, NULL, &tensor, NULL, NULL, NULL, &tensor), EP_ERR_NULL,
                  "handle");
    CHECK_REFUSED(ep_dispatch_backward(NULL, NULL, &tensor, NULL, NULL, &tensor, NULL), EP_ERR_NULL,
                  "handle");
    CHECK_REFUSED(ep_combine_backward(NULL, NULL, &tensor, NULL, NULL, NULL, &tensor, NULL),
                  EP_ERR_NULL, "handle");
    CHECK_REFUSED(ep_handle_info(NULL, &info), EP_ERR_NULL, "handle");
    CHECK_REFUSED(ep_plan_sources(NULL, NULL, NULL, 0, NULL, NULL), EP_ERR_NULL, "handle");
}

/* EpHandleConfig with one wrong field each. */
typedef struct WrongConfig {
    EpHandleConfig config;
    EpStatus status;
    const char *field, *got;
} WrongConfig;

#define CONFIG(...)                                                                      \
    {                                                                                    \
        .struct_size = sizeof(EpHandleConfig), .layout = EP_LAYOUT_EXPERT_MAJOR,         \
        .top_k = EP_DEFAULT, .alignment = EP_DEFAULT, .max_recv_rows = EP_DEFAULT,       \
        .rows_per_expert = EP_DEFAULT, .overflow = EP_DEFAULT, .mode = EP_DEFAULT,       \
        .quant = EP_QUANT_NONE, .scale_order = EP_SCALES_BY_ROW, .num_sms = EP_DEFAULT,  \
        .plans = EP_PLANS_OWNED, .expert_ids = EP_IDS_LOCAL, .padding = EP_PADDING_ZERO, \
        .sum_quant = EP_QUANT_NONE, __VA_ARGS__                                          \
    }

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Woverride-init"
static const WrongConfig wrong_configs[] = {
    {CONFIG(.struct_size = 0), EP_ERR_STRUCT_SIZE, "config", "0"},
    {CONFIG(.struct_size = 9999), EP_ERR_STRUCT_SIZE, "config", "9999"},
    {CONFIG(.layout = 0), EP_ERR_RANGE, "layout", "0"},
    {CONFIG(.layout = 5), EP_ERR_RANGE, "layout", "5"},
    {CONFIG(.layout = EP_LAYOUT_RANK_MAJOR, .mode = EP_MODE_LATENCY, .rows_per_expert = 8),
     EP_ERR_RANGE, "rows_per_expert", "8"},
    {CONFIG(.row_weights = 2), EP_ERR_RANGE, "config.row_weights", "got 2"},
    {CONFIG(.layout = EP_LAYOUT_FLAT, .row_weights = EP_WEIGHTS_ALL), EP_ERR_UNSUPPORTED,
     "config.row_weights", "outside the rank-major layout"},
    {CONFIG(.expert_ids = 0), EP_ERR_RANGE, "expert_ids", "got 0"},
    {CONFIG(.layout = EP_LAYOUT_FLAT, .expert_ids = 3), EP_ERR_RANGE, "expert_ids", "got 3"},
    {CONFIG(.expert_ids = EP_IDS_GLOBAL), EP_ERR_UNSUPPORTED, "config.expert_ids",
     "outside the flat and rank-major layouts"},
    {CONFIG(.layout = EP_LAYOUT_BATCHED, .rows_per_expert = 8, .expert_ids = EP_IDS_GLOBAL),
     EP_ERR_UNSUPPORTED, "config.expert_ids", "got EP_IDS_GLOBAL"},
    {CONFIG(.top_k = 0), EP_ERR_TOP_K, "top_k", "0"},
    {CONFIG(.top_k = 3), EP_ERR_TOP_K, "top_k", "3"},
    {CONFIG(.alignment = 0), EP_ERR_ALIGNMENT, "alignment", "0"},
    {CONFIG(.alignment = 12), EP_ERR_ALIGNMENT, "alignment", "12"},
    {CONFIG(.alignment = -4), EP_ERR_ALIGNMENT, "alignment", "-4"},
    {CONFIG(.max_recv_rows = -2), EP_ERR_RANGE, "max_recv_rows", "-2"},
    {CONFIG(.overflow = 0), EP_ERR_RANGE, "overflow", "0"},
    {CONFIG(.overflow = 3), EP_ERR_RANGE, "overflow", "3"},
    {CONFIG(.zero_tail = 3), EP_ERR_RANGE, "zero_tail", "3"},
    {CONFIG(.zero_tail = EP_TAIL_IDS), EP_ERR_UNSUPPORTED, "zero_tail", "EP_TAIL_IDS"},
    {CONFIG(.sum_quant = 0), EP_ERR_RANGE, "config.sum_quant", "got 0"},
    {CONFIG(.sum_quant = 6), EP_ERR_RANGE, "config.sum_quant", "got 6"},
    {CONFIG(.sum_quant = EP_QUANT_MXFP8), EP_ERR_UNSUPPORTED, "config.sum_quant",
     "EP_QUANT_NONE or EP_QUANT_FP8"},
    {CONFIG(.padding = 0), EP_ERR_RANGE, "padding", "0"},
    {CONFIG(.padding = 3), EP_ERR_RANGE, "padding", "3"},
    {CONFIG(.layout = EP_LAYOUT_BATCHED), EP_ERR_RANGE, "rows_per_expert", ""},
    {CONFIG(.layout = EP_LAYOUT_BATCHED, .rows_per_expert = 0), EP_ERR_RANGE, "rows_per_expert",
     "0"},
    {CONFIG(.layout = EP_LAYOUT_BATCHED, .rows_per_expert = -5), EP_ERR_RANGE, "rows_per_expert",
     "-5"},
    {CONFIG(.rows_per_expert = 8), EP_ERR_RANGE, "rows_per_expert", "8"},
    {CONFIG(.layout = EP_LAYOUT_BATCHED, .rows_per_expert = INT32_MAX / 4), EP_ERR_RANGE, "config",
     "2147483647"},
    {CONFIG(.mode = 0), EP_ERR_RANGE, "mode", "0"},
    {CONFIG(.mode = 4), EP_ERR_RANGE, "mode", "4"},
    {CONFIG(.mode = -2), EP_ERR_RANGE, "mode", "-2"},
    {CONFIG(.quant = 0), EP_ERR_RANGE, "quant", "0"},
    {CONFIG(.quant = 6), EP_ERR_RANGE, "quant", "6"},
    {CONFIG(.scale_order = 0), EP_ERR_RANGE, "scale_order", "0"},
    {CONFIG(.scale_order = 3), EP_ERR_RANGE, "scale_order", "3"},
    {CONFIG(.num_sms = 1), EP_ERR_RANGE, "num_sms", "1"},
    {CONFIG(.num_sms = -2), EP_ERR_RANGE, "num_sms", "-2"},
    {CONFIG(.plans = 0), EP_ERR_RANGE, "plans", "0"},
    {CONFIG(.plans = 3), EP_ERR_RANGE, "plans", "3"},
    {CONFIG(.id = -1), EP_ERR_RANGE, "id", "-1"},
    {CONFIG(.id = EP_MAX_HANDLE_ID + 1), EP_ERR_RANGE, "id", "4096"},
};
#pragma GCC diagnostic pop

SoloTest(handles_arguments, wrong_configs) {
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    fixture_open(&fixture, &c);
    for (int i = 0; i < LENGTH(wrong_configs); i++) {
        const WrongConfig *wrong = &wrong_configs[i];
        EpHandle *handle = NULL;
        size_t bytes = 123;
        check_note("config %d: %s", i, wrong->field);
        CHECK_REFUSED(ep_handle_create(fixture.group, &wrong->config, &handle), wrong->status,
                      "ep_handle_create", wrong->field, wrong->got);
        CHECK_REFUSED(ep_handle_memory(fixture.group, &wrong->config, &bytes), wrong->status,
                      "ep_handle_memory", wrong->field, wrong->got);
        CHECK(handle == NULL && bytes == 123, "outputs were written");
    }
    fixture_close(&fixture);
}

SoloTest(handles_arguments, no_group_or_no_output) {
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    fixture_open(&fixture, &c);
    EpHandle *handle = NULL;
    size_t bytes = 123;
    CHECK_REFUSED(ep_handle_create(NULL, NULL, &handle), EP_ERR_NULL, "group");
    CHECK_REFUSED(ep_handle_create(fixture.group, NULL, NULL), EP_ERR_NULL, "out");
    CHECK_REFUSED(ep_handle_memory(NULL, NULL, &bytes), EP_ERR_NULL, "group");
    CHECK_REFUSED(ep_handle_memory(fixture.group, NULL, NULL), EP_ERR_NULL, "bytes");
    CHECK(handle == NULL && bytes == 123, "outputs were written");
    fixture_close(&fixture);
}

SoloTest(handles_arguments, info_of_unknown_size) {
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    fixture_open(&fixture, &c);
    step_prepare(&fixture.step);
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    info.struct_size = 0;
    CHECK_REFUSED(ep_handle_info(fixture.handle, &info), EP_ERR_STRUCT_SIZE, "out");
    CHECK(info.recv_rows == 0 && info.expert_counts == NULL, "outputs were written");
    CHECK_REFUSED(ep_handle_info(fixture.handle, NULL), EP_ERR_NULL, "out");
    fixture_close(&fixture);
}

SoloTest(handles_arguments, sources_that_are_refused) {
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    enum { ROWS = 1 << 10 };
    static int32_t ranks[ROWS], tokens[ROWS];
    fixture_open(&fixture, &c);
    EpHandle *h = fixture.handle;
    memset(ranks, 0x77, sizeof(ranks)), memset(tokens, 0x77, sizeof(tokens));
    CHECK_REFUSED(ep_plan_sources(h, NULL, NULL, ROWS, ranks, tokens), EP_ERR_NOT_PREPARED,
                  "ep_plan_sources: handle");
    step_prepare(&fixture.step);
    CHECK_REFUSED(ep_plan_sources(h, NULL, NULL, ROWS, NULL, tokens), EP_ERR_NULL,
                  "ep_plan_sources: ranks");
    CHECK_REFUSED(ep_plan_sources(h, NULL, NULL, ROWS, ranks, NULL), EP_ERR_NULL,
                  "ep_plan_sources: tokens");
    CHECK_REFUSED(ep_plan_sources(h, NULL, NULL, -1, ranks, tokens), EP_ERR_RANGE,
                  "ep_plan_sources: rows: expected at least 0, got -1");
    CHECK_REFUSED(ep_plan_sources(h, NULL, NULL, 2, ranks, tokens), EP_ERR_BUFFER_SIZE,
                  "ep_plan_sources: rows", "got 2");
    for (int i = 0; i < ROWS; i++)
        CHECK(ranks[i] == 0x77777777 && tokens[i] == 0x77777777, "row %d was written", i);
    step_move(&fixture.step);
    fixture_close(&fixture);
}

/* Every step must have the K of the handle. */
SoloTest(handles_arguments, other_k_than_the_handle) {
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    fixture_open(&fixture, &c);
    fixture.tensor[TOPK_IDX].shape[1] = 1;
    EpHandleConfig config = EP_HANDLE_CONFIG_INIT;
    config.top_k = 2;
    EpHandle *handle = NULL;
    CHECK_OK(ep_handle_create(fixture.group, &config, &handle));
    CHECK_REFUSED(ep_prepare(handle, NULL, fixture.arg[TOPK_IDX], NULL, NULL, NULL), EP_ERR_SHAPE,
                  "topk_idx", "2", "got 1");
    fixture_close(&fixture);
}

/* 64-bit indices are not truncated: 2^32 + 1 is not expert 1. */
SoloTest(handles_arguments, index_beyond_32_bits) {
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    fixture_open(&fixture, &c);
    int64_t index[2] = {(INT64_C(1) << 32) + 1, 3};
    EpTensor topk_idx = ep_tensor_2d(index, EP_TYPE_INT64, 1, 2);
    CHECK_OK(ep_prepare(fixture.handle, NULL, &topk_idx, NULL, NULL, NULL));
    EpFinding found = EP_FINDING_INIT;
    CHECK_REFUSED(ep_group_status(fixture.group, &found), EP_ERR_ROUTING, "token 0", "k 0",
                  "4294967297");
    CHECK(found.seen == index[0] && found.count == 1, "%lld", (long long)found.seen);
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    CHECK_OK(ep_handle_info(fixture.handle, &info));
    CHECK(info.expert_counts[1] == 0 && info.expert_counts[3] == 1, "%d, %d", info.expert_counts[1],
          info.expert_counts[3]);
    CHECK_OK(ep_group_status(fixture.group, &found));
    CHECK(found.status == EP_OK, "%d", (int)found.status);
    fixture_close(&fixture);
}
