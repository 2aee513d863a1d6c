/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ep_prepare on GPUs: one launch of one block per lane, all resident together.
 *
 * Each block sorts its lane's share of the tokens. Who waits on whom:
 *
 *     lane counts       block -> all blocks      each sums up some columns over all lanes,
 *                                                and all columns over the lanes before it
 *     rank counts       rank  -> all ranks       E + R integers to each
 *     routes            lane  -> that lane of    rows in all, then for each row its slots there
 *                                all ranks
 *
 * A rank that knows how many entries every rank has for every expert knows all slabs of all ranks,
 * and so the slot of each of its own entries, without seeing anybody's routing.
 *
 * A block takes its lane's tokens in chunks of one entry for each thread, a token being a team of
 * lanes of one warp. Entries of one expert are numbered in order of token and k, rows to one rank
 * in order of token: within a warp by comparing lanes, across warps by a table of each warp's
 * counts. The first chunk, which mostly is the only one, is numbered while counts travel.
 *
 * Order: none between words. Each is stored at once and tells by itself whether it is there: counts
 * and numbers of rows carry the epoch in their upper half; a route is not 0, and is set to 0 again
 * by its only reader, so that routes need no tag. Counts and routes have two buffers, used in turn:
 * no rank is more than one operation ahead of another, so that a buffer is written anew only after
 * its reader has left the operation that filled it. The numbers of rows lie where records of other
 * operations are counted: they go out once the counts of all ranks are there, for then all ranks
 * have entered this operation.
 */
#include "handles/plan_cuda.h"
#include "runtime/device.cuh"

#define THREADS 1024
#define WARPS (THREADS / 32)
#define LAST_WARP (THREADS - 32) /* its first thread */

/* What a block knows of each rank. */
typedef struct Ranks {
    uint32_t *out[EP_CUDA_MAX_RANKS];     /* where this lane's routes go, in its window */
    int32_t rows[EP_CUDA_MAX_RANKS];      /* rows of this lane in the chunks before */
    int32_t sent[EP_CUDA_MAX_RANKS];      /* rows of this lane in all */
    int32_t first[EP_CUDA_MAX_RANKS + 1]; /* expert */
} Ranks;

/* A block's lane, and its shared memory. A column is an expert, or a rank after the experts. */
typedef struct Lane {
    Ranks *ranks;
    uint8_t *table; /* [E + R, WARPS] entries or rows of each warp in this chunk: see byte_of */
    int32_t *base;  /* [E + R] slot of this chunk's first entry for the expert; flat: first row */
    int32_t *total; /* [E + R] entries of all ranks for the expert, rows of all to the rank */
    uint8_t *owner; /* [E] rank of each expert */
    int lane, begin, end, columns;
    int team, team_shift, team_tokens; /* lanes of a token, tokens of a chunk */
} Lane;

/* What a thread has of a chunk. */
typedef struct Own {
    int expert, owner; /* -1: none */
    unsigned owners;   /* lanes of this warp whose entries go to the same rank */
    int before;        /* entries for the expert that come before, in this chunk */
    int row;           /* number of the row to the owner, among this lane's */
} Own;

__device__ __forceinline__ int64_t load_integer(const void *data, int is_int64, int64_t i) {
    return is_int64 ? ((const int64_t *)data)[i] : ((const int32_t *)data)[i];
}

__device__ __forceinline__ void store_integer(const EpCudaVector &v, int64_t i, int64_t value) {
    if (!v.data) return;
    if (v.is_int64)
        ((int64_t *)v.data)[i] = value;
    else
        ((int32_t *)v.data)[i] = (int32_t)value;
}

__device__ __forceinline__ int count_tokens(const EpPrepareArgs &a) {
    if (!a.num_tokens.data) return a.num_rows;
    int64_t count = load_integer(a.num_tokens.data, a.num_tokens.is_int64, 0);
    return (int)min((int64_t)a.num_rows, max((int64_t)0, count));
}

__device__ void note_bad_index(const EpPrepareArgs &a, int64_t entry) {
    atomicAdd(&a.group.state->bad_count, 1ull);
    atomicMax(&a.group.state->bad_entry, ~(unsigned long long)entry);
}

