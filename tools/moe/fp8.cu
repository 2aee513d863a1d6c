/* SPDX-License-Identifier: Apache-2.0 */

/**
 * Grouped products of e4m3 matrices with a scale for each block of 128 elements, on the matrix
 * units of compute capability 9.0:
 *
 *     c_g[m, n] = sum over blocks b of 128 of k: a_scale[m, b] * b_scale[n, b] * sum of k in b:
 *                 a_g[m, k] * b_g[n, k]
 *
 * One launch serves all groups. A block of threads takes one tile of some c_g after another:
 * TILE_ROWS x 128, where a tile has rows at all. One warpgroup brings 128 columns of both operands
 * and their scales to a stage of shared memory, several stages ahead. Two warpgroups multiply, half
 * of the tile's rows each, 64 at a time. The sum over a block of k is in the matrix unit, which
 * adds e4m3 with fewer bits than fp32 has. It is scaled and added in fp32.
 *
 * Memory order: a thread waits for its copies into a stage, makes them visible to matrix units, and
 * arrives at `full`. A warp that has waited for its products and read the scales arrives at
 * `empty`, and the stage is filled again.
 */

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#ifndef EP_WITH_CUDA
#define EP_WITH_CUDA 1
#endif
extern "C" {
#include "tools/common/gpu.h"
#include "tools/moe/cuda_state.h"
}
#include "tools/common/ptx.cuh"

/* wgmma and setmaxnreg exist in code for sm_90a alone. */
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_MATRIX_UNITS 1
#else
#define HAS_MATRIX_UNITS 0
#endif

enum {
    BLOCK = 128,    /* columns of k that share a scale; also columns of a tile */
    WAVES = 2,      /* products that a warpgroup makes for a tile, one after the other */
    WAVE_ROWS = 64, /* of one product */
    TILE_ROWS = 2 * WAVES * WAVE_ROWS,
    CONSUMERS = 256, /* threads that multiply */
    PRODUCERS = 128, /* threads that copy, behind them */
    THREADS = CONSUMERS + PRODUCERS,
    STAGES = 4, /* of shared memory */
    BEHIND = 2, /* stages whose copies are under way before the oldest is waited for */
    CHUNK = 16, /* bytes of a copy */
    CHUNKS = BLOCK / CHUNK,
    ROWS_AT_ONCE = PRODUCERS / CHUNKS,
    /* Parts of a stage. Matrices and stages lie on 1024 bytes, as the swizzle wants. */
    STAGE_A = 0,
    STAGE_B = TILE_ROWS * BLOCK,
    STAGE_A_SCALES = STAGE_B + BLOCK * BLOCK,
    STAGE_B_SCALES = STAGE_A_SCALES + TILE_ROWS * 4,
    STAGE_BYTES = (STAGE_B_SCALES + BLOCK * 4 + 1023) / 1024 * 1024
};

/* One operand: rows of codes, and scales of rows (of b: or of 128 rows) and blocks of columns. */
struct Operand {
    const uint8_t *codes;
    const float *scales;
    int64_t pitch, per_group; /* codes from row to row, and from group to group */
    int64_t scale_pitch;      /* scales from row to row */
    int64_t scale_step;       /* scales from block to block */
    int64_t scales_per_group;
};

struct ScaledArgs {
    Operand a, b;
    void *c;
    EpType type;           /* of c */
    const int32_t *places; /* [2, groups]: the first row of each slab, and its rows */
    int32_t groups;
    int32_t sums_rows; /* slabs lie along k rather than along m */
    int64_t m, n, k;   /* of each group; m or k is not used: it is that of the slab */
};

struct Tile {
    const uint8_t *a, *b;
    const float *a_scales, *b_scales;
    int64_t c;             /* index of its first element */
    int32_t rows, columns; /* of c, at most TILE_ROWS and BLOCK */
    int32_t k;
};

#if HAS_MATRIX_UNITS

/* ---- tiles --------------------------------------------------------------------------------- */

/* The group of the last tile, and the number of its first one. Tiles are numbered by groups, then
 * by columns, then by rows. */
struct Place {
    int32_t group;
    int64_t begin;
};

