/* SPDX-License-Identifier: Apache-2.0 */
#include "bootstrap/cuda/mark.h"
#include "runtime/cuda/ptx.cuh"

/* By one thread. The group's operations follow each other, so no two of these run at a time. */
__global__ void mark_progress(const __grid_constant__ EpMarkArgs a) {
    uint64_t ops = a.counts[0] + (a.begins != 0), marks = a.counts[1] + 1;
    a.counts[0] = ops, a.counts[1] = marks;
    ep_store_relaxed_sys(&a.marks->begun, ops << 32 | a.digest);
    ep_store_relaxed_sys(&a.marks->moved, marks << 1 | !a.last);
}

extern "C" int ep_cuda_open_mark(void) {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, mark_progress);
}

extern "C" int ep_cuda_launch_mark(const EpMarkArgs *args, void *stream) {
    EpMarkArgs copy = *args;
    void *arguments[] = {&copy};
    return cudaLaunchKernel(mark_progress, dim3(1), dim3(1), arguments, 0, (cudaStream_t)stream);
}