/* By one thread of the last block: what all have found, for the host, which may be about to fetch
 * what an earlier prepare had found. */
__device__ void tell_bad_indices(const EpPrepareArgs &a) {
    volatile EpCudaState *state = a.group.state;
    volatile EpCudaNotes *notes = a.notes;
    unsigned long long count = state->bad_count, entry = ~state->bad_entry;
    if (!count) return;
    state->bad_count = state->bad_entry = 0;
    if (!notes->bad_count) {
        notes->bad_index = load_integer(a.topk_idx, a.idx_is_int64, (int64_t)entry);
        notes->bad_entry = entry, notes->top_k = a.top_k;
        __threadfence_system();
    }
    atomicAdd_system(&a.notes->bad_count, count);
}

/* ---- one chunk ----------------------------------------------------------------------------- */

__device__ __forceinline__ unsigned lanes_below(int lane) {
    return (1u << lane) - 1;
}

__device__ __forceinline__ int first_lane(unsigned lanes) {
    return lanes ? __ffs(lanes) - 1 : -1;
}

__device__ __forceinline__ int team_begin(const Lane *l) {
    return threadIdx.x % 32 & ~(l->team - 1);
}

__device__ __forceinline__ unsigned team_lanes(const Lane *l) {
    return (l->team == 32 ? ~0u : (1u << l->team) - 1) << team_begin(l);
}

/* The lanes of this thread's warp that have the same key; none where it is negative. */
__device__ __forceinline__ unsigned same_key(int key) {
    unsigned same = __match_any_sync(~0u, key);
    return key >= 0 ? same : 0;
}

/* This thread's token of the chunk that begins with token `first`, and which of its entries. */
__device__ __forceinline__ int own_token(const Lane *l, int first) {
    return first + ((int)threadIdx.x >> l->team_shift);
}

__device__ __forceinline__ int own_k(const Lane *l) {
    return threadIdx.x & (l->team - 1);
}

/* This thread's index of the chunk that begins with token `first`, as the caller gave it. */
__device__ __forceinline__ int64_t load_index(const EpPrepareArgs &a, const Lane *l, int first) {
    int token = own_token(l, first), k = own_k(l);
    if (token >= l->end || k >= a.top_k) return -1;
    return load_integer(a.topk_idx, a.idx_is_int64, (int64_t)token * a.top_k + k);
}

__device__ __forceinline__ Own take_entry(const EpPrepareArgs &a, const Lane *l, int64_t index) {
    Own o = {-1, -1, 0, 0, 0};
    if (index >= 0 && index < a.group.num_experts) {
        o.expert = (int)index;
        o.owner = l->owner[o.expert];
    }
    o.owners = same_key(o.owner);
    return o;
}

__device__ __forceinline__ void check_index(const EpPrepareArgs &a, const Lane *l, int first,
                                            int64_t index) {
    if (index >= a.group.num_experts)
        note_bad_index(a, (int64_t)own_token(l, first) * a.top_k + own_k(l));
}

/* Of the lanes with entries for one owner, those that are first in their team: one for each row. */
__device__ __forceinline__ unsigned first_of_rows(const Lane *l, const Own &o) {
    int is_first = first_lane(o.owners & team_lanes(l)) == (int)threadIdx.x % 32;
    return __ballot_sync(~0u, is_first) & o.owners;
}

/* Columns of the table are 32 bytes; every other four have their halves swapped, so that columns
 * next to each other are in different banks. */
__device__ __forceinline__ uint8_t *byte_of(const Lane *l, int column, int warp) {
    return l->table + column * WARPS + (warp ^ (column & 4) << 2);
}

__device__ __forceinline__ uint4 *half_of(const Lane *l, int column, int half) {
    return (uint4 *)byte_of(l, column, half * 16);
}

__device__ __forceinline__ int add_bytes(uint32_t word, int sum) {
    return (int)__dp4a(word, 0x01010101u, (uint32_t)sum);
}

