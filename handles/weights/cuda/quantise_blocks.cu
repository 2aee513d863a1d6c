/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quantises boxes of whole blocks, of which all is accessed 16 bytes at a time: memory bounds it.
 * quantise.cu has all other boxes. No value waits for another one's place in memory:
 *
 *     rows        a lane takes 16 elements, a unit; lanes beside each other have a block's
 *     tiles       a block of threads takes a tile of 128 x 128, each thread four units
 *     transposed  each thread takes 8 x 8 elements of such a tile into registers, and its codes
 *                 change places in shared memory, where they have half or a quarter of the bytes
 */
#include "handles/weights/cuda/quantise.h"
#include "runtime/cuda/device.cuh"
#include "runtime/cuda/rows.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define EDGE EP_QUANT_EDGE
#define UNIT EP_QUANT_UNIT

/* Tiles of a dimension, and units of a row; the launch has checked that these fit. */
__device__ __forceinline__ uint32_t tiles_of(const EpQuantiseArgs &a, int dim) {
    return (uint32_t)((a.part[dim] + EDGE - 1) / EDGE);
}

__device__ __forceinline__ uint32_t warp_of(void) {
    return threadIdx.x / 32;
}

template <typename T> __device__ __forceinline__ EpUnit<T> load_unit(const T *from, int is_there) {
    EpUnit<T> x;
#pragma unroll
    for (int i = 0; i < EpUnit<T>::PARTS; i++)
        x.part[i] = is_there ? ((const uint4 *)from)[i] : make_uint4(0, 0, 0, 0);
    return x;
}

/* ---- rows ---------------------------------------------------------------------------------- */

#define LANE_UNITS 2 /* that a lane has under way, 32 units apart */
#define ITEM_UNITS (32 * LANE_UNITS)

/* Returns the units of an item that one row has: of short rows an item has several. No block lies
 * in two items. */
EP_HOST_DEVICE static inline uint32_t row_width(int64_t units) {
    uint32_t width = EDGE / UNIT;
    while (width < units && width < ITEM_UNITS)
        width *= 2;
    return width;
}

EP_HOST_DEVICE static inline int64_t count_items(const EpQuantiseArgs *a) {
    int64_t units = a->part[2] / UNIT, width = row_width(units), at_once = ITEM_UNITS / width;
    return (a->part[0] * a->part[1] + at_once - 1) / at_once * ((units + width - 1) / width);
}

/** A unit of the box. */
struct Place {
    uint32_t e, row, unit;
    int is_there;
};

template <typename T>
__global__ void __launch_bounds__(THREADS) quantise_rows(const __grid_constant__ EpQuantiseArgs a) {
    const uint32_t rows = (uint32_t)a.part[1], units = (uint32_t)a.part[2] / UNIT;
    const uint32_t lines = (uint32_t)a.part[0] * rows, width = row_width(units);
    const uint32_t each = (units + width - 1) / width, at_once = ITEM_UNITS / width;
    const uint32_t items = (uint32_t)count_items(&a), warps = gridDim.x * WARPS;
    const int log = ep_quant_log(a.format);
    for (uint32_t item = blockIdx.x * WARPS + warp_of(); item < items; item += warps) {
        uint32_t line = item / each;
        EpUnit<T> x[LANE_UNITS];
        Place p[LANE_UNITS];
#pragma unroll
        for (int k = 0; k < LANE_UNITS; k++) {
            uint32_t at = threadIdx.x % 32 + 32 * k, of = line * at_once + at / width;
            uint32_t e = min(of, lines - 1) / rows, row = min(of, lines - 1) - e * rows;
            uint32_t unit = (item - line * each) * width + at % width;
            int is_there = of < lines && unit < units && row < ep_quantise_length(&a, e, 1);
            p[k] = Place{e, row, unit, is_there};
            x[k] = load_unit((const T *)a.from + e * a.step[0] + row * a.step[1] + unit * UNIT,
                             is_there);
        }
#pragma unroll
        for (int k = 0; k < LANE_UNITS; k++) {
            EpQuantScale scale;
            uint4 codes = ep_quantise_unit(a.format, x[k], p[k].is_there, &scale);
            if (!p[k].is_there) continue;
            ((uint4 *)(a.out + p[k].e * a.out_step[0] + p[k].row * a.out_step[1]))[p[k].unit] =
                codes;
            if (p[k].unit % (1u << log) == 0)
                ep_store_scale(a.format, a.scales,
                               p[k].e * a.scale_step[0] + p[k].row * a.scale_step[1] +
                                   (p[k].unit >> log) * a.scale_step[2],
                               scale);
        }
    }
}

