/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies of shards to their places, and sums of gradients. Both are bound by memory: lanes of a
 * warp take neighbouring pieces, 16 bytes each where addresses allow that. No thread waits for
 * another one, so that any number of blocks is right.
 */
#include "handles/cuda/weight_kernels.h"
#include "runtime/cuda/device.cuh"
#include "runtime/cuda/quantise.cuh"
#include "runtime/cuda/rows.cuh"

/* Threads of a block that shares its multiprocessor, or has it alone. */
#define THREADS(ALONE) ((ALONE) ? 512 : 256)

template <typename Kernel, typename Args>
static int launch(Kernel *beside, Kernel *alone, EpGrid grid, void *stream, const Args &args) {
    return ep_launch(grid.shared ? alone : beside, grid.blocks, THREADS(grid.shared),
                     (size_t)grid.shared, stream, args);
}

/* ---- runs ---------------------------------------------------------------------------------- */

#define SEGMENT 256 /* most pieces of a run that a warp takes at a time */

/* Where a run begins in two places, in pieces. */
typedef struct RunPlaces {
    int64_t packed, whole;
} RunPlaces;

/* Call work(piece in the packed place, piece in the whole, step, left) for the pieces of `runs`
 * runs of `run` pieces, up to PIECES at a time: work has that one and those `step` and `2 * step`
 * behind it and so on, but no more than `left`. places_of(i) says where run i begins. That takes
 * hundreds of instructions, most of them divisions. So each lane asks for another segment, and
 * tells the others. Of short runs a warp takes several at once. By all warps of the grid. */
template <int PIECES, typename PlacesOf, typename Work>
__device__ __forceinline__ void walk_runs(int64_t runs, int64_t run, PlacesOf places_of,
                                          Work work) {
    int lane = threadIdx.x % 32, width = 32;
    while (width / 2 >= run)
        width /= 2;
    int64_t warps = (int64_t)gridDim.x * (blockDim.x / 32);
    int64_t warp = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    int64_t each = (run + SEGMENT - 1) / SEGMENT, segments = runs * each;
    int at_once = 32 / width, least = (int)min((segments + warps - 1) / warps, (int64_t)32);
    int turn = (least + at_once - 1) / at_once * at_once;
    for (int64_t first = warp * turn; first < segments; first += warps * turn) {
        int64_t mine = first + lane;
        RunPlaces places = {0, 0};
        int length = 0;
        if (lane < turn && mine < segments) {
            int64_t begin = mine % each * SEGMENT;
            places = places_of(mine / each);
            places.packed += begin, places.whole += begin;
            length = (int)min(run - begin, (int64_t)SEGMENT);
        }
        for (int i = lane / width; i < turn; i += at_once) {
            int64_t packed = __shfl_sync(~0u, places.packed, i);
            int64_t whole = __shfl_sync(~0u, places.whole, i);
            int pieces = __shfl_sync(~0u, length, i);
            for (int at = lane % width; at < pieces; at += PIECES * width)
                work(packed + at, whole + at, width,
                     PIECES == 1 ? 1 : (pieces - at + width - 1) / width);
        }
    }
}

/* ---- places -------------------------------------------------------------------------------- */

/* A thread that has few others beside it has more loads under way. */
#define LOADS(ALONE) ((ALONE) ? 8 : 1)

/* Copy pieces that lie `step` apart in both places. No load is conditional, or each would be waited
 * for before the next. */
template <int PIECES, typename Piece>
__device__ __forceinline__ void copy_pieces(Piece *to, const Piece *from, int step, int left) {
    Piece x[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; i++)
        x[i] = from[(int64_t)min(i, left - 1) * step];
#pragma unroll
    for (int i = 0; i < PIECES; i++)
        if (i < left) to[(int64_t)i * step] = x[i];
}

template <typename Piece, int ALONE>
__device__ __forceinline__ void arrange(const EpArrangeArgs &a) {
    int per_piece = (int)sizeof(Piece) / a.unit;
    int64_t run = ep_shards_run(&a.shards) / per_piece;
    if (ep_shard_elements(&a.shards) == 0) return;
    int64_t shard = ep_shard_elements(&a.shards) / per_piece, runs = shard / run;
    int64_t stride = a.stride ? a.stride / (int64_t)sizeof(Piece) : shard;
    Piece *flat = (Piece *)(uintptr_t)a.flat, *whole = (Piece *)a.whole;
    int64_t number = ep_shards_number(&a.shards) - (a.without > 0);
    auto places_of = [&](int64_t i) {
        int64_t of = i / runs + (a.without > 0 && i / runs >= a.without - 1);
        int64_t place = ep_shard_run_at(&a.shards, of, i % runs) / per_piece;
        return RunPlaces{of * stride + i % runs * run, place};
    };
    auto copy = [&](int64_t packed, int64_t place, int step, int left) {
        if (a.back)
            copy_pieces<LOADS(ALONE)>(flat + packed, whole + place, step, left);
        else
            copy_pieces<LOADS(ALONE)>(whole + place, flat + packed, step, left);
    };
    walk_runs<LOADS(ALONE)>(runs * number, run, places_of, copy);
}