__device__ __forceinline__ int add_half(const uint4 &x) {
    return add_bytes(x.x, add_bytes(x.y, add_bytes(x.z, add_bytes(x.w, 0))));
}

/* The first n bytes of a word, which has that many at most. */
__device__ __forceinline__ uint32_t first_bytes(uint32_t word, int n) {
    return n >= 4 ? word : n > 0 ? word & ((1u << 8 * n) - 1) : 0;
}

__device__ __forceinline__ int add_first_bytes(const uint4 &x, int n) {
    int sum = add_bytes(first_bytes(x.x, n), 0);
    sum = add_bytes(first_bytes(x.y, n - 4), sum);
    sum = add_bytes(first_bytes(x.z, n - 8), sum);
    return add_bytes(first_bytes(x.w, n - 12), sum);
}

/* Sum of a column over the warps before this one. */
__device__ __forceinline__ int count_before(const Lane *l, int column) {
    int warp = threadIdx.x / 32;
    int sum = add_first_bytes(*half_of(l, column, 0), min(warp, 16));
    if (warp > 16) sum += add_first_bytes(*half_of(l, column, 1), warp - 16);
    return sum;
}

__device__ __forceinline__ int count_column(const Lane *l, int column) {
    return add_half(*half_of(l, column, 0)) + add_half(*half_of(l, column, 1));
}

__device__ __forceinline__ void clear_column(const Lane *l, int column) {
    *half_of(l, column, 0) = *half_of(l, column, 1) = uint4{0, 0, 0, 0};
}

/* This warp's counts go into the table, which is clear; numbers within the warp are found. */
__device__ __forceinline__ void mark_entries(const EpPrepareArgs &a, const Lane *l, Own *o) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned same = same_key(o->expert), rows = first_of_rows(l, *o);
    o->before = __popc(same & lanes_below(lane));
    o->row = __popc(rows & lanes_below(team_begin(l)));
    if (first_lane(same) == lane) *byte_of(l, o->expert, warp) = (uint8_t)__popc(same);
    if (first_lane(o->owners) == lane)
        *byte_of(l, a.group.num_experts + o->owner, warp) = (uint8_t)__popc(rows);
}

/* And across warps. */
__device__ __forceinline__ void number_entries(const EpPrepareArgs &a, const Lane *l, Own *o) {
    if (o->expert < 0) return;
    o->before += count_before(l, o->expert);
    o->row += l->ranks->rows[o->owner] + count_before(l, a.group.num_experts + o->owner);
}

/* The running numbers move on by what this chunk has had; the table is clear for the next. */
__device__ __forceinline__ void advance(const EpPrepareArgs &a, Lane *l) {
    int experts = a.group.num_experts;
    __syncthreads();
    for (int c = threadIdx.x; c < l->columns; c += THREADS) {
        *(c < experts ? l->base + c : l->ranks->rows + (c - experts)) += count_column(l, c);
        clear_column(l, c);
    }
    __syncthreads();
}

/* ---- counts -------------------------------------------------------------------------------- */

__device__ __forceinline__ uint32_t *routes_of(const EpPrepareArgs &a, int holder, int source,
                                               int lane, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int64_t index = ((int64_t)(epoch & 1) * g.size + source) * g.layout.lanes + lane;
    return ep_at<uint32_t>(g, holder, g.layout.routes) + index * g.layout.lane_tokens * a.top_k;
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
        l->ranks->out[r] = routes_of(a, r, g.rank, l->lane, epoch);
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
        int count = c < l->columns ? l->base[c] : 0;
        ep_store_relaxed_gpu(lane_counts_of(g, l->lane) + c, ep_counter(epoch, (uint32_t)count));
        if (c < l->columns) l->base[c] = 0;
        if (c >= g.num_experts && c < l->columns) l->ranks->sent[c - g.num_experts] = count;
    }
    __syncthreads();
    return o;
}

__device__ __forceinline__ uint64_t *counts_of(const EpCudaGroup &g, int holder, int source,
                                               uint32_t epoch) {
    return ep_at<uint64_t>(g, holder, g.layout.counts) +
           ((int64_t)(epoch & 1) * g.size + source) * (g.num_experts + g.size);
}

