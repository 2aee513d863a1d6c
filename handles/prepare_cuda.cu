/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ep_prepare on GPUs: one launch of one block per lane, all resident together.
 *
 * Each block sorts its lane's share of the tokens. Who waits on whom:
 *
 *     lane counts       block -> all blocks      grid barrier
 *     rank counts       rank  -> all ranks       E + R integers to each, then the arrival
 *     routes            lane  -> that lane of    for each row its slots there, then the head
 *                                all ranks
 *
 * A rank that knows how many entries every rank has for every expert knows all slabs of all ranks,
 * and so the slot of each of its own entries, without seeing anybody's routing. Counts and routes
 * have two buffers, used in turn, since no rank is more than one operation ahead of another.
 *
 * A block takes its lane's tokens in chunks of one entry for each thread, a token being a team of
 * lanes of one warp. Entries of one expert are numbered in order of token and k, rows to one rank in
 * order of token: within a warp by comparing lanes, across warps by a table of each warp's counts.
 *
 * Order: data are stored by all threads of a block, then __syncthreads, a system-wide fence and the
 * counter by one thread for each peer; readers acquire the counter before a __syncthreads.
 */
#include "handles/plan_cuda.h"
#include "runtime/device.cuh"

#define THREADS 1024
#define WARPS (THREADS / 32)

/* Shared memory of a block. A column is an expert, or a rank after the experts. */
typedef struct Lane {
    int32_t *base;       /* [E + R] slot of this lane's next entry for the expert; flat: and row */
    int32_t *total;      /* [E + R] entries of all ranks for the expert, rows of all to the rank */
    int32_t *rows;       /* [R] rows of this lane to each rank so far */
    uint8_t *of_experts; /* [WARPS, E] entries of each warp in this chunk */
    uint8_t *of_ranks;   /* [WARPS, R] rows of each warp in this chunk */
    int lane, begin, end, columns;
    int team, team_tokens; /* lanes of a token, tokens of a chunk */
} Lane;

