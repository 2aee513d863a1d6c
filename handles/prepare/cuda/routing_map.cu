/* SPDX-License-Identifier: Apache-2.0 */
/* Routing maps: one launch, with a warp for each token. */
#include "handles/prepare/cuda/routing_map.h"
#include "runtime/cuda/device.cuh"

enum { THREADS = 256, WARPS = THREADS / 32 };

__device__ static int64_t my_token() {
    return (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
}

/* 32 experts at a time: each lane that finds one knows its place by the lanes before it. */
__global__ void read_map(const __grid_constant__ EpRoutingMap m) {
    int64_t token = my_token();
    int lane = (int)threadIdx.x % 32, found = 0;
    if (token >= m.num_tokens) return;
    int32_t *topk_idx = (int32_t *)m.topk_idx + token * m.top_k;
    float *weights = m.topk_weights ? m.topk_weights + token * m.top_k : NULL;
#pragma unroll 4
    for (int first = 0; first < m.num_experts; first += 32) {
        int expert = first + lane;
        int64_t at = token * m.num_experts + expert;
        int is_there = expert < m.num_experts && m.map[at];
        uint32_t there = __ballot_sync(~0u, is_there);
        int place = found + __popc(there & ((1u << lane) - 1));
        if (is_there && place < m.top_k) {
            topk_idx[place] = expert;
            if (weights) weights[place] = m.probs[at];
        }
        found += __popc(there);
    }
    for (int place = found + lane; place < m.top_k; place += 32) {
        topk_idx[place] = -1;
        if (weights) weights[place] = 0;
    }
    __syncwarp(); /* orders the lanes' stores to the last entry */
    if (found > m.top_k && lane == 0) topk_idx[m.top_k - 1] = m.num_experts;
}

template <typename Index> __global__ void write_map(const __grid_constant__ EpRoutingMap m) {
    int64_t token = my_token(), row = token * m.num_experts;
    int lane = (int)threadIdx.x % 32;
    if (token >= m.num_tokens) return;
    for (int expert = lane; expert < m.num_experts; expert += 32) {
        if (m.map) m.map[row + expert] = 0;
        if (m.probs) m.probs[row + expert] = 0;
    }
    __syncwarp(); /* orders these zeros before what other lanes store */
    for (int k = lane; k < m.top_k; k += 32) {
        int64_t expert = ((const Index *)m.topk_idx)[token * m.top_k + k];
        if (!ep_map_names(&m, expert)) continue;
        if (m.map) m.map[row + expert] = 1;
        if (m.probs) m.probs[row + expert] = m.topk_weights[token * m.top_k + k];
    }
}

static int blocks_of(const EpRoutingMap *m) {
    return (int)((m->num_tokens + WARPS - 1) / WARPS);
}

extern "C" int ep_cuda_launch_read_map(const EpRoutingMap *m) {
    return ep_launch(read_map, blocks_of(m), THREADS, 0, m->stream, *m);
}

extern "C" int ep_cuda_launch_write_map(const EpRoutingMap *m) {
    int blocks = blocks_of(m);
    return m->index_type == EP_TYPE_INT64
               ? ep_launch(write_map<int64_t>, blocks, THREADS, 0, m->stream, *m)
               : ep_launch(write_map<int32_t>, blocks, THREADS, 0, m->stream, *m);
}
