/* SPDX-License-Identifier: Apache-2.0 */
/* Wrong arguments of ep_prepare and of the calls that create handles: refusals.def, and calls that
 * it cannot say. */
#include <stddef.h>

#include "tests/cases/fixture.h"

RefusalsTest(handles_arguments, wrong_tensors, "prepare", "");

/* Empty tensors are not read, so their addresses do not matter. */
FixtureTest(handles_arguments, empty_tensors_lie_anywhere, "") {
    f->tensor[IN_INDEX].shape[0] = 0;
    f->tensor[IN_INDEX].data = (char *)f->tensor[IN_INDEX].data + 1;
    f->arg[IN_COUNT] = NULL;
    CHECK_OK(fixture_call(f, STEP_PREPARE));
}

/* Every size of a struct from the first version's to today's is accepted; fields past it are
 * neither read nor written. */
FixtureTest(handles_arguments, structs_of_all_versions, "") {
    for (size_t size = offsetof(EpHandleConfig, mode); size < sizeof(EpHandleConfig); size += 4) {
        EpHandleConfig config = EP_HANDLE_CONFIG_INIT;
        memset((char *)&config + size, 0x77, sizeof(config) - size);
        config.struct_size = size;
        check_note("config of %zu bytes", size);
        EpHandle *handle = open_handle_with(f->group, &config);
        Step step = f->step;
        step.handle = handle;
        if (handle) step_all(&step);
    }
    EpPlanTensors plan = EP_PLAN_TENSORS_INIT;
    plan.struct_size = offsetof(EpPlanTensors, source_counts);
    plan.totals = f->arg[OUT_TOTALS];
    memset(&plan.source_counts, 0x77, sizeof(plan.source_counts));
    CHECK_OK(ep_prepare(f->handle, NULL, f->arg[IN_INDEX], NULL, NULL, &plan));
    const int64_t *totals = f->tensor[OUT_TOTALS].data;
    CHECK(totals[0] == f->world->rank->recv_rows, "%lld rows", (long long)totals[0]);
    for (size_t size = offsetof(EpHandleInfo, mode); size <= sizeof(EpHandleInfo); size++) {
        union {
            EpHandleInfo info;
            unsigned char byte[sizeof(EpHandleInfo)];
        } out;
        memset(&out, 0x77, sizeof(out));
        out.info.struct_size = size;
        CHECK_OK(ep_handle_info(f->handle, &out.info));
        CHECK(out.info.struct_size == size && out.info.num_tokens == 9, "%zu: not filled in", size);
        for (size_t i = size; i < sizeof(out); i++)
            CHECK(out.byte[i] == 0x77, "size %zu: byte %zu was written", size, i);
    }
}

/* A refused prepare keeps the plan of the step before. */
FixtureTest(handles_arguments, refused_prepare_keeps_the_plan, "") {
    step_prepare(&f->step);
    f->tensor[IN_INDEX].shape[0] = 10;
    CHECK_STATUS(fixture_call(f, STEP_PREPARE), EP_ERR_TOKENS);
    step_move(&f->step);
}

/* The host does not read device memory, so kernels clamp the number of tokens to the rows of
 * topk_idx. */
static void check_clamped(Fixture *f, int64_t tokens) {
    CHECK_OK(fixture_call(f, STEP_PREPARE));
    EpHandleInfo info = handle_info(f->handle);
    CHECK(info.num_tokens == tokens, "%lld tokens instead of %lld", (long long)info.num_tokens,
          (long long)tokens);
}

FixtureTest(handles_arguments, number_of_tokens_out_of_range, "") {
    static const int32_t wrong[] = {-1, 10, INT32_MIN};
    for (int i = 0; i < LENGTH(wrong); i++) {
        *(int32_t *)f->tensor[IN_COUNT].data = wrong[i];
        if (TESTS_ON_GPU) {
            check_clamped(f, wrong[i] < 0 ? 0 : 9);
            continue;
        }
        CHECK_REFUSED(fixture_call(f, STEP_PREPARE), EP_ERR_RANGE, "num_tokens", "9");
        fixture_check_untouched(f);
    }
    *(int32_t *)f->tensor[IN_COUNT].data = 9;
    CHECK_OK(fixture_call(f, STEP_PREPARE));
}

