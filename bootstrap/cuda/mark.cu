/* SPDX-License-Identifier: Apache-2.0 */
#include "bootstrap/cuda/mark.cuh"

#define COMPARE_THREADS 128

/* By one thread. */
__global__ void mark_begin(const __grid_constant__ EpMarkArgs a) {
    ep_mark_begin(a);
}

/* By one thread. */
__global__ void mark_move(const __grid_constant__ EpMarkArgs a) {
    ep_mark(a, !a.last);
}

/* Returns what a stamp tells that differs from this rank's. One of an earlier operation is what was
 * here before: nothing has come, since the communicator has ended. */
__device__ __forceinline__ int stamp_fault(const EpStamp &own, const EpStamp &theirs) {
    if (EP_DIGEST_OP(theirs.digest) == EP_OP_GONE) return EP_FAULT_PEER;
    return (int32_t)(own.number - theirs.number) > 0 ? EP_FAULT_ENDED : EP_FAULT_ORDER;
}

/* Report a rank that has failed, is in another operation or reads another plan, or sends nothing.
 */
__device__ void report_stamp(const EpMarkArgs &a, const EpStamp &own, const EpStamp &theirs,
                             int member) {
    int fault = stamp_fault(own, theirs);
    if (EP_DIGEST_OP(own.digest) == EP_OP_GONE) return;
    uint32_t blamed = theirs.blamed ? theirs.blamed - 1 : (uint32_t)member;
    ep_report(a.group, fault,
              EpAwaited{ep_elsewhere(a.group, member), EP_AWAIT_ARRIVAL, 0, own.digest,
                        fault == EP_FAULT_PEER ? blamed : theirs.digest},
              theirs.generation);
}

/* By one block. */
__global__ void compare_stamps(const __grid_constant__ EpMarkArgs a) {
    const EpStamp own = a.stamps[0];
    int alive = ep_failed(a.group) == 0;
    if (threadIdx.x == 0) *ep_own_operation() = EpOwnOperation{own.digest, own.generation};
    if (!__syncthreads_and(alive)) return; /* the stamps may not have come */
    for (int i = threadIdx.x; i < a.num_peers; i += COMPARE_THREADS) {
        const EpStamp theirs = a.stamps[1 + i];
        int is_same = ep_same_operation(own.digest, theirs.digest) && own.number == theirs.number &&
                      own.generation == theirs.generation;
        if (!is_same) report_stamp(a, own, theirs, a.peers ? a.peers[i] : i);
    }
    if (threadIdx.x == 0) ep_mark(a, !a.last);
}

extern "C" int ep_cuda_open_mark(void) {
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, mark_begin);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, mark_move);
    return error != cudaSuccess ? error : cudaFuncGetAttributes(&attributes, compare_stamps);
}

extern "C" int ep_cuda_launch_begin(const EpMarkArgs *args, void *stream) {
    return ep_launch(mark_begin, 1, 1, 0, stream, *args);
}

extern "C" int ep_cuda_launch_compare(const EpMarkArgs *args, void *stream) {
    return ep_launch(compare_stamps, 1, COMPARE_THREADS, 0, stream, *args);
}

extern "C" int ep_cuda_launch_move(const EpMarkArgs *args, void *stream) {
    return ep_launch(mark_move, 1, 1, 0, stream, *args);
}
