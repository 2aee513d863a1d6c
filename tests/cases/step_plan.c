/* SPDX-License-Identifier: Apache-2.0 */
/* The plan of a step: ep_prepare, and the results of ep_handle_info. */
#include <string.h>

#include "tests/cases/step_parts.h"
#include "tests/oracle/expect.h"

/* Returns the indices in the caller's type. */
static Image index_image(const Step *step) {
    const Case *c = &step->world->c;
    size_t entries = (size_t)step_mine(step)->rows * (size_t)c->top_k;
    size_t bytes = c->index_type == EP_TYPE_INT64 ? 8 : 4;
    Image image = image_new(entries * bytes, bytes);
    for (size_t i = 0; i < entries; i++) {
        int32_t narrow = (int32_t)step_mine(step)->index[i];
        const void *from =
            bytes == 8 ? (const void *)&step_mine(step)->index[i] : (const void *)&narrow;
        memcpy(image.data + i * bytes, from, bytes);
    }
    return image;
}

static StepPlanArray plan_array(EpType type, const int64_t *values, int64_t n) {
    size_t bytes = type == EP_TYPE_INT64 ? 8 : 4;
    StepPlanArray array = {
        image_new((size_t)n * bytes, bytes), image_new((size_t)n * bytes, bytes), {0}};
    for (int64_t i = 0; i < n; i++) {
        int32_t narrow = (int32_t)values[i];
        const void *from = bytes == 8 ? (const void *)&values[i] : (const void *)&narrow;
        memcpy(array.expected.data + (size_t)i * bytes, from, bytes);
    }
    array.tensor = ep_tensor_1d(array.got.data, type, n);
    return array;
}

static void plan_array_check(StepPlanArray *array, const char *what) {
    image_check_equal(&array->got, &array->expected, array->expected.bytes, what);
    image_free(&array->got);
    image_free(&array->expected);
}

static void check_info_arrays(const RankWorld *me, const EpHandleInfo *info) {
    for (int e = 0; e < me->num_experts; e++) {
        CHECK(info->expert_counts[e] == me->count[e], "expert %d: %d, not %lld", e,
              (int)info->expert_counts[e], (long long)me->count[e]);
        CHECK(info->expert_padded[e] == me->padded[e], "expert %d: %d, not %lld", e,
              (int)info->expert_padded[e], (long long)me->padded[e]);
    }
    for (int e = 0; e <= me->num_experts; e++)
        CHECK(info->expert_offsets[e] == me->offset[e], "expert %d: %d, not %lld", e,
              (int)info->expert_offsets[e], (long long)me->offset[e]);
}

/* Rows whose slots were all lost count, too. */
static void check_info_traffic(const Step *step, const EpHandleInfo *info) {
    int64_t sent = 0, received = 0;
    for (int peer = 0; peer < step->world->c.ranks; peer++) {
        if (peer == step->rank) continue;
        sent += expect_rows(step->world, step->rank, peer);
        received += expect_rows(step->world, peer, step->rank);
    }
    int64_t local = expect_rows(step->world, step->rank, step->rank);
    CHECK(info->remote_rows_sent == sent, "%lld instead of %lld", (long long)info->remote_rows_sent,
          (long long)sent);
    CHECK(info->remote_rows_received == received, "%lld instead of %lld",
          (long long)info->remote_rows_received, (long long)received);
    CHECK(info->local_rows == local, "%lld instead of %lld", (long long)info->local_rows,
          (long long)local);
}

void step_check_info(const Step *step) {
    const RankWorld *me = step_mine(step);
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    if (step->plan) return;
    REQUIRE_OK(ep_handle_info(step->handle, &info));
    CHECK(info.num_tokens == me->tokens, "%lld instead of %d", (long long)info.num_tokens,
          me->tokens);
    CHECK(info.top_k == step->world->c.top_k, "%lld", (long long)info.top_k);
    CHECK(info.recv_rows == me->recv_rows, "%lld instead of %lld", (long long)info.recv_rows,
          (long long)me->recv_rows);
    CHECK(info.needed_rows == me->needed_rows, "%lld instead of %lld", (long long)info.needed_rows,
          (long long)me->needed_rows);
    CHECK(info.dropped_slots == me->dropped, "%lld instead of %lld", (long long)info.dropped_slots,
          (long long)me->dropped);
    REQUIRE(info.num_local_experts == me->num_experts, "%d", info.num_local_experts);
    check_info_arrays(me, &info);
    check_info_traffic(step, &info);
}

