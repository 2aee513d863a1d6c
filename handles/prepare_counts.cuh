/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PREPARE_COUNTS_CUH
#define EP_HANDLES_PREPARE_COUNTS_CUH

/**
 * Counts of ep_prepare: of a lane, over the lanes of a rank, over all ranks.
 */

#include "handles/prepare_lane.cuh"

/* In `holder`'s window, for the rows of `source`. */
__device__ __forceinline__ uint32_t *routes_of(const EpPrepareArgs &a, int holder, int source,
                                               uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int64_t index = ((int64_t)(epoch & 1) * g.size + source) * g.layout.max_tokens;
    return ep_at<uint32_t>(g, holder, g.layout.routes) + index * a.top_k;
}

/* What a block looks up, and a clear table. */
__device__ void fill_tables(const EpPrepareArgs &a, Lane *l, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    EpPlacement placement = {g.num_experts, g.size};
    for (int c = threadIdx.x; c < l->columns; c += THREADS)
        clear_column(l, c);
    for (int e = threadIdx.x; e < g.num_experts; e += THREADS)
        l->owner[e] = (uint8_t)ep_placement_owner(&placement, e);
    for (int r = THREADS - 1 - threadIdx.x; r <= g.size; r += THREADS)
        l->ranks->first[r] = ep_placement_first(&placement, r);
    for (int r = THREADS - 1 - threadIdx.x; r < g.size; r += THREADS) {
        l->ranks->rows[r] = 0;
        l->ranks->out[r] = routes_of(a, r, g.rank, epoch);
    }
}

/* Entries of the chunks behind the first. */
__device__ void count_more(const EpPrepareArgs &a, Lane *l) {
    int64_t next = load_index(a, l, l->begin + l->team_tokens);
    __syncthreads();
    for (int first = l->begin + l->team_tokens; first < l->end; first += l->team_tokens) {
        int64_t index = next;
        next = load_index(a, l, first + l->team_tokens);
        Own o = take_entry(a, l, index);
        check_index(a, l, first, index);
        unsigned rows = first_of_rows(l, o);
        if (o.expert >= 0) atomicAdd(&l->base[o.expert], 1);
        if (first_lane(o.owners) == (int)threadIdx.x % 32)
            atomicAdd(&l->base[a.group.num_experts + o.owner], __popc(rows));
    }
    __syncthreads();
}

__device__ __forceinline__ uint64_t *lane_counts_of(const EpCudaGroup &g, int lane) {
    return g.lane_counts + (int64_t)lane * EP_COUNT_STRIDE(g.num_experts, g.size);
}

/* Entries of this lane for each expert, and its rows to each rank, for all blocks to see. The first
 * chunk, which is returned, stays in the table; base is 0. */
__device__ Own count_entries(const EpPrepareArgs &a, Lane *l, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int64_t index = load_index(a, l, l->begin);
    fill_tables(a, l, epoch);
    __syncthreads();
    Own o = take_entry(a, l, index);
    check_index(a, l, l->begin, index);
    mark_entries(a, l, &o);
    __syncthreads();
    for (int c = threadIdx.x; c < l->columns; c += THREADS)
        l->base[c] = count_column(l, c);
    if (l->begin + l->team_tokens < l->end) count_more(a, l);
    for (int c = threadIdx.x; c < EP_COUNT_STRIDE(g.num_experts, g.size); c += THREADS) {
        int count = c < l->columns ? l->base[c] : c == l->columns ? l->end - l->begin : 0;
        ep_store_relaxed_gpu(lane_counts_of(g, l->lane) + c, ep_counter(epoch, (uint32_t)count));
        if (c < l->columns) l->base[c] = 0;
    }
    __syncthreads();
    return o;
}

__device__ __forceinline__ uint64_t *counts_of(const EpCudaGroup &g, int holder, int source,
                                               uint32_t epoch) {
    return ep_at<uint64_t>(g, holder, g.layout.counts) +
           ((int64_t)(epoch & 1) * g.size + source) * EP_COUNT_WORDS(g.num_experts, g.size);
}

