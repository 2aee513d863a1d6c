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

/* Every row's route, straight into its rank's window: lane k of the team has word k of each. `row`
 * is this lane's row's number among all of this rank's. */
__device__ __forceinline__ void send_routes(const EpPrepareArgs &a, const Lane *l, const Own &o,
                                            int row, int carries, int value) {
    unsigned left = __ballot_sync(~0u, carries) & team_lanes(l);
    while (__any_sync(~0u, left)) {
        int from = max(0, first_lane(left));
        int owner = __shfl_sync(~0u, o.owner, from), number = __shfl_sync(~0u, row, from);
        if (left && own_k(l) < a.top_k)
            ep_store_relaxed_sys32(l->ranks->out[owner] + (int64_t)number * a.top_k + own_k(l),
                                   (uint32_t)(o.owner == owner ? value : -1) + 2);
        left &= left - 1;
    }
}

__device__ __forceinline__ uint64_t *begins_of(const EpCudaGroup &g, int holder, int source,
                                               uint32_t epoch) {
    return ep_at<uint64_t>(g, holder, g.layout.begins) +
           ((int64_t)(epoch & 1) * g.size + source) * g.layout.max_tokens;
}

/* The lanes of this warp that are the first of their token for rank r: for the ranks that this lane
 * has, every 32nd. */
__device__ __forceinline__ void rows_by_rank(const Lane *l, const Own &o,
                                             unsigned rows[RANK_WORDS]) {
    int lane = threadIdx.x % 32;
    unsigned own = first_of_rows(l, o);
    unsigned left = __ballot_sync(~0u, o.owner >= 0 && first_lane(o.owners) == lane);
#pragma unroll
    for (int w = 0; w < RANK_WORDS; w++)
        rows[w] = 0;
    for (; left; left &= left - 1) {
        int from = first_lane(left), owner = __shfl_sync(~0u, o.owner, from);
        unsigned its = __shfl_sync(~0u, own, from);
#pragma unroll
        for (int w = 0; w < RANK_WORDS; w++)
            if (owner == w * 32 + lane) rows[w] = its;
    }
}

/* To each rank, how many rows come to it of the tokens before each of this warp's. */
__device__ __forceinline__ void send_begins(const EpPrepareArgs &a, const Lane *l, const Own &o,
                                            int first, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    unsigned rows[RANK_WORDS];
    int token = first + ((int)(threadIdx.x & ~31u) >> l->team_shift);
    if (token >= l->end) return;
    rows_by_rank(l, o, rows);
#pragma unroll
    for (int w = 0; w < RANK_WORDS; w++) {
        int r = w * 32 + (int)threadIdx.x % 32, column = g.num_experts + r;
        if (r >= g.size) continue;
        int before = l->base[column] + l->ranks->rows[r] + count_before(l, column);
        uint64_t *out = begins_of(g, r, g.rank, epoch) + token;
        for (int i = 0; i < 32 >> l->team_shift && token + i < l->end; i++)
            ep_store_relaxed_sys(
                out + i,
                ep_counter(epoch, before + __popc(rows[w] & lanes_below(i << l->team_shift))));
    }
}

/* A chunk's entries: into the plan, and to their owners. */
__device__ __forceinline__ void place_chunk(const EpPrepareArgs &a, const Lane *l, const Own &o,
                                            int first) {
    const EpCudaGroup &g = a.group;
    int token = own_token(l, first), k = own_k(l), row = 0;
    int flat = a.shape.layout == EP_LAYOUT_FLAT, slot = -1;
    if (o.owner >= 0) row = l->base[g.num_experts + o.owner] + o.row;
    int expert = o.expert < 0 ? -1 : o.expert - l->ranks->first[o.owner];
    if (!flat && expert >= 0) slot = l->base[o.expert] + o.before;
    if (slot >= slot_limit(a, expert)) slot = -1;
    int carries = find_carrier(l, o, slot) == (int)threadIdx.x % 32;
    send_routes(a, l, o, row, carries, flat ? expert : slot);
    if (flat && carries) slot = l->ranks->before[o.owner] + row;
    if (flat && carries && slot >= slot_limit(a, 0)) slot = -1;
    if (token < l->end && k < a.top_k)
        a.plan.entries[(int64_t)token * a.top_k + k] =
            EpEntry{slot, row, (int16_t)o.owner, (int16_t)expert, carries};
    if (carries && o.owner == g.rank) a.plan.own_token[row] = token;
}