static __device__ int64_t ceiling(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

/* Tile i, j of a group's c. */
template <bool B_TILES>
static __device__ void describe_tile(const ScaledArgs &args, int64_t g, int64_t m, int64_t i,
                                     int64_t j, Tile *out) {
    const int64_t slab = __ldg(args.places + g);
    const int64_t row = args.sums_rows ? i : slab + i, from = args.sums_rows ? slab : 0;
    const Operand *a = &args.a, *b = &args.b;
    out->a = a->codes + row * a->pitch + from;
    out->b = b->codes + g * b->per_group + j * b->pitch + from;
    out->a_scales = a->scales + row * a->scale_pitch + from / BLOCK * a->scale_step;
    out->b_scales = b->scales + g * b->scales_per_group +
                    (B_TILES ? j / BLOCK : j) * b->scale_pitch + from / BLOCK * b->scale_step;
    out->c = (args.sums_rows ? g * m + i : row) * args.n + j;
    out->rows = (int32_t)min((int64_t)TILE_ROWS, m - i);
    out->columns = (int32_t)min((int64_t)BLOCK, args.n - j);
    out->k = args.sums_rows ? __ldg(args.places + args.groups + g) : (int32_t)args.k;
}

/* Returns false behind the last tile. Numbers ascend from call to call. */
template <bool B_TILES>
static __device__ bool find_tile(const ScaledArgs &args, int64_t number, Place *at, Tile *out) {
    const int64_t across = ceiling(args.n, BLOCK);
    for (; at->group < args.groups; at->group++) {
        const int64_t m = args.sums_rows ? args.m : __ldg(args.places + args.groups + at->group);
        const int64_t down = ceiling(m, TILE_ROWS), tile = number - at->begin;
        if (tile < down * across) {
            describe_tile<B_TILES>(args, at->group, m, tile % down * TILE_ROWS, tile / down * BLOCK,
                                   out);
            return true;
        }
        at->begin += down * across;
    }
    return false;
}

static __device__ void wait_for(uint64_t *arrival, uint32_t parity) {
    while (!arrival_test(arrival, parity)) {
    }
}

/* ---- copying ------------------------------------------------------------------------------- */

/* Rows of a matrix. Behind its last row and column are zeros. The pieces of a row change places by
 * the row's number, as the matrix units expect. */
static __device__ void copy_rows(uint32_t to, const uint8_t *from, int64_t pitch, int rows,
                                 int tile_rows, int columns) {
    const int thread = (int)threadIdx.x - CONSUMERS, chunk = thread % CHUNKS;
    const int first = thread / CHUNKS;
    const int bytes = min(max(columns - chunk * CHUNK, 0), (int)CHUNK);
    const uint8_t *source = from + first * pitch + chunk * CHUNK;
    uint32_t place = to + (uint32_t)(first * BLOCK + (chunk ^ first % CHUNKS) * CHUNK);
    for (int row = first; row < tile_rows; row += ROWS_AT_ONCE) {
        const bool is = bytes > 0 && row < rows;
        copy_16(place, is ? source : from, is ? (uint32_t)bytes : 0);
        source += ROWS_AT_ONCE * pitch, place += ROWS_AT_ONCE * BLOCK;
    }
}

/* A scale for each row. */
static __device__ void copy_scales(uint32_t to, const float *from, int64_t pitch, int rows) {
    for (int row = (int)threadIdx.x - CONSUMERS; row < rows; row += PRODUCERS)
        copy_4(to + (uint32_t)row * 4, from + row * pitch, 4);
}

template <bool B_TILES>
static __device__ void copy_stage(const ScaledArgs &args, const Tile &tile, int block,
                                  uint32_t stage) {
    const int at = block * BLOCK;
    copy_rows(stage + STAGE_A, tile.a + at, args.a.pitch, tile.rows, TILE_ROWS, tile.k - at);
    copy_rows(stage + STAGE_B, tile.b + at, args.b.pitch, tile.columns, BLOCK, tile.k - at);
    copy_scales(stage + STAGE_A_SCALES, tile.a_scales + block * args.a.scale_step,
                args.a.scale_pitch, tile.rows);
    copy_scales(stage + STAGE_B_SCALES, tile.b_scales + block * args.b.scale_step,
                args.b.scale_pitch, B_TILES ? 1 : tile.columns);
    copies_commit();
}

template <int YOUNGEST> static __device__ void announce(uint64_t *full, int64_t step) {
    copies_wait<YOUNGEST>();
    fence_matrix_units();
    arrival_arrive(full + step % STAGES);
}

template <bool B_TILES>
static __device__ void produce(const ScaledArgs &args, uint32_t stages, uint64_t *full,
                               uint64_t *empty) {
    Place place = {0, 0};
    Tile tile;
    int64_t step = 0;
    for (int64_t number = blockIdx.x; find_tile<B_TILES>(args, number, &place, &tile);
         number += gridDim.x) {
        for (int block = 0; block * BLOCK < tile.k; block++, step++) {
            const int stage = (int)(step % STAGES);
            wait_for(empty + stage, (uint32_t)(step / STAGES & 1) ^ 1);
            copy_stage<B_TILES>(args, tile, block, stages + (uint32_t)(stage * STAGE_BYTES));
            if (step >= BEHIND) announce<BEHIND>(full, step - BEHIND);
        }
    }
    for (int64_t rest = max(step - BEHIND, (int64_t)0); rest < step; rest++)
        announce<0>(full, rest);
}

/* ---- multiplying --------------------------------------------------------------------------- */

/* Rows of 128 bytes in shared memory, 8 of them 1024 bytes from the next 8, swizzled by 128. */
static __device__ uint64_t describe_matrix(uint32_t address) {
    return (uint64_t)((address & 0x3ffff) >> 4) | 1ull << 16 | (1024ull >> 4) << 32 | 1ull << 62;
}

/* sums = the products of one block of k. */
static __device__ void multiply_block(uint32_t a, uint32_t b, float (&sums)[64]) {
    const uint64_t rows = describe_matrix(a), columns = describe_matrix(b);
#pragma unroll
    for (int i = 0; i < 64; i++)
        keep_register(sums[i]);
    products_begin();
#pragma unroll
    for (int k = 0; k < BLOCK / 32; k++)
        multiply_e4m3(sums, rows + (uint64_t)(k * 32 >> 4), columns + (uint64_t)(k * 32 >> 4),
                      k > 0);
    products_commit();
    products_wait<0>();
#pragma unroll
    for (int i = 0; i < 64; i++)
        keep_register(sums[i]);
}

/* total += sums * scales. `a` has the scales of the wave's rows. */
template <bool B_TILES>
static __device__ void add_scaled(const float *a, const float *b, const float (&sums)[64],
                                  float (&total)[64]) {
    const int lane = (int)threadIdx.x % 32, row = (int)threadIdx.x % 128 / 32 * 16 + lane / 4;
    const float one = B_TILES ? b[0] : 1, scale[2] = {a[row] * one, a[row + 8] * one};
#pragma unroll
    for (int j = 0; j < 16; j++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const float column = B_TILES ? 1 : b[8 * j + lane % 4 * 2 + c];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int i = 4 * j + 2 * r + c;
                total[i] = fmaf(B_TILES ? sums[i] : sums[i] * column, scale[r], total[i]);
            }
        }
    }
}

