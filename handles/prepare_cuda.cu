/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ep_prepare on GPUs: one launch, all of its blocks resident together.
 *
 * The blocks divide the rank's tokens into lanes. Each block sorts its lane; one more tells the
 * host what has come of it. Who waits on whom:
 *
 *     lane counts       block -> all blocks      each sums up some columns over all lanes,
 *                                                and all columns over the lanes before it
 *     rank counts       rank  -> all ranks       E + R + 1 integers to each
 *     begins, routes    block -> all ranks       for each token, how many rows come before it; for
 *                                                each row its slots there
 *
 * A rank that knows how many entries every rank has for every expert knows all slabs of all ranks,
 * and so the slot of each of its own entries, without seeing anybody's routing. What the others
 * send is kept by all blocks alike, each its share of the words.
 *
 * A block takes its lane's tokens in chunks of one entry for each thread, a token being a team of
 * lanes of one warp. Entries of one expert are numbered in order of token and k, rows to one rank
 * in order of token: within a warp by comparing lanes, across warps by a table of each warp's
 * counts. The first chunk, which mostly is the only one, is numbered while counts travel.
 *
 * Order: none between words. Each is stored at once and tells by itself whether it is there: counts
 * and begins carry the epoch in their upper half; a route is not 0, and is set to 0 again by its
 * only reader, so that routes need no tag. Each has two buffers, used in turn: no rank is more than
 * one operation ahead of another, so that a buffer is written anew only after its readers have left
 * the operation that filled it.
 */
#include "handles/prepare_entries.cuh"

/* ---- flat rows ----------------------------------------------------------------------------- */

/* Flat rows lie by source, without gaps. By a warp. */
__device__ void lay_flat_rows(const EpPrepareArgs &a, const Lane *l, uint32_t step) {
    int lane = threadIdx.x, begin = 0;
    for (int at = 0; at < a.group.size; at += 32) {
        int rows = at + lane < a.group.size ? l->ranks->coming[at + lane] : 0;
        int through = ep_warp_prefix(rows);
        if (at + lane < a.group.size) a.plan.flat_begin[at + lane] = begin + through - rows;
        begin += __shfl_sync(~0u, through, 31);
    }
    int64_t kept = min((int64_t)begin, slot_limit(a, 0));
    if (lane == 0) publish_totals(a, step, kept, begin, begin - kept);
}

/* Entries of the rows that are kept, into the plan. */
__device__ void count_kept_entries(const EpPrepareArgs &a, const Lane *l) {
    int k = a.top_k;
    int64_t kept = a.plan.header->recv_rows;
    for (int e = threadIdx.x; e < a.shape.num_local; e += THREADS)
        a.plan.expert_counts[e] = 0;
    clear_sources(a);
    __syncthreads();
    for (int r = 0; r < a.group.size; r++) {
        int64_t rows = min((int64_t)l->ranks->coming[r], kept - a.plan.flat_begin[r]);
        const int32_t *routes = a.plan.routes + (int64_t)r * a.group.layout.max_tokens * k;
        for (int i = threadIdx.x; i < rows * k; i += THREADS) {
            int local = __ldcg(routes + i);
            if (local < 0) continue;
            atomicAdd(&a.plan.expert_counts[local], 1);
            count_source(a, local, r);
        }
    }
    __syncthreads();
}

/* By the last block: only now are all rows known. What a failure leaves is not to be walked. */
__device__ void complete_flat(const EpPrepareArgs &a, const Lane *l, int tokens, uint32_t epoch) {
    __threadfence();
    if (*(volatile uint32_t *)&a.group.state->failed) return;
    uint32_t step = step_under_way(a);
    if (threadIdx.x < 32) lay_flat_rows(a, l, step);
    __syncthreads();
    int all_kept = *(volatile int64_t *)&a.plan.header->dropped_slots == 0;
    if (!all_kept) count_kept_entries(a, l);
    if (threadIdx.x < 32)
        publish_flat_experts(a, step, all_kept ? l->total + l->ranks->first[a.group.rank] : NULL);
    __syncthreads();
    if (all_kept) publish_lane_sources(a, l, epoch);
    __syncthreads();
    if (threadIdx.x == 0) publish_step(a, step, tokens);
}

/* ---- kernel -------------------------------------------------------------------------------- */

__device__ void prepare_lane(const EpPrepareArgs &a, Lane *l, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    Own o = count_entries(a, l, epoch);
    int alive = share_counts(a, l, epoch);
    if (l->lane == 0) announce_arrivals(g, epoch);
    number_entries(a, l, &o);
    alive = alive && add_lanes(a, l, epoch);
    alive = alive && await_counts(a, l, epoch);
    if (!__syncthreads_and(alive)) return;
    for (int r = threadIdx.x / 32; r < g.size && a.shape.layout != EP_LAYOUT_FLAT; r += WARPS)
        lay_slabs(a, l, r);
    __syncthreads();
    place_entries(a, l, o, epoch);
    keep_routes(a, l, epoch);
}

__device__ void publish_lanes(const EpPrepareArgs &a, Lane *l, int tokens, uint32_t epoch) {
    uint32_t step = step_under_way(a);
    fill_tables(a, l, epoch);
    for (int c = threadIdx.x; c < l->columns; c += THREADS)
        l->base[c] = 0;
    __syncthreads();
    int alive = await_counts(a, l, epoch);
    if (!__syncthreads_and(alive)) return;
    if (threadIdx.x < 32) publish_rows(a, l, step, epoch);
    if (a.shape.layout == EP_LAYOUT_FLAT) return; /* its rows are laid at the end */
    if (threadIdx.x < 32) publish_slabs(a, step, l->total + l->ranks->first[a.group.rank]);
    __syncthreads();
    publish_lane_sources(a, l, epoch);
    __syncthreads();
    if (threadIdx.x == 0) publish_step(a, step, tokens);
}

__device__ Lane open_lane(const EpPrepareArgs &a, Ranks *ranks, uint4 *memory, int tokens) {
    const EpCudaGroup &g = a.group;
    Lane l;
    l.lane = blockIdx.x;
    lane_range(g, tokens, l.lane, &l.begin, &l.end);
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
    if (!ep_enter(a.group, a.plan, epoch)) {
        ep_leave(a.group, epoch);
        return;
    }
    int tokens = count_tokens(a);
    Lane l = open_lane(a, &ranks, memory, tokens);
    if (is_publisher(a, &l))
        publish_lanes(a, &l, tokens, epoch);
    else
        prepare_lane(a, &l, epoch);
    if (!ep_leave(a.group, epoch)) return;
    if (threadIdx.x == 0) tell_all_bad_indices(a);
    if (a.shape.layout == EP_LAYOUT_FLAT) complete_flat(a, &l, tokens, epoch);
}

extern "C" int ep_cuda_open_prepare(int shared_bytes) {
    return ep_open_kernel(prepare_kernel, shared_bytes);
}

extern "C" int ep_cuda_launch_prepare(const EpPrepareArgs *a, void *stream) {
    size_t experts = (size_t)a->group.num_experts, columns = experts + (size_t)a->group.size;
    size_t shared = (WARPS + 2 * sizeof(int32_t)) * columns + experts;
    prepare_kernel<<<a->group.lanes + 1, THREADS, shared, (cudaStream_t)stream>>>(*a);
    return cudaGetLastError();
}