template <int ALONE>
__global__ void __launch_bounds__(THREADS(ALONE), ALONE)
    arrange_vectors(const __grid_constant__ EpArrangeArgs a) {
    arrange<uint4, ALONE>(a);
}

template <int ALONE>
__global__ void __launch_bounds__(THREADS(ALONE), ALONE)
    arrange_elements(const __grid_constant__ EpArrangeArgs a) {
    if (a.unit == 4)
        arrange<uint32_t, ALONE>(a);
    else if (a.unit == 2)
        arrange<uint16_t, ALONE>(a);
    else
        arrange<uint8_t, ALONE>(a);
}

/* Runs that are multiples of 16 bytes begin on multiples of 16, as tensors do, but for scales. */
extern "C" int ep_cuda_launch_arrange(const EpArrangeArgs *a, EpGrid grid, void *stream) {
    int whole = ep_shards_run(&a->shards) * a->unit % 16 == 0 && (uintptr_t)a->whole % 16 == 0;
    if (whole) return launch(arrange_vectors<0>, arrange_vectors<1>, grid, stream, *a);
    return launch(arrange_elements<0>, arrange_elements<1>, grid, stream, *a);
}

/* ---- sums ---------------------------------------------------------------------------------- */

/* Returns where a rank's part lies; this rank's may lie in the whole, from whose beginning on. */
template <typename T> __device__ __forceinline__ const T *part_of(const EpSumArgs &a, int rank) {
    return (const T *)(rank == a.rank ? (const char *)a.mine : a.received + rank * a.stride);
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

/* Returns what is stored where a sum, from +0 on, is `sum`: rounded by the caller, once. */
template <typename Out>
__device__ __forceinline__ float final_sum(const Out *out, float sum, int accumulate) {
    return accumulate ? ep_float(*out) + sum : sum;
}

__device__ __forceinline__ void store_sum(float *out, float sum) {
    *out = sum;
}
__device__ __forceinline__ void store_sum(__nv_bfloat16 *out, float sum) {
    *out = __float2bfloat16_rn(sum);
}
__device__ __forceinline__ void store_sum(__half *out, float sum) {
    *out = __float2half_rn(sum);
}

template <typename T, typename Out>
__device__ __forceinline__ void sum_element(const EpSumArgs &a, int64_t at, int64_t to_whole) {
    float total = 0, sum = 0; /* of the nodes before, of this one */
    Out *out = (Out *)a.out + at;
    walk_parts(
        a, [&] { total += sum, sum = 0; },
        [&](int rank) {
            sum += ep_float(part_of<T>(a, rank)[at + (rank == a.rank ? to_whole : 0)]);
        });
    store_sum(out, final_sum(out, total + sum, a.accumulate));
}

/* N neighbouring elements of `out`, which are loaded and stored as one. */
template <typename Out, int N> struct alignas(N * sizeof(Out) < 16 ? N * sizeof(Out) : 16) Sums {
    Out at[N];
};

/* Of sums that a thread has under way: as LOADS. */
#define SUMS(ALONE) ((ALONE) ? 4 : 1)

/** The vectors or elements of sums that a thread takes: `left` of them, `step` apart, without those
 * before the piece or behind it. What it loads besides lies in the parts, too, and is not stored:
 * so no load is conditional. */
typedef struct SumPlaces {
    int64_t first, last; /* of them, and of all */
    int64_t whole;       /* from a place among the sums to one in the whole */
    int step, left;
} SumPlaces;

__device__ __forceinline__ int64_t sum_place(const SumPlaces &p, int i) {
    return max((int64_t)0, min(p.first + (int64_t)i * p.step, p.last));
}

__device__ __forceinline__ int is_sum_place(const SumPlaces &p, int i) {
    int64_t at = p.first + (int64_t)i * p.step;
    return i < p.left && at >= 0 && at <= p.last;
}

template <typename T, typename Out, int N>
__device__ __forceinline__ void sum_vectors(const EpSumArgs &a, const SumPlaces &p) {
    typedef Sums<Out, EpVector<T>::SIZE> Result;
    EpVector<T> total[N] = {}, sum[N] = {}; /* of the nodes before, of this one */
    walk_parts(
        a,
        [&] {
#pragma unroll
            for (int i = 0; i < N; i++)
                ep_add(&total[i], sum[i]), sum[i] = {};
        },
        [&](int rank) {
            const uint4 *from = (const uint4 *)part_of<T>(a, rank);
            int64_t offset = rank == a.rank ? p.whole : 0;
            uint4 x[N];
#pragma unroll
            for (int i = 0; i < N; i++)
                x[i] = from[sum_place(p, i) + offset];
#pragma unroll
            for (int i = 0; i < N; i++)
                ep_add(&sum[i], ep_unpack<T>(x[i]));
        });
#pragma unroll
    for (int i = 0; i < N; i++) {
        Result *out = (Result *)a.out + sum_place(p, i), result;
        if (!is_sum_place(p, i)) continue;
        ep_add(&total[i], sum[i]);
        if (a.accumulate) result = *out;
#pragma unroll
        for (int e = 0; e < EpVector<T>::SIZE; e++)
            store_sum(&result.at[e], final_sum(&result.at[e], total[i].at[e], a.accumulate));
        *out = result;
    }
}

/* This rank's part lies in one run, or in the runs of a shard in the whole; a piece of a shard may
 * begin and end within one. */
template <typename T, typename Out, int ALONE>
__global__ void __launch_bounds__(THREADS(ALONE), ALONE)
    sum_parts(const __grid_constant__ EpSumArgs a) {
    constexpr int N = SUMS(ALONE);
    int width = a.vectors ? EpVector<T>::SIZE : 1;
    if (a.elements == 0) return;
    int64_t begin = a.in_whole ? a.own_begin : 0;
    int64_t run = a.in_whole ? ep_shards_run(&a.shards) : a.elements, first = begin / run;
    int64_t runs = (begin + a.elements + run - 1) / run - first;
    auto places_of = [&](int64_t i) {
        int64_t at = (first + i) * run - begin;
        int64_t place = a.in_whole ? ep_shard_run_at(&a.shards, a.own_shard, first + i) : at;
        return RunPlaces{at / width, place / width};
    };
    walk_runs<N>(runs, run / width, places_of, [&](int64_t at, int64_t place, int step, int left) {
        SumPlaces p = {at, a.elements / width - 1, place - at, step, left};
        if (a.vectors) return sum_vectors<T, Out, N>(a, p);
        for (int i = 0; i < left; i++)
            if (is_sum_place(p, i)) sum_element<T, Out>(a, sum_place(p, i), p.whole);
    });
}

template <typename T, typename Out>
static int launch_sum(const EpSumArgs *a, EpGrid grid, void *stream) {
    return launch(sum_parts<T, Out, 0>, sum_parts<T, Out, 1>, grid, stream, *a);
}

extern "C" int ep_cuda_launch_sum(const EpSumArgs *a, EpGrid grid, void *stream) {
    if (a->out_type == EP_TYPE_FP32) {
        if (a->type == EP_TYPE_BF16) return launch_sum<__nv_bfloat16, float>(a, grid, stream);
        if (a->type == EP_TYPE_FP16) return launch_sum<__half, float>(a, grid, stream);
        return launch_sum<float, float>(a, grid, stream);
    }
    if (a->out_type == EP_TYPE_BF16)
        return a->type == EP_TYPE_FP32 ? launch_sum<float, __nv_bfloat16>(a, grid, stream)
                                       : launch_sum<__nv_bfloat16, __nv_bfloat16>(a, grid, stream);
    return a->type == EP_TYPE_FP32 ? launch_sum<float, __half>(a, grid, stream)
                                   : launch_sum<__half, __half>(a, grid, stream);
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

__global__ void __launch_bounds__(THREADS(0)) merge_amaxes(const __grid_constant__ EpMergeArgs a) {
    int64_t all = a.blocks[0] * a.blocks[1] * a.blocks[2], shards = ep_shards_number(&a.shards);
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < all;
         i += (int64_t)gridDim.x * blockDim.x) {
        int64_t block[3] = {i / a.blocks[2] / a.blocks[1], i / a.blocks[2] % a.blocks[1],
                            i % a.blocks[2]};
        uint32_t amax = EP_QUANT_LEAST_BITS;
        for (int64_t shard = 0; shard < shards; shard++)
            amax = max(amax, found_by(a, shard, block));
        a.amaxes[i] = amax;
        EpQuantScale scale = ep_quant_scale(a.format, amax);
        ep_store_scale(a.format, a.scales, i, scale);
    }
}

extern "C" int ep_cuda_launch_merge(const EpMergeArgs *a, int blocks, void *stream) {
    return ep_launch(merge_amaxes, blocks, THREADS(0), 0, stream, *a);
}

/* ---- loading ------------------------------------------------------------------------------- */

/* Only blocks that are alone ask for shared memory. */
extern "C" int ep_cuda_open_weight_kernels(int shared_bytes) {
    int error = ep_open_kernel(arrange_vectors<1>, shared_bytes);
    if (!error) error = ep_open_kernel(arrange_elements<1>, shared_bytes);
    if (!error) error = ep_open_kernel(sum_parts<__nv_bfloat16, float, 1>, shared_bytes);
    if (!error) error = ep_open_kernel(sum_parts<__half, float, 1>, shared_bytes);
    if (!error) error = ep_open_kernel(sum_parts<float, float, 1>, shared_bytes);
    if (!error) error = ep_open_kernel(sum_parts<__nv_bfloat16, __nv_bfloat16, 1>, shared_bytes);
    if (!error) error = ep_open_kernel(sum_parts<__half, __half, 1>, shared_bytes);
    if (!error) error = ep_open_kernel(sum_parts<float, __nv_bfloat16, 1>, shared_bytes);
    return error ? error : ep_open_kernel(sum_parts<float, __half, 1>, shared_bytes);
}
