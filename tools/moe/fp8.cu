/* SPDX-License-Identifier: Apache-2.0 */

/**
 * Grouped products of e4m3 matrices with a scale for each block of 128 elements, on the matrix
 * units of compute capability 9.0:
 *
 *     c_g[m, n] = sum over blocks b of 128 of k: a_scale[m, b] * b_scale[n, b] * sum of k in b:
 *                 a_g[m, k] * b_g[n, k]
 *
 * One launch serves all groups. A cluster of two blocks takes one tile of some c_g after another:
 * TILE_ROWS x 256, of which each block has 128 columns. So both need the same rows of a: each loads
 * half of them into the shared memory of both, where a tile has rows at all. Two warpgroups
 * multiply, half of the tile's rows each, 64 at a time. The sum over a block of k is in the matrix
 * unit, which adds e4m3 with fewer bits than fp32 has. It is scaled and added in fp32.
 *
 * The third warpgroup works ahead. One thread takes tiles, one loads matrices, and two warps copy
 * scales, those of several blocks of k at a time. Clusters draw tiles from a counter, since other
 * kernels hold multiprocessors meanwhile: a cluster that finds no place until the end finds no
 * tiles left, and delays nobody.
 *
 * Memory order: the bytes of the matrices complete `full`. A warp that has waited for its products
 * arrives at `empty` of both blocks, since both write to its block. Then the stage is filled again.
 * Scales have stages of their own, and the copies of a block complete them. The first block of a
 * cluster draws, and stores the number into both: its bytes complete `drawn`. Each block describes
 * its part of the tile in shared memory, for all its warps, behind `told`. Blocks of a cluster end
 * together, so that none writes to one that has ended.
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

#define ALL_LANES 0xffffffffu

enum {
    BLOCK = 128,    /* columns of k that share a scale; also columns of a block's part of a tile */
    WAVES = 2,      /* products that a warpgroup makes for a tile, one after the other */
    WAVE_ROWS = 64, /* of one product, and of one load of a */
    TILE_ROWS = 2 * WAVES * WAVE_ROWS,
    TILE_COLUMNS = CLUSTER * BLOCK,
    CONSUMERS = 256,         /* threads that multiply */
    LOADER = CONSUMERS,      /* the thread that loads matrices */
    DRAWER = CONSUMERS + 32, /* the thread that takes tiles */
    COPIERS = 64,            /* threads that copy scales, the last ones */
    THREADS = CONSUMERS + 128,
    FIRST_COPIER = THREADS - COPIERS,
    READERS = (CONSUMERS + COPIERS) / 32 + 1, /* warps that read a tile's description */
    TILES = 2,                                /* descriptions in shared memory */
    STAGES = 4,                               /* of matrices in shared memory */
    WAVE_BYTES = WAVE_ROWS * BLOCK,
    /* Parts of a stage. Matrices lie on 1024 bytes, as the swizzle wants. */
    STAGE_A = 0,
    STAGE_B = TILE_ROWS * BLOCK,
    STAGE_BYTES = STAGE_B + BLOCK * BLOCK,
    /* Stages of scales lie behind: for each block of k those of a's rows, then of b's. */
    SCALE_STAGES = 2,
    SCALE_BLOCKS = 4, /* blocks of k in a stage */
    SCALE_ROWS = TILE_ROWS + BLOCK,
    SCALES = SCALE_BLOCKS * SCALE_ROWS,
    SCALES_BYTES = SCALES * 4,
    SHARED_BYTES = STAGES * STAGE_BYTES + SCALE_STAGES * SCALES_BYTES
};

/* What has arrived in stages, and which are free again. */
struct Arrivals {
    uint64_t full[STAGES], empty[STAGES];
    uint64_t scales_full[SCALE_STAGES], scales_empty[SCALE_STAGES];
    uint64_t drawn[TILES], read[TILES]; /* numbers; `read` is that of the first block */
    uint64_t told[TILES], known[TILES]; /* descriptions */
};