__device__ __forceinline__ int is_of(uint64_t word, uint32_t epoch) {
    return (uint32_t)(word >> 32) == epoch;
}

__device__ __forceinline__ int patient_with_grid(const EpCudaGroup &g, EpPatience *patience,
                                                 const Lane *l, uint32_t epoch) {
    return ep_patience(g, patience, EpAwaited{g.rank, EP_PHASE_GRID, l->lane, epoch, epoch - 1});
}

/* Nothing is ordered behind it. */
__device__ void announce_arrivals(const EpCudaGroup &g, uint32_t epoch) {
    for (int r = THREADS - 1 - threadIdx.x; r < g.size; r += THREADS) {
        EpArrival *arrival = ep_arrival(g, r, g.rank, epoch);
        ep_store_relaxed_sys(&arrival->where, (uint64_t)epoch << 48);
        ep_store_relaxed_sys(&arrival->what, ep_counter(epoch, g.digest));
    }
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
            if (from < g.layout.lanes)
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
    int lane = threadIdx.x % 32, group = l->lane + g.layout.lanes * ((int)threadIdx.x / 32);
    for (; group * 4 < l->columns; group += g.layout.lanes * WARPS) {
        int sums[4];
        if (!sum_lanes(g, l, group * 4, epoch, sums)) return 0;
        int column = group * 4 + lane % 4;
        int sum = lane & 2 ? (lane & 1 ? sums[3] : sums[2]) : (lane & 1 ? sums[1] : sums[0]);
        for (int r = lane / 4; r < g.size && column < l->columns; r += 8)
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

/* Counts of the ranks before this one, into base too; of all ranks, into total. */
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
        } while (late >= 0 && ep_patience(g, &patience,
                                          EpAwaited{late, EP_PHASE_ARRIVAL, l->lane, epoch, seen}));
        if (late >= 0) return 0;
#pragma unroll
        for (int i = 0; i < SOURCES_AT_ONCE; i++) {
            before += from + i < g.rank ? (int)x[i] : 0;
            all += (int)x[i];
        }
    }
    atomicAdd(&l->base[column], before);
    l->total[column] = all;
    return 1;
}

/* One block also sees that all ranks have entered the same operation, so that another one is
 * reported as such. */
__device__ int await_counts(const EpPrepareArgs &a, Lane *l, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int alive = 1;
    for (int r = THREADS - 1 - threadIdx.x; r < g.size && l->lane == 0; r += THREADS)
        alive = alive && ep_await_arrival(g, r, epoch, l->lane, NULL);
    for (int c = threadIdx.x; c < l->columns; c += THREADS)
        alive = alive && add_sources(a, l, c, epoch);
    return alive;
}

/* ---- slabs --------------------------------------------------------------------------------- */

__device__ void publish_expert(const EpPrepareArgs &a, int local, int count, int64_t offset,
                               int64_t padded) {
    int experts = a.shape.num_local;
    a.plan.expert_counts[local] = count;
    a.plan.expert_padded[local] = (int)padded;
    a.plan.expert_offsets[local] = (int)offset;
    store_integer(a.counts, local, count);
    store_integer(a.padded, local, padded);
    store_integer(a.offsets, local, offset);
    a.info->experts[local] = count;
    a.info->experts[experts + local] = (int)padded;
    a.info->experts[2 * experts + local] = (int)offset;
}

__device__ __forceinline__ int64_t slot_limit(const EpPrepareArgs &a, int local) {
    const EpPlanShape &s = a.shape;
    if (s.layout == EP_LAYOUT_BATCHED) return (local + 1) * s.rows_per_expert;
    return s.capacity ? s.capacity : INT32_MAX;
}

__device__ __forceinline__ int warp_sum(int value) {
    return __reduce_add_sync(~0u, value);
}

__device__ __forceinline__ int warp_prefix(int value, int lane) {
    for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(~0u, value, d);
        value += lane >= d ? other : 0;
    }
    return value;
}