/* ---- storing ------------------------------------------------------------------------------- */

static __device__ uint32_t pair_of(EpType type, float low, float high) {
    uint32_t word;
    if (type == EP_TYPE_BF16) {
        const __nv_bfloat16 both[2] = {__float2bfloat16_rn(low), __float2bfloat16_rn(high)};
        memcpy(&word, both, sizeof(word));
    } else {
        const __half both[2] = {__float2half_rn(low), __float2half_rn(high)};
        memcpy(&word, both, sizeof(word));
    }
    return word;
}

/* A thread has two neighbouring columns of each 8. Neighbouring threads exchange theirs of two 8s:
 * each then has four columns of one, and a warp stores 32 bytes of a row together. */
static __device__ void store_halves(const ScaledArgs &args, int64_t at, int columns, bool is_row,
                                    const float (&total)[64], int r) {
    const int lane = (int)threadIdx.x % 32, odd = lane & 1;
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
        const int i = 4 * j + 2 * r, column = 8 * (j + odd) + lane % 4 / 2 * 4;
        const uint32_t low = pair_of(args.type, total[i], total[i + 1]);
        const uint32_t high = pair_of(args.type, total[i + 4], total[i + 5]);
        const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
        if (is_row && column < columns)
            ((uint2 *)args.c)[(at + column) / 4] =
                odd ? make_uint2(other, high) : make_uint2(low, other);
    }
}

static __device__ void store_floats(const ScaledArgs &args, int64_t at, int columns,
                                    const float (&total)[64], int r) {
#pragma unroll
    for (int j = 0; j < 16; j++) {
        const int column = 8 * j + (int)threadIdx.x % 4 * 2;
        if (column < columns)
            ((float2 *)args.c)[(at + column) / 2] =
                float2{total[4 * j + 2 * r], total[4 * j + 2 * r + 1]};
    }
}

static __device__ void store_wave(const ScaledArgs &args, const Tile &tile, int first,
                                  const float (&total)[64]) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x % 128 / 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = first + warp * 16 + lane / 4 + 8 * r;
        const int64_t at = tile.c + row * args.n;
        if (args.type != EP_TYPE_FP32)
            store_halves(args, at, tile.columns, row < tile.rows, total, r);
        else if (row < tile.rows)
            store_floats(args, at, tile.columns, total, r);
    }
}

