/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An operation on several nodes begins, and checks the plan that it reads. On one node kernels
 * check their plan before they announce themselves, and no rank gets rows until all have. Messages
 * between nodes come whether their sender has put rows into them or not, so its peers must know
 * first.
 *
 * This kernel has a source of its own: beside others it would change their code.
 */
#include "handles/nodes/cuda/route.h"

#include "runtime/cuda/plan.cuh"

/* By one thread. */
__global__ void check_plan(const __grid_constant__ EpCheckArgs a) {
    const EpCudaGroup &g = a.mark.group;
    const EpLoadedHeader header = ep_load_header(g, a.plan);
    uint32_t epoch;
    if (!ep_begin_operation(g, a.plan, header, &epoch)) ep_report_plan(g, a.plan);
    ep_mark_begin(a.mark, (uint32_t)header.plan.generation);
}

extern "C" int ep_cuda_open_check(int shared_bytes) {
    return ep_open_kernel(check_plan, shared_bytes);
}

extern "C" int ep_cuda_launch_check(const void *args, int blocks, void *stream) {
    return ep_launch(check_plan, blocks, 1, 0, stream, *(const EpCheckArgs *)args);
}
