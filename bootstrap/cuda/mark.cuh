/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_CUDA_MARK_CUH
#define EP_BOOTSTRAP_CUDA_MARK_CUH

#include "bootstrap/cuda/mark.h"
#include "runtime/cuda/device.cuh"

/**
 * If this rank has failed, let its stamp say so. Every kernel that fills a message ends with this,
 * in each of its blocks: a block that leaves early does so because the rank has failed, and its
 * rows are not what they should be. The stamp stays so until an operation begins. Whom this rank
 * blames it has told its node: see ep_give_up. By all threads of a block, or by one.
 */
__device__ __forceinline__ void ep_seal_stamp(const EpCudaGroup &g, EpStamp *stamp) {
    if (threadIdx.x || !ep_failed(g)) return;
    stamp->digest = EP_DIGEST(EP_OP_GONE, 0, 0);
    stamp->blamed =
        (uint32_t)ep_load_relaxed_sys(&ep_arrival(g, g.rank, g.rank, ep_epoch(g))->gone);
}

/* The group's operations follow each other, so no two kernels that mark run at a time. */
__device__ __forceinline__ void ep_mark(const EpMarkArgs &a, int under_way) {
    uint64_t marks = a.counts[1] + 1;
    a.counts[1] = marks;
    ep_store_relaxed_sys(&a.marks->moved, marks << 1 | under_way);
}

/** The operation begins: write this rank's stamp, for a plan of this generation. By one thread. */
__device__ __forceinline__ void ep_mark_begin(const EpMarkArgs &a, uint32_t generation = 0) {
    a.counts[0]++;
    *a.stamps = EpStamp{a.group.digest, (uint32_t)a.counts[0], generation, 0};
    ep_seal_stamp(a.group, a.stamps);
    ep_store_relaxed_sys(&a.marks->begun, a.counts[0] << 32 | a.group.digest);
    ep_mark(a, 1);
}

#endif