FixtureTest(handles_arguments, structs_of_unknown_size, "") {
    static const size_t sizes[] = {0, 3, 100000};
    for (int i = 0; i < LENGTH(sizes); i++) {
        EpPlanTensors plan = EP_PLAN_TENSORS_INIT;
        plan.struct_size = sizes[i];
        CHECK_REFUSED(ep_prepare(f->handle, NULL, f->arg[IN_INDEX], NULL, NULL, &plan),
                      EP_ERR_STRUCT_SIZE, "out");
    }
    CHECK_OK(ep_prepare(f->handle, NULL, f->arg[IN_INDEX], NULL, NULL, NULL));
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    EpHandleCost cost = EP_HANDLE_COST_INIT;
    info.struct_size = 0, cost.struct_size = 3;
    CHECK_REFUSED(ep_handle_info(f->handle, &info), EP_ERR_STRUCT_SIZE, "out");
    CHECK_REFUSED(ep_handle_cost(f->group, NULL, &cost), EP_ERR_STRUCT_SIZE, "out");
    CHECK(info.recv_rows == 0 && info.expert_counts == NULL, "outputs were written");
}

SoloTest(handles_arguments, missing_objects) {
    EpTensor t = ep_tensor_2d(NULL, EP_TYPE_INT32, 0, 2);
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    EpHandleCost cost = EP_HANDLE_COST_INIT;
    EpHandle *handle = NULL;
    size_t bytes = 123;
    const EpStatus null = EP_ERR_NULL;
    CHECK_REFUSED(ep_prepare(NULL, NULL, &t, NULL, NULL, NULL), null, "handle");
    CHECK_REFUSED(ep_dispatch(NULL, NULL, NULL, &t, NULL, NULL, NULL, &t, NULL, NULL, NULL), null,
                  "handle");
    CHECK_REFUSED(ep_combine(NULL, NULL, &t, NULL, NULL, NULL, &t), null, "handle");
    CHECK_REFUSED(ep_dispatch_backward(NULL, NULL, &t, NULL, NULL, &t, NULL), null, "handle");
    CHECK_REFUSED(ep_combine_backward(NULL, NULL, &t, NULL, NULL, NULL, &t, NULL), null, "handle");
    CHECK_REFUSED(ep_dispatch_send(NULL, NULL, NULL, &t, NULL, NULL, NULL), null, "handle");
    CHECK_REFUSED(ep_dispatch_wait(NULL, NULL, &t, NULL, NULL, NULL), null, "handle");
    CHECK_REFUSED(ep_combine_send(NULL, NULL, &t, NULL, NULL, NULL), null, "handle");
    CHECK_REFUSED(ep_combine_wait(NULL, NULL, &t), null, "handle");
    CHECK_REFUSED(ep_handle_info(NULL, &info), null, "handle");
    CHECK_REFUSED(ep_plan_sources(NULL, NULL, NULL, 0, NULL, NULL), null, "handle");
    CHECK_REFUSED(ep_plan_source_tokens(NULL, NULL, NULL, NULL), null, "handle");
    CHECK_REFUSED(ep_plan_entries(NULL, NULL, NULL, 0, NULL, NULL, NULL), null, "handle");
    CHECK_REFUSED(ep_handle_create(NULL, NULL, &handle), null, "group");
    CHECK_REFUSED(ep_handle_memory(NULL, NULL, &bytes), null, "group");
    CHECK_REFUSED(ep_handle_cost(NULL, NULL, &cost), null, "group");
    Fixture *f = fixture_new_prepared("");
    CHECK_REFUSED(ep_handle_create(f->group, NULL, NULL), null, "out");
    CHECK_REFUSED(ep_handle_memory(f->group, NULL, NULL), null, "bytes");
    CHECK_REFUSED(ep_handle_cost(f->group, NULL, NULL), null, "out");
    CHECK_REFUSED(ep_handle_info(f->handle, NULL), null, "out");
    CHECK(handle == NULL && bytes == 123, "outputs were written");
    fixture_free(f);
}

