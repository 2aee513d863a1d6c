/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Several blocks copy each message. The last one to end, of all blocks, gives the heads: its fence
 * is behind those of the others. It waits for nobody, so blocks of the kernel that receives may
 * start beside it, as behind other kernels of latency mode.
 */
#define EP_SEVERAL_NODES 1
#include "handles/nodes/cuda/forward.h"

#include "runtime/cuda/latency.cuh"

using namespace several_nodes;

/* Copy a block's part of a message's rows. */
__device__ __forceinline__ void copy_rows(const uint4 *from, uint4 *to, int units, int part,
                                          int parts) {
    int stride = parts * LATENCY_THREADS;
#pragma unroll 1
    for (int i = part * LATENCY_THREADS + (int)threadIdx.x; i < units; i += 4 * stride) {
        uint4 x[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (i + j * stride < units) x[j] = from[i + j * stride];
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (i + j * stride < units) to[i + j * stride] = x[j];
    }
}

__global__ void __launch_bounds__(LATENCY_THREADS, 1)
    latency_forward_kernel(const __grid_constant__ EpForwardArgs a) {
    __shared__ uint64_t flag;
    __shared__ int rows, is_last;
    const EpCudaGroup &g = a.group;
    const EpLatency &l = a.latency;
    int others = l.nodes.num_others, warp = (int)(threadIdx.x / 32), lane = threadIdx.x % 32;
    int other = (int)blockIdx.x % others, part = (int)blockIdx.x / others;
    const char *from = l.own + l.layout.landing + other * l.layout.message_bytes;
    LatencyOp op;
    if (l.releases) ep_grid_release();
    EpCudaPlan none = {};
    EpLoadedHeader header = {};
    header.failed = ep_failed(g);
    if (warp == 1 && latency_find(l, &op) && lane == 0) flag = op.flag;
    if (warp == 2) {
        int count = landed_rows(l, other);
        if (lane == 0) rows = count;
    }
    latency_compare_stamps(l, 0, &header);
    int agrees = ep_begin_operation_as(g, none, header, 0);
    if (agrees && (a.relayed.stats.peer_rows || a.relayed.stats.peer_bytes))
        count_landed(g, l, a.relayed, other, part * LATENCY_WARPS + warp,
                     ((int)gridDim.x - other + others - 1) / others * LATENCY_WARPS);
    if (agrees) {
        char *to = latency_messages(l, l.own, flag) + other * l.layout.message_bytes;
        copy_rows((const uint4 *)(from + l.layout.message_heads),
                  (uint4 *)(to + l.layout.message_heads),
                  rows * l.nodes.record_steps * (EP_STEP_BYTES / 16), part,
                  ((int)gridDim.x - other + others - 1) / others);
    } else {
        latency_report_stamps(g, l, 0);
    }
    ep_fence_sys();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(l.nodes.forwarded, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    if (threadIdx.x == 0) *(volatile uint32_t *)l.nodes.forwarded = 0, ep_mark(l.nodes.marks, 0);
    ep_fence_sys();
#pragma unroll 1
    for (int i = warp; i < others * g.size && agrees && a.gives_heads; i += LATENCY_WARPS)
        forward_head(g, l, i / g.size, i % g.size, flag);
}

extern "C" int ep_cuda_open_forward(int shared_bytes) {
    return ep_open_kernel(latency_forward_kernel, shared_bytes);
}

extern "C" int ep_cuda_launch_forward(const void *args, int blocks, void *stream) {
    const EpForwardArgs *a = (const EpForwardArgs *)args;
    return ep_launch(latency_forward_kernel, blocks, LATENCY_THREADS, 0, stream, *a);
}
