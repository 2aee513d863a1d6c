/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quantises any box of a tensor; quantise_blocks.cu is faster where it can. A block of threads takes a tile at a time: up to 128 x 128 elements
 * of the last two dimensions, from a multiple of 128 on, as far as they lie in the box.
 *
 *     load      warps read along the dimension that is contiguous in memory, and store the tile to
 *               shared memory, so that a transposed form costs no more than a plain one
 *     amax      each thread takes half a row of the tile, 64 elements, into registers: two threads
 *               have a block of 128, one has two blocks of 32, all have a tile
 *     convert   each thread converts what it has, 16 bytes at a time
 *
 * In shared memory the gaps between half rows make the 32 lanes of a warp, which read the same
 * place of 16 rows and both halves, use different banks.
 */
#include "handles/weights/cuda/quantise.h"
#include "runtime/cuda/device.cuh"
#include "runtime/cuda/rows.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define EDGE EP_QUANT_EDGE
#define HALF (EDGE / 2) /* elements that a thread has */
#define GROUP 16        /* elements that it converts at a time */
#define MX_BLOCK 32

/* A gap of one word follows each half of a row. */
template <typename T> struct Tile {
    static constexpr int GAP = (int)(4 / sizeof(T)); /* elements */
    static constexpr int ROW = EDGE + 2 * GAP;
    T memory[EDGE * ROW];

    __device__ __forceinline__ T *at(int row, int column) {
        return memory + row * ROW + column + (column >= HALF ? GAP : 0);
    }
};

/* The part of a tile that lies in the box: [begin, end) of dimensions 1 and 2 of the tile. */
struct Part {
    int64_t e, tile[2]; /* dimension 0 within the box; the tile's number in the tensor */
    int begin[2], end[2];
    int64_t origin[2]; /* of the tile, within the box; may be negative */
};

__device__ static Part part_of(const EpQuantiseArgs &a, int64_t number) {
    Part p;
    int64_t first[2], tiles[2];
    for (int d = 0; d < 2; d++) {
        first[d] = a.begin[d + 1] / EDGE;
        tiles[d] = ep_quantise_tiles(&a, d + 1);
    }
    p.e = number / tiles[1] / tiles[0];
    p.tile[0] = first[0] + number / tiles[1] % tiles[0];
    p.tile[1] = first[1] + number % tiles[1];
    for (int d = 0; d < 2; d++) {
        p.origin[d] = p.tile[d] * EDGE - a.begin[d + 1];
        p.begin[d] = (int)max(-p.origin[d], (int64_t)0);
        p.end[d] = (int)min(ep_quantise_length(&a, p.e, d + 1) - p.origin[d], (int64_t)EDGE);
    }
    return p;
}

/* ---- load ---------------------------------------------------------------------------------- */

/* Four neighbouring elements. */
template <typename T> struct alignas(4 * sizeof(T)) Four { T at[4]; };

/* Load rows that are contiguous in memory, four elements at a time. */
template <typename T>
__device__ static void load_rows(const T *from, int64_t step, const Part &p, Tile<T> *tile) {
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, k = 4 * lane;
    if (k < p.begin[1] || k >= p.end[1]) return;
    for (int i = p.begin[0] + warp; i < p.end[0]; i += WARPS) {
        Four<T> x = *(const Four<T> *)(from + i * step + k);
        T *to = tile->at(i, k); /* on a multiple of 4 bytes */
#pragma unroll
        for (int e = 0; e < 4; e++)
            to[e] = x.at[e];
    }
}

/* `along`: the dimension, 0 or 1 of the tile, that is contiguous in memory. */
template <typename T>
__device__ static void load_elements(const T *from, const int64_t step[2], int along, const Part &p,
                                     Tile<T> *tile) {
    int across = 1 - along, warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    for (int i = p.begin[across] + warp; i < p.end[across]; i += WARPS)
#pragma unroll 4
        for (int k = p.begin[along] + lane; k < p.end[along]; k += 32)
            *(along ? tile->at(i, k) : tile->at(k, i)) = from[i * step[across] + k];
}

