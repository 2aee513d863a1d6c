/* SPDX-License-Identifier: Apache-2.0 */
#include "bootstrap/network/cuda/mark.h"
#include "runtime/cuda/device.cuh"

/* By one thread. */
__global__ void mark_begin(const __grid_constant__ EpMarkArgs a) {
    ep_mark_begin(a);
}

/* By one thread. */
__global__ void mark_move(const __grid_constant__ EpMarkArgs a) {
    ep_mark(a.marks, !a.marks.last);
}

/* By one warp. */
__global__ void compare_stamps(const __grid_constant__ EpMarkArgs a) {
    const EpStamp own = *a.marks.own;
    if (threadIdx.x == 0) *ep_own_operation() = EpOwnOperation{own.digest, own.generation};
    int alive = ep_failed(a.group) == 0;
    if (!__all_sync(~0u, alive)) return; /* the stamps may not have come */
    int agree = ep_stamps_agree(a.marks);
    if (threadIdx.x == 0) ep_mark(a.marks, !a.marks.last);
    if (!agree) ep_report_stamps(a.group, a.marks);
}

/* By one warp. Ranks that find out that they disagree report it; a rank that has failed before
 * waits for nobody. */
__global__ void __launch_bounds__(32) meet(const __grid_constant__ EpMarkArgs a) {
    uint32_t epoch = ep_epoch(a.group);
    if (threadIdx.x == 0) {
        ep_mark_begin(a);
        ep_set_operation(a.group, 0);
    }
    __syncwarp();
    if (!ep_failed_before(ep_failed(a.group), epoch)) {
        ep_arrive(a.group, epoch, 0, 0);
        (void)ep_await_arrivals(a.group, epoch);
    }
    if (threadIdx.x == 0) ep_mark(a.marks, !a.marks.last);
    (void)ep_end_operation(a.group, epoch, 0);
}

/* By one thread. The epoch is that of the next operation, which no rank can complete. The words of
 * the one after it are those of the last operation, too, which other ranks may be in. */
__global__ void depart(const __grid_constant__ EpCudaGroup g) {
    ep_give_up(g, ep_member(g, g.rank), 0);
}

extern "C" int ep_cuda_open_mark(void) {
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, mark_begin);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, mark_move);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, meet);
    return error != cudaSuccess ? error : cudaFuncGetAttributes(&attributes, compare_stamps);
}

extern "C" int ep_cuda_launch_begin(const EpMarkArgs *args, void *stream) {
    return ep_launch(mark_begin, 1, 1, 0, stream, *args);
}

extern "C" int ep_cuda_launch_meet(const EpMarkArgs *args, void *stream) {
    return ep_launch(meet, 1, 32, 0, stream, *args);
}

extern "C" int ep_cuda_launch_compare(const EpMarkArgs *args, void *stream) {
    return ep_launch(compare_stamps, 1, 32, 0, stream, *args);
}

extern "C" int ep_cuda_launch_move(const EpMarkArgs *args, void *stream) {
    return ep_launch(mark_move, 1, 1, 0, stream, *args);
}

extern "C" int ep_cuda_launch_depart(const EpCudaGroup *group, void *stream) {
    return ep_launch(depart, 1, 1, 0, stream, *group);
}
