/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies of shards to their places, and sums of gradients. Both are bound by memory: threads of a
 * warp take neighbouring pieces, 16 bytes each where addresses allow that. No thread waits for
 * another one, so that any number of blocks is right.
 */
#include "handles/cuda/weight_kernels.h"
#include "runtime/cuda/device.cuh"
#include "runtime/cuda/rows.cuh"
#include "runtime/quant.h"

#define THREADS 256

/* ---- places -------------------------------------------------------------------------------- */

template <typename Piece> __device__ __forceinline__ void arrange(const EpArrangeArgs &a) {
    int64_t run = ep_shards_run(&a.shards) * a.unit / (int64_t)sizeof(Piece);
    int64_t shard = ep_shard_elements(&a.shards) * a.unit / (int64_t)sizeof(Piece);
    int64_t all = shard * ep_shards_number(&a.shards);
    int64_t stride = a.stride ? a.stride / (int64_t)sizeof(Piece) : shard;
    Piece *flat = (Piece *)(uintptr_t)a.flat, *whole = (Piece *)a.whole;
    for (int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x; at < all;
         at += (int64_t)gridDim.x * THREADS) {
        int64_t place = ep_shard_run_at(&a.shards, at / shard, at % shard / run) * a.unit /
                            (int64_t)sizeof(Piece) +
                        at % shard % run;
        int64_t packed = at / shard * stride + at % shard;
        if (a.back)
            flat[packed] = whole[place];
        else
            whole[place] = flat[packed];
    }
}

__global__ void __launch_bounds__(THREADS)
    arrange_vectors(const __grid_constant__ EpArrangeArgs a) {
    arrange<uint4>(a);
}

__global__ void __launch_bounds__(THREADS)
    arrange_elements(const __grid_constant__ EpArrangeArgs a) {
    if (a.unit == 4)
        arrange<uint32_t>(a);
    else if (a.unit == 2)
        arrange<uint16_t>(a);
    else
        arrange<uint8_t>(a);
}

/* Runs that are multiples of 16 bytes begin on multiples of 16, as tensors do. */
extern "C" int ep_cuda_launch_arrange(const EpArrangeArgs *a, int blocks, void *stream) {
    int whole = ep_shards_run(&a->shards) * a->unit % 16 == 0;
    return ep_launch(whole ? arrange_vectors : arrange_elements, blocks, THREADS, 0, stream, *a);
}

/* ---- sums ---------------------------------------------------------------------------------- */

/* Returns where element number `at` of a rank's part lies. */
template <typename T>
__device__ __forceinline__ const T *element_of(const EpSumArgs &a, int rank, int64_t at,
                                               int64_t run) {
    if (rank != a.rank) return (const T *)(a.received + rank * a.stride) + at;
    if (!a.in_whole) return (const T *)a.mine + at;
    at += a.own_begin;
    return (const T *)a.mine + ep_shard_run_at(&a.shards, a.own_shard, at / run) + at % run;
}

/* Call add(rank) for each part in the order of summation, and next_node() before each node. */
template <typename NextNode, typename Add>
__device__ __forceinline__ void walk_parts(const EpSumArgs &a, NextNode next_node, Add add) {
    for (int p = 0; p < a.parts; p++) {
        int rank = a.by_node ? a.by_node[p] : p;
        if (rank & EP_NODE_BEGINS) next_node();
        add(rank & ~EP_NODE_BEGINS);
    }
}

__device__ __forceinline__ void store_sum(float *out, float sum, int accumulate) {
    *out = accumulate ? *out + sum : sum;
}
__device__ __forceinline__ void store_sum(__nv_bfloat16 *out, float sum, int accumulate) {
    *out = __float2bfloat16_rn(accumulate ? ep_float(*out) + sum : sum);
}
__device__ __forceinline__ void store_sum(__half *out, float sum, int accumulate) {
    *out = __float2half_rn(accumulate ? ep_float(*out) + sum : sum);
}

template <typename T, typename Out>
__device__ __forceinline__ void sum_element(const EpSumArgs &a, int64_t at, int64_t run) {
    float total = 0, sum = 0; /* of the nodes before, of this one */
    walk_parts(
        a, [&] { total += sum, sum = 0; },
        [&](int rank) { sum += ep_float(*element_of<T>(a, rank, at, run)); });
    store_sum((Out *)a.out + at, total + sum, a.accumulate);
}