/* Whether the backend tells the sources of rows: not on several nodes of GPUs. */
static int tells_sources(const Step *step) {
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    CHECK_OK(ep_group_query(step->group, &info));
    return info.backend == EP_BACKEND_HOST || info.num_nodes == 1;
}

/* Returns the row of a plan's slot, or NULL where the buffer has none: a plan counts blocks of
 * sources at their largest. */
static const Row *row_of_slot(const Step *step, int64_t slot) {
    const Case *c = &step->world->c;
    const RankWorld *me = step_mine(step);
    int64_t all = c->max_tokens + c->spare_tokens, at = slot;
    if (case_layout(c)->blocks == BLOCKS_OF_TOKENS) {
        if (slot % all >= c->max_tokens) return NULL;
        at = slot / all * c->max_tokens + slot % all;
    }
    return at < me->buffer_rows ? &me->row[at] : NULL;
}

/* Compare what the library tells of the first rows. entries: NULL if it does not tell them. */
static void check_sources(const Step *step, int64_t rows, const int32_t *ranks,
                          const int32_t *tokens, const int32_t *entries) {
    for (int64_t i = 0; i < rows; i++) {
        const Row *row = row_of_slot(step, i);
        int filled = row && row->kind == ROW_FILLED;
        int rank = filled ? row->source : -1, token = filled ? row->token : -1;
        int k = filled ? row->k : -1;
        REQUIRE(ranks[i] == rank && tokens[i] == token,
                "row %lld: expected rank %d, token %d, got %d, %d", (long long)i, rank, token,
                ranks[i], tokens[i]);
        if (!entries) continue;
        REQUIRE(entries[i] == k, "row %lld: expected entry %d, got %d", (long long)i, k,
                entries[i]);
    }
}

/* Whether a token of `rank` names an expert of this step's rank. */
static int travels(const Step *step, int rank, int token) {
    const Case *c = &step->world->c;
    const int64_t *experts = step->world->rank[rank].index + (int64_t)token * c->top_k;
    for (int k = 0; k < c->top_k; k++)
        if (world_live(step->world, rank, token, k) && world_owner(c, experts[k]) == step->rank)
            return 1;
    return 0;
}

/* Each token that has travelled here counts once, whether or not it has a slot. */
static void check_source_tokens(const Step *step) {
    int32_t *counts = calloc((size_t)step->world->c.ranks, sizeof(*counts));
    int is_told = tells_sources(step) && !step_is_latency(step);
    EpStatus status = ep_plan_source_tokens(step->handle, step->plan, NULL, counts);
    CHECK(status == (is_told ? EP_OK : EP_ERR_UNSUPPORTED), "%s", ep_last_error());
    for (int rank = 0; rank < step->world->c.ranks && status == EP_OK; rank++) {
        int expected = 0;
        for (int token = 0; token < step->world->rank[rank].tokens; token++)
            expected += travels(step, rank, token);
        CHECK(counts[rank] == expected, "rank %d: %d tokens instead of %d", rank, counts[rank],
              expected);
    }
    free(counts);
}

void step_check_sources(const Step *step) {
    const RankWorld *me = step_mine(step);
    /* more than the plan has */
    int64_t rows = (me->buffer_rows > me->recv_rows ? me->buffer_rows : me->recv_rows) + 3;
    int32_t *ranks = malloc((size_t)(3 * rows) * sizeof(*ranks)), *tokens = ranks + rows;
    int32_t *entries = tokens + rows;
    EpStatus expected = tells_sources(step) ? EP_OK : EP_ERR_UNSUPPORTED;
    EpStatus status = ep_plan_sources(step->handle, step->plan, NULL, rows, ranks, tokens);
    CHECK(status == expected, "%s", ep_last_error());
    check_sources(step, status == EP_OK ? rows : 0, ranks, tokens, NULL);
    status = ep_plan_entries(step->handle, step->plan, NULL, rows, ranks, tokens, entries);
    CHECK(status == expected, "%s", ep_last_error());
    check_sources(step, status == EP_OK ? rows : 0, ranks, tokens, entries);
    free(ranks);
    check_source_tokens(step);
}

