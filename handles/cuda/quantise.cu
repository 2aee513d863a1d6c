/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quantises a box of a tensor. A block of threads takes a tile at a time: up to 128 x 128 elements
 * of the last two dimensions, from a multiple of 128 on, as far as they lie in the box.
 *
 *     load      warps read along the dimension that is contiguous in memory, and store the tile to
 *               shared memory, so that a transposed form costs no more than a plain one
 *     amax      each thread has half a row of the tile, 64 elements: two threads have a block of
 *               128, one has two blocks of 32, all have a tile
 *     convert   each thread converts what it has, 16 bytes at a time
 *
 * Rows of the tile in shared memory are padded by one word: so lanes that read the same column of
 * different rows use different banks.
 */
#include "handles/cuda/quantise.h"
#include "runtime/cuda/device.cuh"
#include "runtime/cuda/ptx.cuh"
#include "runtime/cuda/rows.cuh"
#include "runtime/quant.h"

#define THREADS 256
#define WARPS (THREADS / 32)
#define EDGE 128        /* of a tile */
#define HALF (EDGE / 2) /* elements that a thread has */
#define GROUP 16        /* elements that it converts at a time */
#define MX_BLOCK 32

template <typename T> struct Tile {
    static constexpr int ROW = EDGE + (int)(4 / sizeof(T)); /* elements from row to row */
    T at[EDGE * ROW];
};

/* The part of a tile that lies in the box: [begin, end) of dimensions 1 and 2 of the tile. */
struct Part {
    int64_t e, tile[2]; /* dimension 0 within the box; the tile's number in the tensor */
    int begin[2], end[2];
    int64_t origin[2]; /* of the tile, within the box; may be negative */
};

/* Returns how much of dimension `d` is there. */
__device__ static int64_t length_of(const EpQuantiseArgs &a, int64_t e, int d) {
    if (!a.count || a.counted != d) return a.part[d];
    int64_t count =
        a.count_is_int64 ? ((const int64_t *)a.count)[e] : ((const int32_t *)a.count)[e];
    return max((int64_t)0, min(count, a.part[d]));
}

__device__ static Part part_of(const EpQuantiseArgs &a, int64_t number) {
    Part p;
    int64_t first[2], tiles[2];
    for (int d = 0; d < 2; d++) {
        first[d] = a.begin[d + 1] / EDGE;
        tiles[d] = (a.begin[d + 1] + a.part[d + 1] - 1) / EDGE - first[d] + 1;
    }
    p.e = number / tiles[1] / tiles[0];
    p.tile[0] = first[0] + number / tiles[1] % tiles[0];
    p.tile[1] = first[1] + number % tiles[1];
    for (int d = 0; d < 2; d++) {
        p.origin[d] = p.tile[d] * EDGE - a.begin[d + 1];
        p.begin[d] = (int)max(-p.origin[d], (int64_t)0);
        p.end[d] = (int)min(length_of(a, p.e, d + 1) - p.origin[d], (int64_t)EDGE);
    }
    return p;
}

/* ---- load ---------------------------------------------------------------------------------- */

/* `along`: the dimension, 0 or 1 of the tile, that is contiguous in memory. */
template <typename T>
__device__ static void load_tile(const EpQuantiseArgs &a, const Part &p, Tile<T> *tile) {
    int along = a.step[2] == 1, across = 1 - along;
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    int64_t base = p.e * a.step[0] + p.origin[0] * a.step[1] + p.origin[1] * a.step[2];
    const T *from = (const T *)a.from + base;
    for (int i = p.begin[across] + warp; i < p.end[across]; i += WARPS)
#pragma unroll 4
        for (int k = p.begin[along] + lane; k < p.end[along]; k += 32)
            tile->at[along ? i * Tile<T>::ROW + k : k * Tile<T>::ROW + i] =
                from[i * a.step[along ? 1 : 2] + k];
}

/* ---- amax ---------------------------------------------------------------------------------- */

/* Returns the amax of the elements [begin, end) of a row. */
template <typename T> __device__ static uint32_t find_amax(const T *row, int begin, int end) {
    uint32_t amax = EP_QUANT_LEAST_BITS;
    for (int k = begin; k < end; k++)
        amax = max(amax, ep_quant_magnitude(ep_float(row[k])));
    return amax;
}

/* Returns the largest value of all threads. */
__device__ static uint32_t find_largest(uint32_t value) {
    __shared__ uint32_t largest[WARPS];
    value = __reduce_max_sync(~0u, value);
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = value;
    __syncthreads();
    for (int w = 0; w < WARPS; w++)
        value = max(value, largest[w]);
    __syncthreads(); /* before the next tile's values */
    return value;
}

/* ---- scales -------------------------------------------------------------------------------- */

/* Where a block's word is, counted from the box's first one. `row` and `column` are within the
 * tile. */
__device__ static int64_t scale_at(const EpQuantiseArgs &a, const Part &p, int row, int column) {
    int width = a.quant == EP_QUANT_MXFP8 ? MX_BLOCK : EDGE;
    int64_t across = p.tile[1] * (EDGE / width) + column - a.begin[2] / width;
    int64_t down = a.tiles ? p.tile[0] - a.begin[1] / EDGE : p.origin[0] + row;
    return p.e * a.scale_step[0] + down * a.scale_step[1] + across * a.scale_step[2];
}