template <typename T, typename Out>
__device__ __forceinline__ void sum_vector(const EpSumArgs &a, int64_t at, int64_t run) {
    EpVector<T> total = {}, sum = {}; /* of the nodes before, of this one */
    walk_parts(
        a, [&] { ep_add(&total, sum), sum = {}; },
        [&](int rank) {
            ep_add(&sum, ep_unpack<T>(*(const uint4 *)element_of<T>(a, rank, at, run)));
        });
    ep_add(&total, sum);
#pragma unroll
    for (int e = 0; e < EpVector<T>::SIZE; e++)
        store_sum((Out *)a.out + at + e, total.at[e], a.accumulate);
}

template <typename T, typename Out>
__global__ void __launch_bounds__(THREADS) sum_parts(const __grid_constant__ EpSumArgs a) {
    int64_t run = ep_shards_run(&a.shards);
    int width = a.vectors ? EpVector<T>::SIZE : 1;
    for (int64_t at = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * width; at < a.elements;
         at += (int64_t)gridDim.x * THREADS * width) {
        if (a.vectors)
            sum_vector<T, Out>(a, at, run);
        else
            sum_element<T, Out>(a, at, run);
    }
}

template <typename T, typename Out>
static int launch_sum(const EpSumArgs *a, int blocks, void *stream) {
    return ep_launch(sum_parts<T, Out>, blocks, THREADS, 0, stream, *a);
}

extern "C" int ep_cuda_launch_sum(const EpSumArgs *a, int blocks, void *stream) {
    if (a->out_type == EP_TYPE_FP32) {
        if (a->type == EP_TYPE_BF16) return launch_sum<__nv_bfloat16, float>(a, blocks, stream);
        if (a->type == EP_TYPE_FP16) return launch_sum<__half, float>(a, blocks, stream);
        return launch_sum<float, float>(a, blocks, stream);
    }
    if (a->out_type == EP_TYPE_BF16)
        return a->type == EP_TYPE_FP32
                   ? launch_sum<float, __nv_bfloat16>(a, blocks, stream)
                   : launch_sum<__nv_bfloat16, __nv_bfloat16>(a, blocks, stream);
    return a->type == EP_TYPE_FP32 ? launch_sum<float, __half>(a, blocks, stream)
                                   : launch_sum<__half, __half>(a, blocks, stream);
}

/* ---- blocks that lie in several shards ----------------------------------------------------- */

/* Returns what a shard has found for a block, or the least amax if it does not touch the block. */
__device__ static uint32_t found_by(const EpMergeArgs &a, int64_t shard, const int64_t block[3]) {
    int64_t begin[3], at[3];
    ep_shard_begin(&a.shards, shard, begin);
    for (int d = 0; d < 3; d++) {
        at[d] = block[d] - begin[d] / a.block[d];
        int64_t last = (begin[d] + a.shards.part[d] - 1) / a.block[d];
        if (at[d] < 0 || block[d] > last) return EP_QUANT_LEAST_BITS;
    }
    int64_t e = shard * a.shards.part[0] + at[0];
    return a.found[(e * a.touched[1] + at[1]) * a.touched[2] + at[2]];
}

__global__ void __launch_bounds__(THREADS) merge_amaxes(const __grid_constant__ EpMergeArgs a) {
    int64_t all = a.blocks[0] * a.blocks[1] * a.blocks[2], shards = ep_shards_number(&a.shards);
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < all;
         i += (int64_t)gridDim.x * THREADS) {
        int64_t block[3] = {i / a.blocks[2] / a.blocks[1], i / a.blocks[2] % a.blocks[1],
                            i % a.blocks[2]};
        uint32_t amax = EP_QUANT_LEAST_BITS;
        for (int64_t shard = 0; shard < shards; shard++)
            amax = max(amax, found_by(a, shard, block));
        a.amaxes[i] = amax;
        EpQuantScale scale = ep_quant_scale(a.quant, amax);
        if (ep_quant_scale_type(a.quant) == EP_TYPE_FP32)
            ((uint32_t *)a.scales)[i] = scale.stored;
        else
            ((uint8_t *)a.scales)[i] = (uint8_t)scale.stored;
    }
}

extern "C" int ep_cuda_launch_merge(const EpMergeArgs *a, int blocks, void *stream) {
    return ep_launch(merge_amaxes, blocks, THREADS, 0, stream, *a);
}
