/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PREPARE_ENTRIES_CUH
#define EP_HANDLES_PREPARE_ENTRIES_CUH

/**
 * Entries of ep_prepare: their slots and rows, into the plan and to the ranks that will receive
 * them.
 */

#include "handles/prepare_slabs.cuh"

/* Which entry of each row carries it: the first that has a slot, if any. */
__device__ __forceinline__ int find_carrier(const Lane *l, const Own &o, int slot) {
    unsigned entries = o.owners & team_lanes(l);
    unsigned kept = entries & __ballot_sync(~0u, slot >= 0);
    return first_lane(kept ? kept : entries);
}

/* A row for each team: that of the lanes `its`, where they are any. Its route is at the lanes'
 * `to`, straight in its rank's window; lane k of the team has word k of it. */
__device__ __forceinline__ void send_route(const EpPrepareArgs &a, const Lane *l, unsigned its,
                                           int is_own, const uint32_t *to, int value) {
    int k = own_k(l);
    uint64_t route = __shfl_sync(~0u, (unsigned long long)to, max(0, last_lane(its)));
    if (its && k < a.top_k)
        ep_store_relaxed_sys32((uint32_t *)route + k, (uint32_t)(is_own ? value : -1) + 2);
}

#define RANKS_IN_TURN 8

/* The routes of all rows. Those of neighbouring tokens to one rank lie side by side, and are stored
 * at once where ranks have their turn; many ranks would have it in vain. */
__device__ __forceinline__ void send_routes(const EpPrepareArgs &a, const Lane *l, const Own &o,
                                            const uint32_t *to, int value) {
    if (a.group.size <= RANKS_IN_TURN) {
#pragma unroll 1
        for (int r = 0; r < a.group.size; r++) {
            unsigned its = __ballot_sync(~0u, o.owner == r) & team_lanes(l);
            send_route(a, l, its, o.owner == r, to, value);
        }
        return;
    }
    unsigned left = o.firsts & team_lanes(l);
#pragma unroll 1
    for (; __any_sync(~0u, left); left &= left - 1) {
        unsigned its = left & -left;
        send_route(a, l, its, (o.owners & its) != 0, to, value);
    }
}

/* The lanes of this warp that stand for rows to rank r, of which each lane has one of its own. */
__device__ __forceinline__ unsigned rows_to(const Own &o, int r) {
    int lane = threadIdx.x % 32;
    unsigned rows = 0;
    unsigned left = __ballot_sync(~0u, o.owner >= 0 && first_lane(o.owners) == lane);
#pragma unroll 1
    for (; left; left &= left - 1) {
        int from = first_lane(left), owner = __shfl_sync(~0u, o.owner, from);
        unsigned its = __shfl_sync(~0u, o.owners, from);
        if (owner == r) rows = its & o.firsts;
    }
    return rows;
}

/* How many rows come to rank r of the tokens before this warp's; a negative number: that is not to
 * be had. */
__device__ __forceinline__ int rows_before(const EpPrepareArgs &a, const Lane *l, int first, int r,
                                           uint32_t epoch) {
    int column = a.group.num_experts + r, lanes;
    if (first != l->begin)
        lanes = l->base[column];
    else if (!await_before(a.group, l, column, epoch, 0, &lanes))
        return -1;
    return lanes + l->ranks->rows[r] + count_before(l, column, warps_before());
}

/* To 32 ranks from rank `at` on, `before` and `rows` being those of each lane's: how many rows come
 * of the tokens before each of this warp's, of which `token` is the first. What a rank is told lies
 * side by side, and is stored at once. */
__device__ __forceinline__ void send_some_begins(const EpPrepareArgs &a, const Lane *l, int at,
                                                 int token, int before, unsigned rows,
                                                 uint32_t epoch) {
    int lane = threadIdx.x % 32, tokens_shift = 5 - l->team_shift;
    int i = lane & ((1 << tokens_shift) - 1);
#pragma unroll 1
    for (int from = 0; from < 32 && at + from < a.group.size; from += l->team) {
        int of = from + (lane >> tokens_shift);
        int begin = __shfl_sync(~0u, before, of);
        unsigned its = __shfl_sync(~0u, rows, of) & lanes_below(i << l->team_shift);
        if (at + of < a.group.size && token + i < l->end)
            ep_store_relaxed_sys(l->ranks->begins[epoch & 1][at + of] + token + i,
                                 ep_counter(epoch, (uint32_t)(begin + __popc(its))));
    }
}

