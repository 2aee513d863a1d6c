/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ep_prepare on GPUs: one launch of one block per lane, all resident together.
 *
 * Each block sorts its lane's share of the tokens. Who waits on whom:
 *
 *     lane counts       block -> all blocks      grid barrier
 *     rank counts       rank  -> all ranks       E integers to each, count_flag
 *     routes            lane  -> that lane of    for each row its slots there, route_flag
 *                                all ranks
 *
 * A rank that knows how many entries every rank has for every expert knows all slabs of all ranks,
 * and so the slot of each of its own entries, without seeing anybody's routing. Counts and routes
 * have two buffers, used in turn: a peer that stores those of step n + 2 has seen this rank's
 * counts of step n + 1, so this rank is done with step n.
 *
 * Order: data are stored by all threads of a block, then __syncthreads, a system-wide fence and the
 * flag by one thread for each peer; readers acquire the flag before a __syncthreads.
 */
#include "handles/plan_cuda.h"
#include "runtime/device.cuh"

#define THREADS 512
#define WARPS (THREADS / 32)

/* Shared memory of a block: the entries of the lane, and for every expert a running sum. */
typedef struct Lane {
    int32_t *expert; /* [entries] expert of each entry, -1 if dead */
    int32_t *value;  /* [entries] what the expert's rank is told: the slot; flat: local expert */
    int32_t *base;   /* [E] slot of this lane's first entry for the expert */
    int32_t *padded; /* [E] rows of its slab */
    int lane, begin, end, entries;
} Lane;

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

