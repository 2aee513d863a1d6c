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

/* Every row's route, straight into its rank's window: lane k of the team has word k of each. */
__device__ __forceinline__ void send_routes(const EpPrepareArgs &a, const Lane *l, const Own &o,
                                            int carries, int value) {
    unsigned left = __ballot_sync(~0u, carries) & team_lanes(l);
    while (__any_sync(~0u, left)) {
        int from = max(0, first_lane(left));
        int owner = __shfl_sync(~0u, o.owner, from), row = __shfl_sync(~0u, o.row, from);
        if (left && own_k(l) < a.top_k)
            ep_store_relaxed_sys32(l->ranks->out[owner] + (int64_t)row * a.top_k + own_k(l),
                                   (uint32_t)(o.owner == owner ? value : -1) + 2);
        left &= left - 1;
    }
}

/* A chunk's entries: into the plan, and to their owners. */
__device__ __forceinline__ void place_chunk(const EpPrepareArgs &a, const Lane *l, const Own &o,
                                            int first) {
    const EpCudaGroup &g = a.group;
    int token = own_token(l, first), k = own_k(l);
    int flat = a.shape.layout == EP_LAYOUT_FLAT, slot = -1;
    int expert = o.expert < 0 ? -1 : o.expert - l->ranks->first[o.owner];
    if (!flat && expert >= 0) slot = l->base[o.expert] + o.before;
    if (slot >= slot_limit(a, expert)) slot = -1;
    int carries = find_carrier(l, o, slot) == (int)threadIdx.x % 32;
    send_routes(a, l, o, carries, flat ? expert : slot);
    if (flat && carries) slot = l->base[g.num_experts + o.owner] + o.row;
    if (flat && carries && slot >= slot_limit(a, 0)) slot = -1;
    if (token < l->end && k < a.top_k)
        a.plan.entries[(int64_t)token * a.top_k + k] =
            EpEntry{slot, o.row, (int16_t)o.owner, (int16_t)expert, carries};
    if (carries && o.owner == g.rank)
        a.plan.own_token[(int64_t)l->lane * g.layout.lane_tokens + o.row] = token;
}

/* All entries of the lane; those of the first chunk are numbered. */
__device__ void place_entries(const EpPrepareArgs &a, Lane *l, Own o) {
    for (int first = l->begin; first < l->end; first += l->team_tokens) {
        int64_t index = load_index(a, l, first + l->team_tokens);
        place_chunk(a, l, o, first);
        if (first + l->team_tokens >= l->end) return;
        advance(a, l);
        o = take_entry(a, l, index);
        mark_entries(a, l, &o);
        __syncthreads();
        number_entries(a, l, &o);
    }
}

/* The counter says how many rows there are for each rank, before they are. */
__device__ void announce_routes(const EpPrepareArgs &a, const Lane *l, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    for (int r = THREADS - 1 - threadIdx.x; r < g.size; r += THREADS) {
        a.plan.send_rows[r * g.layout.lanes + l->lane] = l->ranks->sent[r];
        ep_store_relaxed_sys(ep_head(g, r, g.rank, l->lane), ep_counter(epoch, l->ranks->sent[r]));
    }
}

/* Word i of the routes from some sources, once they are there, and how many there are of each. */
__device__ __forceinline__ int await_routes(const EpPrepareArgs &a, const Lane *l, int from, int i,
                                            uint32_t epoch, uint32_t words[SOURCES_AT_ONCE],
                                            int counts[SOURCES_AT_ONCE]) {
    const EpCudaGroup &g = a.group;
    EpPatience patience = {0, 0};
    uint64_t heads[SOURCES_AT_ONCE];
    int late;
    uint32_t seen;
    do {
#pragma unroll
        for (int j = 0; j < SOURCES_AT_ONCE; j++) {
            heads[j] = ep_counter(epoch, 0), words[j] = 0;
            if (from + j >= g.size) continue;
            heads[j] = ep_load_relaxed_sys(ep_head(g, g.rank, from + j, l->lane));
            if (i < g.layout.lane_tokens * a.top_k)
                words[j] =
                    ep_load_relaxed_sys32(routes_of(a, g.rank, from + j, l->lane, epoch) + i);
        }
        late = -1, seen = 0;
#pragma unroll
        for (int j = 0; j < SOURCES_AT_ONCE; j++) {
            counts[j] = (int)(uint32_t)heads[j] * a.top_k;
            if (!is_of(heads[j], epoch) || (i < counts[j] && !words[j]))
                late = from + j, seen = (uint32_t)(heads[j] >> 32);
        }
    } while (late >= 0 &&
             ep_patience(g, &patience, EpAwaited{late, EP_PHASE_ROUTES, l->lane, epoch, seen}));
    return late < 0;
}

/* This lane's routes of some sources, from the window into the plan; 0 is left behind. */
__device__ int keep_some_routes(const EpPrepareArgs &a, const Lane *l, int from, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int64_t stride = (int64_t)g.layout.lane_tokens * a.top_k;
    for (int i = threadIdx.x, most = 1; i < most || i < THREADS; i += THREADS) {
        uint32_t words[SOURCES_AT_ONCE];
        int counts[SOURCES_AT_ONCE];
        if (!await_routes(a, l, from, i, epoch, words, counts)) return 0;
#pragma unroll
        for (int j = 0; j < SOURCES_AT_ONCE; j++) {
            if (from + j >= g.size) continue;
            int ring = (from + j) * g.layout.lanes + l->lane;
            most = max(most, counts[j]);
            if (i == 0) a.plan.lane_rows[ring] = counts[j] / a.top_k;
            if (i >= counts[j]) continue;
            a.plan.routes[ring * stride + i] = (int32_t)(words[j] - 2);
            *(routes_of(a, g.rank, from + j, l->lane, epoch) + i) = 0;
        }
    }
    return 1;
}

__device__ void keep_routes(const EpPrepareArgs &a, const Lane *l, uint32_t epoch) {
    for (int from = 0; from < a.group.size; from += SOURCES_AT_ONCE)
        if (!keep_some_routes(a, l, from, epoch)) return;
}

#endif
