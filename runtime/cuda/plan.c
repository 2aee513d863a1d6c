/* SPDX-License-Identifier: Apache-2.0 */
/* Locates the arrays of a plan, and of its chunk plans. */
#include "runtime/cuda/plan.h"

/* Latency mode has none on several nodes either: a row takes the way of its own record. */
static int has_chunk_plans(const EpPlanShape *s) {
    return s->nodes.nodes > 1 && s->mode != EP_MODE_LATENCY;
}

EpRouteSizes ep_route_sizes(const EpPlanShape *s) {
    int64_t rows = (int64_t)s->num_ranks * s->max_tokens, capacity = s->capacity;
    int has_rows = s->has_rows, several = has_chunk_plans(s);
    if (s->mode == EP_MODE_LATENCY || (several && !has_rows))
        return (EpRouteSizes){EP_ROUTES_DENSE, 0};
    if (has_rows)
        return (EpRouteSizes){several ? EP_ROUTES_LISTED : EP_ROUTES_FLAT,
                              (int32_t)(capacity ? ep_min(rows, capacity) : rows)};
    int64_t dense = rows * s->max_top_k * (int64_t)sizeof(int32_t);
    int64_t chained = rows * (int64_t)sizeof(EpChain) + capacity * (int64_t)sizeof(int32_t);
    if (!capacity || 2 * chained > dense) return (EpRouteSizes){EP_ROUTES_DENSE, 0};
    return (EpRouteSizes){EP_ROUTES_CHAINED, (int32_t)capacity};
}

#define TAKE(field, count) plan->field = ep_arena_array(&arena, count, sizeof(*plan->field))

/* The arrays of tokens and rows, of `ranks` ranks with up to `tokens` tokens. `messages`: that a
 * chunk plan has to other nodes. */
static void take_rows(const EpPlanShape *s, int64_t ranks, int64_t tokens, int64_t messages,
                      EpArena *at, EpCudaPlan *plan) {
    EpArena arena = *at;
    int64_t rows = ranks * tokens, k = s->max_top_k;
    TAKE(entries, tokens * k);
    TAKE(own_token, tokens);
    TAKE(tokens, ranks);
    TAKE(begins, ranks * (tokens + 1));
    if (plan->sizes.form == EP_ROUTES_DENSE) TAKE(routes, rows * k);
    TAKE(chains, plan->sizes.form == EP_ROUTES_CHAINED ? rows : 0);
    TAKE(row_slots, plan->sizes.form == EP_ROUTES_LISTED ? rows : 0);
    TAKE(rows_to, ranks + messages);
    TAKE(rows_from, ranks);
    *at = arena;
}

static void take_chunk_rows(const EpPlanShape *s, EpChunkPlan kind, EpArena *at, EpCudaPlan *plan) {
    int64_t messages = kind == EP_CHUNK_OWN ? s->nodes.nodes - 1 : s->nodes.sources;
    take_rows(s, s->nodes.ranks, ep_chunk_plan_tokens(s, kind), messages, at, plan);
}

static int64_t chunk_plan_bytes(const EpPlanShape *s, EpChunkPlan kind) {
    EpArena arena = {.unit = 128};
    EpCudaPlan plan = {.sizes = ep_route_sizes(s)};
    take_chunk_rows(s, kind, &arena, &plan);
    return arena.bytes;
}

int64_t ep_cuda_plan_map(const EpPlanShape *s, void *memory, EpCudaPlan *plan) {
    EpArena arena = {.base = (uintptr_t)memory, .unit = 128};
    int64_t ranks = s->num_ranks, local = s->num_local, k = s->max_top_k;
    *plan = (EpCudaPlan){.sizes = ep_route_sizes(s)};
    int64_t slots = plan->sizes.slots;
    TAKE(header, 1);
    TAKE(expert_counts, local);
    TAKE(expert_padded, local);
    TAKE(expert_offsets, local + 1);
    TAKE(flat_begin, ranks);
    if (!has_chunk_plans(s)) take_rows(s, ranks, s->max_tokens, 0, &arena, plan);
    if (plan->sizes.form == EP_ROUTES_FLAT || plan->sizes.form == EP_ROUTES_LISTED)
        TAKE(routes, slots * k);
    TAKE(next, plan->sizes.form == EP_ROUTES_CHAINED ? slots : 0);
    int64_t places = s->nodes.limit ? s->nodes.limit : s->max_tokens;
    if (s->mode == EP_MODE_LATENCY) TAKE(relay_owners, (s->nodes.nodes - 1) * places * k);
    if (has_chunk_plans(s)) {
        plan->chunk_plan_bytes[EP_CHUNK_OWN] = chunk_plan_bytes(s, EP_CHUNK_OWN);
        plan->chunk_plan_bytes[EP_CHUNK_RELAYED] = chunk_plan_bytes(s, EP_CHUNK_RELAYED);
        int64_t both =
            plan->chunk_plan_bytes[EP_CHUNK_OWN] + plan->chunk_plan_bytes[EP_CHUNK_RELAYED];
        TAKE(chunk_plans, ep_plan_chunks(s) * both);
    }
    TAKE(tail, 1);
    return arena.bytes;
}

#undef TAKE

EpCudaPlan ep_cuda_chunk_plan(const EpPlanShape *s, const EpCudaPlan *whole, EpChunkPlan kind,
                              int32_t chunk) {
    const int64_t *bytes = whole->chunk_plan_bytes;
    EpCudaPlan plan = *whole;
    int64_t at = chunk * (bytes[EP_CHUNK_OWN] + bytes[EP_CHUNK_RELAYED]);
    if (kind == EP_CHUNK_RELAYED) at += bytes[EP_CHUNK_OWN];
    EpArena arena = {.base = (uintptr_t)whole->chunk_plans + (uintptr_t)at, .unit = 128};
    take_chunk_rows(s, kind, &arena, &plan);
    return plan;
}

int64_t ep_info_words(const EpPlanShape *s) {
    const EpNodeSizes *n = &s->nodes;
    int64_t several =
        has_chunk_plans(s) ? 1 + (int64_t)ep_plan_chunks(s) * (n->nodes - 1 + n->sources) : 0;
    return ep_info_chunks(s) + several;
}
