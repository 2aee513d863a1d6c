/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PREPARE_SLABS_CUH
#define EP_HANDLES_PREPARE_SLABS_CUH

/**
 * Slabs of ep_prepare: where each expert's rows begin on each rank; and what of it this rank is
 * told.
 */

#include "handles/prepare_counts.cuh"

__device__ __forceinline__ void move_base(const Lane *l, int expert, int64_t offset) {
    l->base[expert] += (int)min(offset, (int64_t)INT32_MAX);
}

/* Slabs of one rank: adds each one's offset to base. By a warp, two experts to a lane. */
__device__ __forceinline__ void lay_slabs(const EpPrepareArgs &a, const Lane *l, int rank) {
    const EpPlanShape &s = a.shape;
    int first = ep_owner_first(&a.owners, rank), local = ep_owner_count(&a.owners, rank);
    int batched = s.layout == EP_LAYOUT_BATCHED;
    int64_t start = 0;
#pragma unroll 1
    for (int e = threadIdx.x % 32 * 2; __any_sync(~0u, e < local); e += 64) {
        int rows = e < local ? slab_rows(s, l->total[first + e]) : 0;
        int both = rows + (e + 1 < local ? slab_rows(s, l->total[first + e + 1]) : 0);
        int through = ep_warp_prefix(both);
        int64_t begin = start + through - both;
        if (e < local) move_base(l, first + e, batched ? e * s.rows_per_expert : begin);
        if (e + 1 < local)
            move_base(l, first + e + 1, batched ? (e + 1) * s.rows_per_expert : begin + rows);
        start += __shfl_sync(~0u, through, 31);
    }
}

/* Slots by expert and source, where the caller asks for them. */
__device__ void publish_lane_sources(const EpPrepareArgs &a, const Lane *l, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int first = ep_owner_first(&a.owners, g.rank);
    publish_sources(a, [&](int e, int source) {
        return ep_load_relaxed_sys(counts_of(g, g.rank, source, epoch) + first + e);
    });
}

/* Rows to and from the other ranks, and those that stay. By a warp. */
__device__ void publish_rows(const EpPrepareArgs &a, const Lane *l, int64_t step, uint32_t epoch) {
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
