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

/* Give rank r its head of the source on another node. By a warp. */
__device__ __forceinline__ void forward_head(const EpForwardArgs &a, int other, int r,
                                             uint64_t flag) {
    const EpLatency &l = a.latency;
    const char *from = l.own + l.layout.landing + other * l.layout.message_bytes +
                       (int64_t)r * l.layout.head_bytes;
    EpRankPlace source = {(int16_t)other, (int16_t)a.group.rank};
    char *to =
        latency_head(l, l.window[r], ep_head_of(source, a.group.size), l.layout.num_heads, flag);
#pragma unroll 1
    for (int at = 0; at < l.layout.head_bytes; at += EP_STEP_BYTES)
        step_store(to + at, step_load(from + at), l.whole);
    if (!l.whole) step_fence();
#pragma unroll 1
    for (int at = 0; at < l.layout.head_bytes && !l.whole; at += EP_STEP_BYTES)
        step_store_flag(to + at, flag);
}

/* Add the rows of a message that the ranks of this node take to the caller's counters: a warp for
 * each place. */
__device__ __noinline__ void count_rows(const EpForwardArgs &a, const char *from, int rows,
                                        int warp, int warps) {
    const EpLatency &l = a.latency;
    int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int place = warp; place < rows; place += warps) {
        const char *at =
            from + l.layout.message_heads + (int64_t)place * l.nodes.record_steps * EP_STEP_BYTES;
        uint4 unit = step_unpack(step_load(at));
        RecordWords h = record_words(unit, a.carries_weights, lane < a.top_k ? lane : 0);
        int expert = (int)(h.word & ((1u << a.expert_bits) - 1)) - 1, number = -1;
        if (lane < a.top_k && expert >= 0 && expert < a.group.num_experts) {
            EpRankPlace owner = rank_place(l, ep_owner(&a.owners, expert));
            if (owner.other < 0) number = owner.number;
        }
        int leads = __ffs((int)__match_any_sync(~0u, number)) - 1 == lane;
        if (leads && number >= 0) ep_count_row(a.stats, ep_member(a.group, number), 1);
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
    uint4 head = make_uint4(0, 0, 0, 0);
    if (warp == 2) head = step_unpack(step_load(from));
    if (warp == 2 && lane == 0) rows = min(max((int)head.w, 0), l.layout.node_rows);
    latency_compare_stamps(l, 0, &header);
    int agrees = ep_begin_operation_as(g, none, header, 0);
    if (agrees && (a.stats.peer_rows || a.stats.peer_bytes))
        count_rows(a, from, rows, part * LATENCY_WARPS + warp,
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
        forward_head(a, i / g.size, i % g.size, flag);
}

extern "C" int ep_cuda_open_forward(int shared_bytes) {
    return ep_open_kernel(latency_forward_kernel, shared_bytes);
}

extern "C" int ep_cuda_launch_forward(const void *args, int blocks, void *stream) {
    const EpForwardArgs *a = (const EpForwardArgs *)args;
    return ep_launch(latency_forward_kernel, blocks, LATENCY_THREADS, 0, stream, *a);
}