template <typename T>
__device__ static void load_tile(const EpQuantiseArgs &a, const Part &p, Tile<T> *tile) {
    const T *from =
        (const T *)a.from + p.e * a.step[0] + p.origin[0] * a.step[1] + p.origin[1] * a.step[2];
    int along = a.step[2] == 1;
    int fours = along && a.step[1] % 4 == 0 && (uintptr_t)from % sizeof(Four<T>) == 0 &&
                p.begin[1] % 4 == 0 && p.end[1] % 4 == 0;
    if (fours)
        load_rows(from, a.step[1], p, tile);
    else
        load_elements(from, a.step + 1, along, p, tile);
}

/* ---- amax ---------------------------------------------------------------------------------- */

/* Half a row of the tile. Elements that are not there are 0, which no amax sees. */
struct HalfRow {
    float at[HALF];
};

/* `begin`, `end`: of what is there, within the half. */
template <typename T>
__device__ static void take_half(const T *from, int begin, int end, HalfRow *x) {
    if (begin == 0 && end == HALF) {
        const uint32_t *words = (const uint32_t *)from;
#pragma unroll
        for (int w = 0; w < HALF * (int)sizeof(T) / 4; w++) {
            T part[4 / sizeof(T)];
            uint32_t word = words[w];
            memcpy(part, &word, sizeof(word));
#pragma unroll
            for (int e = 0; e < (int)(4 / sizeof(T)); e++)
                x->at[w * (int)(4 / sizeof(T)) + e] = ep_float(part[e]);
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < HALF; k++)
        x->at[k] = k >= begin && k < end ? ep_float(from[k]) : 0.0f;
}

/* Returns the amax of COUNT elements. */
template <int COUNT> __device__ __forceinline__ uint32_t find_amax(const float *x) {
    uint32_t amax = EP_QUANT_LEAST_BITS;
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        amax = max(amax, ep_quant_magnitude(x[k]));
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

/* Returns whether a block has the width of a tile; else it is one of MX_BLOCK elements. */
__device__ __forceinline__ int has_tiles(const EpQuantiseArgs &a) {
    return a.format.block == EDGE;
}

/* Where a block's word is, counted from the box's first one. `row` and `column` are within the
 * tile. */
__device__ static int64_t scale_at(const EpQuantiseArgs &a, const Part &p, int row, int column) {
    int width = has_tiles(a) ? EDGE : MX_BLOCK;
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
    EpQuantScale scale = ep_quant_scale(a.format, amax);
    if (a.phase == EP_QUANT_CONVERT || !stores) return scale.inverse;
    ep_store_scale(a.format, a.scales, at, scale);
    return scale.inverse;
}

/* ---- convert ------------------------------------------------------------------------------- */

__device__ __forceinline__ uint32_t convert_pair(float low, float high) {
    uint32_t codes = ep_convert_e4m3x2(low, high);
    if (low != low) codes &= ~0x80u; /* every NaN is 0x7f */
    if (high != high) codes &= ~0x8000u;
    return codes;
}

__device__ __forceinline__ uint4 convert_group(const float *x, float inverse) {
    uint32_t word[GROUP / 4];
#pragma unroll
    for (int w = 0; w < GROUP / 4; w++)
        word[w] = convert_pair(x[4 * w] * inverse, x[4 * w + 1] * inverse) |
                  convert_pair(x[4 * w + 2] * inverse, x[4 * w + 3] * inverse) << 16;
    return make_uint4(word[0], word[1], word[2], word[3]);
}

/* Convert COUNT elements, of which those from `begin` to before `end` are there. */
template <int COUNT>
__device__ __forceinline__ void convert(const float *x, int begin, int end, float inverse,
                                        uint8_t *out) {
    int whole = begin <= 0 && end >= COUNT && ((uintptr_t)out & (GROUP - 1)) == 0;
#pragma unroll
    for (int k = 0; k < COUNT; k += GROUP) {
        uint4 codes = convert_group(x + k, inverse);
        const uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};
        if (whole) {
            *(uint4 *)(out + k) = codes;
            continue;
        }
#pragma unroll
        for (int i = 0; i < GROUP; i++)
            if (k + i >= begin && k + i < end) out[k + i] = (uint8_t)(word[i / 4] >> i % 4 * 8);
    }
}

/* ---- a tile -------------------------------------------------------------------------------- */

/** A thread's half of a row. */
struct Own {
    int row, half;
    int begin, end; /* of what is there, within the half */
    uint8_t *out;   /* of the half's first element */
};

/* Blocks of 32. */
__device__ static void quantise_mx(const EpQuantiseArgs &a, const Part &p, const Own &own,
                                   const HalfRow &x) {
#pragma unroll
    for (int b = 0; b < HALF / MX_BLOCK; b++) {
        int first = b * MX_BLOCK, begin = own.begin - first, end = own.end - first;
        if (begin >= MX_BLOCK || end <= 0) continue;
        int64_t at = scale_at(a, p, own.row, own.half * (HALF / MX_BLOCK) + b);
        float inverse = settle_block(a, at, find_amax<MX_BLOCK>(x.at + first), 1);
        if (a.phase != EP_QUANT_FIND)
            convert<MX_BLOCK>(x.at + first, begin, end, inverse, own.out + first);
    }
}

template <typename T>
__device__ static void quantise_tile(const EpQuantiseArgs &a, const Part &p, Tile<T> *tile) {
    int r = (int)threadIdx.x / 2, half = (int)threadIdx.x % 2;
    int there = r >= p.begin[0] && r < p.end[0];
    uint8_t *out = a.out + p.e * a.out_step[0] + (p.origin[0] + r) * a.out_step[1] + p.origin[1];
    Own own = {r, half, max(p.begin[1] - half * HALF, 0), min(p.end[1] - half * HALF, HALF),
               out + half * HALF};
    if (!there) own.end = 0;
    HalfRow x;
    take_half(tile->at(r, half * HALF), own.begin, own.end, &x);
    if (!has_tiles(a)) {
        quantise_mx(a, p, own, x);
        return;
    }
    uint32_t amax = find_amax<HALF>(x.at);
    int stores = there && half == 0;
    if (a.tiles) {
        amax = find_largest(amax);
        stores = threadIdx.x == 0;
    } else {
        amax = max(amax, __shfl_xor_sync(~0u, amax, 1));
    }
    if (!there && !stores) return;
    float inverse = settle_block(a, scale_at(a, p, r, 0), amax, stores);
    if (a.phase != EP_QUANT_FIND) convert<HALF>(x.at, own.begin, own.end, inverse, own.out);
}

template <typename T>
__global__ void __launch_bounds__(THREADS) quantise_box(const __grid_constant__ EpQuantiseArgs a) {
    extern __shared__ uint4 memory[];
    Tile<T> *tile = (Tile<T> *)memory;
    int64_t tiles = a.part[0] * ep_quantise_tiles(&a, 1) * ep_quantise_tiles(&a, 2);
    for (int64_t number = blockIdx.x; number < tiles; number += gridDim.x) {
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
    int error = ep_cuda_open_quantise_blocks();
    if (!error) error = ep_open_kernel(quantise_box<__nv_bfloat16>, shared_bytes);
    if (!error) error = ep_open_kernel(quantise_box<__half>, shared_bytes);
    return error ? error : ep_open_kernel(quantise_box<float>, shared_bytes);
}

extern "C" int ep_cuda_launch_quantise(const EpQuantiseArgs *a, int blocks, void *stream) {
    int64_t tiles = a->part[0] * ep_quantise_tiles(a, 1) * ep_quantise_tiles(a, 2);
    if (tiles == 0) return cudaSuccess;
    if (ep_cuda_can_quantise_blocks(a)) return ep_cuda_launch_quantise_blocks(a, blocks, stream);
    blocks = (int)min(tiles, (int64_t)blocks);
    if (a->type == EP_TYPE_BF16) return launch_quant<__nv_bfloat16>(a, blocks, stream);
    if (a->type == EP_TYPE_FP16) return launch_quant<__half>(a, blocks, stream);
    return launch_quant<float>(a, blocks, stream);
}