__device__ void publish_offset_end(const EpPrepareArgs &a, int64_t offset) {
    a.plan.expert_offsets[a.shape.num_local] = (int)offset;
    store_integer(a.offsets, a.shape.num_local, offset);
    a.info->experts[3 * a.shape.num_local] = (int)offset;
}

/* Under EP_OVERFLOW_ERROR the group's status tells of lost slots. */
__device__ void note_overflow(const EpPrepareArgs &a, int64_t needed, int64_t dropped) {
    a.notes->capacity =
        a.shape.layout == EP_LAYOUT_BATCHED ? a.shape.rows_per_expert : a.shape.capacity;
    a.notes->needed = needed;
    __threadfence_system();
    atomicAdd_system(&a.notes->lost, (unsigned long long)dropped);
}

__device__ void publish_totals(const EpPrepareArgs &a, int64_t rows, int64_t needed,
                               int64_t dropped) {
    volatile EpPlanHeader *h = a.plan.header, *out = &a.info->header;
    h->recv_rows = rows, h->needed_rows = needed, h->dropped_slots = dropped;
    out->recv_rows = rows, out->needed_rows = needed, out->dropped_slots = dropped;
    store_integer(a.totals, 0, rows);
    store_integer(a.totals, 1, needed);
    store_integer(a.totals, 2, dropped);
    if (dropped && a.shape.overflow == EP_OVERFLOW_ERROR) note_overflow(a, needed, dropped);
}

/* The slab of an expert: entries that want to go there, rows that they take, where it begins. */
typedef struct Slab {
    int count, rows;
    int64_t offset;
} Slab;

/* Of a rank's expert number at + lane, for a warp that walks the experts in order; `start` is where
 * the next 32 begin. */
__device__ __forceinline__ Slab lay_slab(const EpPrepareArgs &a, const Lane *l, int rank, int at,
                                         int64_t *start) {
    const EpPlanShape &s = a.shape;
    int lane = threadIdx.x % 32, e = at + lane, column = l->ranks->first[rank] + e;
    int count = column < l->ranks->first[rank + 1] ? l->total[column] : 0;
    int rows = (count + s.alignment - 1) / s.alignment * s.alignment;
    int through = warp_prefix(rows, lane);
    int64_t begin = *start + through - rows;
    *start += __shfl_sync(~0u, through, 31);
    return Slab{count, rows, s.layout == EP_LAYOUT_BATCHED ? e * s.rows_per_expert : begin};
}

/* Slabs of one rank: adds each one's offset to base. By a warp. */
__device__ void lay_slabs(const EpPrepareArgs &a, Lane *l, int rank) {
    int local = l->ranks->first[rank + 1] - l->ranks->first[rank], lane = threadIdx.x % 32;
    int64_t start = 0;
    for (int at = 0; at < local; at += 32) {
        Slab slab = lay_slab(a, l, rank, at, &start);
        if (at + lane < local)
            l->base[l->ranks->first[rank] + at + lane] += (int)min(slab.offset, (int64_t)INT32_MAX);
    }
}

/* Slabs of this rank, for everyone to see. By a warp. */
__device__ void publish_slabs(const EpPrepareArgs &a, const Lane *l) {
    int local = a.shape.num_local, lane = threadIdx.x % 32;
    int batched = a.shape.layout == EP_LAYOUT_BATCHED, most = 0;
    int64_t start = 0, dropped = 0;
    for (int at = 0; at < local; at += 32) {
        int e = at + lane;
        Slab slab = lay_slab(a, l, a.group.rank, at, &start);
        int64_t limit = slot_limit(a, e), begin = min(slab.offset, limit);
        int64_t kept = max((int64_t)0, min((int64_t)slab.count, limit - slab.offset));
        if (e < local)
            publish_expert(a, e, (int)kept, begin, min(slab.offset + slab.rows, limit) - begin);
        most = max(most, slab.rows);
        dropped += warp_sum((int)(e < local ? slab.count - kept : 0));
    }
    most = __reduce_max_sync(~0u, most);
    int64_t needed = batched ? most : start;
    int64_t rows = batched ? local * a.shape.rows_per_expert : min(start, slot_limit(a, 0));
    if (lane) return;
    publish_totals(a, rows, needed, dropped);
    publish_offset_end(a, rows);
}

