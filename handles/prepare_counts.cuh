/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PREPARE_COUNTS_CUH
#define EP_HANDLES_PREPARE_COUNTS_CUH

/**
 * Counts of ep_prepare: of a lane, over the lanes of a rank, over all ranks.
 */

#include "handles/prepare_lane.cuh"

/* Where what is received of `source` begins, in tokens. There are two buffers for each. */
__device__ __forceinline__ int64_t tokens_of(const EpCudaGroup &g, int source, uint32_t epoch) {
    return (int64_t)((int)(epoch & 1) * g.size + source) * g.layout.max_tokens;
}

/* In `holder`'s window, for the rows of `source`. */
__device__ __forceinline__ uint32_t *routes_of(const EpPrepareArgs &a, int holder, int source,
                                               uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    return ep_at<uint32_t>(g, holder, g.layout.routes) + tokens_of(g, source, epoch) * a.top_k;
}

__device__ __forceinline__ uint64_t *begins_of(const EpCudaGroup &g, int holder, int source,
                                               uint32_t epoch) {
    return ep_at<uint64_t>(g, holder, g.layout.begins) + tokens_of(g, source, epoch);
}

/* Before a barrier of the block's, and before it is known which operation this is. */
__device__ __forceinline__ void fill_tables(const EpPrepareArgs &a, const Lane *l) {
    static_assert(EP_CUDA_MAX_RANKS <= THREADS, "a thread for each rank");
    const EpCudaGroup &g = a.group;
    int r = THREADS - 1 - threadIdx.x;
#pragma unroll 1
    for (int c = threadIdx.x; c < l->columns; c += THREADS)
        clear_column(l, c);
    if (r < g.size) {
        l->ranks->rows[r] = 0;
#pragma unroll
        for (int turn = 0; turn < 2; turn++) {
            l->ranks->routes[turn][r] = routes_of(a, r, g.rank, turn);
            l->ranks->begins[turn][r] = begins_of(g, r, g.rank, turn);
        }
    }
    if (threadIdx.x == 0) l->ranks->has_bad = 0;
}

/* Entries of the chunks behind the first, into base. */
__device__ void count_more(const EpPrepareArgs &a, Lane *l) {
    Index next = load_own_index(a, l, l->begin + l->team_tokens);
#pragma unroll 1
    for (int c = threadIdx.x; c < l->columns; c += THREADS)
        l->base[c] = 0;
    __syncthreads();
    for (int first = l->begin + l->team_tokens; first < l->end; first += l->team_tokens) {
        Index index = next;
        next = load_own_index(a, l, first + l->team_tokens);
        Own o = take_entry(a, index);
        check_index(a, l, first, index);
        unsigned rows = first_of_rows(l, o) & o.owners;
        if (o.expert >= 0) atomicAdd(&l->base[o.expert], 1);
        if (first_lane(o.owners) == (int)threadIdx.x % 32)
            atomicAdd(&l->base[a.group.num_experts + o.owner], __popc(rows));
    }
    __syncthreads();
}

__device__ __forceinline__ uint64_t *lane_counts_of(const EpCudaGroup &g, int lane) {
    return g.lane_counts + (int64_t)lane * EP_COUNT_STRIDE(g.num_experts, g.size);
}

/* Entries of this lane for each expert, and its rows to each rank, for other blocks to see. The
 * first chunk, whose indices are given and which is returned, stays in the table. */