void step_routed_new(const Step *step, StepRouted *r) {
    const Case *c = &step->world->c;
    const RankWorld *me = step_mine(step);
    int64_t totals[] = {me->recv_rows, me->needed_rows, me->dropped}, count = me->tokens;
    EpType type = c->index_type, other = type == EP_TYPE_INT32 ? EP_TYPE_INT64 : EP_TYPE_INT32;
    r->counts = plan_array(type, me->count, me->num_experts);
    r->padded = plan_array(other, me->padded, me->num_experts);
    /* every second seed passes offsets without their end */
    r->offsets = plan_array(type, me->offset, me->num_experts + (c->seed % 2 == 0));
    r->totals = plan_array(other, totals, 3);
    r->sources = plan_array(other, me->from, (int64_t)me->num_experts * c->ranks);
    r->sources.tensor = ep_tensor_2d(r->sources.got.data, other, me->num_experts, c->ranks);
    r->recv_rows = plan_array(type, &me->recv_rows, 1);
    r->needed_rows = plan_array(other, &me->needed_rows, 1);
    r->dropped_slots = plan_array(type, &me->dropped, 1);
    r->source_rows = plan_array(other, me->from_rows, c->ranks);
    r->tokens = plan_array(type, &count, 1);
    r->tokens.tensor.data = r->tokens.expected.data;
    r->index = index_image(step);
    r->topk_idx = ep_tensor_2d(me->rows ? r->index.data : NULL, type, me->rows, c->top_k);
}

/* Prepare with copies of the tensors that are cleared afterwards: the library may keep only data
 * pointers. */
void step_routed_prepare(const Step *step, StepRouted *r) {
    EpTensor counts = r->counts.tensor, padded = r->padded.tensor, offsets = r->offsets.tensor,
             totals = r->totals.tensor, sources = r->sources.tensor, tokens = r->tokens.tensor,
             topk_idx = r->topk_idx;
    EpTensor rows = r->recv_rows.tensor, needed = r->needed_rows.tensor,
             dropped = r->dropped_slots.tensor, by_source = r->source_rows.tensor;
    EpPlanTensors out = EP_PLAN_TENSORS_INIT;
    out.expert_counts = &counts, out.expert_padded = &padded;
    out.expert_offsets = &offsets, out.totals = &totals;
    out.recv_rows = &rows, out.needed_rows = &needed;
    out.dropped_slots = &dropped, out.source_rows = &by_source;
    out.source_counts = &sources;
    StepExtras n;
    step_extras_new(step, step_is_latency(step) ? 0 : COUNT_WAITS, 0, &n);
    CHECK_OK(ep_prepare_with(step->handle, step->plan, &topk_idx,
                             step->world->c.counted ? &tokens : NULL, NULL, &out, n.given));
    step_extras_check(step, &n, COUNTED_PREPARE);
    memset(&out, 0x77, sizeof(out));
    counts = padded = offsets = totals = sources = tokens = topk_idx = (EpTensor){0};
    rows = needed = dropped = by_source = (EpTensor){0};
}

/* Check the plan's outputs. Overwrite the indices first: a finished plan must not depend on
 * them. */
void step_routed_check(const Step *step, StepRouted *r) {
    memset(r->index.data, 0x77, r->index.bytes);
    plan_array_check(&r->counts, "expert_counts");
    plan_array_check(&r->padded, "expert_padded");
    plan_array_check(&r->offsets, "expert_offsets");
    plan_array_check(&r->totals, "totals");
    plan_array_check(&r->recv_rows, "recv_rows");
    plan_array_check(&r->needed_rows, "needed_rows");
    plan_array_check(&r->dropped_slots, "dropped_slots");
    plan_array_check(&r->source_rows, "source_rows");
    plan_array_check(&r->sources, "source_counts");
    image_free(&r->tokens.got);
    image_free(&r->tokens.expected);
    image_free(&r->index);
    step_check_info(step);
}

void step_numbers_new(const Step *step, StepRouted *r, EpPlanTensors *out) {
    step_routed_new(step, r);
    *out = (EpPlanTensors)EP_PLAN_TENSORS_INIT;
    out->expert_counts = &r->counts.tensor, out->expert_padded = &r->padded.tensor;
    out->expert_offsets = &r->offsets.tensor, out->totals = &r->totals.tensor;
    out->recv_rows = &r->recv_rows.tensor, out->needed_rows = &r->needed_rows.tensor;
    out->dropped_slots = &r->dropped_slots.tensor;
}

/* Counts by source are not asked for. */
void step_numbers_check(const Step *step, StepRouted *r) {
    memcpy(r->sources.got.data, r->sources.expected.data, r->sources.expected.bytes);
    memcpy(r->source_rows.got.data, r->source_rows.expected.data, r->source_rows.expected.bytes);
    step_routed_check(step, r);
}

void step_prepare(const Step *step) {
    StepRouted r;
    if (step_is_latency(step)) return;
    step_routed_new(step, &r);
    step_routed_prepare(step, &r);
    step_routed_check(step, &r);
}