/* ---- tiles --------------------------------------------------------------------------------- */

/** A tile of the box: its dimension 0, and which one it is along the others. */
struct TilePlace {
    uint32_t e, down, across;
    int rows, columns; /* of it that are there; 0 or less: none */
};

__device__ __forceinline__ TilePlace place_of(const EpQuantiseArgs &a, uint32_t number) {
    uint32_t across = tiles_of(a, 2), down = tiles_of(a, 1);
    uint32_t line = number / across, e = line / down;
    TilePlace p = {e, line - e * down, number - line * across, 0, 0};
    p.rows = (int)min(ep_quantise_length(&a, e, 1) - (int64_t)p.down * EDGE, (int64_t)EDGE);
    p.columns = (int)min(ep_quantise_length(&a, e, 2) - (int64_t)p.across * EDGE, (int64_t)EDGE);
    return p;
}

/* Returns the largest value of all threads. */
__device__ __forceinline__ uint32_t find_largest(uint32_t value) {
    __shared__ uint32_t largest[WARPS];
    value = __reduce_max_sync(~0u, value);
    __syncthreads(); /* the last one's readers are done */
    if (threadIdx.x % 32 == 0) largest[warp_of()] = value;
    __syncthreads();
    for (int w = 0; w < WARPS; w++)
        value = max(value, largest[w]);
    return value;
}

#define THREAD_UNITS (EDGE * EDGE / UNIT / THREADS)
#define ROW_UNITS (EDGE / UNIT)

template <typename T>
__device__ __forceinline__ void quantise_tile(const EpQuantiseArgs &a, const TilePlace &p) {
    const int column = (int)threadIdx.x % ROW_UNITS * UNIT, row = (int)threadIdx.x / ROW_UNITS;
    const T *from = (const T *)a.from + p.e * a.step[0] + (int64_t)p.down * EDGE * a.step[1] +
                    (int64_t)p.across * EDGE;
    uint8_t *out = a.out + p.e * a.out_step[0] + (int64_t)p.down * EDGE * a.out_step[1] +
                   (int64_t)p.across * EDGE;
    EpUnit<T> x[THREAD_UNITS];
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < THREAD_UNITS; k++) {
        int i = row + k * (THREADS / ROW_UNITS);
        x[k] = load_unit(from + i * a.step[1] + column, i < p.rows && column < p.columns);
    }
#pragma unroll
    for (int k = 0; k < THREAD_UNITS; k++)
        largest = max(largest, ep_unit_most(x[k]));
    uint32_t amax = largest;
    if (largest >= EP_QUANT_INFINITY_BITS) {
        amax = 0;
#pragma unroll
        for (int k = 0; k < THREAD_UNITS; k++)
            amax = max(amax, ep_unit_largest(x[k], 1));
    }
    EpQuantScale scale = ep_quant_scale(a.format, max(find_largest(amax), EP_QUANT_LEAST_BITS));
    if (threadIdx.x == 0)
        ep_store_scale(
            a.format, a.scales,
            p.e * a.scale_step[0] + p.down * a.scale_step[1] + p.across * a.scale_step[2], scale);