__device__ __forceinline__ Own count_entries(const EpPrepareArgs &a, Lane *l, const Index &index,
                                             uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    Own o = take_entry(a, index);
    mark_entries(a, l, &o);
    check_index(a, l, l->begin, index);
    __syncthreads();
    int has_more = l->begin + l->team_tokens < l->end;
    if (has_more) count_more(a, l);
#pragma unroll 1
    for (int c = threadIdx.x; c < EP_COUNT_STRIDE(g.num_experts, g.size); c += THREADS) {
        int count = c == l->columns ? l->end - l->begin : 0;
        if (c < l->columns) count = count_column(l, c) + (has_more ? l->base[c] : 0);
        ep_store_relaxed_gpu(lane_counts_of(g, l->lane) + c, ep_counter(epoch, (uint32_t)count));
    }
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
__device__ __forceinline__ void announce_arrivals(const EpCudaGroup &g, uint32_t epoch) {
    int r = THREADS - 1 - threadIdx.x;
    if (r < g.size) ep_announce_arrival(g, r, epoch, g.facts);
}

/* Four columns of two lanes. */
typedef struct Quads {
    int of[2][4];
} Quads;

/* Four columns of all lanes, two neighbours to each thread of the warp. */
__device__ __forceinline__ int await_lanes(const EpCudaGroup &g, const Lane *l, int column,
                                           uint32_t epoch, Quads *q) {
    static_assert(EP_MAX_LANES <= 2 * 32, "two lanes for each thread");
    EpPatience patience = {0, 0};
    int ready, from = threadIdx.x % 32 * 2, stride = EP_COUNT_STRIDE(g.num_experts, g.size);
    const uint64_t *words = lane_counts_of(g, from) + column;
    do {
        ulonglong2 x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i].x = x[i].y = ep_counter(epoch, 0);
            if (from + i / 2 < g.lanes)
                x[i] = ep_load_relaxed_gpu_pair(words + i / 2 * stride + i % 2 * 2);
        }
        ready = 1;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            ready = ready & is_of(x[i].x, epoch) & is_of(x[i].y, epoch);
            q->of[i / 2][i % 2 * 2] = (int)x[i].x, q->of[i / 2][i % 2 * 2 + 1] = (int)x[i].y;
        }
    } while (!ready && patient_with_grid(g, &patience, l, epoch));
    return __all_sync(~0u, ready);
}

/* And tells each of them what those before it have. Nobody else looks at their counts. */
__device__ __forceinline__ void tell_lanes(const EpCudaGroup &g, int column, uint32_t epoch,
                                           const Quads &q) {
    int before[4], lane = threadIdx.x % 32 * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int both = q.of[0][i] + q.of[1][i];
        before[i] = ep_warp_prefix(both) - both;
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        uint64_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] =
                ep_counter(epoch, EP_LANES_BEFORE | (uint32_t)(before[i] + (j ? q.of[0][i] : 0)));
        if (lane + j >= g.lanes) return;
        uint64_t *to = lane_counts_of(g, lane + j) + column;
        ep_store_relaxed_gpu_pair(to, ulonglong2{words[0], words[1]});
        ep_store_relaxed_gpu_pair(to + 2, ulonglong2{words[2], words[3]});
    }
}

/* Sums over all lanes go to all ranks, those over the lanes before each to that lane: each warp has
 * four columns, if there are so many. */
__device__ __forceinline__ int share_counts(const EpPrepareArgs &a, const Lane *l, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int lane = threadIdx.x % 32, group = l->lane + g.lanes * ((int)threadIdx.x / 32);
#pragma unroll 1
    for (; group * 4 <= l->columns; group += g.lanes * WARPS) {
        Quads q;
        int sums[4];
        if (!await_lanes(g, l, group * 4, epoch, &q)) return 0;
#pragma unroll
        for (int i = 0; i < 4; i++)
            sums[i] = __reduce_add_sync(~0u, q.of[0][i] + q.of[1][i]);
        int column = group * 4 + lane % 4;
        int sum = lane & 2 ? (lane & 1 ? sums[3] : sums[2]) : (lane & 1 ? sums[1] : sums[0]);
#pragma unroll 1
        for (int r = lane / 4; r < g.size && column <= l->columns; r += 8)
            ep_store_relaxed_sys(counts_of(g, r, g.rank, epoch) + column,
                                 ep_counter(epoch, (uint32_t)sum));
        tell_lanes(g, group * 4, epoch, q);
    }
    return 1;
}

__device__ __forceinline__ const uint64_t *lanes_before(const EpCudaGroup &g, const Lane *l,
                                                        int column) {
    return lane_counts_of(g, l->lane) + column;
}