/* ---- configurations ---- */

static const TextField config_fields[] = {
    TEXT_FIELD(EpHandleConfig, struct_size, NULL),
    TEXT_FIELD(EpHandleConfig, layout, TEXT_LAYOUTS),
    TEXT_FIELD(EpHandleConfig, top_k, NULL),
    TEXT_FIELD(EpHandleConfig, alignment, NULL),
    TEXT_FIELD(EpHandleConfig, max_recv_rows, NULL),
    TEXT_FIELD(EpHandleConfig, rows_per_expert, NULL),
    TEXT_FIELD(EpHandleConfig, overflow, TEXT_OVERFLOWS),
    TEXT_FIELD(EpHandleConfig, zero_tail, TEXT_TAILS),
    TEXT_FIELD(EpHandleConfig, mode, TEXT_MODES),
    TEXT_FIELD(EpHandleConfig, quant, TEXT_QUANTS),
    TEXT_FIELD(EpHandleConfig, scale_order, TEXT_ORDERS),
    TEXT_FIELD(EpHandleConfig, num_sms, NULL),
    TEXT_FIELD(EpHandleConfig, plans, "|owned|named"),
    TEXT_FIELD(EpHandleConfig, id, NULL),
    TEXT_FIELD(EpHandleConfig, expert_ids, "|local|global"),
    TEXT_FIELD(EpHandleConfig, padding, "|zero|keep"),
    TEXT_FIELD(EpHandleConfig, sum_quant, TEXT_QUANTS),
    TEXT_FIELD(EpHandleConfig, grad_quant, TEXT_QUANTS),
    TEXT_FIELD(EpHandleConfig, row_weights, "here|all"),
};

typedef struct Configured {
    EpGroup *group;
    EpHandleConfig config;
    EpHandle *handle;
    EpHandleCost cost;
    size_t bytes;
} Configured;

static EpStatus call_with_config(void *context, const char *call) {
    Configured *c = context;
    if (!strcmp(call, "ep_handle_create"))
        return ep_handle_create(c->group, &c->config, &c->handle);
    if (!strcmp(call, "ep_handle_cost")) return ep_handle_cost(c->group, &c->config, &c->cost);
    return ep_handle_memory(c->group, &c->config, &c->bytes);
}

static void refuse_configs(Fixture *f, const char *group) {
    static const char *const calls[] = {"ep_handle_create", "ep_handle_memory", "ep_handle_cost",
                                        NULL};
    static const Member members[] = {MEMBER("", config_fields, Configured, config)};
    static const Subject subject = {members, 1, sizeof(Configured), call_with_config,
                                    .calls = calls};
    check_refusals(group, &subject,
                   &(Configured){f->group, EP_HANDLE_CONFIG_INIT, NULL, EP_HANDLE_COST_INIT, 123});
}

FixtureTest(handles_arguments, wrong_configs, "sets=1") {
    refuse_configs(f, "handle_config");
}

FixtureTest(handles_arguments, wrong_configs_by_entry, "by_entry=1") {
    refuse_configs(f, "handle_config_by_entry");
}

/* ---- others ---- */