/* Stages are taken in turn: the current one, and the parity of its arrivals. */
template <int NUM> struct Turn {
    int stage;
    uint32_t parity;

    __device__ void next(void) {
        if (++stage == NUM) stage = 0, parity ^= 1;
    }
};

/* Scales of one operand: of rows (of b: or of 128 rows) and blocks of columns. */
struct Scales {
    const float *data;
    int64_t pitch, step; /* from row to row, and from block to block */
    int64_t per_group;
};

struct ScaledArgs {
    TensorMap a_map, b_map; /* of the codes, in which groups of b follow one another */
    Scales a, b;
    void *c;
    EpType type;           /* of c */
    const int32_t *places; /* [2, groups]: the first row of each slab, and its rows */
    uint32_t *drawn;       /* tiles, and clusters that have found none; both 0 between launches */
    int32_t groups;
    int32_t sums_rows; /* slabs lie along k rather than along m */
    int64_t m, n, k;   /* of each group; m or k is not used: it is that of the slab */
};

/* This block's part of a tile. */
struct Tile {
    int32_t a_row, b_row, from; /* in the maps: rows, and the first column */
    const float *a_scales, *b_scales;
    int64_t c;             /* index of its first element */
    int32_t rows, columns; /* of c, at most TILE_ROWS and BLOCK; there may be no columns */
    int32_t k;             /* -1: there are no tiles left */
};

/* What a block's warps share. */
struct Shared {
    Arrivals arrivals;
    Tile tiles[TILES];
    uint32_t numbers[TILES];
};

#if HAS_MATRIX_UNITS

/* ---- tiles --------------------------------------------------------------------------------- */

/* The group of the last tile, and the number of its first one. Tiles are numbered by groups, then
 * by columns, then by rows. */
struct Place {
    int32_t group;
    uint32_t begin;
};

static __device__ int32_t ceiling(int32_t a, int32_t b) {
    return (a + b - 1) / b;
}

/* Tile i, j of a group's c. */
template <bool B_TILES>
static __device__ void describe_tile(const ScaledArgs &args, int64_t g, int64_t m, int64_t i,
                                     int64_t j, Tile *out) {
    const int64_t slab = __ldg(args.places + g);
    const int64_t row = args.sums_rows ? i : slab + i, from = args.sums_rows ? slab : 0;
    const Scales *a = &args.a, *b = &args.b;
    out->a_row = (int32_t)row, out->from = (int32_t)from;
    out->b_row = (int32_t)(args.sums_rows ? j : g * args.n + j);
    out->a_scales = a->data + row * a->pitch + from / BLOCK * a->step;
    out->b_scales =
        b->data + g * b->per_group + (B_TILES ? j / BLOCK : j) * b->pitch + from / BLOCK * b->step;
    out->c = (args.sums_rows ? g * m + i : row) * args.n + j;
    out->rows = (int32_t)min((int64_t)TILE_ROWS, m - i);
    out->columns = (int32_t)max((int64_t)0, min((int64_t)BLOCK, args.n - j));
    out->k = args.sums_rows ? __ldg(args.places + args.groups + g) : (int32_t)args.k;
}

/* Returns false behind the last tile. Numbers ascend from call to call. */
template <bool B_TILES>
static __device__ bool find_tile(const ScaledArgs &args, uint32_t number, Place *at, Tile *out) {
    const uint32_t across = (uint32_t)ceiling((int32_t)args.n, TILE_COLUMNS);
    for (; at->group < args.groups; at->group++) {
        const int32_t m =
            args.sums_rows ? (int32_t)args.m : __ldg(args.places + args.groups + at->group);
        const uint32_t down = (uint32_t)ceiling(m, TILE_ROWS), tile = number - at->begin;
        if (tile < down * across) {
            const uint32_t column = tile / down * TILE_COLUMNS + cluster_rank() * BLOCK;
            describe_tile<B_TILES>(args, at->group, m, tile % down * TILE_ROWS, column, out);
            return true;
        }
        at->begin += down * across;
    }
    return false;
}