#pragma unroll
    for (int k = 0; k < THREAD_UNITS; k++) {
        int i = row + k * (THREADS / ROW_UNITS);
        uint4 codes = ep_unit_codes(a.format, x[k], scale.inverse);
        if (largest > EP_QUANT_INFINITY_BITS) codes = ep_unit_nan(x[k], codes);
        if (i < p.rows && column < p.columns) *(uint4 *)(out + i * a.out_step[1] + column) = codes;
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    quantise_tiles(const __grid_constant__ EpQuantiseArgs a) {
    const uint32_t tiles = (uint32_t)a.part[0] * tiles_of(a, 1) * tiles_of(a, 2);
    for (uint32_t number = blockIdx.x; number < tiles; number += gridDim.x) {
        TilePlace p = place_of(a, number);
        if (p.rows > 0 && p.columns > 0) quantise_tile<T>(a, p);
    }
}

/* ---- transposed ---------------------------------------------------------------------------- */

/* Names are of the result: a thread's elements are SIDE rows, which lie beside each other in the
 * input, and SIDE columns. */
#define SIDE 8
#define GROUPS (EDGE / SIDE)
#define MX_BANDS (EDGE / 32)

/** SIDE elements of each of SIDE columns. */
template <typename T> struct Square {
    static constexpr int PARTS = SIDE * (int)sizeof(T) / 16;
    uint4 at[SIDE][PARTS];
};

template <typename T> __device__ __forceinline__ float element(const uint4 *parts, int i) {
    const EpVector<T> v = ep_unpack<T>(parts[i / EpVector<T>::SIZE]);
    return v.at[i % EpVector<T>::SIZE];
}

/* Find the largest magnitudes of the rows of a square, as bits of floats, of finite elements alone.
 */
template <typename T>
__device__ __forceinline__ void find_finite(const Square<T> &x, uint32_t most[SIDE]) {
#pragma unroll
    for (int i = 0; i < SIDE; i++) {
        most[i] = 0;
#pragma unroll
        for (int c = 0; c < SIDE; c++)
            most[i] = max(most[i], ep_quant_magnitude(element<T>(x.at[c], i)));
    }
}

/* The same of all elements: see ep_unit_most. */
template <typename T>
__device__ __forceinline__ void find_most(const Square<T> &x, uint32_t most[SIDE]) {
#pragma unroll
    for (int w = 0; w < SIDE / 2; w++) {
        uint32_t pair = 0;
#pragma unroll
        for (int c = 0; c < SIDE; c++) {
            const uint4 &part = x.at[c][0];
            const uint32_t word[4] = {part.x, part.y, part.z, part.w};
            pair = ep_max_u16x2(pair, word[w] & 0x7fff7fffu);
        }
        T values[2];
        memcpy(values, &pair, sizeof(values));
        most[2 * w] = ep_quant_bits(ep_float(values[0]));
        most[2 * w + 1] = ep_quant_bits(ep_float(values[1]));
    }
}

template <>
__device__ __forceinline__ void find_most<float>(const Square<float> &x, uint32_t most[SIDE]) {
#pragma unroll
    for (int i = 0; i < SIDE; i++) {
        most[i] = 0;
#pragma unroll
        for (int c = 0; c < SIDE; c++)
            most[i] = max(most[i], ep_quant_bits(element<float>(x.at[c], i)) & 0x7fffffffu);
    }
}

/** What the threads of a block share. */
struct Turned {
    uint32_t most[WARPS][EDGE];     /* magnitudes of each row, by warp: of 16 columns */
    float inverse[MX_BANDS][EDGE];  /* for each band of columns that share scales */
    uint4 codes[EDGE][EDGE / UNIT]; /* see codes_at */
};

/* Returns where 8 codes of a row lie, of columns 8 * group and so on. Threads that store have other
 * rows, SIDE apart, threads that load 16 bytes have other columns: both use all banks. */
__device__ __forceinline__ uint2 *codes_at(Turned *s, int row, int group) {
    int chunk = group / 2 ^ (row / SIDE & 7), half = (group & 1) ^ row / (EDGE / 2);
    return (uint2 *)&s->codes[row][chunk] + half;
}

/* Store the scales of a tile's rows, and by what their elements are multiplied. */
__device__ __forceinline__ void settle_rows(const EpQuantiseArgs &a, const TilePlace &p,
                                            Turned *s) {
    int width = a.format.block, bands = EDGE / width, each = WARPS / bands;
    for (int n = (int)threadIdx.x; n < EDGE * bands; n += THREADS) {
        int row = n % EDGE, band = n / EDGE;
        uint32_t amax = EP_QUANT_LEAST_BITS;
        for (int w = band * each; w < (band + 1) * each; w++)
            amax = max(amax, s->most[w][row]);
        EpQuantScale scale = ep_quant_scale(a.format, amax);
        s->inverse[band][row] = scale.inverse;
        if (row < p.rows && band * width < p.columns)
            ep_store_scale(a.format, a.scales,
                           p.e * a.scale_step[0] +
                               ((int64_t)p.down * EDGE + row) * a.scale_step[1] +
                               ((int64_t)p.across * bands + band) * a.scale_step[2],
                           scale);
    }
}

/* The same of a tile with one scale. `amax`: of this thread. */
__device__ __forceinline__ void settle_tile(const EpQuantiseArgs &a, const TilePlace &p,
                                            uint32_t amax, Turned *s) {
    EpQuantScale scale = ep_quant_scale(a.format, max(find_largest(amax), EP_QUANT_LEAST_BITS));
    if (threadIdx.x < EDGE) s->inverse[0][threadIdx.x] = scale.inverse;
    if (threadIdx.x == 0)
        ep_store_scale(
            a.format, a.scales,
            p.e * a.scale_step[0] + p.down * a.scale_step[1] + p.across * a.scale_step[2], scale);
}

/* Returns the codes of a row of a square. */
template <typename T>
__device__ __forceinline__ uint2 codes_of(const Square<T> &x, int i, float inverse, int has_nan) {
    uint32_t word[2] = {0, 0};
#pragma unroll
    for (int c = 0; c < SIDE; c += 2) {
        float low = element<T>(x.at[c], i), high = element<T>(x.at[c + 1], i);
        uint32_t codes = ep_convert_e4m3x2(low * inverse, high * inverse);
        if (has_nan && low != low) codes &= ~0x80u; /* every NaN is 0x7f */
        if (has_nan && high != high) codes &= ~0x8000u;
        word[c / 4] |= codes << c % 4 * 8;
    }
    return make_uint2(word[0], word[1]);
}

/* Store the rows of a tile, 16 bytes at a time, but for its last column's. */
__device__ __forceinline__ void store_codes(const EpQuantiseArgs &a, const TilePlace &p,
                                            Turned *s) {
    int unit = (int)threadIdx.x % ROW_UNITS, left = p.columns - unit * UNIT;
    uint8_t *out = a.out + p.e * a.out_step[0] + (int64_t)p.down * EDGE * a.out_step[1] +
                   (int64_t)p.across * EDGE + unit * UNIT;
#pragma unroll
    for (int k = 0; k < EDGE * ROW_UNITS / THREADS; k++) {
        int row = (int)threadIdx.x / ROW_UNITS + k * (THREADS / ROW_UNITS);
        const uint2 low = *codes_at(s, row, 2 * unit), high = *codes_at(s, row, 2 * unit + 1);
        const uint32_t word[4] = {low.x, low.y, high.x, high.y};
        uint8_t *to = out + row * a.out_step[1];
        if (row >= p.rows) continue;
        if (left >= UNIT) *(uint4 *)to = make_uint4(low.x, low.y, high.x, high.y);
        for (int i = 0; left < UNIT && i < left; i++)
            to[i] = (uint8_t)(word[i / 4] >> i % 4 * 8);
    }
}

template <typename T>
__device__ __forceinline__ void turn_tile(const EpQuantiseArgs &a, const TilePlace &p, Turned *s) {
    const int row = (int)threadIdx.x % GROUPS * SIDE, group = (int)threadIdx.x / GROUPS;
    const T *from = (const T *)a.from + p.e * a.step[0] + (int64_t)p.down * EDGE + row +
                    ((int64_t)p.across * EDGE + group * SIDE) * a.step[2];
    Square<T> x;
    uint32_t most[SIDE], raw = 0, amax = 0;
#pragma unroll
    for (int c = 0; c < SIDE; c++)
#pragma unroll
        for (int k = 0; k < Square<T>::PARTS; k++) {
            int is_there = row < p.rows && group * SIDE + c < p.columns;
            x.at[c][k] =
                is_there ? ((const uint4 *)(from + c * a.step[2]))[k] : make_uint4(0, 0, 0, 0);
        }
    find_most(x, most);
#pragma unroll
    for (int i = 0; i < SIDE; i++)
        raw = max(raw, most[i]);
    if (raw >= EP_QUANT_INFINITY_BITS) find_finite(x, most);
#pragma unroll
    for (int i = 0; i < SIDE; i++)
        amax = max(amax, most[i]);
    if (a.tiles) {
        settle_tile(a, p, amax, s);
    } else {
#pragma unroll
        for (int i = 0; i < SIDE; i++)
            most[i] = max(most[i], __shfl_xor_sync(~0u, most[i], 16));
#pragma unroll
        for (int i = 0; i < SIDE; i += 4)
            if (threadIdx.x % 32 < GROUPS)
                *(uint4 *)&s->most[warp_of()][row + i] =
                    make_uint4(most[i], most[i + 1], most[i + 2], most[i + 3]);
        __syncthreads();
        settle_rows(a, p, s);
    }
    __syncthreads();
    int band = a.tiles ? 0 : group * SIDE / a.format.block;
#pragma unroll
    for (int i = 0; i < SIDE; i++)
        *codes_at(s, row + i, group) =
            codes_of(x, i, s->inverse[band][row + i], raw > EP_QUANT_INFINITY_BITS);
    __syncthreads();
    store_codes(a, p, s);
}

/* A tile's first store to shared memory is behind all loads of the one before: its barriers follow
 * them. Three blocks on a multiprocessor have enough loads under way. */
template <typename T>
__global__ void __launch_bounds__(THREADS, sizeof(T) == 2 ? 3 : 1)
    turn_tiles(const __grid_constant__ EpQuantiseArgs a) {
    __shared__ __align__(16) Turned shared;
    const uint32_t tiles = (uint32_t)a.part[0] * tiles_of(a, 1) * tiles_of(a, 2);
    for (uint32_t number = blockIdx.x; number < tiles; number += gridDim.x) {
        TilePlace p = place_of(a, number);
        if (p.rows > 0 && p.columns > 0) turn_tile<T>(a, p, &shared);
    }
}

/* ---- launching ----------------------------------------------------------------------------- */

template <typename T> static int open_for(void) {
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, quantise_rows<T>);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, quantise_tiles<T>);
    return error != cudaSuccess ? error : cudaFuncGetAttributes(&attributes, turn_tiles<T>);
}

