/* SPDX-License-Identifier: Apache-2.0 */
/* What the library tells of a step's plan: ep_handle_info and the sources of rows. */
#include "tests/cases/step.h"
#include "tests/oracle/expect.h"

EpGroupInfo group_info(const EpGroup *group) {
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    CHECK_OK(ep_group_query(group, &info));
    return info;
}

EpHandleInfo handle_info(const EpHandle *handle) {
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    CHECK_OK(ep_handle_info(handle, &info));
    return info;
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
        sent += expect_rows(step->world, step->rank, peer, 0);
        received += expect_rows(step->world, peer, step->rank, 0);
    }
    int64_t local = expect_rows(step->world, step->rank, step->rank, 0);
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
    EpGroupInfo info = group_info(step->group);
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
    const int64_t *experts = step->world->rank[rank].taken + (int64_t)token * c->top_k;
    for (int k = 0; k < c->top_k; k++)
        if (world_live(step->world, rank, token, k) && world_owner(c, experts[k]) == step->rank)
            return 1;
    return 0;
}

/* Each token that has travelled here counts once, whether or not it has a slot. */
static void check_source_tokens(const Step *step) {
    int32_t *counts = calloc((size_t)step->world->c.ranks, sizeof(*counts));
    int is_told = tells_sources(step) && step->world->c.mode != EP_MODE_LATENCY;
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