__device__ __forceinline__ int is_of(uint64_t word, uint32_t epoch) {
    return (uint32_t)(word >> 32) == epoch;
}

__device__ __forceinline__ int patient_with_grid(const EpCudaGroup &g, EpPatience *patience,
                                                 const Lane *l, uint32_t epoch) {
    return ep_patience(g, patience, EpAwaited{g.rank, EP_PHASE_GRID, 0, epoch, epoch - 1});
}

/* Nothing is ordered behind it. */
__device__ void announce_arrivals(const EpCudaGroup &g, uint32_t epoch) {
    for (int r = THREADS - 1 - threadIdx.x; r < g.size; r += THREADS)
        ep_announce_arrival(g, r, epoch, g.facts);
}

/* Four columns over all lanes, two for each thread of the warp. */
__device__ __forceinline__ int sum_lanes(const EpCudaGroup &g, const Lane *l, int column,
                                         uint32_t epoch, int sums[4]) {
    static_assert(EP_MAX_LANES <= 2 * 32, "two lanes for each thread");
    EpPatience patience = {0, 0};
    int ready, lane = threadIdx.x % 32;
    do {
        ulonglong2 x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int from = lane + i / 2 * 32;
            x[i].x = x[i].y = ep_counter(epoch, 0);
            if (from < g.lanes)
                x[i] = ep_load_relaxed_gpu_pair(lane_counts_of(g, from) + column + i % 2 * 2);
        }
        ready = 1;
#pragma unroll
        for (int i = 0; i < 4; i++)
            ready = ready && is_of(x[i].x, epoch) && is_of(x[i].y, epoch);
        sums[0] = (int)x[0].x + (int)x[2].x, sums[1] = (int)x[0].y + (int)x[2].y;
        sums[2] = (int)x[1].x + (int)x[3].x, sums[3] = (int)x[1].y + (int)x[3].y;
    } while (!ready && patient_with_grid(g, &patience, l, epoch));
    for (int i = 0; i < 4; i++)
        sums[i] = __reduce_add_sync(~0u, sums[i]);
    return __all_sync(~0u, ready);
}

/* Sums over all lanes go to all ranks: each warp has four columns, if there are so many. */
__device__ int share_counts(const EpPrepareArgs &a, const Lane *l, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int lane = threadIdx.x % 32, group = l->lane + g.lanes * ((int)threadIdx.x / 32);
    for (; group * 4 <= l->columns; group += g.lanes * WARPS) {
        int sums[4];
        if (!sum_lanes(g, l, group * 4, epoch, sums)) return 0;
        int column = group * 4 + lane % 4;
        int sum = lane & 2 ? (lane & 1 ? sums[3] : sums[2]) : (lane & 1 ? sums[1] : sums[0]);
        for (int r = lane / 4; r < g.size && column <= l->columns; r += 8)
            ep_store_relaxed_sys(counts_of(g, r, g.rank, epoch) + column,
                                 ep_counter(epoch, (uint32_t)sum));
    }
    return 1;
}

#define LANES_AT_ONCE 4

/* Two columns over some lanes, every `step`th from `from` to before this one, into base. */
__device__ __forceinline__ int add_pair(const EpCudaGroup &g, Lane *l, int column, int from,
                                        int step, uint32_t epoch) {
    int64_t stride = (int64_t)step * EP_COUNT_STRIDE(g.num_experts, g.size);
    const uint64_t *words = lane_counts_of(g, from) + column;
    int left = l->lane - from, sum, next, ready;
    EpPatience patience = {0, 0};
    do {
        ulonglong2 x[LANES_AT_ONCE];
#pragma unroll
        for (int i = 0; i < LANES_AT_ONCE; i++) {
            x[i].x = x[i].y = ep_counter(epoch, 0);
            if (i * step < left) x[i] = ep_load_relaxed_gpu_pair(words + i * stride);
        }
        ready = 1, sum = next = 0;
#pragma unroll
        for (int i = 0; i < LANES_AT_ONCE; i++) {
            ready = ready && is_of(x[i].x, epoch) && is_of(x[i].y, epoch);
            sum += (int)x[i].x, next += (int)x[i].y;
        }
    } while (!ready && patient_with_grid(g, &patience, l, epoch));
    atomicAdd(&l->base[column], sum);
    if (column + 1 < l->columns) atomicAdd(&l->base[column + 1], next);
    return ready;
}