/* And to all of them. */
__device__ __forceinline__ int send_begins(const EpPrepareArgs &a, const Lane *l, const Own &o,
                                           int first, uint32_t epoch) {
    int token = first + ((int)(threadIdx.x & ~31u) >> l->team_shift);
    if (token >= l->end) return 1;
#pragma unroll 1
    for (int at = 0; at < a.group.size; at += 32) {
        int r = at + (int)threadIdx.x % 32;
        unsigned rows = rows_to(o, r);
        int before = r < a.group.size ? rows_before(a, l, first, r, epoch) : 0;
        if (!__all_sync(~0u, before >= 0)) return 0;
        send_some_begins(a, l, at, token, before, rows, epoch);
    }
    return 1;
}

/* At once. Who reads entries waits for less of them if it does not: so the type is not aligned to
 * this. */
__device__ __forceinline__ void store_entry(const EpPrepareArgs &a, int64_t i, const EpEntry &e) {
    static_assert(sizeof(EpEntry) == sizeof(uint4), "as one");
    *((uint4 *)a.plan.entries + i) =
        make_uint4((uint32_t)e.slot, (uint32_t)e.row,
                   (uint16_t)e.owner | (uint32_t)(uint16_t)e.expert << 16, (uint32_t)e.carrier);
}

/* A chunk's entries: into the plan, and to their owners. */
template <int FLAT>
__device__ __forceinline__ void place_chunk(const EpPrepareArgs &a, const Lane *l, const Own &o,
                                            int first, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int token = own_token(l, first), k = own_k(l), row = 0, slot = -1, expert = -1;
    const uint32_t *to = NULL;
    if (o.owner >= 0) {
        row = l->base[g.num_experts + o.owner] + o.row;
        to = l->ranks->routes[epoch & 1][o.owner] + (int64_t)row * a.top_k;
        expert = o.expert - ep_owner_first(&a.owners, o.owner);
        if (!FLAT) slot = l->base[o.expert] + o.before;
    }
    if (slot >= slot_limit(a, expert)) slot = -1;
    send_routes(a, l, o, to, FLAT ? expert : slot);
    int carries = find_carrier(l, o, slot) == (int)threadIdx.x % 32;
    if (FLAT && carries) slot = l->ranks->before[o.owner] + row;
    if (FLAT && carries && slot >= slot_limit(a, 0)) slot = -1;
    if (token < l->end && k < a.top_k)
        store_entry(a, (int64_t)token * a.top_k + k,
                    EpEntry{slot, row, (int16_t)o.owner, (int16_t)expert, carries});
    if (carries && o.owner == g.rank) a.plan.own_token[row] = token;
}

/* All entries of the lane; those of the first chunk are numbered, and their begins sent. */
template <int FLAT>
__device__ __forceinline__ void place_entries(const EpPrepareArgs &a, Lane *l, Own o,
                                              uint32_t epoch) {
#pragma unroll 1
    for (int first = l->begin; first < l->end; first += l->team_tokens) {
        place_chunk<FLAT>(a, l, o, first, epoch);
        if (first != l->begin) send_begins(a, l, o, first, epoch);
        if (first + l->team_tokens >= l->end) return;
        Index index = load_own_index(a, l, first + l->team_tokens);
        advance(a, l);
        o = take_entry(a, index);
        mark_entries(a, l, &o);
        __syncthreads();
        number_entries(a, l, &o);
    }
}

/* ---- what the other ranks have sent -------------------------------------------------------- */

/* Words that are kept are divided among all threads of all lanes, 32 to a warp: this one's first.
 */
__device__ __forceinline__ int first_share(const EpPrepareArgs &a, const Lane *l) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return (warp * a.group.lanes + l->lane) * 32 + lane;
}

__device__ __forceinline__ int next_share(const EpPrepareArgs &a) {
    return a.group.lanes * THREADS;
}

/* A word of each of some sources' routes, the first of which are at `routes`, once they are there:
 * of source j if i < end[j]. */
