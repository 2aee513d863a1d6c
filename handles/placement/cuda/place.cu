/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ep_group_place on one node: one block. Each rank sends all ranks the hash of its map with its
 * arrival, in place of where rows go. Once all have come and are equal, it makes its own table.
 *
 * No operation of the group reads the table meanwhile: the stream orders those before and behind.
 * Kernels that start early wait for the end of this one before they read anything.
 */
#include "handles/placement/cuda/place.h"

#include "handles/placement/cuda/copies.cuh"

EP_VARIANT_BEGIN

/* Returns whether a rank is here with the same map. Its hash is in the digest, too, but for the
 * upper half. */
__device__ __forceinline__ int await_map(const EpCudaGroup &g, int rank, uint32_t epoch,
                                         uint32_t hash) {
    uint64_t where;
    if (!ep_await_arrival(g, rank, epoch, &where, NULL)) return 0;
    if (where == hash || !ep_is_alive(rank)) return 1;
    ep_report_other(g, rank, epoch, ep_own_operation()->digest, where);
    return 0;
}

__global__ void __launch_bounds__(COPIES_THREADS)
    place_experts(const __grid_constant__ EpPlaceArgs a) {
    static_assert(EP_CUDA_MAX_RANKS <= COPIES_THREADS, "a thread for each rank");
    const EpCudaGroup &g = a.group;
    uint32_t epoch = ep_epoch(g), hash = hash_map(a.copies, a.map);
    ep_load_alive(g);
    if (threadIdx.x == 0) ep_set_operation(g, hash); /* reports give it as a plan's generation */
    int alive = __syncthreads_and(!ep_failed_before(ep_failed(g), epoch));
    if (alive) {
        ep_arrive(g, epoch, hash, 0);
        int r = threadIdx.x;
        alive = __syncthreads_and(r >= g.size || await_map(g, r, epoch, hash));
    }
    if (alive) take_map(a.copies, a.map, a.errors);
    (void)ep_end_operation(g, epoch, 0);
}

extern "C" int EP_VARIANT(ep_cuda_open_place)(int shared_bytes) {
    return ep_open_kernel(place_experts, shared_bytes);
}

extern "C" int EP_VARIANT(ep_cuda_launch_place)(const void *args, int blocks, void *stream) {
    const EpPlaceArgs *a = (const EpPlaceArgs *)args;
    return ep_launch(place_experts, blocks, COPIES_THREADS, 0, stream, *a);
}

EP_VARIANT_END