/* What a thread has of a chunk. */
typedef struct Own {
    int token, k;
    int expert, owner; /* -1: none */
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

__device__ void note_bad_index(const EpPrepareArgs &a, int64_t entry, int64_t index) {
    a.notes->top_k = a.top_k;
    atomicAdd_system(&a.notes->bad_count, 1ull);
    if (atomicMin_system(&a.notes->bad_entry, (unsigned long long)entry) >
        (unsigned long long)entry)
        a.notes->bad_index = index;
}

__device__ __forceinline__ EpPlacement placement_of(const EpCudaGroup &g) {
    return EpPlacement{g.num_experts, g.size};
}

/* This thread's entry of the chunk that begins with token `first`. */
__device__ __forceinline__ Own take_entry(const EpPrepareArgs &a, const Lane *l, int first,
                                          int notes) {
    Own o = {first + (int)threadIdx.x / l->team, (int)threadIdx.x % l->team, -1, -1};
    if (o.token >= l->end || o.k >= a.top_k) return o;
    int64_t entry = (int64_t)o.token * a.top_k + o.k;
    int64_t index = load_integer(a.topk_idx, a.idx_is_int64, entry);
    if (notes && index >= a.group.num_experts) note_bad_index(a, entry, index);
    if (index < 0 || index >= a.group.num_experts) return o;
    EpPlacement placement = placement_of(a.group);
    o.expert = (int)index;
    o.owner = ep_placement_owner(&placement, o.expert);
    return o;
}

/* The lanes of this thread's warp that have the same key, >= 0, in the same team or in any. */
__device__ __forceinline__ unsigned same_key(const Lane *l, int key, int within_team) {
    int lane = threadIdx.x % 32, unique = -1 - lane;
    if (key >= 0 && within_team) key = key * 32 + lane / l->team;
    unsigned same = __match_any_sync(~0u, key >= 0 ? key : unique);
    return key >= 0 ? same : 0;
}

__device__ __forceinline__ unsigned lanes_before(void) {
    return (1u << (threadIdx.x % 32)) - 1;
}

__device__ __forceinline__ int first_lane(unsigned lanes) {
    return lanes ? __ffs(lanes) - 1 : -1;
}

/* Entries of this lane for each expert, and its rows to each rank. */
__device__ Own count_entries(const EpPrepareArgs &a, Lane *l) {
    const EpCudaGroup &g = a.group;
    Own kept = {0, 0, -1, -1};
    for (int c = threadIdx.x; c < l->columns; c += THREADS)
        l->base[c] = l->total[c] = 0;
    for (int r = threadIdx.x; r < g.size; r += THREADS)
        l->rows[r] = 0;
    __syncthreads();
    for (int first = l->begin; first < l->end; first += l->team_tokens) {
        Own o = take_entry(a, l, first, 1);
        if (first == l->begin) kept = o;
        unsigned row = same_key(l, o.owner, 1);
        if (o.expert >= 0) atomicAdd(&l->base[o.expert], 1);
        if (first_lane(row) == (int)threadIdx.x % 32) atomicAdd(&l->base[g.num_experts + o.owner], 1);
    }
    __syncthreads();
    for (int c = threadIdx.x; c < l->columns; c += THREADS)
        g.lane_counts[(int64_t)l->lane * l->columns + c] = l->base[c];
    return kept;
}

/* ---- counts -------------------------------------------------------------------------------- */

__device__ __forceinline__ int32_t *counts_of(const EpCudaGroup &g, int holder, int source,
                                              uint32_t epoch) {
    return ep_at<int32_t>(g, holder, g.layout.counts) +
           ((int64_t)(epoch & 1) * g.size + source) * (g.num_experts + g.size);
}

/* Counts of the lanes before this one, into base; of all lanes, into total. */
__device__ void add_lanes(const EpPrepareArgs &a, Lane *l) {
    const EpCudaGroup &g = a.group;
    int padded = min(THREADS, (l->columns + 31) / 32 * 32), parts = THREADS / padded;
    int part = threadIdx.x / padded;
    for (int c = threadIdx.x; c < l->columns; c += THREADS)
        l->base[c] = 0;
    __syncthreads();
    for (int c = threadIdx.x % padded; c < l->columns && part < parts; c += padded) {
        int before = 0, all = 0;
#pragma unroll 8
        for (int lane = part; lane < g.layout.lanes; lane += parts) {
            int count = __ldcg(&g.lane_counts[(int64_t)lane * l->columns + c]);
            before += lane < l->lane ? count : 0;
            all += count;
        }
        atomicAdd(&l->base[c], before);
        atomicAdd(&l->total[c], all);
    }
    __syncthreads();
}

/* The sums over all lanes go to one peer from each block, as far as there are peers. */
__device__ void share_counts(const EpPrepareArgs &a, const Lane *l, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    for (int r = l->lane; r < g.size; r += g.layout.lanes)
        for (int c = threadIdx.x; c < l->columns; c += THREADS)
            counts_of(g, r, g.rank, epoch)[c] = l->total[c];
    __syncthreads();
    if (threadIdx.x) return;
    ep_fence_sys();
    for (int r = l->lane; r < g.size; r += g.layout.lanes)
        ep_announce_arrival(g, r, epoch, 0);
}

__device__ int await_counts(const EpCudaGroup &g, const Lane *l, uint32_t epoch) {
    int alive = 1;
    for (int r = threadIdx.x; r < g.size; r += THREADS)
        alive = alive && ep_await_arrival(g, r, epoch, l->lane, NULL);
    return __syncthreads_and(alive);
}

/* Counts of the ranks before this one, into base too; of all ranks, into total. */
__device__ void add_sources(const EpPrepareArgs &a, Lane *l, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    for (int c = threadIdx.x; c < l->columns; c += THREADS) {
        int before = 0, all = 0;
#pragma unroll 4
        for (int s = 0; s < g.size; s++) {
            int count = __ldcg(counts_of(g, g.rank, s, epoch) + c);
            before += s < g.rank ? count : 0;
            all += count;
        }
        l->base[c] += before;
        l->total[c] = all;
    }
    __syncthreads();
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
    for (int d = 16; d > 0; d /= 2)
        value += __shfl_xor_sync(~0u, value, d);
    return value;
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

__device__ void publish_totals(const EpPrepareArgs &a, int64_t rows, int64_t needed,
                               int64_t dropped) {
    EpPlanHeader *h = a.plan.header;
    h->recv_rows = rows, h->needed_rows = needed, h->dropped_slots = dropped;
    store_integer(a.totals, 0, rows);
    store_integer(a.totals, 1, needed);
    store_integer(a.totals, 2, dropped);
}

/* Slabs of one rank: a warp walks its experts in order, and adds each slab's offset to base. The
 * first block also publishes those of this rank. */
__device__ void lay_slabs(const EpPrepareArgs &a, Lane *l, int rank) {
    const EpPlanShape &s = a.shape;
    EpPlacement placement = {a.group.num_experts, a.group.size};
    int first = ep_placement_first(&placement, rank), local = ep_placement_count(&placement, rank);
    int lane = threadIdx.x % 32, batched = s.layout == EP_LAYOUT_BATCHED;
    int publishes = l->lane == 0 && rank == a.group.rank && s.layout != EP_LAYOUT_FLAT;
    int64_t start = 0, most = 0, dropped = 0;
    for (int at = 0; at < local; at += 32) {
        int e = at + lane, count = e < local ? l->total[first + e] : 0;
        int rows = (count + s.alignment - 1) / s.alignment * s.alignment;
        int through = warp_prefix(rows, lane);
        int64_t offset = batched ? e * s.rows_per_expert : start + through - rows;
        int64_t limit = slot_limit(a, e),
                kept = max((int64_t)0, min((int64_t)count, limit - offset));
        if (e < local) l->base[first + e] += (int)min(offset, (int64_t)INT32_MAX);
        if (e < local && publishes)
            publish_expert(a, e, (int)kept, min(offset, limit),
                           min(offset + rows, limit) - min(offset, limit));
        start += __shfl_sync(~0u, through, 31);
        most = max(most, (int64_t)rows);
        dropped += warp_sum((int)(e < local ? count - kept : 0));
    }
    for (int d = 16; d > 0; d /= 2)
        most = max(most, (int64_t)__shfl_xor_sync(~0u, (int)most, d));
    if (!publishes || lane) return;
    int64_t needed = batched ? most : start;
    int64_t rows = batched ? local * s.rows_per_expert : min(start, slot_limit(a, 0));
    publish_totals(a, rows, needed, dropped);
    publish_offset_end(a, rows);
}

/* ---- entries ------------------------------------------------------------------------------- */

/* Sum of a column of a table over the warps before this one. */
__device__ __forceinline__ int count_before(const uint8_t *table, int columns, int column) {
    int count = 0;
    for (int w = 0; w < (int)threadIdx.x / 32; w++)
        count += table[w * columns + column];
    return count;
}

/* The running numbers move on by what this chunk has had. */
__device__ __forceinline__ void advance(int32_t *number, const uint8_t *table, int columns) {
    for (int c = threadIdx.x; c < columns; c += THREADS)
        for (int w = 0; w < WARPS; w++)
            number[c] += table[w * columns + c];
}

__device__ __forceinline__ void clear_tables(const EpPrepareArgs &a, Lane *l) {
    int words = WARPS * (a.group.num_experts + a.group.size) / 4;
    for (int i = threadIdx.x; i < words; i += THREADS)
        ((uint32_t *)l->of_experts)[i] = 0; /* of_ranks lies behind */
}

/* Slot of this thread's entry; -1: none, or lost to the capacity. */
__device__ __forceinline__ int number_entry(const EpPrepareArgs &a, Lane *l, const Own &o) {
    int experts = a.group.num_experts, warp = threadIdx.x / 32, slot = -1;
    unsigned same = same_key(l, o.expert, 0);
    if (o.expert >= 0 && !(same & lanes_before()))
        l->of_experts[warp * experts + o.expert] = (uint8_t)__popc(same);
    __syncthreads();
    if (o.expert < 0 || a.shape.layout == EP_LAYOUT_FLAT) return -1;
    EpPlacement placement = placement_of(a.group);
    slot = l->base[o.expert] + count_before(l->of_experts, experts, o.expert) +
           __popc(same & lanes_before());
    return slot < slot_limit(a, o.expert - ep_placement_first(&placement, o.owner)) ? slot : -1;
}

/* Number of the row to this entry's owner, among this lane's; and which lane is its carrier. */
__device__ __forceinline__ int number_row(const EpPrepareArgs &a, Lane *l, const Own &o, int slot,
                                          int *carrier) {
    int size = a.group.size, warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = 0;
    unsigned entries = same_key(l, o.owner, 1);
    unsigned kept = entries & __ballot_sync(~0u, slot >= 0);
    *carrier = first_lane(kept ? kept : entries);
    int carries = *carrier == lane;
    unsigned rows = same_key(l, carries ? o.owner : -1, 0);
    if (carries && !(rows & lanes_before()))
        l->of_ranks[warp * size + o.owner] = (uint8_t)__popc(rows);
    __syncthreads();
    if (carries)
        row = l->rows[o.owner] + count_before(l->of_ranks, size, o.owner) +
              __popc(rows & lanes_before());
    return __shfl_sync(~0u, row, max(0, *carrier));
}

__device__ __forceinline__ int32_t *routes_of(const EpCudaGroup &g, int holder, int source,
                                              int lane, uint32_t epoch, int top_k) {
    int64_t index = ((int64_t)(epoch & 1) * g.size + source) * g.layout.lanes + lane;
    return ep_at<int32_t>(g, holder, g.layout.routes) + index * g.layout.lane_tokens * top_k;
}

/* Every row's route, straight into its rank's window: lane k of the team has word k of each. */
__device__ __forceinline__ void send_routes(const EpPrepareArgs &a, const Lane *l, const Own &o,
                                            int row, int carries, int value, uint32_t epoch) {
    unsigned team = l->team == 32 ? ~0u : ((1u << l->team) - 1)
                                              << (threadIdx.x % 32 / l->team * l->team);
    unsigned carriers = __ballot_sync(~0u, carries);
    for (int i = 0; i < l->team; i++) {
        unsigned left = carriers & team;
        int from = first_lane(left), live = from >= 0;
        if (live) carriers &= ~(1u << from);
        if (!__any_sync(~0u, live)) return;
        int owner = __shfl_sync(~0u, o.owner, max(0, from));
        int number = __shfl_sync(~0u, row, max(0, from));
        if (!live || o.k >= a.top_k) continue;
        routes_of(a.group, owner, a.group.rank, l->lane, epoch, a.top_k)[(int64_t)number * a.top_k +
                                                                         o.k] =
            o.owner == owner ? value : -1;
    }
}

/* All entries of the lane: into the plan, and to their owners. */
__device__ void place_entries(const EpPrepareArgs &a, Lane *l, const Own &kept, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    EpPlacement placement = placement_of(g);
    int flat = a.shape.layout == EP_LAYOUT_FLAT;
    for (int first = l->begin; first < l->end; first += l->team_tokens) {
        Own o = first == l->begin ? kept : take_entry(a, l, first, 0);
        int carrier, slot = number_entry(a, l, o);
        int row = number_row(a, l, o, slot, &carrier), carries = carrier == (int)threadIdx.x % 32;
        int expert = o.expert < 0 ? -1 : o.expert - ep_placement_first(&placement, o.owner);
        if (flat && carries) slot = l->base[g.num_experts + o.owner] + row;
        if (flat && carries && slot >= slot_limit(a, 0)) slot = -1;
        if (o.token < l->end && o.k < a.top_k)
            a.plan.entries[(int64_t)o.token * a.top_k + o.k] =
                EpEntry{slot, row, (int16_t)o.owner, (int16_t)expert, carries};
        if (carries && o.owner == g.rank)
            a.plan.own_token[(int64_t)l->lane * g.layout.lane_tokens + row] = o.token;
        send_routes(a, l, o, row, carries, flat ? expert : slot, epoch);
        __syncthreads();
        if (first + l->team_tokens < l->end && !flat) advance(l->base, l->of_experts, g.num_experts);
        advance(l->rows, l->of_ranks, g.size);
        __syncthreads();
        clear_tables(a, l);
        __syncthreads();
    }
}

/* The counter says which rows there are for each rank. */
__device__ void announce_routes(const EpPrepareArgs &a, const Lane *l, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    for (int r = threadIdx.x; r < g.size; r += THREADS) {
        a.plan.send_rows[r * g.layout.lanes + l->lane] = l->rows[r];
        ep_store_release_sys(ep_head(g, r, g.rank, l->lane), ep_counter(epoch, l->rows[r]));
    }
}

/* Rows of every source in this lane, into l->rows. */
__device__ int await_routes(const EpPrepareArgs &a, Lane *l, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int alive = 1;
    __syncthreads();
    for (int s = threadIdx.x; s < g.size; s += THREADS) {
        const uint64_t *head = ep_head(g, g.rank, s, l->lane);
        EpPatience patience = {0, 0};
        uint64_t seen = ep_load_acquire_sys(head);
        while (alive && (uint32_t)(seen >> 32) != epoch) {
            alive = ep_patience(
                g, &patience,
                EpAwaited{s, EP_PHASE_ROUTES, l->lane, epoch, (uint32_t)(seen >> 32)});
            seen = ep_load_acquire_sys(head);
        }
        l->rows[s] = (int)(uint32_t)seen;
        a.plan.lane_rows[s * g.layout.lanes + l->lane] = (int)(uint32_t)seen;
    }
    return __syncthreads_and(alive);
}

/* This lane's routes of all sources, from the window into the plan. */
__device__ void keep_routes(const EpPrepareArgs &a, const Lane *l, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    for (int s = 0; s < g.size; s++) {
        const int32_t *from = routes_of(g, g.rank, s, l->lane, epoch, a.top_k);
        int32_t *to = a.plan.routes + (int64_t)(s * g.layout.lanes + l->lane) *
                                          g.layout.lane_tokens * a.top_k;
        for (int i = threadIdx.x; i < l->rows[s] * a.top_k; i += THREADS)
            to[i] = __ldcg(from + i);
    }
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

/* Entries of the rows that are kept, by expert; offsets as a permutation by expert would have. Each
 * warp takes lanes. */
__device__ void count_flat_entries(const EpPrepareArgs &a) {
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
    if (threadIdx.x) return;
    int offset = 0;
    for (int e = 0; e < local; e++) {
        int count = *(volatile int32_t *)&a.plan.expert_counts[e];
        publish_expert(a, e, count, offset, count);
        offset += count;
    }
    publish_offset_end(a, offset);
}

/* Rows to and from the other ranks, and those that stay. */
__device__ void publish_rows(const EpPrepareArgs &a) {
    __shared__ int sent, received, local;
    if (threadIdx.x == 0) sent = received = local = 0;
    __syncthreads();
    for (int at = threadIdx.x; at < a.group.size * a.group.layout.lanes; at += THREADS) {
        int rows = __ldcg(&a.plan.lane_rows[at]), is_own = at / a.group.layout.lanes == a.group.rank;
        atomicAdd(is_own ? &local : &received, rows);
        if (!is_own) atomicAdd(&sent, __ldcg(&a.plan.send_rows[at]));
    }
    __syncthreads();
    if (threadIdx.x) return;
    a.info->remote_sent = sent, a.info->remote_received = received, a.info->local = local;
}

/* Under EP_OVERFLOW_ERROR the group's status tells of lost slots. */
__device__ void note_overflow(const EpPrepareArgs &a) {
    const volatile EpPlanHeader *h = a.plan.header;
    if (!h->dropped_slots || a.shape.overflow != EP_OVERFLOW_ERROR) return;
    a.notes->capacity =
        a.shape.layout == EP_LAYOUT_BATCHED ? a.shape.rows_per_expert : a.shape.capacity;
    a.notes->needed = h->needed_rows;
    __threadfence_system();
    atomicAdd_system(&a.notes->lost, (unsigned long long)h->dropped_slots);
}

/* By the last block: the step is complete. */
__device__ void complete(const EpPrepareArgs &a, int tokens) {
    __threadfence();
    if (a.shape.layout == EP_LAYOUT_FLAT) {
        if (threadIdx.x < 32) lay_flat_rows(a);
        __syncthreads();
        count_flat_entries(a);
    }
    publish_rows(a);
    if (threadIdx.x) return;
    note_overflow(a);
    volatile EpPlanHeader *h = a.plan.header;
    h->num_tokens = tokens;
    h->num_rows = a.num_rows;
    h->top_k = a.top_k;
    h->exact_rows = a.num_tokens.data == NULL;
    h->step = h->step + 1;
    h->prepared = 1;
    volatile EpPlanHeader *out = &a.info->header;
    out->num_tokens = tokens, out->top_k = a.top_k;
    out->recv_rows = h->recv_rows, out->needed_rows = h->needed_rows;
    out->dropped_slots = h->dropped_slots;
    __threadfence_system();
    out->step = h->step;
}

__device__ void prepare(const EpPrepareArgs &a, Lane *l, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    Own kept = count_entries(a, l);
    if (!ep_grid_barrier(g)) return;
    add_lanes(a, l);
    share_counts(a, l, epoch);
    clear_tables(a, l);
    if (!await_counts(g, l, epoch)) return;
    add_sources(a, l, epoch);
    for (int r = threadIdx.x / 32; r < g.size; r += WARPS)
        lay_slabs(a, l, r);
    __syncthreads();
    place_entries(a, l, kept, epoch);
    announce_routes(a, l, epoch);
    if (!await_routes(a, l, epoch)) return;
    keep_routes(a, l, epoch);
}

__device__ Lane open_lane(const EpPrepareArgs &a, int32_t *memory, int tokens) {
    const EpCudaGroup &g = a.group;
    Lane l;
    l.lane = blockIdx.x;
    ep_lane_range(g, tokens, l.lane, &l.begin, &l.end);
    l.columns = g.num_experts + g.size;
    l.base = memory;
    l.total = l.base + l.columns;
    l.rows = l.total + l.columns;
    l.of_experts = (uint8_t *)(l.rows + g.size);
    l.of_ranks = l.of_experts + WARPS * g.num_experts;
    l.team = 1;
    while (l.team < a.top_k)
        l.team *= 2;
    l.team_tokens = THREADS / l.team;
    return l;
}

__global__ void __launch_bounds__(THREADS) prepare_kernel(const __grid_constant__ EpPrepareArgs a) {
    extern __shared__ int32_t memory[];
    int tokens = count_tokens(a);
    uint32_t epoch = ep_epoch(a.group);
    Lane l = open_lane(a, memory, tokens);
    prepare(a, &l, epoch);
    if (ep_leave(a.group, epoch)) complete(a, tokens);
}

extern "C" int ep_cuda_launch_prepare(const EpPrepareArgs *a, void *stream) {
    size_t columns = (size_t)a->group.num_experts + (size_t)a->group.size;
    size_t shared = sizeof(int32_t) * (2 * columns + (size_t)a->group.size) + WARPS * columns;
    cudaError_t error = cudaFuncSetAttribute(
        prepare_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    if (error != cudaSuccess) return error;
    prepare_kernel<<<a->group.layout.lanes, THREADS, shared, (cudaStream_t)stream>>>(*a);
    return cudaGetLastError();
}
