/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PREPARE_SOURCES_CUH
#define EP_HANDLES_PREPARE_SOURCES_CUH

/**
 * Slots of ep_prepare by expert and source, where the caller asks for them.
 */

#include "handles/prepare_slabs.cuh"

__device__ __forceinline__ int64_t source_count_at(const EpPrepareArgs &a, int local, int source) {
    return (int64_t)local * a.group.size + source;
}

/* An expert's slots are its sources' in ascending order, and what is kept of them comes first. By
 * the threads of a block, once they see how many of each expert are kept. */
__device__ void publish_sources(const EpPrepareArgs &a, const Lane *l, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int first = l->ranks->first[g.rank];
    for (int e = threadIdx.x; a.source_counts.data && e < a.shape.num_local; e += THREADS) {
        int left = *(volatile int32_t *)&a.plan.expert_counts[e];
        for (int s = 0; s < g.size; s++) {
            uint64_t word = ep_load_relaxed_sys(counts_of(g, g.rank, s, epoch) + first + e);
            int count = min(left, (int)word);
            store_integer(a.source_counts, source_count_at(a, e, s), count);
            left -= count;
        }
    }
}

/* Where flat rows are lost, entries are counted one by one. */
__device__ void clear_sources(const EpPrepareArgs &a) {
    int counts = a.shape.num_local * a.group.size;
    for (int i = threadIdx.x; a.source_counts.data && i < counts; i += THREADS)
        store_integer(a.source_counts, i, 0);
}

__device__ __forceinline__ void count_source(const EpPrepareArgs &a, int local, int source) {
    const EpCudaVector &v = a.source_counts;
    int64_t at = source_count_at(a, local, source);
    if (v.data && v.is_int64)
        atomicAdd((unsigned long long *)v.data + at, 1ull);
    else if (v.data)
        atomicAdd((int32_t *)v.data + at, 1);
}

#endif
