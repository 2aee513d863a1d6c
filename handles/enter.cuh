/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_ENTER_CUH
#define EP_HANDLES_ENTER_CUH

/**
 * What every kernel does first: see that there is something to be done.
 */

#include "handles/plan_cuda.h"
#include "runtime/device.cuh"

#define EP_EPOCH_THREAD 32 /* of another warp than thread 0, which sees to the rest */

/* What handle memory says of itself. The loads are under way together. */
__device__ __forceinline__ EpPlanMark ep_read_mark(const EpCudaPlan &plan) {
    const volatile EpPlanHeader *h = plan.header;
    EpPlanMark mark = {h->magic, h->group, h->bytes, h->handle, *(volatile uint64_t *)plan.tail};
    return mark;
}

__device__ __forceinline__ int ep_same_mark(const EpPlanMark &a, const EpPlanMark &b) {
    return a.magic == b.magic && a.group == b.group && a.bytes == b.bytes && a.handle == b.handle &&
           a.tail == b.tail;
}

/**
 * By all threads of every block, before anything else; the caller's inputs may be read already. 0:
 * nothing is to be read, written or announced, since this rank has failed in an operation before,
 * which left plan and rings void; or since the handle's memory is not what it was, which fails this
 * operation.
 */
template <typename Epoch>
__device__ __forceinline__ int ep_enter_with(const EpCudaGroup &g, const EpCudaPlan &plan,
                                             Epoch epoch_of) {
    int same = 1, failed = 0;
    EpPlanMark mark = plan.mark;
    if (threadIdx.x == 0) {
        mark = ep_read_mark(plan);
        failed = ep_failed_before(g, epoch_of());
        same = ep_same_mark(mark, plan.mark);
    }
    if (__syncthreads_and(same && !failed)) return 1;
    if (failed || same) return 0;
    /* All blocks say the same, and the first of them is heard. */
    g.failure->expected_mark = plan.mark, g.failure->mark = mark;
    ep_report(g, EP_FAULT_MEMORY, EpAwaited{g.rank, 0, 0, 0, 0});
    return 0;
}

__device__ __forceinline__ int ep_enter(const EpCudaGroup &g, const EpCudaPlan &plan,
                                        uint32_t epoch) {
    return ep_enter_with(g, plan, [=] { return epoch; });
}

/** Where the epoch is not known yet either: it is under way together with the rest, and all threads
 *  are told of it. */
__device__ __forceinline__ int ep_enter_next(const EpCudaGroup &g, const EpCudaPlan &plan,
                                             uint32_t *epoch) {
    __shared__ uint32_t shared;
    if (threadIdx.x == EP_EPOCH_THREAD) shared = ep_epoch(g);
    int alive = ep_enter_with(g, plan, [&] { return ep_epoch(g); });
    *epoch = shared;
    return alive;
}

#endif