static __device__ void wait_for(uint64_t *arrival, uint32_t parity) {
    while (!ep_mbarrier_try_wait(arrival, parity)) {
    }
}

/* ---- taking tiles -------------------------------------------------------------------------- */

/* The next number, in both blocks of the cluster. */
static __device__ uint32_t draw(const ScaledArgs &args, Shared *shared, const Turn<TILES> &turn) {
    uint64_t *drawn = shared->arrivals.drawn + turn.stage;
    uint32_t *number = shared->numbers + turn.stage;
    ep_mbarrier_expect(drawn, sizeof(*number));
    if (cluster_rank() == 0) {
        wait_for(shared->arrivals.read + turn.stage, turn.parity ^ 1);
        const uint32_t next = count_up(args.drawn);
        for (uint32_t rank = 0; rank < CLUSTER; rank++)
            arrival_store_at(number, next, drawn, rank);
    }
    wait_for(drawn, turn.parity);
    const uint32_t next = *(volatile uint32_t *)number;
    arrival_arrive_at(shared->arrivals.read + turn.stage, 0);
    return next;
}

/* The last cluster that finds no tile leaves the counters as the next launch wants them. */
static __device__ void stop_drawing(const ScaledArgs &args) {
    if (cluster_rank() == 0 && count_up(args.drawn + 1) == gridDim.x / CLUSTER - 1)
        args.drawn[0] = args.drawn[1] = 0;
}

template <bool B_TILES> static __device__ void take_tiles(const ScaledArgs &args, Shared *shared) {
    Place place = {0, 0};
    Turn<TILES> turn = {0, 0};
    for (bool found = true; found; turn.next()) {
        const uint32_t number = draw(args, shared, turn);
        Tile *tile = shared->tiles + turn.stage;
        wait_for(shared->arrivals.known + turn.stage, turn.parity ^ 1);
        found = find_tile<B_TILES>(args, number, &place, tile);
        if (!found) tile->k = -1;
        ep_mbarrier_arrive(shared->arrivals.told + turn.stage);
    }
    stop_drawing(args);
}

/* The next tile of the block, for a whole warp or its first lane alone. False if there is none. */
static __device__ bool next_tile(Shared *shared, bool is_whole, Turn<TILES> *turn, Tile *out) {
    wait_for(shared->arrivals.told + turn->stage, turn->parity);
    *out = shared->tiles[turn->stage];
    if (is_whole) __syncwarp();
    if (threadIdx.x % 32 == 0) ep_mbarrier_arrive(shared->arrivals.known + turn->stage);
    turn->next();
    return out->k >= 0;
}

/* ---- loading ------------------------------------------------------------------------------- */

/* Waves of a without rows are not loaded: nobody multiplies them. Beyond a matrix are zeros, and so
 * are, with sums over rows, those that pad a slab. What else is beyond a tile is not stored. */
static __device__ void load_stage(const ScaledArgs &args, const Tile &tile, int block,
                                  uint32_t stage, uint64_t *full) {
    const int column = tile.from + block * BLOCK, waves = ceiling(tile.rows, WAVE_ROWS);
    ep_mbarrier_expect(full, (uint32_t)(waves * WAVE_BYTES + BLOCK * BLOCK));
    for (int wave = (int)cluster_rank(); wave < waves; wave += CLUSTER)
        tensor_load_all(stage + STAGE_A + (uint32_t)(wave * WAVE_BYTES), &args.a_map, column,
                        tile.a_row + wave * WAVE_ROWS, full);
    tensor_load(stage + STAGE_B, &args.b_map, column, tile.b_row, full);
}

static __device__ void load_matrices(const ScaledArgs &args, uint32_t stages, Shared *shared) {
    Arrivals *arrivals = &shared->arrivals;
    Turn<TILES> tiles = {0, 0};
    Turn<STAGES> turn = {0, 0};
    Tile tile;
    while (next_tile(shared, false, &tiles, &tile)) {
        for (int block = 0; block * BLOCK < tile.k; block++, turn.next()) {
            wait_for(arrivals->empty + turn.stage, turn.parity ^ 1);
            load_stage(args, tile, block, stages + (uint32_t)(turn.stage * STAGE_BYTES),
                       arrivals->full + turn.stage);
        }
    }
}