__device__ int count_tokens(const EpPrepareArgs &a) {
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

/* Experts of this lane's entries, their owners for later, and how many each expert gets. */
__device__ void read_entries(const EpPrepareArgs &a, const Lane &l) {
    int experts = a.group.num_experts;
    EpPlacement placement = {experts, a.group.size};
    for (int e = threadIdx.x; e < experts; e += THREADS)
        l.base[e] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < l.entries; i += THREADS) {
        int64_t entry = (int64_t)l.begin * a.top_k + i;
        int64_t index = load_integer(a.topk_idx, a.idx_is_int64, entry);
        if (index >= experts) note_bad_index(a, entry, index);
        int live = index >= 0 && index < experts;
        l.expert[i] = live ? (int)index : -1;
        a.plan.owner[entry] =
            live ? (int16_t)ep_placement_owner(&placement, (int)index) : (int16_t)-1;
        if (live) atomicAdd(&l.base[index], 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += THREADS)
        a.group.lane_counts[(int64_t)l.lane * experts + e] = l.base[e];
}

__device__ __forceinline__ int32_t *counts_of(const EpCudaGroup &g, int holder, int source,
                                              uint32_t step) {
    return ep_at<int32_t>(g, holder, g.layout.counts) +
           ((int64_t)(step & 1) * g.size + source) * g.num_experts;
}

/* Entries of the lanes before this one, into base; and, by as many blocks as there are ranks, the
 * sum over all lanes to one peer each. */
__device__ void share_counts(const EpPrepareArgs &a, const Lane &l, uint32_t step) {
    const EpCudaGroup &g = a.group;
    for (int e = threadIdx.x; e < g.num_experts; e += THREADS) {
        int before = 0, all = 0;
#pragma unroll 16
        for (int lane = 0; lane < EP_LANES; lane++) {
            int count = __ldcg(&g.lane_counts[(int64_t)lane * g.num_experts + e]);
            before += lane < l.lane ? count : 0;
            all += count;
        }
        l.base[e] = before;
        for (int r = l.lane; r < g.size; r += EP_LANES)
            counts_of(g, r, g.rank, step)[e] = all;
    }
    __syncthreads();
    if (threadIdx.x == 0 && l.lane < g.size) {
        __threadfence_system();
        ep_store_release_sys(ep_at<uint32_t>(g, l.lane, g.layout.count_flag) + g.rank, step);
    }
}

/* Flags of all ranks, one thread each. */
__device__ int wait_flags(const EpCudaGroup &g, const uint32_t *flags, int stride, uint32_t step,
                          int phase, int lane) {
    int alive = 1;
    for (int r = threadIdx.x; r < g.size; r += THREADS)
        alive &= ep_wait_counter(g, flags + (int64_t)r * stride, step, r, phase, lane);
    return __syncthreads_and(alive);
}

/* Of every expert: rows of its slab, and where this source's entries begin within it. */
__device__ void add_sources(const EpPrepareArgs &a, const Lane &l, uint32_t step) {
    const EpCudaGroup &g = a.group;
    for (int e = threadIdx.x; e < g.num_experts; e += THREADS) {
        int before = 0, all = 0;
        for (int s = 0; s < g.size; s++) {
            int count = __ldcg(&counts_of(g, g.rank, s, step)[e]);
            before += s < g.rank ? count : 0;
            all += count;
        }
        l.base[e] += before;
        l.padded[e] = all;
    }
    __syncthreads();
}

/* What this rank tells its user about one of its experts. */
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
__device__ void lay_slabs(const EpPrepareArgs &a, const Lane &l, int rank) {
    const EpPlanShape &s = a.shape;
    EpPlacement placement = {a.group.num_experts, a.group.size};
    int first = ep_placement_first(&placement, rank), local = ep_placement_count(&placement, rank);
    int lane = threadIdx.x % 32, batched = s.layout == EP_LAYOUT_BATCHED;
    int publishes = l.lane == 0 && rank == a.group.rank && s.layout != EP_LAYOUT_FLAT;
    int64_t start = 0, most = 0, dropped = 0;
    for (int at = 0; at < local; at += 32) {
        int e = at + lane, count = e < local ? l.padded[first + e] : 0;
        int rows = (count + s.alignment - 1) / s.alignment * s.alignment;
        int through = warp_prefix(rows, lane);
        int64_t offset = batched ? e * s.rows_per_expert : start + through - rows;
        int64_t limit = slot_limit(a, e),
                kept = max((int64_t)0, min((int64_t)count, limit - offset));
        if (e < local) l.base[first + e] += (int)min(offset, (int64_t)INT32_MAX);
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

/* Slot of each entry: entries of one expert are numbered in order of token and k. After this an
 * entry is known by its owner instead of its expert. */
__device__ void number_entries(const EpPrepareArgs &a, const Lane &l) {
    EpPlacement placement = {a.group.num_experts, a.group.size};
    for (int i = threadIdx.x; i < l.entries; i += THREADS) {
        int expert = l.expert[i], before = 0;
        for (int j = 0; j < i; j++)
            before += l.expert[j] == expert;
        int owner = expert < 0 ? 0 : ep_placement_owner(&placement, expert);
        int slot = expert < 0 ? 0 : l.base[expert] + before;
        int live =
            expert >= 0 && slot < slot_limit(a, expert - ep_placement_first(&placement, owner));
        if (a.shape.layout == EP_LAYOUT_FLAT)
            slot = expert - ep_placement_first(&placement, owner), live = expert >= 0;
        l.value[i] = live ? slot : -1;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < l.entries; i += THREADS)
        l.expert[i] = l.expert[i] < 0 ? -1 : ep_placement_owner(&placement, l.expert[i]);
    __syncthreads();
}

__device__ __forceinline__ int32_t *routes_of(const EpCudaGroup &g, int holder, int source,
                                              int lane, uint32_t step, int top_k) {
    int64_t index = ((int64_t)(step & 1) * g.size + source) * EP_LANES + lane;
    return ep_at<int32_t>(g, holder, g.layout.routes) + index * g.layout.lane_tokens * top_k;
}

__device__ __forceinline__ int32_t *route_rows_of(const EpCudaGroup &g, int holder, int source,
                                                  int lane, uint32_t step) {
    return ep_at<int32_t>(g, holder, g.layout.route_rows) +
           ((int64_t)(step & 1) * g.size + source) * EP_LANES + lane;
}

/* Rows of one rank: a warp walks the lane's tokens, and stores the slots of those that go there
 * straight into that rank's window. */
__device__ void send_routes(const EpPrepareArgs &a, const Lane &l, int rank, uint32_t step) {
    int lane = threadIdx.x % 32, k = a.top_k, tokens = l.end - l.begin, rows = 0;
    int32_t *routes = routes_of(a.group, rank, a.group.rank, l.lane, step, k);
    for (int at = 0; at < tokens; at += 32) {
        int token = at + lane, goes = 0;
        for (int j = 0; j < k && token < tokens; j++)
            goes |= l.expert[token * k + j] == rank;
        unsigned who = __ballot_sync(~0u, goes);
        int32_t *route = routes + (int64_t)(rows + __popc(who & ((1u << lane) - 1))) * k;
        for (int j = 0; j < k && goes; j++)
            route[j] = l.expert[token * k + j] == rank ? l.value[token * k + j] : -1;
        rows += __popc(who);
    }
    if (lane) return;
    *route_rows_of(a.group, rank, a.group.rank, l.lane, step) = rows;
    a.plan.send_rows[rank * EP_LANES + l.lane] = rows;
}

/* This lane's routes of all sources, from the window into the plan. */
__device__ void keep_routes(const EpPrepareArgs &a, const Lane &l, uint32_t step) {
    const EpCudaGroup &g = a.group;
    for (int s = 0; s < g.size; s++) {
        int rows = __ldcg(route_rows_of(g, g.rank, s, l.lane, step));
        const int32_t *from = routes_of(g, g.rank, s, l.lane, step, a.top_k);
        int32_t *to =
            a.plan.routes + (int64_t)(s * EP_LANES + l.lane) * g.layout.lane_tokens * a.top_k;
        for (int i = threadIdx.x; i < rows * a.top_k; i += THREADS)
            to[i] = __ldcg(from + i);
        if (threadIdx.x == 0) a.plan.lane_rows[s * EP_LANES + l.lane] = rows;
    }
}

/* Flat rows lie by (source, lane), without gaps: one warp walks the lanes. */
__device__ void lay_flat_rows(const EpPrepareArgs &a) {
    int lanes = a.group.size * EP_LANES, lane = threadIdx.x, begin = 0;
    for (int at = 0; at < lanes; at += 32) {
        int rows = at + lane < lanes ? __ldcg(&a.plan.lane_rows[at + lane]) : 0;
        int through = warp_prefix(rows, lane);
        if (at + lane < lanes) a.plan.lane_begin[at + lane] = begin + through - rows;
        begin += __shfl_sync(~0u, through, 31);
    }
    int64_t kept = min((int64_t)begin, slot_limit(a, 0));
    if (lane == 0) publish_totals(a, kept, begin, begin - kept);
}

/* Entries of the rows that are kept, by expert; offsets as a permutation by expert would have. */
__device__ void count_flat_entries(const EpPrepareArgs &a) {
    int lanes = a.group.size * EP_LANES, local = a.shape.num_local, k = a.top_k;
    for (int e = threadIdx.x; e < local; e += THREADS)
        a.plan.expert_counts[e] = 0;
    __syncthreads();
    for (int at = 0; at < lanes; at++) {
        int64_t kept = a.plan.header->recv_rows - a.plan.lane_begin[at];
        int64_t rows = max((int64_t)0, min((int64_t)__ldcg(&a.plan.lane_rows[at]), kept));
        const int32_t *routes = a.plan.routes + (int64_t)at * a.group.layout.lane_tokens * k;
        for (int i = threadIdx.x; i < rows * k; i += THREADS)
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

/* Rows to and from the other ranks, and those that stay. By a warp. */
__device__ void publish_rows(const EpPrepareArgs &a) {
    int sent = 0, received = 0, local = 0, rank = a.group.rank;
    for (int at = threadIdx.x; at < a.group.size * EP_LANES; at += 32) {
        int here = at / EP_LANES == rank;
        sent += here ? 0 : __ldcg(&a.plan.send_rows[at]);
        received += here ? 0 : __ldcg(&a.plan.lane_rows[at]);
        local += here ? __ldcg(&a.plan.lane_rows[at]) : 0;
    }
    a.info->remote_sent = warp_sum(sent);
    a.info->remote_received = warp_sum(received);
    a.info->local = warp_sum(local);
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

/* The last block to finish completes the step. */
__device__ void complete(const EpPrepareArgs &a, int tokens, uint32_t step) {
    __shared__ int is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd(&a.group.state->finished, 1) % EP_LANES == EP_LANES - 1;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (a.shape.layout == EP_LAYOUT_FLAT) {
        if (threadIdx.x < 32) lay_flat_rows(a);
        __syncthreads();
        count_flat_entries(a);
    }
    if (threadIdx.x < 32) publish_rows(a);
    if (threadIdx.x) return;
    note_overflow(a);
    a.group.state->step = step;
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

__global__ void __launch_bounds__(THREADS) prepare_kernel(const __grid_constant__ EpPrepareArgs a) {
    extern __shared__ int32_t shared[];
    const EpCudaGroup &g = a.group;
    int tokens = count_tokens(a), warp = threadIdx.x / 32;
    uint32_t step = *(volatile uint32_t *)&g.state->step + 1;
    Lane l;
    l.lane = blockIdx.x;
    ep_lane_range(tokens, l.lane, &l.begin, &l.end);
    l.entries = (l.end - l.begin) * a.top_k;
    l.base = shared;
    l.padded = l.base + g.num_experts;
    l.expert = l.padded + g.num_experts;
    l.value = l.expert + g.layout.lane_tokens * a.top_k;

    read_entries(a, l);
    if (!ep_grid_barrier(g)) return;
    share_counts(a, l, step);
    if (!wait_flags(g, ep_at<uint32_t>(g, g.rank, g.layout.count_flag), 1, step, EP_PHASE_COUNTS,
                    l.lane))
        return;
    add_sources(a, l, step);
    for (int r = warp; r < g.size; r += WARPS)
        lay_slabs(a, l, r);
    __syncthreads();
    number_entries(a, l);
    for (int r = warp; r < g.size; r += WARPS)
        send_routes(a, l, r, step);
    __syncthreads();
    for (int r = threadIdx.x; r < g.size; r += THREADS) {
        __threadfence_system();
        ep_store_release_sys(
            ep_at<uint32_t>(g, r, g.layout.route_flag) + g.rank * EP_LANES + l.lane, step);
    }
    if (!wait_flags(g, ep_at<uint32_t>(g, g.rank, g.layout.route_flag) + l.lane, EP_LANES, step,
                    EP_PHASE_ROUTES, l.lane))
        return;
    keep_routes(a, l, step);
    complete(a, tokens, step);
}

extern "C" int ep_cuda_launch_prepare(const EpPrepareArgs *a, void *stream) {
    size_t shared = sizeof(int32_t) * (2 * (size_t)a->group.num_experts +
                                       2 * (size_t)a->group.layout.lane_tokens * a->top_k);
    cudaError_t error = cudaFuncSetAttribute(
        prepare_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    if (error != cudaSuccess) return error;
    prepare_kernel<<<EP_LANES, THREADS, shared, (cudaStream_t)stream>>>(*a);
    return cudaGetLastError();
}