/* Rows to and from the other ranks, and those that stay. By a warp. */
__device__ void publish_rows(const EpPrepareArgs &a, const Lane *l, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    const uint64_t *own = counts_of(g, g.rank, g.rank, epoch) + g.num_experts;
    int sent = 0, local = (int)ep_load_relaxed_sys(own + g.rank);
    for (int r = threadIdx.x % 32; r < g.size; r += 32)
        sent += r == g.rank ? 0 : (int)ep_load_relaxed_sys(own + r);
    sent = warp_sum(sent);
    if (threadIdx.x % 32) return;
    a.info->remote_sent = sent, a.info->local = local;
    a.info->remote_received = l->total[g.num_experts + g.rank] - local;
}

/* The step's numbers are all there. By one thread, behind whatever it has seen. */
__device__ void publish_step(const EpPrepareArgs &a, int tokens) {
    volatile EpPlanHeader *h = a.plan.header, *out = &a.info->header;
    int64_t step = h->step + 1;
    h->num_tokens = tokens;
    h->num_rows = a.num_rows;
    h->top_k = a.top_k;
    h->exact_rows = a.num_tokens.data == NULL;
    h->step = step;
    h->prepared = 1;
    out->num_tokens = tokens, out->top_k = a.top_k;
    __threadfence_system();
    out->step = step;
}

/* What the host wants to know, by one warp of one block. Flat rows are laid at the end. */
__device__ void publish(const EpPrepareArgs &a, const Lane *l, int tokens, uint32_t epoch) {
    publish_rows(a, l, epoch);
    if (a.shape.layout == EP_LAYOUT_FLAT) return;
    publish_slabs(a, l);
    __syncwarp();
    if (threadIdx.x % 32 == 0) publish_step(a, tokens);
    __syncwarp();
}

/* ---- entries ------------------------------------------------------------------------------- */

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

/* ---- the end ------------------------------------------------------------------------------- */

/* Flat rows lie by (source, lane), without gaps: one warp walks the lanes. */
__device__ void lay_flat_rows(const EpPrepareArgs &a) {
    int lanes = a.group.size * a.group.layout.lanes, lane = threadIdx.x, begin = 0;
    for (int at = 0; at < lanes; at += 32) {
        int rows = at + lane < lanes ? __ldcg(&a.plan.lane_rows[at + lane]) : 0;
        int through = warp_prefix(rows, lane);
        if (at + lane < lanes) a.plan.lane_begin[at + lane] = begin + through - rows;
        begin += __shfl_sync(~0u, through, 31);
    }
    int64_t kept = min((int64_t)begin, slot_limit(a, 0));
    if (lane == 0) publish_totals(a, kept, begin, begin - kept);
}

/* Entries of the rows that are kept, into the plan. Each warp takes lanes. */
__device__ void count_kept_entries(const EpPrepareArgs &a) {
    int lanes = a.group.size * a.group.layout.lanes, local = a.shape.num_local, k = a.top_k;
    int64_t kept = a.plan.header->recv_rows;
    for (int e = threadIdx.x; e < local; e += THREADS)
        a.plan.expert_counts[e] = 0;
    __syncthreads();
    for (int at = threadIdx.x / 32; at < lanes; at += WARPS) {
        int64_t rows = min((int64_t)__ldcg(&a.plan.lane_rows[at]), kept - a.plan.lane_begin[at]);
        const int32_t *routes = a.plan.routes + (int64_t)at * a.group.layout.lane_tokens * k;
        for (int i = threadIdx.x % 32; i < rows * k; i += 32)
            if (__ldcg(routes + i) >= 0) atomicAdd(&a.plan.expert_counts[__ldcg(routes + i)], 1);
    }
    __syncthreads();
}

