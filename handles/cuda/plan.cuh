/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_CUDA_PLAN_CUH
#define EP_HANDLES_CUDA_PLAN_CUH

/**
 * How a kernel enters an operation, and how it reads the plan.
 */

#include "handles/cuda/plan.h"
#include "runtime/cuda/device.cuh"

#define EP_EPOCH_THREAD 32 /* in another warp than thread 0, which checks the mark */

/* Read the mark from handle memory. The loads overlap. */
__device__ __forceinline__ EpMemoryMark ep_read_mark(const EpCudaPlan &plan) {
    const volatile EpPlanHeader *h = plan.header;
    EpMemoryMark mark = {h->magic, h->group, h->bytes, h->handle, *(volatile uint64_t *)plan.tail};
    return mark;
}

__device__ __forceinline__ int ep_same_mark(const EpMemoryMark &a, const EpMemoryMark &b) {
    return a.magic == b.magic && a.group == b.group && a.bytes == b.bytes && a.handle == b.handle &&
           a.tail == b.tail;
}

/**
 * Check that the operation may run. The caller's inputs may be read before. Returns 0 if nothing
 * may be read, written or sent: this rank has failed in an earlier operation, which left plan and
 * rings void; or the handle's memory does not hold the expected plan, which fails this operation.
 * By all threads of every block, before anything else.
 */
template <typename Epoch>
__device__ __forceinline__ int ep_enter_with(const EpCudaGroup &g, const EpCudaPlan &plan,
                                             Epoch epoch_of) {
    int same = 1, failed = 0;
    EpMemoryMark mark = plan.mark;
    if (threadIdx.x == 0) {
        mark = ep_read_mark(plan);
        failed = ep_failed_before(g, epoch_of());
        same = ep_same_mark(mark, plan.mark);
    }
    if (__syncthreads_and(same && !failed)) return 1;
    if (failed || same) return 0;
    /* All blocks find the same; the first one reports it. */
    g.failure->expected_mark = plan.mark, g.failure->mark = mark;
    ep_report(g, EP_FAULT_MEMORY, EpAwaited{g.rank, 0, 0, 0, 0});
    return 0;
}

__device__ __forceinline__ int ep_enter(const EpCudaGroup &g, const EpCudaPlan &plan,
                                        uint32_t epoch) {
    return ep_enter_with(g, plan, [=] { return epoch; });
}

/** Enter the operation when its epoch is not known yet: load it with the rest, and give it to all
 *  threads. */
__device__ __forceinline__ int ep_enter_next(const EpCudaGroup &g, const EpCudaPlan &plan,
                                             uint32_t *epoch) {
    __shared__ uint32_t shared;
    if (threadIdx.x == EP_EPOCH_THREAD) shared = ep_epoch(g);
    int alive = ep_enter_with(g, plan, [&] { return ep_epoch(g); });
    *epoch = shared;
    return alive;
}

/* ---- the plan's words ---------------------------------------------------------------------- */

/** Returns entry k of a row, as its source sent it. */
__device__ __forceinline__ int32_t ep_route(const EpCudaPlan &plan, const EpCudaGroup &g, int top_k,
                                            int source, int row, int k) {
    return plan.routes[((int64_t)source * g.layout.max_tokens + row) * top_k + k];
}

/** Returns the slot of entry k of a row, -1 for none. A flat row fills one slot, returned for k =
 *  0. */
__device__ __forceinline__ int32_t ep_slot(const EpCudaPlan &plan, const EpCudaGroup &g,
                                           const EpPlanShape &shape, int top_k, int source, int row,
                                           int k) {
    if (shape.layout != EP_LAYOUT_FLAT) return ep_route(plan, g, top_k, source, row, k);
    int slot = plan.flat_begin[source] + row;
    return k == 0 && slot < plan.header->recv_rows ? slot : -1;
}

#endif