/* The two warpgroups take waves in turn, so that both have work where a tile has few rows. */
static __device__ int wave_row(int wave) {
    return (2 * wave + (int)threadIdx.x / 128) * WAVE_ROWS;
}

template <bool B_TILES>
static __device__ void multiply_stage(const uint8_t *memory, uint32_t stage, const Tile &tile,
                                      float (&total)[WAVES][64]) {
    const float *a_scales = (const float *)(memory + STAGE_A_SCALES);
    const float *b_scales = (const float *)(memory + STAGE_B_SCALES);
#pragma unroll
    for (int wave = 0; wave < WAVES; wave++) {
        float sums[64];
        const int row = wave_row(wave);
        if (row >= tile.rows) continue;
        multiply_block(stage + STAGE_A + (uint32_t)(row * BLOCK), stage + STAGE_B, sums);
        add_scaled<B_TILES>(a_scales + row, b_scales, sums, total[wave]);
    }
}

template <bool B_TILES>
static __device__ void consume(const ScaledArgs &args, const uint8_t *memory, uint64_t *full,
                               uint64_t *empty) {
    Place place = {0, 0};
    Tile tile;
    int64_t step = 0;
    for (int64_t number = blockIdx.x; find_tile<B_TILES>(args, number, &place, &tile);
         number += gridDim.x) {
        float total[WAVES][64] = {};
        for (int block = 0; block * BLOCK < tile.k; block++, step++) {
            const int stage = (int)(step % STAGES);
            const uint8_t *at = memory + stage * STAGE_BYTES;
            wait_for(full + stage, (uint32_t)(step / STAGES & 1));
            multiply_stage<B_TILES>(at, shared_address(at), tile, total);
            __syncwarp();
            if (threadIdx.x % 32 == 0) arrival_arrive(empty + stage);
        }
#pragma unroll
        for (int wave = 0; wave < WAVES; wave++)
            store_wave(args, tile, wave_row(wave), total[wave]);
    }
}

#endif

/* ---- the kernel ---------------------------------------------------------------------------- */

template <bool B_TILES>
static __global__ void __launch_bounds__(THREADS, 1)
    multiply_scaled(const __grid_constant__ ScaledArgs args) {
#if HAS_MATRIX_UNITS
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ uint64_t full[STAGES], empty[STAGES];
    if (threadIdx.x < STAGES) {
        arrival_init(full + threadIdx.x, PRODUCERS);
        arrival_init(empty + threadIdx.x, CONSUMERS / 32);
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        registers_give<40>();
        produce<B_TILES>(args, shared_address(memory), full, empty);
    } else {
        registers_take<232>();
        consume<B_TILES>(args, memory, full, empty);
    }
#endif
}

/* ---- launches ------------------------------------------------------------------------------ */

/* Of the last two dimensions; a third one before them is that of groups. */
static Operand operand_of(const Scaled *t) {
    const int d = t->codes.ndim - 2;
    const int64_t rows = t->codes.shape[d], columns = t->codes.shape[d + 1];
    const int64_t *scales = t->scales.shape + d;
    return {
        (const uint8_t *)t->codes.data, (const float *)t->scales.data, columns,
        d ? rows * columns : 0,         t->by_column ? 1 : scales[1],  t->by_column ? scales[1] : 1,
        d ? scales[0] * scales[1] : 0};
}

static bool launch(MoeDevice *d, const Groups *groups, const Scaled *b, const ScaledArgs &args) {
    auto kernel = b->tiles ? multiply_scaled<true> : multiply_scaled<false>;
    const int bytes = STAGES * STAGE_BYTES;
    if (groups->num == 0 || args.n == 0) return true;
    if (!cuda_ok(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                 "cudaFuncSetAttribute"))
        return false;
    d->gemm_calls++;
    kernel<<<(unsigned)d->multiprocessors, THREADS, bytes, cuda_stream_of(d)>>>(args);
    return cuda_ok(cudaGetLastError(), "a product of e4m3");
}

bool cuda_multiply_scaled(MoeDevice *d, const Groups *groups, const Scaled *a, const Scaled *b,
                          const EpTensor *c) {
    const ScaledArgs args = {operand_of(a),  operand_of(b),    c->data, c->type,
                             groups->places, groups->num,      0,       0,
                             c->shape[1],    a->codes.shape[1]};
    return launch(d, groups, b, args);
}

bool cuda_correlate_scaled(MoeDevice *d, const Groups *groups, const Scaled *a, const Scaled *b,
                           const EpTensor *c) {
    const ScaledArgs args = {
        operand_of(a),     operand_of(b),     c->data, c->type, groups->places, groups->num, 1,
        a->codes.shape[0], b->codes.shape[0], 0};
    return launch(d, groups, b, args);
}
