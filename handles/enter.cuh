/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_ENTER_CUH
#define EP_HANDLES_ENTER_CUH

/**
 * What every kernel does first: see that there is something to be done.
 */

#include "handles/plan_cuda.h"
#include "runtime/device.cuh"

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
 * By all threads of every block, before anything else. 0: nothing is to be read, written or
 * announced, since this rank has failed in an operation before, which left plan and rings void; or
 * since the handle's memory is not what it was, which fails this operation.
 */
__device__ __forceinline__ int ep_enter(const EpCudaGroup &g, const EpCudaPlan &plan,
                                        uint32_t epoch) {
    int same = 1, failed = 0;
    EpPlanMark mark = plan.mark;
    if (threadIdx.x == 0) {
        failed = ep_failed_before(g, epoch);
        mark = ep_read_mark(plan);
        same = ep_same_mark(mark, plan.mark);
    }
    if (__syncthreads_and(same && !failed)) return 1;
    if (failed || same) return 0;
    /* All blocks say the same, and the first of them is heard. */
    g.failure->expected_mark = plan.mark, g.failure->mark = mark;
    ep_report(g, EP_FAULT_MEMORY, EpAwaited{g.rank, 0, 0, 0, 0});
    return 0;
}

#endif
