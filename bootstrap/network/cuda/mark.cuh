/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_NETWORK_CUDA_MARK_CUH
#define EP_BOOTSTRAP_NETWORK_CUDA_MARK_CUH

#include "bootstrap/network/cuda/mark.h"
#include "runtime/cuda/device.cuh"

/* ---- how far this rank is ------------------------------------------------------------------- */

/** Tell the watcher that an exchange is complete, and whether one is to follow. The group's
 *  operations follow each other, so no two kernels that mark run at a time. By one thread. */
__device__ __forceinline__ void ep_mark(const EpMarks &m, int under_way) {
    uint64_t marks = m.counts[1] + 1;
    m.counts[1] = marks;
    ep_store_relaxed_sys(&m.watch->moved, marks << 1 | under_way);
}

/* ---- this rank's stamp ---------------------------------------------------------------------- */

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

/** The operation begins: write this rank's stamp, for a plan of this generation. By one thread. */
__device__ __forceinline__ void ep_mark_begin(const EpMarkArgs &a, uint32_t generation = 0) {
    const EpMarks &m = a.marks;
    m.counts[0]++;
    *m.own = EpStamp{a.group.digest, (uint32_t)m.counts[0], generation, 0};
    ep_seal_stamp(a.group, m.own);
    ep_store_relaxed_sys(&m.watch->begun, m.counts[0] << 32 | a.group.digest);
    ep_mark(m, 1);
}

/* ---- the others' stamps --------------------------------------------------------------------- */

__device__ __forceinline__ int ep_stamps_match(const EpStamp &a, const EpStamp &b) {
    return ep_same_operation(a.digest, b.digest) && a.number == b.number &&
           a.generation == b.generation;
}

/** Returns whether all stamps that have come are as this rank's own. By a whole warp. */
__device__ __forceinline__ int ep_stamps_agree(const EpMarks &m) {
    const EpStamp own = *m.own;
    int agree = 1;
    for (int i = threadIdx.x % 32; i < m.num_peers; i += 32)
        agree &= ep_stamps_match(own, m.theirs[i]);
    return __all_sync(~0u, agree);
}

/* Returns what a stamp tells that differs from this rank's. One of an earlier operation is what was
 * here before: nothing has come, since the communicator has ended. */
static __device__ int ep_stamp_fault(const EpStamp &own, const EpStamp &theirs) {
    if (EP_DIGEST_OP(theirs.digest) == EP_OP_GONE) return EP_FAULT_PEER;
    return (int32_t)(own.number - theirs.number) > 0 ? EP_FAULT_ENDED : EP_FAULT_ORDER;
}

/**
 * Report a rank that has failed, is in another operation or reads another plan, or sends nothing,
 * unless this rank has failed already. On a path that leaves the kernel: see ep_report_plan. The
 * block knows its operation (ep_own_operation).
 */
[[maybe_unused]] static __device__ __noinline__ void ep_report_stamps(const EpCudaGroup &g,
                                                                      const EpMarks &m) {
    const EpStamp own = *m.own;
    if (threadIdx.x || EP_DIGEST_OP(own.digest) == EP_OP_GONE) return;
    for (int i = 0; i < m.num_peers && !ep_failed(g); i++) {
        const EpStamp theirs = m.theirs[i];
        if (ep_stamps_match(own, theirs)) continue;
        int fault = ep_stamp_fault(own, theirs), member = m.peers ? m.peers[i] : i;
        uint32_t blamed = theirs.blamed ? theirs.blamed - 1 : (uint32_t)member;
        ep_report(g, fault,
                  EpAwaited{ep_elsewhere(g, member), EP_AWAIT_ARRIVAL, 0, own.digest,
                            fault == EP_FAULT_PEER ? blamed : theirs.digest},
                  theirs.generation);
    }
}

#endif
