/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tokens of this rank to e4m3 rows with their scales, in the handle's workspace, before a scatter
 * takes them to their slots as it takes any rows.
 *
 * A launch of its own on the scatter's stream: nobody waits for anybody, and what it writes is
 * there when the scatter begins. As many rows are quantised as the plan has tokens. It is no
 * operation of the group: it counts no epoch and tells nobody that it is there. Where nothing is to
 * be done, it finds out like any kernel, and the scatter behind it does so again.
 */
#include "dispatch/quantise.cuh"
#include "dispatch/quantise.h"
#include "handles/enter.cuh"

#define THREADS 128   /* a row at a time */
#define BLOCKS_EACH 8 /* at once on a multiprocessor: loads under way are what counts */

__global__ void __launch_bounds__(THREADS, BLOCKS_EACH)
    quantise_kernel(const __grid_constant__ EpQuantiseArgs a) {
    if (!ep_enter(a.group, a.plan, ep_epoch(a.group))) return;
    int64_t count = a.plan.header->num_tokens;
    for (int64_t row = blockIdx.x; row < count; row += gridDim.x)
        ep_quantise_row(a.quant, a.type, a.rows + row * a.row_bytes, a.elements,
                        (uint8_t *)a.out + row * a.elements,
                        a.out + a.to.scales + row * a.to.scale_bytes, (int)threadIdx.x, THREADS);
}

extern "C" int ep_cuda_open_quantise(int shared_bytes) {
    return ep_open_kernel(quantise_kernel, shared_bytes);
}

extern "C" int ep_cuda_launch_quantise(const EpQuantiseArgs *a, void *stream) {
    int most = BLOCKS_EACH * a->group.blocks, blocks = a->num_rows < most ? a->num_rows : most;
    if (!blocks) return cudaSuccess;
    quantise_kernel<<<blocks, THREADS, 0, (cudaStream_t)stream>>>(*a);
    return cudaGetLastError();
}
