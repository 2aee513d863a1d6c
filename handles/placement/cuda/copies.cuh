/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PLACEMENT_CUDA_COPIES_CUH
#define EP_HANDLES_PLACEMENT_CUDA_COPIES_CUH

/** How one block reads a map of ep_group_place and makes this rank's table of copies from it. */

#include "handles/prepare/cuda/publish.cuh"

EP_VARIANT_BEGIN

#define COPIES_THREADS 1024

/** Returns the hash of a map. By all threads. */
__device__ __forceinline__ uint32_t hash_map(const EpCopySetup &s, const int32_t *map) {
    __shared__ unsigned long long sum;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    for (int p = threadIdx.x; p < s.placement.num_experts; p += COPIES_THREADS)
        atomicAdd(&sum, (unsigned long long)ep_copies_hash(p, map[p]));
    __syncthreads();
    return (uint32_t)ep_copies_hash_end(sum);
}

/** Make the table from the map that is kept, and from who is alive. By all threads. */
__device__ __forceinline__ void build_copies(const EpCopySetup &s) {
    __syncthreads();
    for (int p = threadIdx.x; p < s.placement.num_experts; p += COPIES_THREADS)
        ep_copies_set_kind(&s, p);
    __syncthreads();
    for (int e = threadIdx.x; e < s.num_logical; e += COPIES_THREADS)
        ep_copies_find(&s, e);
}

/** Report bad entries of a map as report_bad_indices does those of a routing; `top_k` 0 tells them
 * apart. Operations of a group follow each other, so there is one writer at a time. */
__device__ inline void report_bad_entries(EpCudaAsyncErrors *to, int count, int first,
                                          int logical) {
    volatile EpCudaAsyncErrors *errors = to;
    unsigned long long number = errors->bad_reports + 1;
    volatile EpCudaBadIndices *report = &errors->bad[number % 2];
    report->total = errors->bad[(number - 1) % 2].total + (unsigned)count;
    report->entry = (unsigned)first, report->top_k = 0, report->index = logical;
    __threadfence_system();
    errors->bad_reports = number;
}

/** Keep a map, report what is wrong in it, and make the table. By all threads. */
__device__ __forceinline__ void take_map(const EpCopySetup &s, const int32_t *map,
                                         EpCudaAsyncErrors *errors) {
    __shared__ int count, lowest; /* ~ of the lowest one */
    if (threadIdx.x == 0) count = 0, lowest = INT32_MIN;
    __syncthreads();
    for (int p = threadIdx.x; p < s.placement.num_experts; p += COPIES_THREADS) {
        int logical = map[p], is_bad = logical < -1 || logical >= s.num_logical;
        if (is_bad) atomicAdd(&count, 1), atomicMax(&lowest, ~p);
        s.memory.logical_of[p] = is_bad ? -1 : logical;
    }
    build_copies(s);
    if (threadIdx.x == 0 && count) report_bad_entries(errors, count, ~lowest, map[~lowest]);
}

EP_VARIANT_END

#endif