/* Counts of the lanes before this one, into base. */
__device__ int add_lanes(const EpPrepareArgs &a, Lane *l, uint32_t epoch) {
    int pairs = (l->columns + 1) / 2, parts = max(1, THREADS / pairs);
    int part = (int)threadIdx.x / pairs, alive = 1;
    if (part >= parts) return 1;
#pragma unroll 1
    for (int p = (int)threadIdx.x - part * pairs; p < pairs; p += THREADS)
#pragma unroll 1
        for (int from = part; from < l->lane && alive; from += LANES_AT_ONCE * parts)
            alive = add_pair(a.group, l, 2 * p, from, parts, epoch);
    return alive;
}

#define SOURCES_AT_ONCE 4

/* Counts of the ranks before this one, entries into base too; of all ranks, into total. */
__device__ int add_sources(const EpPrepareArgs &a, Lane *l, int column, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int before = 0, all = 0;
    for (int from = 0; from < g.size; from += SOURCES_AT_ONCE) {
        EpPatience patience = {0, 0};
        uint64_t x[SOURCES_AT_ONCE];
        int late;
        uint32_t seen;
        do {
#pragma unroll
            for (int i = 0; i < SOURCES_AT_ONCE; i++) {
                x[i] = ep_counter(epoch, 0);
                if (from + i < g.size)
                    x[i] = ep_load_relaxed_sys(counts_of(g, g.rank, from + i, epoch) + column);
            }
            late = -1, seen = 0;
#pragma unroll
            for (int i = 0; i < SOURCES_AT_ONCE; i++)
                if (!is_of(x[i], epoch)) late = from + i, seen = (uint32_t)(x[i] >> 32);
        } while (late >= 0 &&
                 ep_patience(g, &patience, EpAwaited{late, EP_PHASE_ARRIVAL, 0, epoch, seen}));
        if (late >= 0) return 0;
#pragma unroll
        for (int i = 0; i < SOURCES_AT_ONCE; i++) {
            before += from + i < g.rank ? (int)x[i] : 0;
            all += (int)x[i];
        }
    }
    if (column < g.num_experts)
        atomicAdd(&l->base[column], before);
    else
        l->ranks->before[column - g.num_experts] = before;
    l->total[column] = all;
    return 1;
}

/* A count of another rank's. */
__device__ __forceinline__ int await_count(const EpCudaGroup &g, int source, int column,
                                           uint32_t epoch, int32_t *count) {
    EpPatience patience = {0, 0};
    uint64_t word;
    while (!is_of(word = ep_load_relaxed_sys(counts_of(g, g.rank, source, epoch) + column), epoch))
        if (!ep_patience(g, &patience,
                         EpAwaited{source, EP_PHASE_ARRIVAL, 0, epoch, (uint32_t)(word >> 32)}))
            return 0;
    *count = (int)word;
    return 1;
}

/* The publisher also sees that all ranks have entered the same operation, so that another one is
 * reported as such. */
__device__ int await_counts(const EpPrepareArgs &a, Lane *l, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int alive = 1;
    for (int r = THREADS - 1 - threadIdx.x; r < g.size && is_publisher(a, l); r += THREADS)
        alive = alive && ep_await_arrival(g, r, epoch, NULL);
    for (int r = THREADS - 1 - threadIdx.x; r < g.size; r += THREADS)
        alive = alive && await_count(g, r, l->columns, epoch, &l->ranks->tokens[r]) &&
                await_count(g, r, g.num_experts + g.rank, epoch, &l->ranks->coming[r]);
    for (int c = threadIdx.x; c < l->columns; c += THREADS)
        alive = alive && add_sources(a, l, c, epoch);
    return alive;
}

#endif