/* A column over the lanes before this one; `word` is what has been seen of it. */
__device__ __forceinline__ int await_before(const EpCudaGroup &g, const Lane *l, int column,
                                            uint32_t epoch, uint64_t word, int *before) {
    EpPatience patience = {0, 0};
    while (!is_of(word, epoch) || !((uint32_t)word & EP_LANES_BEFORE)) {
        if (!patient_with_grid(g, &patience, l, epoch)) return 0;
        word = ep_load_relaxed_gpu(lanes_before(g, l, column));
    }
    *before = (int)((uint32_t)word & ~EP_LANES_BEFORE);
    return 1;
}

#define SOURCES_AT_ONCE 4

/* A column of some ranks' counts. */
__device__ __forceinline__ int await_sources(const EpCudaGroup &g, int from, int column,
                                             uint32_t epoch, uint64_t x[SOURCES_AT_ONCE]) {
    const uint64_t *words = counts_of(g, g.rank, from, epoch) + column;
    EpPatience patience = {0, 0};
    int late;
    uint32_t seen;
    do {
#pragma unroll
        for (int i = 0; i < SOURCES_AT_ONCE; i++) {
            x[i] = ep_counter(epoch, 0);
            if (from + i < g.size)
                x[i] = ep_load_relaxed_sys(words + i * EP_COUNT_WORDS(g.num_experts, g.size));
        }
        late = -1, seen = 0;
#pragma unroll
        for (int i = 0; i < SOURCES_AT_ONCE; i++)
            if (!is_of(x[i], epoch)) late = from + i, seen = (uint32_t)(x[i] >> 32);
    } while (late >= 0 &&
             ep_patience(g, &patience, EpAwaited{late, EP_PHASE_ARRIVAL, 0, epoch, seen}));
    return late < 0;
}

/* A column over the ranks, into total; over those before this one, into *before. What of it is told
 * of each rank is kept. */
__device__ __forceinline__ int add_sources(const EpPrepareArgs &a, Lane *l, int column,
                                           uint32_t epoch, int *before) {
    const EpCudaGroup &g = a.group;
    int all = 0, is_kept = column == l->columns || column == g.num_experts + g.rank;
    int32_t *kept = column == l->columns ? l->ranks->tokens : l->ranks->coming;
    *before = 0;
#pragma unroll 1
    for (int from = 0; from < g.size; from += SOURCES_AT_ONCE) {
        uint64_t x[SOURCES_AT_ONCE];
        if (!await_sources(g, from, column, epoch, x)) return 0;
#pragma unroll
        for (int i = 0; i < SOURCES_AT_ONCE; i++) {
            *before += from + i < g.rank ? (int)x[i] : 0;
            all += (int)x[i];
            if (is_kept && from + i < g.size) kept[from + i] = (int)x[i];
        }
    }
    if (column < l->columns) l->total[column] = all;
    return 1;
}

/* Where this lane's entries for each expert begin among those of all ranks, into base; of rows only
 * those of this rank count there. */
__device__ __forceinline__ int await_counts(const EpPrepareArgs &a, Lane *l, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int alive = 1;
#pragma unroll 1
    for (int c = threadIdx.x; c <= l->columns && alive; c += THREADS) {
        int ranks, lanes = 0;
        uint64_t word = ep_load_relaxed_gpu(lanes_before(g, l, c));
        alive = add_sources(a, l, c, epoch, &ranks) && await_before(g, l, c, epoch, word, &lanes);
        if (c < g.num_experts)
            l->base[c] = lanes + ranks;
        else if (c < l->columns)
            l->base[c] = lanes, l->ranks->before[c - g.num_experts] = ranks;
    }
    return alive;
}

/* By the publisher, which has no lane. It also sees that all ranks have entered the same operation,
 * so that another one is reported as such. */
__device__ __forceinline__ int await_all(const EpPrepareArgs &a, Lane *l, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int r = THREADS - 1 - threadIdx.x, before;
    int alive = r >= g.size || ep_await_arrival(g, r, epoch, NULL);
#pragma unroll 1
    for (int c = threadIdx.x; c <= l->columns && alive; c += THREADS)
        alive = add_sources(a, l, c, epoch, &before);
    return alive;
}

#endif