/* All entries of the lane; those of the first chunk are numbered. */
__device__ void place_entries(const EpPrepareArgs &a, Lane *l, Own o, uint32_t epoch) {
    for (int first = l->begin; first < l->end; first += l->team_tokens) {
        int64_t index = load_index(a, l, first + l->team_tokens);
        place_chunk(a, l, o, first);
        send_begins(a, l, o, first, epoch);
        if (first + l->team_tokens >= l->end) return;
        advance(a, l);
        o = take_entry(a, l, index);
        mark_entries(a, l, &o);
        __syncthreads();
        number_entries(a, l, &o);
    }
}

/* ---- what the other ranks have sent -------------------------------------------------------- */

/* This block's share of so many words. */
__device__ __forceinline__ int share_of(const EpPrepareArgs &a, int words) {
    return (words + a.group.lanes - 1) / a.group.lanes;
}

/* A word of each of some sources' routes, at[j] of them, once they are there. */
__device__ __forceinline__ int await_routes(const EpPrepareArgs &a, int from,
                                            const int at[SOURCES_AT_ONCE], uint32_t epoch,
                                            uint32_t words[SOURCES_AT_ONCE]) {
    const EpCudaGroup &g = a.group;
    EpPatience patience = {0, 0};
    int late;
    do {
        late = -1;
#pragma unroll
        for (int j = 0; j < SOURCES_AT_ONCE; j++)
            words[j] = at[j] < 0
                           ? 1
                           : ep_load_relaxed_sys32(routes_of(a, g.rank, from + j, epoch) + at[j]);
#pragma unroll
        for (int j = 0; j < SOURCES_AT_ONCE; j++)
            if (!words[j]) late = from + j;
    } while (late >= 0 && ep_patience(g, &patience, EpAwaited{late, EP_PHASE_ROUTES, 0, 1, 0}));
    return late < 0;
}

/* This block's share of some sources' routes, from the window into the plan; 0 is left behind. */
__device__ int keep_some_routes(const EpPrepareArgs &a, const Lane *l, int from, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int begin[SOURCES_AT_ONCE], end[SOURCES_AT_ONCE], most = 0;
#pragma unroll
    for (int j = 0; j < SOURCES_AT_ONCE; j++) {
        int words = from + j < g.size ? l->ranks->coming[from + j] * a.top_k : 0;
        begin[j] = min(words, l->lane * share_of(a, words));
        end[j] = min(words, begin[j] + share_of(a, words));
        most = max(most, end[j] - begin[j]);
    }
    for (int i = threadIdx.x; i < most; i += THREADS) {
        uint32_t words[SOURCES_AT_ONCE];
        int at[SOURCES_AT_ONCE];
#pragma unroll
        for (int j = 0; j < SOURCES_AT_ONCE; j++)
            at[j] = begin[j] + i < end[j] ? begin[j] + i : -1;
        if (!await_routes(a, from, at, epoch, words)) return 0;
#pragma unroll
        for (int j = 0; j < SOURCES_AT_ONCE; j++) {
            if (at[j] < 0) continue;
            int64_t first = (int64_t)(from + j) * g.layout.max_tokens * a.top_k;
            a.plan.routes[first + at[j]] = (int32_t)(words[j] - 2);
            routes_of(a, g.rank, from + j, epoch)[at[j]] = 0;
        }
    }
    return 1;
}

__device__ __forceinline__ int await_begin(const EpCudaGroup &g, int source, int token,
                                           uint32_t epoch, int *begin) {
    const uint64_t *word = begins_of(g, g.rank, source, epoch) + token;
    EpPatience patience = {0, 0};
    uint64_t seen;
    while (!is_of(seen = ep_load_relaxed_sys(word), epoch))
        if (!ep_patience(g, &patience,
                         EpAwaited{source, EP_PHASE_ROUTES, token, epoch, (uint32_t)(seen >> 32)}))
            return 0;
    *begin = (int)seen;
    return 1;
}

/* And of where the rows of their tokens begin. Behind the last token are all rows. */
__device__ int keep_begins(const EpPrepareArgs &a, const Lane *l, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int share = share_of(a, g.layout.max_tokens + 1);
    for (int i = threadIdx.x; i < g.size * share; i += THREADS) {
        int source = i / share, token = l->lane * share + i % share;
        int tokens = l->ranks->tokens[source], begin = l->ranks->coming[source];
        if (token > tokens) continue;
        if (token < tokens && !await_begin(g, source, token, epoch, &begin)) return 0;
        a.plan.begins[(int64_t)source * (g.layout.max_tokens + 1) + token] = begin;
        if (token == tokens) a.plan.tokens[source] = tokens;
    }
    return 1;
}

__device__ void keep_routes(const EpPrepareArgs &a, const Lane *l, uint32_t epoch) {
    if (!keep_begins(a, l, epoch)) return;
    for (int from = 0; from < a.group.size; from += SOURCES_AT_ONCE)
        if (!keep_some_routes(a, l, from, epoch)) return;
}

#endif
