/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checks a plan before an operation on several nodes says that it has begun. On one node kernels
 * check it before they announce themselves, and no rank gets rows until all have. Messages between
 * nodes come whether their sender has put rows into them or not, so its peers must know first.
 */
#include "handles/cuda/plan.cuh"

/* By one thread. */
__global__ void check_plan(const __grid_constant__ EpCheckArgs a) {
    uint32_t epoch;
    if (!ep_enter(a.group, a.plan, ep_look(a.group, a.plan), &epoch))
        ep_report_plan(a.group, a.plan);
}

extern "C" int ep_cuda_open_check(int shared_bytes) {
    return ep_open_kernel(check_plan, shared_bytes);
}

extern "C" int ep_cuda_launch_check(const void *args, int blocks, void *stream) {
    return ep_launch(check_plan, blocks, 1, 0, stream, *(const EpCheckArgs *)args);
}
