/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ep_prepare on GPUs: one launch, all of its blocks resident together.
 *
 * The blocks divide the rank's tokens into lanes. Each block sorts its lane; one more tells the
 * host what has come of it, and peers that the rank is there. Who waits on whom:
 *
 *     lane counts       block -> block           each sums up some columns over all lanes
 *     lanes before      block -> block           and tells each of the sum over those before it
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
 * counts. The first chunk, which mostly is the only one, is numbered, and its begins are sent,
 * while counts travel.
 *
 * Order: none between words. Each is stored at once and tells by itself whether it is there: counts
 * and begins carry the epoch in their upper half; a route is not 0, and is set to 0 again by its
 * only reader, so that routes need no tag. Each has two buffers, used in turn: no rank is more than
 * one operation ahead of another, so that a buffer is written anew only after its readers have left
 * the operation that filled it. A lane's counts have one reader, which then puts in their place
 * what the lanes before have; who waits for that knows it by a bit.
 */
#include "handles/prepare_entries.cuh"

/* ---- flat rows ----------------------------------------------------------------------------- */

/* Flat rows lie by source, without gaps. By a warp. */
__device__ void lay_flat_rows(const EpPrepareArgs &a, const Lane *l, int64_t step) {
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

/* Entries for this rank's experts. */
__device__ __forceinline__ const int32_t *own_total(const EpPrepareArgs &a, const Lane *l) {
    return l->total + ep_owner_first(&a.owners, a.group.rank);
}

/* By the last block: only now are all rows known. What a failure leaves is not to be walked. */
__device__ void complete_flat(const EpPrepareArgs &a, const Lane *l, uint32_t epoch) {
    __threadfence();
    if (*(volatile uint32_t *)&a.group.state->failed) return;
    int64_t step = step_under_way(a);
    if (threadIdx.x < 32) lay_flat_rows(a, l, step);
    __syncthreads();
    int all_kept = *(volatile int64_t *)&a.plan.header->dropped_slots == 0;
    if (!all_kept) count_kept_entries(a, l);
    if (threadIdx.x < 32) publish_flat_experts(a, step, all_kept ? own_total(a, l) : NULL);
    __syncthreads();
    if (all_kept) publish_lane_sources(a, l, epoch);
    __syncthreads();
    if (threadIdx.x == 0) publish_step(a, step, l->ranks->num_tokens);
}

/* ---- kernel -------------------------------------------------------------------------------- */

template <int FLAT>
__device__ __forceinline__ void prepare_lane(const EpPrepareArgs &a, Lane *l, const Index &index,
                                             uint32_t epoch) {
    Own o = count_entries(a, l, index, epoch);
    int alive = share_counts(a, l, epoch);
    number_entries(a, l, &o);
    alive = alive && send_begins(a, l, o, l->begin, epoch);
    alive = alive && await_counts(a, l, epoch);
    if (!__syncthreads_and(alive)) return;
#pragma unroll 1
    for (int r = threadIdx.x / 32; r < a.group.size && !FLAT; r += WARPS)
        lay_slabs(a, l, r);
    if (!FLAT) __syncthreads();
    place_entries<FLAT>(a, l, o, epoch);
    keep_routes(a, l, epoch);
}

template <int FLAT>
__device__ __forceinline__ void publish_lanes(const EpPrepareArgs &a, Lane *l, uint32_t epoch) {
    announce_arrivals(a.group, epoch);
    int64_t step = step_under_way(a);
    int alive = await_all(a, l, epoch);
    if (!__syncthreads_and(alive)) return;
    if (threadIdx.x / 32 == 1) publish_rows(a, l, step, epoch);
    if (FLAT) return; /* its rows are laid at the end */
    if (threadIdx.x < 32) publish_slabs(a, step, own_total(a, l));
    __syncthreads();
    publish_lane_sources(a, l, epoch);
    __syncthreads();
    if (threadIdx.x == 0) publish_step(a, step, l->ranks->num_tokens);
}

__device__ __forceinline__ Lane open_lane(const EpPrepareArgs &a, uint4 *memory) {
    const EpCudaGroup &g = a.group;
    int tokens = count_tokens(a);
    Lane l;
    l.lane = blockIdx.x;
    lane_range(a, tokens, l.lane, &l.begin, &l.end);
    l.columns = g.num_experts + g.size;
    l.ranks = (Ranks *)memory;
    l.table = (uint8_t *)(l.ranks + 1);
    if (threadIdx.x == 0) l.ranks->num_tokens = tokens;
    l.base = (int32_t *)(l.table + WARPS * l.columns);
    l.total = l.base + l.columns;
    l.team_shift = a.top_k > 1 ? 32 - __clz(a.top_k - 1) : 0;
    l.team = 1 << l.team_shift;
    l.team_tokens = THREADS >> l.team_shift;
    return l;
}

/* The first indices are under way together with what ep_enter asks for. */
template <int FLAT> __device__ __forceinline__ void prepare(const EpPrepareArgs &a, uint4 *memory) {
    Lane l = open_lane(a, memory);
    Index index = load_own_index(a, &l, l.begin);
    uint32_t epoch;
    fill_tables(a, &l);
    if (!ep_enter_next(a.group, a.plan, &epoch)) {
        ep_leave(a.group, epoch);
        return;
    }
    if (is_publisher(a, &l))
        publish_lanes<FLAT>(a, &l, epoch);
    else
        prepare_lane<FLAT>(a, &l, index, epoch);
    if (ep_leave(a.group, epoch, FLAT || l.ranks->has_bad) != EP_LEFT_TRACES) return;
    if (threadIdx.x == 0) tell_all_bad_indices(a);
    if (FLAT) complete_flat(a, &l, epoch);
}

__global__ void __launch_bounds__(THREADS) prepare_slabs(const __grid_constant__ EpPrepareArgs a) {
    extern __shared__ uint4 memory[];
    prepare<0>(a, ep_keep_shared(memory));
}

__global__ void __launch_bounds__(THREADS) prepare_flat(const __grid_constant__ EpPrepareArgs a) {
    extern __shared__ uint4 memory[];
    prepare<1>(a, ep_keep_shared(memory));
}

extern "C" int ep_cuda_open_prepare(int shared_bytes) {
    int error = ep_open_kernel(prepare_slabs, shared_bytes);
    return error ? error : ep_open_kernel(prepare_flat, shared_bytes);
}

extern "C" int ep_cuda_launch_prepare(const EpPrepareArgs *a, void *stream) {
    size_t columns = (size_t)a->group.num_experts + (size_t)a->group.size;
    size_t shared = sizeof(Ranks) + (WARPS + 2 * sizeof(int32_t)) * columns;
    auto kernel = a->shape.layout == EP_LAYOUT_FLAT ? prepare_flat : prepare_slabs;
    return ep_launch(kernel, a->group.lanes + 1, THREADS, shared, stream, *a);
}
