/* SPDX-License-Identifier: Apache-2.0 */
/*
 * On one node kernels check their plan before they announce themselves, and no rank gets rows until
 * all have. Messages between nodes come whether their sender has put rows into them or not, so its
 * peers must know first.
 */
#include "handles/cuda/check_plan.h"

#include "bootstrap/network/cuda/mark.cuh"
#include "handles/cuda/plan.cuh"

/* By one thread. */
__global__ void check_plan(const __grid_constant__ EpCheckArgs a) {
    const EpCudaGroup &g = a.mark.group;
    const EpLook look = ep_look(g, a.plan);
    uint32_t epoch;
    if (!ep_enter(g, a.plan, look, &epoch)) ep_report_plan(g, a.plan);
    ep_mark_begin(a.mark, (uint32_t)look.plan.generation);
}

extern "C" int ep_cuda_open_check(int shared_bytes) {
    return ep_open_kernel(check_plan, shared_bytes);
}

extern "C" int ep_cuda_launch_check(const void *args, int blocks, void *stream) {
    return ep_launch(check_plan, blocks, 1, 0, stream, *(const EpCheckArgs *)args);
}