/* Returns by what elements of a block are multiplied. One thread of a block `stores`. */
__device__ static float settle_block(const EpQuantiseArgs &a, int64_t at, uint32_t amax,
                                     int stores) {
    if (a.phase == EP_QUANT_FIND) {
        if (stores) ((uint32_t *)a.scales)[at] = amax;
        return 0;
    }
    if (a.phase == EP_QUANT_CONVERT) amax = ((const uint32_t *)a.scales)[at];
    EpQuantScale scale = ep_quant_scale(a.quant, amax);
    if (a.phase == EP_QUANT_CONVERT || !stores) return scale.inverse;
    if (ep_quant_scale_type(a.quant) == EP_TYPE_FP32)
        ((uint32_t *)a.scales)[at] = scale.stored;
    else
        ((uint8_t *)a.scales)[at] = (uint8_t)scale.stored;
    return scale.inverse;
}

/* ---- convert ------------------------------------------------------------------------------- */

__device__ __forceinline__ uint32_t convert_pair(float low, float high) {
    uint32_t codes = ep_convert_e4m3x2(low, high);
    if (low != low) codes &= ~0x80u; /* every NaN is 0x7f */
    if (high != high) codes &= ~0x8000u;
    return codes;
}

template <typename T> __device__ __forceinline__ uint4 convert_group(const T *row, float inverse) {
    uint32_t word[GROUP / 4];
#pragma unroll
    for (int w = 0; w < GROUP / 4; w++) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[i] = ep_float(row[4 * w + i]) * inverse;
        word[w] = convert_pair(x[0], x[1]) | convert_pair(x[2], x[3]) << 16;
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

/* Convert the elements [begin, end) of a row, which begin at a multiple of 16 unless the box
 * begins there. */
template <typename T>
__device__ static void convert_row(const T *row, int begin, int end, float inverse, uint8_t *out) {
    int aligned = ((uintptr_t)(out + begin) & (GROUP - 1)) == 0;
    int k = begin;
    for (; aligned && k + GROUP <= end; k += GROUP)
        *(uint4 *)(out + k) = convert_group(row + k, inverse);
    for (; k < end; k++)
        out[k] = (uint8_t)convert_pair(ep_float(row[k]) * inverse, 0);
}

/* ---- a tile -------------------------------------------------------------------------------- */

/* A thread's half of a row of the tile: blocks of 32. */
template <typename T>
__device__ static void quantise_mx(const EpQuantiseArgs &a, const Part &p, const T *row, int r,
                                   int begin, int end, uint8_t *out) {
    for (int column = begin / MX_BLOCK; column * MX_BLOCK < end; column++) {
        int from = max(begin, column * MX_BLOCK), to = min(end, (column + 1) * MX_BLOCK);
        uint32_t amax = find_amax(row, from, to);
        float inverse = settle_block(a, scale_at(a, p, r, column), amax, 1);
        if (a.phase != EP_QUANT_FIND) convert_row(row, from, to, inverse, out);
    }
}

template <typename T>
__device__ static void quantise_tile(const EpQuantiseArgs &a, const Part &p, const Tile<T> *tile) {
    int r = (int)threadIdx.x / 2, half = (int)threadIdx.x % 2;
    int there = r >= p.begin[0] && r < p.end[0];
    int begin = max(p.begin[1], half * HALF), end = min(p.end[1], (half + 1) * HALF);
    const T *row = tile->at + r * Tile<T>::ROW;
    uint8_t *out = a.out + p.e * a.out_step[0] + (p.origin[0] + r) * a.out_step[1] + p.origin[1];
    if (a.quant == EP_QUANT_MXFP8) {
        if (there && begin < end) quantise_mx(a, p, row, r, begin, end, out);
        return;
    }
    uint32_t amax = there ? find_amax(row, begin, end) : EP_QUANT_LEAST_BITS;
    int stores = there && half == 0;
    if (a.tiles) {
        amax = find_largest(amax);
        stores = threadIdx.x == 0;
    } else {
        amax = max(amax, __shfl_xor_sync(~0u, amax, 1));
    }
    if (!there && !stores) return;
    float inverse = settle_block(a, scale_at(a, p, r, 0), amax, stores);
    if (there && a.phase != EP_QUANT_FIND) convert_row(row, begin, end, inverse, out);
}

template <typename T>
__global__ void __launch_bounds__(THREADS) quantise_box(const __grid_constant__ EpQuantiseArgs a) {
    extern __shared__ uint4 memory[];
    Tile<T> *tile = (Tile<T> *)memory;
    for (int64_t number = blockIdx.x; number < a.number; number += gridDim.x) {
        Part p = part_of(a, number);
        if (p.begin[0] >= p.end[0] || p.begin[1] >= p.end[1]) continue; /* nothing is there */
        load_tile(a, p, tile);
        __syncthreads();
        quantise_tile(a, p, tile);
        __syncthreads();
    }
}

template <typename T> static int launch_quant(const EpQuantiseArgs *a, int blocks, void *stream) {
    return ep_launch(quantise_box<T>, blocks, THREADS, sizeof(Tile<T>), stream, *a);
}

extern "C" int ep_cuda_open_quantise(int shared_bytes) {
    int error = ep_open_kernel(quantise_box<__nv_bfloat16>, shared_bytes);
    if (!error) error = ep_open_kernel(quantise_box<__half>, shared_bytes);
    return error ? error : ep_open_kernel(quantise_box<float>, shared_bytes);
}

extern "C" int ep_cuda_launch_quantise(const EpQuantiseArgs *a, int blocks, void *stream) {
    if (a->type == EP_TYPE_BF16) return launch_quant<__nv_bfloat16>(a, blocks, stream);
    if (a->type == EP_TYPE_FP16) return launch_quant<__half>(a, blocks, stream);
    return launch_quant<float>(a, blocks, stream);
}
