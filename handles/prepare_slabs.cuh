/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PREPARE_SLABS_CUH
#define EP_HANDLES_PREPARE_SLABS_CUH

/**
 * Slabs of ep_prepare: where each expert's rows begin on each rank; and what of it this rank is
 * told.
 */

#include "handles/prepare_counts.cuh"

/* Slabs of one rank: adds each one's offset to base. By a warp. */
__device__ void lay_slabs(const EpPrepareArgs &a, Lane *l, int rank) {
    int first = l->ranks->first[rank], local = l->ranks->first[rank + 1] - first;
    int lane = threadIdx.x % 32;
    int64_t start = 0;
    for (int at = 0; at < local; at += 32) {
        Slab slab = lay_slab(a, l->total + first, local, at, &start);
        if (at + lane < local)
            l->base[first + at + lane] += (int)min(slab.offset, (int64_t)INT32_MAX);
    }
}

/* Slots by expert and source, where the caller asks for them. */
__device__ void publish_lane_sources(const EpPrepareArgs &a, const Lane *l, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int first = l->ranks->first[g.rank];
    publish_sources(a, [&](int e, int source) {
        return ep_load_relaxed_sys(counts_of(g, g.rank, source, epoch) + first + e);
    });
}

/* Rows to and from the other ranks, and those that stay. By a warp. */
__device__ void publish_rows(const EpPrepareArgs &a, const Lane *l, uint32_t step, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    const uint64_t *own = counts_of(g, g.rank, g.rank, epoch) + g.num_experts;
    int sent = 0, local = (int)ep_load_relaxed_sys(own + g.rank);
    for (int r = threadIdx.x % 32; r < g.size; r += 32)
        sent += r == g.rank ? 0 : (int)ep_load_relaxed_sys(own + r);
    sent = warp_sum(sent);
    if (threadIdx.x % 32) return;
    publish_row_counts(a, step, sent, l->total[g.num_experts + g.rank] - local, local);
}

#endif