/* Offsets as a permutation by expert would have. By a warp. */
__device__ void publish_flat_experts(const EpPrepareArgs &a, const Lane *l, int all_kept) {
    int local = a.shape.num_local, lane = threadIdx.x, offset = 0;
    for (int at = 0; at < local; at += 32) {
        int e = at + lane, count = 0;
        if (e < local)
            count = all_kept ? l->total[l->ranks->first[a.group.rank] + e]
                             : *(volatile int32_t *)&a.plan.expert_counts[e];
        int through = warp_prefix(count, lane);
        if (e < local) publish_expert(a, e, count, offset + through - count, count);
        offset += __shfl_sync(~0u, through, 31);
    }
    if (lane == 0) publish_offset_end(a, offset);
}

/* By the last block: only now are all rows known. What a failure leaves is not to be walked. */
__device__ void complete_flat(const EpPrepareArgs &a, const Lane *l, int tokens) {
    __threadfence();
    if (*(volatile int32_t *)&a.group.state->failed) return;
    if (threadIdx.x < 32) lay_flat_rows(a);
    __syncthreads();
    int all_kept = *(volatile int64_t *)&a.plan.header->dropped_slots == 0;
    if (!all_kept) count_kept_entries(a);
    if (threadIdx.x >= 32) return;
    publish_flat_experts(a, l, all_kept);
    __syncwarp();
    if (threadIdx.x == 0) publish_step(a, tokens);
}

__device__ void prepare(const EpPrepareArgs &a, Lane *l, int tokens, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    Own o = count_entries(a, l, epoch);
    int alive = share_counts(a, l, epoch);
    if (l->lane == 0) announce_arrivals(g, epoch);
    number_entries(a, l, &o);
    alive = alive && add_lanes(a, l, epoch);
    alive = alive && await_counts(a, l, epoch);
    if (!__syncthreads_and(alive)) return;
    announce_routes(a, l, epoch);
    for (int r = threadIdx.x / 32; r < g.size && a.shape.layout != EP_LAYOUT_FLAT; r += WARPS)
        lay_slabs(a, l, r);
    __syncthreads();
    place_entries(a, l, o);
    if (l->lane == 0 && threadIdx.x >= LAST_WARP) publish(a, l, tokens, epoch);
    keep_routes(a, l, epoch);
}

__device__ Lane open_lane(const EpPrepareArgs &a, Ranks *ranks, uint4 *memory, int tokens) {
    const EpCudaGroup &g = a.group;
    Lane l;
    l.lane = blockIdx.x;
    ep_lane_range(g, tokens, l.lane, &l.begin, &l.end);
    l.columns = g.num_experts + g.size;
    l.ranks = ranks;
    l.table = (uint8_t *)memory;
    l.base = (int32_t *)(l.table + WARPS * l.columns);
    l.total = l.base + l.columns;
    l.owner = (uint8_t *)(l.total + l.columns);
    l.team_shift = a.top_k > 1 ? 32 - __clz(a.top_k - 1) : 0;
    l.team = 1 << l.team_shift;
    l.team_tokens = THREADS >> l.team_shift;
    return l;
}

__global__ void __launch_bounds__(THREADS) prepare_kernel(const __grid_constant__ EpPrepareArgs a) {
    extern __shared__ uint4 memory[];
    __shared__ Ranks ranks;
    uint32_t epoch = ep_epoch(a.group);
    int tokens = count_tokens(a);
    Lane l = open_lane(a, &ranks, memory, tokens);
    prepare(a, &l, tokens, epoch);
    if (!ep_leave(a.group, epoch)) return;
    if (threadIdx.x == 0) tell_bad_indices(a);
    if (a.shape.layout == EP_LAYOUT_FLAT) complete_flat(a, &l, tokens);
}

extern "C" int ep_cuda_open_prepare(int shared_bytes) {
    return ep_open_kernel(prepare_kernel, shared_bytes);
}

extern "C" int ep_cuda_launch_prepare(const EpPrepareArgs *a, void *stream) {
    size_t experts = (size_t)a->group.num_experts, columns = experts + (size_t)a->group.size;
    size_t shared = (WARPS + 2 * sizeof(int32_t)) * columns + experts;
    prepare_kernel<<<a->group.layout.lanes, THREADS, shared, (cudaStream_t)stream>>>(*a);
    return cudaGetLastError();
}