extern "C" int ep_cuda_open_quantise_blocks(void) {
    int error = open_for<__nv_bfloat16>();
    if (!error) error = open_for<__half>();
    return error ? error : open_for<float>();
}

/* Returns the blocks that have something to do. */
static int64_t count_blocks(const EpQuantiseArgs *a) {
    if (a->step[2] == 1 && !a->tiles) return (count_items(a) + WARPS - 1) / WARPS;
    return a->part[0] * ep_quantise_tiles(a, 1) * ep_quantise_tiles(a, 2);
}

extern "C" int ep_cuda_can_quantise_blocks(const EpQuantiseArgs *a) {
    int is_turned = a->step[2] != 1, size = a->type == EP_TYPE_FP32 ? 4 : 2;
    int64_t across = a->step[is_turned ? 2 : 1];
    if (a->phase != EP_QUANT_WHOLE || a->begin[1] % EDGE || a->begin[2] % EDGE) return 0;
    if (is_turned ? a->step[1] != 1 || a->part[1] % SIDE : a->part[2] % UNIT) return 0;
    uint64_t bytes = (uint64_t)(uintptr_t)a->from | (uint64_t)(a->step[0] * size) |
                     (uint64_t)(across * size) | (uint64_t)(uintptr_t)a->out |
                     (uint64_t)a->out_step[0] | (uint64_t)a->out_step[1];
    return bytes % 16 == 0 && count_blocks(a) < INT32_MAX / (2 * WARPS) &&
           a->part[0] * a->part[1] < INT32_MAX / 2;
}

template <typename T> static int launch_for(const EpQuantiseArgs *a, int blocks, void *stream) {
    if (a->step[2] != 1) return ep_launch(turn_tiles<T>, blocks, THREADS, 0, stream, *a);
    if (a->tiles) return ep_launch(quantise_tiles<T>, blocks, THREADS, 0, stream, *a);
    return ep_launch(quantise_rows<T>, blocks, THREADS, 0, stream, *a);
}

extern "C" int ep_cuda_launch_quantise_blocks(const EpQuantiseArgs *a, int blocks, void *stream) {
    blocks = (int)min(count_blocks(a), (int64_t)blocks);
    if (a->type == EP_TYPE_BF16) return launch_for<__nv_bfloat16>(a, blocks, stream);
    if (a->type == EP_TYPE_FP16) return launch_for<__half>(a, blocks, stream);
    return launch_for<float>(a, blocks, stream);
}
