/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counts a routing: one launch, whose blocks need nothing of each other. A block counts the entries
 * of EXPERTS neighbouring experts, or the tokens of one rank, whose column of token_in_rank it
 * writes. Each block reads the whole routing, which the L2 cache holds, and adds in registers. So
 * nothing has to be zeroed before.
 */
#include "handles/prepare/cuda/count.h"
#include "runtime/cuda/device.cuh"

enum { THREADS = 512, EXPERTS = 8 };

/* Add the values of all threads. Thread 0 has the sum. All threads call it. */
__device__ static int sum_of_block(int value) {
    __shared__ int sums[THREADS / 32];
    int lane = (int)threadIdx.x % 32;
    value = __reduce_add_sync(~0u, value);
    if (lane == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    value = __reduce_add_sync(~0u, lane < THREADS / 32 ? sums[lane] : 0);
    __syncthreads(); /* before the next sums */
    return value;
}

template <typename Index>
__device__ static void count_experts(const EpCountArgs &a, const Index *topk_idx, int first) {
    int64_t entries = (int64_t)a.num_tokens * a.top_k;
    int counts[EXPERTS] = {};
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < entries; i += THREADS) {
        uint64_t expert = (uint64_t)topk_idx[i] - (uint64_t)first;
#pragma unroll
        for (int e = 0; e < EXPERTS; e++)
            counts[e] += expert == (uint64_t)e;
    }
#pragma unroll
    for (int e = 0; e < EXPERTS; e++) {
        int sum = sum_of_block(counts[e]);
        if (threadIdx.x == 0 && first + e < a.num_experts) a.expert_tokens[first + e] = sum;
    }
}

template <typename Index>
__device__ static void count_rank(const EpCountArgs &a, const Index *topk_idx, int rank) {
    uint64_t first = (uint64_t)ep_owner_first(&a.owners, rank);
    uint64_t experts = (uint64_t)ep_owner_count(&a.owners, rank);
    int tokens = 0;
    for (int64_t t = threadIdx.x; t < a.num_tokens; t += THREADS) {
        int is_in = 0;
#pragma unroll 8
        for (int k = 0; k < a.top_k; k++)
            is_in |= (uint64_t)topk_idx[t * a.top_k + k] - first < experts;
        a.token_in_rank[t * a.num_ranks + rank] = (uint8_t)is_in;
        tokens += is_in;
    }
    tokens = sum_of_block(tokens);
    if (threadIdx.x == 0) a.rank_tokens[rank] = tokens;
}

template <typename Index> __global__ void count_routing(const __grid_constant__ EpCountArgs a) {
    const Index *topk_idx = (const Index *)a.topk_idx;
    int block = (int)blockIdx.x;
    if (block < a.expert_blocks)
        count_experts(a, topk_idx, block * EXPERTS);
    else
        count_rank(a, topk_idx, block - a.expert_blocks);
}

extern "C" int ep_cuda_launch_count(const EpCountArgs *given, int is_int64, void *stream) {
    EpCountArgs a = *given;
    a.expert_blocks = (a.num_experts + EXPERTS - 1) / EXPERTS;
    int blocks = a.expert_blocks + a.num_ranks;
    return is_int64 ? ep_launch(count_routing<int64_t>, blocks, THREADS, 0, stream, a)
                    : ep_launch(count_routing<int32_t>, blocks, THREADS, 0, stream, a);
}