FixtureTest(handles_arguments, sources_that_are_refused, "") {
    enum { ROWS = 1 << 10 };
    static int32_t ranks[ROWS], tokens[ROWS];
    EpHandle *h = f->handle;
    memset(ranks, 0x77, sizeof(ranks)), memset(tokens, 0x77, sizeof(tokens));
    CHECK_REFUSED(ep_plan_sources(h, NULL, NULL, ROWS, ranks, tokens), EP_ERR_NOT_PREPARED,
                  "ep_plan_sources: handle");
    CHECK_REFUSED(ep_plan_source_tokens(h, NULL, NULL, ranks), EP_ERR_NOT_PREPARED,
                  "ep_plan_source_tokens: handle");
    step_prepare(&f->step);
    CHECK_REFUSED(ep_plan_sources(h, NULL, NULL, ROWS, NULL, tokens), EP_ERR_NULL,
                  "ep_plan_sources: ranks");
    CHECK_REFUSED(ep_plan_sources(h, NULL, NULL, ROWS, ranks, NULL), EP_ERR_NULL,
                  "ep_plan_sources: tokens");
    CHECK_REFUSED(ep_plan_sources(h, NULL, NULL, -1, ranks, tokens), EP_ERR_RANGE,
                  "ep_plan_sources: rows: expected at least 0, got -1");
    CHECK_REFUSED(ep_plan_sources(h, NULL, NULL, 2, ranks, tokens), EP_ERR_BUFFER_SIZE,
                  "ep_plan_sources: rows", "got 2");
    CHECK_REFUSED(ep_plan_source_tokens(h, NULL, NULL, NULL), EP_ERR_NULL,
                  "ep_plan_source_tokens: counts");
    CHECK_REFUSED(ep_plan_entries(h, NULL, NULL, ROWS, ranks, tokens, NULL), EP_ERR_NULL,
                  "ep_plan_entries: entries");
    CHECK_REFUSED(ep_plan_entries(h, NULL, NULL, 2, ranks, tokens, ranks), EP_ERR_BUFFER_SIZE,
                  "ep_plan_entries: rows", "got 2");
    for (int i = 0; i < ROWS; i++)
        CHECK(ranks[i] == 0x77777777 && tokens[i] == 0x77777777, "row %d was written", i);
    step_move(&f->step);
}

/* A rank that receives nothing needs no memory for it. */
FixtureTest(handles_arguments, sources_of_no_rows, "masked_percent=100") {
    step_prepare(&f->step);
    CHECK_OK(ep_plan_sources(f->handle, NULL, NULL, 0, NULL, NULL));
    CHECK_OK(ep_plan_entries(f->handle, NULL, NULL, 0, NULL, NULL, NULL));
}

/* Every step must have the K of the handle. */
FixtureTest(handles_arguments, other_k_than_the_handle, "") {
    f->tensor[IN_INDEX].shape[1] = 1;
    EpHandleConfig config = EP_HANDLE_CONFIG_INIT;
    config.top_k = 2;
    EpHandle *handle = open_handle_with(f->group, &config);
    CHECK_REFUSED(ep_prepare(handle, NULL, f->arg[IN_INDEX], NULL, NULL, NULL), EP_ERR_SHAPE,
                  "topk_idx", "2", "got 1");
}

/* 64-bit indices are not truncated: 2^32 + 1 is not expert 1. */
FixtureTest(handles_arguments, index_beyond_32_bits, "") {
    int64_t index[2] = {(INT64_C(1) << 32) + 1, 3};
    EpTensor topk_idx = ep_tensor_2d(index, EP_TYPE_INT64, 1, 2);
    CHECK_OK(ep_prepare(f->handle, NULL, &topk_idx, NULL, NULL, NULL));
    EpFinding found = EP_FINDING_INIT;
    CHECK_REFUSED(ep_group_status(f->group, &found), EP_ERR_ROUTING, "token 0", "k 0",
                  "4294967297");
    CHECK(found.seen == index[0] && found.count == 1, "%lld", (long long)found.seen);
    EpHandleInfo info = handle_info(f->handle);
    CHECK(info.expert_counts[1] == 0 && info.expert_counts[3] == 1, "%d, %d", info.expert_counts[1],
          info.expert_counts[3]);
    CHECK_OK(ep_group_status(f->group, &found));
    CHECK(found.status == EP_OK, "%d", (int)found.status);
}