/* Scales of `rows` rows and `blocks` blocks of k. One copy takes those of four rows where they are
 * neighbours on 16 bytes. */
static __device__ void copy_scales(uint32_t to, const float *from, const Scales &scales, int rows,
                                   int blocks) {
    const int thread = (int)threadIdx.x - FIRST_COPIER;
    const bool fours = scales.pitch == 1 && scales.step % 4 == 0 && (uintptr_t)from % 16 == 0;
    for (int block = 0; block < blocks; block++, to += SCALE_ROWS * 4, from += scales.step) {
        if (fours)
            for (int row = thread * 4; row < rows; row += COPIERS * 4)
                copy_16(to + (uint32_t)row * 4, from + row);
        else
            for (int row = thread; row < rows; row += COPIERS)
                copy_4(to + (uint32_t)row * 4, from + row * scales.pitch);
    }
}

template <bool B_TILES>
static __device__ void load_scales(const ScaledArgs &args, uint32_t stages, Shared *shared) {
    Arrivals *arrivals = &shared->arrivals;
    Turn<TILES> tiles = {0, 0};
    Turn<SCALE_STAGES> turn = {0, 0};
    Tile tile;
    while (next_tile(shared, true, &tiles, &tile)) {
        const int columns = B_TILES ? min(tile.columns, 1) : tile.columns;
        for (int block = 0; block * BLOCK < tile.k; block += SCALE_BLOCKS, turn.next()) {
            const int blocks = min((int)SCALE_BLOCKS, ceiling(tile.k, BLOCK) - block);
            const uint32_t to = stages + (uint32_t)(turn.stage * SCALES_BYTES);
            wait_for(arrivals->scales_empty + turn.stage, turn.parity ^ 1);
            copy_scales(to, tile.a_scales + block * args.a.step, args.a, tile.rows, blocks);
            copy_scales(to + TILE_ROWS * 4, tile.b_scales + block * args.b.step, args.b, columns,
                        blocks);
            copies_arrive(arrivals->scales_full + turn.stage);
        }
    }
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

/* total += sums * scales. `scale` has those of the thread's two rows, and `b` those of columns,
 * unless B_TILES. */
template <bool B_TILES>
static __device__ void add_scaled(const float (&scale)[2], const float *b, const float (&sums)[64],
                                  float (&total)[64]) {
#pragma unroll
    for (int j = 0; j < 16; j++) {
        const float2 columns =
            B_TILES ? float2{1, 1} : *(const float2 *)(b + 8 * j + threadIdx.x % 4 * 2);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const float column = c ? columns.y : columns.x;
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

/* words[i] of lane j of each four becomes words[j] of lane i. */
static __device__ void transpose_four(uint32_t (&words)[4]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t other = __shfl_xor_sync(ALL_LANES, odd ? words[i] : words[i + 1], 1);
        (odd ? words[i] : words[i + 1]) = other;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t other = __shfl_xor_sync(ALL_LANES, high ? words[i] : words[i + 2], 2);
        (high ? words[i] : words[i + 2]) = other;
    }
}

/* A thread has two neighbouring columns of each 8. Four threads exchange theirs of four 8s: each
 * then has 8 columns of one, and together they store 64 bytes of a row. */
static __device__ void store_halves(const ScaledArgs &args, int64_t at, int columns, bool is_row,
                                    const float (&total)[64], int r) {
#pragma unroll
    for (int j = 0; j < 16; j += 4) {
        const int column = 8 * (j + (int)threadIdx.x % 4);
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] =
                pair_of(args.type, total[4 * (j + i) + 2 * r], total[4 * (j + i) + 2 * r + 1]);
        transpose_four(words);
        if (is_row && column < columns)
            ((uint4 *)args.c)[(at + column) / 8] =
                make_uint4(words[0], words[1], words[2], words[3]);
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
static __device__ int wave_row(int group, int wave) {
    return (2 * wave + group) * WAVE_ROWS;
}

/* Scales are read before products are waited for. */
template <bool B_TILES>
static __device__ void multiply_stage(int group, uint32_t stage, const float *scales, int rows,
                                      float (&total)[WAVES][64]) {
    const int lane = (int)threadIdx.x % 32, row = (int)threadIdx.x % 128 / 32 * 16 + lane / 4;
    const float *b_scales = scales + TILE_ROWS;
    const float tile = B_TILES ? b_scales[0] : 1;
#pragma unroll
    for (int wave = 0; wave < WAVES; wave++) {
        float sums[64];
        const int first = wave_row(group, wave);
        if (first >= rows) continue;
        const float *at = scales + first + row;
        const float scale[2] = {at[0] * tile, at[8] * tile};
        multiply_block(stage + STAGE_A + (uint32_t)(first * BLOCK), stage + STAGE_B, sums);
        add_scaled<B_TILES>(scale, b_scales, sums, total[wave]);
    }
}

template <bool B_TILES>
static __device__ void consume(const ScaledArgs &args, int group, const uint8_t *memory,
                               uint32_t stages, Shared *shared) {
    const float *scales = (const float *)(memory + STAGES * STAGE_BYTES);
    const int lane = (int)threadIdx.x % 32;
    Arrivals *arrivals = &shared->arrivals;
    Turn<TILES> tiles = {0, 0};
    Turn<STAGES> turn = {0, 0};
    Turn<SCALE_STAGES> scale_turn = {0, 0};
    Tile tile;
    /* In this form the compiler keeps `total` in registers from its first value on. */
    for (bool more = next_tile(shared, true, &tiles, &tile); more;
         more = next_tile(shared, true, &tiles, &tile)) {
        float total[WAVES][64] = {};
        const int last = ceiling(tile.k, BLOCK) - 1;
        for (int block = 0; block <= last; block++, turn.next()) {
            const int part = block % SCALE_BLOCKS;
            if (part == 0) wait_for(arrivals->scales_full + scale_turn.stage, scale_turn.parity);
            wait_for(arrivals->full + turn.stage, turn.parity);
            multiply_stage<B_TILES>(group, stages + (uint32_t)(turn.stage * STAGE_BYTES),
                                    scales + scale_turn.stage * SCALES + part * SCALE_ROWS,
                                    tile.rows, total);
            __syncwarp();
            if (lane < CLUSTER) arrival_arrive_at(arrivals->empty + turn.stage, (uint32_t)lane);
            if (part == SCALE_BLOCKS - 1 || block == last) {
                if (lane == 0) ep_mbarrier_arrive(arrivals->scales_empty + scale_turn.stage);
                scale_turn.next();
            }
        }
#pragma unroll
        for (int wave = 0; wave < WAVES; wave++)
            store_wave(args, tile, wave_row(group, wave), total[wave]);
    }
}

#endif

/* ---- the kernel ---------------------------------------------------------------------------- */

#if HAS_MATRIX_UNITS

static __device__ void begin_arrivals(Arrivals *arrivals) {
    if (threadIdx.x < STAGES) {
        ep_mbarrier_init(arrivals->full + threadIdx.x, 1);
        ep_mbarrier_init(arrivals->empty + threadIdx.x, CLUSTER * CONSUMERS / 32);
    }
    if (threadIdx.x < SCALE_STAGES) {
        ep_mbarrier_init(arrivals->scales_full + threadIdx.x, COPIERS);
        ep_mbarrier_init(arrivals->scales_empty + threadIdx.x, CONSUMERS / 32);
    }
    if (threadIdx.x < TILES) {
        ep_mbarrier_init(arrivals->drawn + threadIdx.x, 1);
        ep_mbarrier_init(arrivals->read + threadIdx.x, CLUSTER);
        ep_mbarrier_init(arrivals->told + threadIdx.x, 1);
        ep_mbarrier_init(arrivals->known + threadIdx.x, READERS);
    }
}

#endif

template <bool B_TILES>
static __global__ void __launch_bounds__(THREADS, 1)
    multiply_scaled(const __grid_constant__ ScaledArgs args) {
#if HAS_MATRIX_UNITS
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ Shared shared;
    const int warp = same_for_warp((int)threadIdx.x / 32);
    const uint32_t stages = ep_smem(memory);
    begin_arrivals(&shared.arrivals);
    cluster_begin();
    if (warp >= CONSUMERS / 32) {
        registers_give<40>();
        if (warp >= FIRST_COPIER / 32)
            load_scales<B_TILES>(args, stages + STAGES * STAGE_BYTES, &shared);
        else if (threadIdx.x == DRAWER)
            take_tiles<B_TILES>(args, &shared);
        else if (threadIdx.x == LOADER)
            load_matrices(args, stages, &shared);
    } else {
        registers_take<232>();
        consume<B_TILES>(args, warp / 4, memory, stages, &shared);
    }
    cluster_end();
#endif
}

/* ---- launches ------------------------------------------------------------------------------ */

/* Of the last two dimensions; a third one before them is that of groups. */
static Scales scales_of(const Scaled *t) {
    const int d = t->codes.ndim - 2;
    const int64_t *shape = t->scales.shape + d;
    return {(const float *)t->scales.data, t->by_column ? 1 : shape[1], t->by_column ? shape[1] : 1,
            d ? shape[0] * shape[1] : 0};
}

static bool map_codes(const EpTensor *t, int box_rows, TensorMap *out) {
    const int64_t columns = t->shape[t->ndim - 1];
    const int64_t rows = columns ? tensor_elements(t) / columns : 0;
    return tensor_map_make(t->data, rows, columns, box_rows, out) ||
           bench_fail("a product of e4m3: expected a matrix that the GPU's loads can take, got "
                      "%lld x %lld",
                      (long long)rows, (long long)columns);
}

static bool launch(MoeDevice *d, const Groups *groups, const Scaled *a, const Scaled *b,
                   ScaledArgs *args) {
    auto kernel = b->tiles ? multiply_scaled<true> : multiply_scaled<false>;
    const int bytes = SHARED_BYTES;
    if (groups->num == 0 || args->n == 0) return true;
    if (!map_codes(&a->codes, WAVE_ROWS, &args->a_map) ||
        !map_codes(&b->codes, BLOCK, &args->b_map) ||
        !cuda_ok(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                 "cudaFuncSetAttribute"))
        return false;
    d->gemm_calls++;
    const unsigned blocks = (unsigned)(d->product_sms / CLUSTER * CLUSTER);
    args->drawn = cuda_state(d)->drawn;
    return cuda_ok(cluster_launch(kernel, blocks, THREADS, bytes, cuda_stream_of(d), *args),
                   "a product of e4m3");
}

static ScaledArgs args_of(const Groups *groups, const Scaled *a, const Scaled *b,
                          const EpTensor *c) {
    ScaledArgs args = {};
    args.a = scales_of(a), args.b = scales_of(b);
    args.c = c->data, args.type = c->type;
    args.places = groups->places, args.groups = groups->num;
    return args;
}

bool cuda_multiply_scaled(MoeDevice *d, const Groups *groups, const Scaled *a, const Scaled *b,
                          const EpTensor *c) {
    ScaledArgs args = args_of(groups, a, b, c);
    args.n = c->shape[1], args.k = a->codes.shape[1];
    return launch(d, groups, a, b, &args);
}

bool cuda_correlate_scaled(MoeDevice *d, const Groups *groups, const Scaled *a, const Scaled *b,
                           const EpTensor *c) {
    ScaledArgs args = args_of(groups, a, b, c);
    args.sums_rows = 1, args.m = a->codes.shape[0], args.n = b->codes.shape[0];
    return launch(d, groups, a, b, &args);
}