__device__ __forceinline__ int await_routes(const EpPrepareArgs &a, int from,
                                            const uint32_t *routes, int i,
                                            const int end[SOURCES_AT_ONCE],
                                            uint32_t words[SOURCES_AT_ONCE]) {
    int64_t stride = (int64_t)a.group.layout.max_tokens * a.top_k;
    EpPatience patience = {0, 0};
    int late;
    do {
        late = -1;
#pragma unroll
        for (int j = 0; j < SOURCES_AT_ONCE; j++)
            words[j] = i < end[j] ? ep_load_relaxed_sys32(routes + j * stride + i) : 1;
#pragma unroll
        for (int j = 0; j < SOURCES_AT_ONCE; j++)
            if (!words[j]) late = from + j;
    } while (late >= 0 &&
             ep_patience(a.group, &patience, EpAwaited{late, EP_PHASE_ROUTES, 0, 1, 0}));
    return late < 0;
}

/* This block's share of some sources' routes, from the window into the plan; 0 is left behind. */
__device__ __forceinline__ int keep_some_routes(const EpPrepareArgs &a, const Lane *l, int from,
                                                uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int64_t stride = (int64_t)g.layout.max_tokens * a.top_k;
    uint32_t *routes = routes_of(a, g.rank, from, epoch);
    int32_t *kept = a.plan.routes + from * stride;
    int end[SOURCES_AT_ONCE], most = 0;
#pragma unroll
    for (int j = 0; j < SOURCES_AT_ONCE; j++) {
        end[j] = from + j < g.size ? l->ranks->coming[from + j] * a.top_k : 0;
        most = max(most, end[j]);
    }
#pragma unroll 1
    for (int i = first_share(a, l); i < most; i += next_share(a)) {
        uint32_t words[SOURCES_AT_ONCE];
        if (!await_routes(a, from, routes, i, end, words)) return 0;
#pragma unroll
        for (int j = 0; j < SOURCES_AT_ONCE; j++) {
            if (i >= end[j]) continue;
            kept[j * stride + i] = (int32_t)(words[j] - 2);
            routes[j * stride + i] = 0;
        }
    }
    return 1;
}

/* Where the rows of a token of some sources begin: of source j if token < tokens[j]. */
__device__ __forceinline__ int await_begins(const EpCudaGroup &g, int from, int token,
                                            const int tokens[SOURCES_AT_ONCE], uint32_t epoch,
                                            uint64_t begins[SOURCES_AT_ONCE]) {
    const uint64_t *words = begins_of(g, g.rank, from, epoch) + token;
    EpPatience patience = {0, 0};
    int late;
    uint32_t seen;
    do {
        late = -1, seen = 0;
#pragma unroll
        for (int j = 0; j < SOURCES_AT_ONCE; j++)
            begins[j] = token < tokens[j]
                            ? ep_load_relaxed_sys(words + (int64_t)j * g.layout.max_tokens)
                            : ep_counter(epoch, 0);
#pragma unroll
        for (int j = 0; j < SOURCES_AT_ONCE; j++)
            if (!is_of(begins[j], epoch)) late = from + j, seen = (uint32_t)(begins[j] >> 32);
    } while (late >= 0 &&
             ep_patience(g, &patience, EpAwaited{late, EP_PHASE_ROUTES, token, epoch, seen}));
    return late < 0;
}

/* And of where the rows of their tokens begin. Behind the last token are all rows. */
__device__ __forceinline__ int keep_some_begins(const EpPrepareArgs &a, const Lane *l, int from,
                                                uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int tokens[SOURCES_AT_ONCE], most = -1;
#pragma unroll
    for (int j = 0; j < SOURCES_AT_ONCE; j++) {
        tokens[j] = from + j < g.size ? l->ranks->tokens[from + j] : -1;
        most = max(most, tokens[j]);
    }
#pragma unroll 1
    for (int token = first_share(a, l); token <= most; token += next_share(a)) {
        uint64_t begins[SOURCES_AT_ONCE];
        if (!await_begins(g, from, token, tokens, epoch, begins)) return 0;
#pragma unroll
        for (int j = 0; j < SOURCES_AT_ONCE; j++) {
            if (token > tokens[j]) continue;
            int begin = token < tokens[j] ? (int)begins[j] : l->ranks->coming[from + j];
            a.plan.begins[(int64_t)(from + j) * (g.layout.max_tokens + 1) + token] = begin;
            if (token == tokens[j]) a.plan.tokens[from + j] = token;
        }
    }
    return 1;
}

/* Begins have been sent first. */
__device__ __forceinline__ void keep_routes(const EpPrepareArgs &a, const Lane *l, uint32_t epoch) {
#pragma unroll 1
    for (int from = 0; from < a.group.size; from += SOURCES_AT_ONCE)
        if (!keep_some_begins(a, l, from, epoch) || !keep_some_routes(a, l, from, epoch)) return;
}

#endif
