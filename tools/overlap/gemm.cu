/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A GEMM of experts for compute capability 9.0, as an example of a kernel on both sides of words.
 *
 * Blocks are persistent and take tiles of GEMM_ROWS x GEMM_COLUMNS from a counter. A tile's rows
 * are pieces of one expert (GemmTile). In a block
 *
 *   - a loader takes tiles, waits for the words of their pieces, and brings 64 columns of both
 *     operands at a time to a stage of shared memory, by bulk copies;
 *   - two warpgroups multiply, half of the tile's rows each, and store their sums;
 *   - a signaller adds to the done words of a tile that is stored. So `expected` of a combine is
 *     the number of tiles of columns.
 *
 * Where rows are not there yet, the loader brings weights meanwhile, as many as there are stages.
 *
 * Memory order. Ready: lanes of the loader's warp acquire the words, the warp synchronises, and a
 * proxy fence orders the bulk copies behind them. Done: rows are stored by ordinary stores, which
 * an mbarrier orders before the signaller's fence and addition. A kernel that stores by bulk copies
 * waits for them and executes a proxy fence first.
 */
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "tools/common/ptx.cuh"
#include "tools/overlap/gemm.h"

/* wgmma and setmaxnreg exist in code for sm_90a alone. */
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_MATRIX_UNITS 1
#else
#define HAS_MATRIX_UNITS 0
#endif

enum {
    STEP = 64, /* columns of k in a stage: rows of 128 bytes, as the swizzle wants */
    STEP_BYTES = STEP * 2,
    HALF = 64,       /* rows of a warpgroup */
    CONSUMERS = 256, /* threads that multiply */
    THREADS = CONSUMERS + 128,
    STAGES = 4,
    TILES = 4, /* that a block is at, at most */
    STAGE_IN = 0,
    STAGE_WEIGHTS = GEMM_ROWS * STEP_BYTES,
    STAGE_BYTES = STAGE_WEIGHTS + GEMM_COLUMNS * STEP_BYTES,
    SHARED_ALIGNMENT = 1024,
    SHARED_BYTES = STAGES * STAGE_BYTES + SHARED_ALIGNMENT
};

/* How bulk copies read both operands: boxes of a piece, and of GEMM_COLUMNS rows of weights. */
typedef struct GemmMaps {
    TensorMap in, weights;
} GemmMaps;

__device__ __forceinline__ int load_ready(const int32_t *word) {
    return (int)ep_load_acquire_gpu32((const uint32_t *)word);
}

__device__ __forceinline__ float activate(float x, int squares) {
    return squares ? (x > 0 ? x * x : 0) : x;
}

#if HAS_MATRIX_UNITS

/* ---- tiles --------------------------------------------------------------------------------- */

/* What a loader tells the others of a tile. */
typedef struct Taken {
    int column; /* -1: there are no more tiles */
    int pieces[GEMM_PIECES];
} Taken;

typedef struct Shared {
    uint64_t full[STAGES], empty[STAGES];
    /* Of each tile: its loader has told of it; its sums are stored; its words are set. */
    uint64_t posted[TILES], stored[TILES], freed[TILES];
    Taken tile[TILES];
} Shared;

__device__ __forceinline__ void wait_for(uint64_t *arrival, uint32_t parity) {
    while (!ep_mbarrier_try_wait(arrival, parity)) {
    }
}

/* The parity to wait for, of use `number` of one of `all` barriers in turn. */
__device__ __forceinline__ uint32_t parity_of(int number, int all) {
    return (uint32_t)(number / all & 1);
}

/* Returns the number of the next columns of a tile; -1: there are none for this block. */
__device__ __forceinline__ int take(const GemmArgs &a) {
    int leaves = (int)blockIdx.x >= a.stay;
    if (leaves && load_ready(a.taken) >= a.leave_at) return -1;
    int taken = (int)count_up((uint32_t *)a.taken);
    return taken < a.num_tiles * (a.n / GEMM_COLUMNS) ? taken : -1;
}

/* Describe what was taken. Returns its expert. By a warp: lane i has piece i, others -1. */
__device__ __forceinline__ int describe(const GemmArgs &a, int taken, int *column, int *piece) {
    int columns = a.n / GEMM_COLUMNS, lane = (int)threadIdx.x % 32;
    const GemmTile *tile = &a.tiles[taken / columns];
    int at = taken - tile->group * columns, size = tile->size;
    *column = at / size * GEMM_COLUMNS;
    tile = &a.tiles[tile->group + at % size];
    *piece = lane < GEMM_PIECES ? tile->pieces[lane] : -1;
    return tile->expert;
}

/* ---- loading ------------------------------------------------------------------------------- */

/* The loader's place in a tile. */
typedef struct Loads {
    int expert, column, piece; /* piece: of the lane */
    int bytes;                 /* of a step */
    int step;                  /* of all tiles of the block so far */
} Loads;

__device__ __forceinline__ uint32_t stage_of(uint32_t memory, int step) {
    return memory + (uint32_t)(step % STAGES * STAGE_BYTES);
}

/* Wait until a stage is free, and load weights of step `i` of the tile. By one thread. */
__device__ __forceinline__ void load_weights(const GemmArgs &a, const GemmMaps &maps, Shared *s,
                                             uint32_t memory, const Loads &l, int i) {
    int step = l.step + i;
    uint64_t *full = &s->full[step % STAGES];
    wait_for(&s->empty[step % STAGES], parity_of(step, STAGES) ^ 1);
    ep_mbarrier_expect(full, (uint32_t)l.bytes);
    tensor_load(stage_of(memory, step) + STAGE_WEIGHTS, &maps.weights, i * STEP_BYTES,
                l.expert * a.n + l.column, full);
}

/* Load the lane's piece of a step. */
__device__ __forceinline__ void load_piece(const GemmArgs &a, const GemmMaps &maps, Shared *s,
                                           uint32_t memory, const Loads &l, int i) {
    int step = l.step + i, lane = (int)threadIdx.x % 32;
    uint32_t to = stage_of(memory, step) + STAGE_IN;
    if (l.piece < 0) return;
    tensor_load(to + (uint32_t)(lane * a.block_rows * STEP_BYTES), &maps.in, i * STEP_BYTES,
                l.piece * a.block_rows, &s->full[step % STAGES]);
}

/* Whether the lane's rows are there. */
__device__ __forceinline__ int is_ready(const GemmArgs &a, int piece) {
    return !a.ready || piece < 0 || load_ready(a.ready + piece);
}

/* Wait until the rows of all lanes are there. Returns 0 if they do not come in time. */
__device__ __forceinline__ int await_rows(const GemmArgs &a, int piece) {
    uint64_t start = ep_global_timer();
    int here = is_ready(a, piece), alive = 1;
    while (!__all_sync(~0u, here) && alive) {
        here = here || is_ready(a, piece);
        alive = __all_sync(~0u, ep_global_timer() - start < a.deadline_ns);
    }
    return alive;
}

/* Load a tile. Returns 0 if its rows did not come in time: then what is there of them was loaded.
 * `next` becomes what the block takes after it; it is asked for before the end, since the answer
 * takes a microsecond. By a warp. */
__device__ int load_tile(const GemmArgs &a, const GemmMaps &maps, Shared *s, uint32_t memory,
                         Loads *l, int *next) {
    int lane = (int)threadIdx.x % 32, steps = a.k / STEP, early = 0, alive = 1;
    if (!__all_sync(~0u, is_ready(a, l->piece))) {
        early = min((int)STAGES, steps);
        for (int i = 0; i < early && lane == 0; i++)
            load_weights(a, maps, s, memory, *l, i);
        alive = await_rows(a, l->piece);
    }
    ep_fence_proxy_global();
    for (int i = 0; i < steps; i++) {
        if (lane == 0 && i >= early) load_weights(a, maps, s, memory, *l, i);
        if (lane == 0 && i == max(0, steps - 2 * STAGES)) *next = alive ? take(a) : -1;
        __syncwarp();
        load_piece(a, maps, s, memory, *l, i);
    }
    l->step += steps;
    if (!alive && lane == 0) *a.late = 1;
    return alive;
}

__device__ void load_tiles(const GemmArgs &a, const GemmMaps &maps, Shared *s, uint32_t memory) {
    int lane = (int)threadIdx.x % 32, next = -1;
    Loads l = {0, 0, 0, 0, 0};
    if (lane == 0) next = take(a);
    for (int number = 0;; number++) {
        Taken *tile = &s->tile[number % TILES];
        int taken = __shfl_sync(~0u, next, 0);
        l.column = l.piece = -1;
        if (taken >= 0) l.expert = describe(a, taken, &l.column, &l.piece);
        int pieces = __popc(__ballot_sync(~0u, l.piece >= 0));
        l.bytes = (pieces * a.block_rows + GEMM_COLUMNS) * STEP_BYTES;
        wait_for(&s->freed[number % TILES], parity_of(number, TILES) ^ 1);
        if (lane == 0) tile->column = l.column;
        if (lane < GEMM_PIECES) tile->pieces[lane] = l.piece;
        __syncwarp();
        if (lane == 0) ep_mbarrier_arrive(&s->posted[number % TILES]);
        if (taken < 0) return;
        load_tile(a, maps, s, memory, &l, &next);
    }
}

/* ---- multiplying --------------------------------------------------------------------------- */

/* Rows of 128 bytes in shared memory, 8 of them 1024 bytes from the next 8, swizzled by 128. */
__device__ __forceinline__ uint64_t describe_matrix(uint32_t address) {
    return (uint64_t)((address & 0x3ffff) >> 4) | 1ull << 16 | (1024ull >> 4) << 32 | 1ull << 62;
}

/* One lane of each warp says that the warp has read a stage. */
__device__ __forceinline__ void give_back(Shared *s, int step) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ep_mbarrier_arrive(&s->empty[step % STAGES]);
}

/* Multiply all steps of a tile. The products of a step run while the next step is waited for. */
__device__ __forceinline__ void multiply_tile(Shared *s, uint32_t memory, int first, int steps,
                                              float (&sum)[128]) {
    uint32_t half = threadIdx.x / 128 * (HALF * STEP_BYTES);
#pragma unroll
    for (int i = 0; i < 128; i++)
        keep_register(sum[i]);
#pragma unroll 1
    for (int step = first; step < first + steps; step++) {
        uint32_t stage = stage_of(memory, step);
        uint64_t rows = describe_matrix(stage + STAGE_IN + half);
        uint64_t columns = describe_matrix(stage + STAGE_WEIGHTS);
        wait_for(&s->full[step % STAGES], parity_of(step, STAGES));
        products_begin();
#pragma unroll
        for (int k = 0; k < STEP / 16; k++)
            multiply_bf16(sum, rows + (uint64_t)(k * 32 >> 4), columns + (uint64_t)(k * 32 >> 4),
                          step > first || k > 0);
        products_commit();
        products_wait<1>();
        if (step > first) give_back(s, step - 1);
    }
    products_wait<0>();
    give_back(s, first + steps - 1);
#pragma unroll
    for (int i = 0; i < 128; i++)
        keep_register(sum[i]);
}

/* What a warpgroup does where none of its rows is there. */
__device__ __forceinline__ void skip_tile(Shared *s, int first, int steps) {
    for (int step = first; step < first + steps; step++) {
        wait_for(&s->full[step % STAGES], parity_of(step, STAGES));
        give_back(s, step);
    }
}

__device__ __forceinline__ uint32_t pair_of(float low, float high) {
    __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    uint32_t word;
    memcpy(&word, &both, sizeof(word));
    return word;
}

/* Store a row of sums from `to` on; NULL: none. A thread has two neighbouring columns of each 8.
 * Neighbouring threads exchange theirs of two 8s: each then has four columns of one, and a warp
 * stores 32 bytes of a row together. */
template <int R>
__device__ __forceinline__ void store_row(__nv_bfloat16 *to, int squares, const float (&sum)[128]) {
    int lane = (int)threadIdx.x % 32, odd = lane & 1;
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
        const float *x = &sum[4 * j + 2 * R], *y = x + 4;
        uint32_t low = pair_of(activate(x[0], squares), activate(x[1], squares));
        uint32_t high = pair_of(activate(y[0], squares), activate(y[1], squares));
        uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
        if (to)
            *(uint2 *)(to + 8 * (j + odd) + lane % 4 / 2 * 4) =
                odd ? make_uint2(other, high) : make_uint2(low, other);
    }
}

/* Returns where row i of a tile is stored. */
__device__ __forceinline__ __nv_bfloat16 *row_of(const GemmArgs &a, const Taken &tile, int i) {
    int piece = tile.pieces[i / a.block_rows];
    int64_t row = (int64_t)piece * a.block_rows + i % a.block_rows;
    return piece < 0 ? NULL : (__nv_bfloat16 *)a.out + row * a.n + tile.column;
}

__device__ void multiply_tiles(const GemmArgs &a, Shared *s, uint32_t memory) {
    int thread = (int)threadIdx.x, half = thread / 128 * HALF, steps = a.k / STEP;
    int row = half + thread % 128 / 32 * 16 + thread % 32 / 4;
    for (int number = 0;; number++) {
        const Taken &tile = s->tile[number % TILES];
        wait_for(&s->posted[number % TILES], parity_of(number, TILES));
        if (tile.column < 0) return;
        __nv_bfloat16 *first = row_of(a, tile, row), *second = row_of(a, tile, row + 8);
        int is_empty = 1;
        for (int i = half; i < half + HALF; i += a.block_rows)
            is_empty &= tile.pieces[i / a.block_rows] < 0;
        if (is_empty) {
            skip_tile(s, number * steps, steps);
        } else {
            float sum[128] = {};
            multiply_tile(s, memory, number * steps, steps, sum);
            store_row<0>(first, a.squares, sum);
            store_row<1>(second, a.squares, sum);
        }
        ep_mbarrier_arrive(&s->stored[number % TILES]);
    }
}

/* ---- signalling ---------------------------------------------------------------------------- */

/* Let others read the rows of tiles that are stored. By a warp. */
__device__ void signal_tiles(const GemmArgs &a, Shared *s) {
    int lane = (int)threadIdx.x % 32;
    for (int number = 0;; number++) {
        const Taken &tile = s->tile[number % TILES];
        wait_for(&s->posted[number % TILES], parity_of(number, TILES));
        if (tile.column < 0) return;
        wait_for(&s->stored[number % TILES], parity_of(number, TILES));
        if (a.done && lane < GEMM_PIECES && tile.pieces[lane] >= 0) {
            __threadfence();
            atomicAdd(a.done + tile.pieces[lane], 1);
        }
        __syncwarp();
        if (lane == 0) ep_mbarrier_arrive(&s->freed[number % TILES]);
    }
}

__device__ __forceinline__ void open_shared(Shared *s) {
    if (threadIdx.x < STAGES) {
        ep_mbarrier_init(&s->full[threadIdx.x], 1);
        ep_mbarrier_init(&s->empty[threadIdx.x], CONSUMERS / 32);
    }
    if (threadIdx.x < TILES) {
        ep_mbarrier_init(&s->posted[threadIdx.x], 1);
        ep_mbarrier_init(&s->stored[threadIdx.x], CONSUMERS);
        ep_mbarrier_init(&s->freed[threadIdx.x], 1);
    }
    ep_fence_mbarrier_init();
    ep_fence_proxy_shared();
    __syncthreads();
}

#endif

/* ---- the kernel ---------------------------------------------------------------------------- */

__global__ void __launch_bounds__(THREADS, 1)
    gemm(const __grid_constant__ GemmArgs a, const __grid_constant__ GemmMaps maps) {
#if HAS_MATRIX_UNITS
    extern __shared__ __align__(1024) char dynamic[];
    __shared__ Shared shared;
    uint32_t memory = ep_smem(dynamic);
    memory += (0u - memory) % SHARED_ALIGNMENT;
    int warp = (int)threadIdx.x / 32;
    open_shared(&shared);
    if (warp < CONSUMERS / 32) {
        registers_take<232>();
        multiply_tiles(a, &shared, memory);
        return;
    }
    registers_give<40>();
    if (warp == CONSUMERS / 32)
        load_tiles(a, maps, &shared, memory);
    else if (warp == CONSUMERS / 32 + 1)
        signal_tiles(a, &shared);
#endif
}

/* One thread looks at a word of another kernel. Its block fits beside one of the GEMM. */
__global__ void hold(const int32_t *word, int least, uint64_t deadline_ns, int32_t *late) {
    uint64_t start = ep_global_timer();
    while (load_ready(word) < least)
        if (ep_global_timer() - start >= deadline_ns) {
            *late = 1;
            return;
        }
}

__global__ void spin(uint64_t ns) {
    uint64_t start = ep_global_timer();
    while (ep_global_timer() - start < ns) {
    }
}

/* ---- a watcher ----------------------------------------------------------------------------- */

/* A thread for each row looks at four of its words, the last thread at the block's word. */
__global__ void watch(const WatchArgs a) {
    unsigned long long start = ep_global_timer(), time = 0;
    int is_word = threadIdx.x == blockDim.x - 1;
    volatile const uint32_t *row = a.rows + (int64_t)threadIdx.x * a.row_words;
    while (!time && ep_global_timer() - start < a.deadline_ns) {
        int here = is_word && load_ready(a.word);
        if (!is_word && (int)threadIdx.x < a.num_rows) {
            here = 1;
            for (int i = 1; i <= 4; i++)
                here &= row[a.row_words * i / 4 - 1] != a.poison;
        }
        if (here) time = ep_global_timer();
        if (!is_word && (int)threadIdx.x >= a.num_rows) return;
    }
    atomicMax(&a.times[is_word], time);
}

/* ---- contents ------------------------------------------------------------------------------ */

__device__ __forceinline__ uint32_t hash(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return (uint32_t)(x >> 32);
}

__global__ void fill(__nv_bfloat16 *out, int64_t count, uint64_t seed) {
    int64_t stride = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += stride)
        out[i] = __float2bfloat16_rn((float)(hash(seed + i) >> 8) * 0x1p-23f - 1);
}

/* Distinct experts: an odd step through a power of two, past those that are none. */
__global__ void route(int32_t *topk_idx, float *weights, int64_t tokens, int top_k, int experts,
                      uint64_t seed) {
    int64_t stride = (int64_t)gridDim.x * blockDim.x;
    uint32_t all = 1;
    while (all < (uint32_t)experts)
        all *= 2;
    for (int64_t t = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; t < tokens; t += stride) {
        uint32_t at = hash(seed + 2 * t), step = hash(seed + 2 * t + 1) | 1;
        for (int k = 0; k < top_k; at += step) {
            if ((at & (all - 1)) >= (uint32_t)experts) continue;
            topk_idx[t * top_k + k] = (int32_t)(at & (all - 1));
            weights[t * top_k + k++] = 1.f / (float)top_k;
        }
    }
}

/* A thread adds up one element, drawn at random: within the rounding of bf16 it is the GEMM's. */
__global__ void check(const __grid_constant__ GemmArgs a, int samples, unsigned long long *wrong) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= samples || !a.num_tiles) return;
    const GemmTile *tile = &a.tiles[hash(3 * i) % (uint32_t)a.num_tiles];
    int row = (int)(hash(3 * i + 1) % GEMM_ROWS), column = (int)(hash(3 * i + 2) % (uint32_t)a.n);
    int piece = tile->pieces[row / a.block_rows];
    if (piece < 0) return;
    row = piece * a.block_rows + row % a.block_rows;
    const __nv_bfloat16 *x = (const __nv_bfloat16 *)a.in + (int64_t)row * a.k;
    const __nv_bfloat16 *w =
        (const __nv_bfloat16 *)a.weights + ((int64_t)tile->expert * a.n + column) * a.k;
    double sum = 0, size = 0;
    for (int k = 0; k < a.k; k++) {
        double term = (double)__bfloat162float(x[k]) * (double)__bfloat162float(w[k]);
        sum += term, size += fabs(term);
    }
    double expected = activate((float)sum, a.squares), slack = 1e-5 * size;
    if (a.squares) slack *= 2 * fabs(sum) + slack;
    double got =
        (double)__bfloat162float(((const __nv_bfloat16 *)a.out)[(int64_t)row * a.n + column]);
    if (!(fabs(got - expected) <= 0.005 * fabs(expected) + slack)) atomicAdd(wrong, 1ull);
}

__global__ void compare(const uint32_t *a, const uint32_t *b, int64_t words,
                        unsigned long long *wrong) {
    int64_t stride = (int64_t)gridDim.x * blockDim.x;
    unsigned long long count = 0;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < words; i += stride)
        count += a[i] != b[i];
    if (count) atomicAdd(wrong, count);
}

/* ---- launches ------------------------------------------------------------------------------ */

extern "C" int overlap_open(void) {
    return cudaFuncSetAttribute(gemm, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
}

extern "C" int overlap_gemm(const GemmArgs *args, int blocks, void *stream) {
    const int64_t row_bytes = (int64_t)args->k * 2, columns = (int64_t)args->experts * args->n;
    GemmMaps maps;
    if (!tensor_map_make(args->in, args->rows, row_bytes, args->block_rows, &maps.in) ||
        !tensor_map_make(args->weights, columns, row_bytes, GEMM_COLUMNS, &maps.weights))
        return cudaErrorInvalidValue;
    gemm<<<blocks, THREADS, SHARED_BYTES, (cudaStream_t)stream>>>(*args, maps);
    return cudaGetLastError();
}

extern "C" int overlap_hold(const int32_t *word, int least, uint64_t deadline_ns, int32_t *late,
                            void *stream) {
    hold<<<1, 1, 0, (cudaStream_t)stream>>>(word, least, deadline_ns, late);
    return cudaGetLastError();
}

extern "C" int overlap_spin(uint64_t ns, void *stream) {
    spin<<<1, 1, 0, (cudaStream_t)stream>>>(ns);
    return cudaGetLastError();
}

extern "C" int overlap_watch(const WatchArgs *args, void *stream) {
    int rows = (args->num_rows + 31) / 32 * 32; /* whoever looks at the word has its own warp */
    watch<<<1, rows + 1, 0, (cudaStream_t)stream>>>(*args);
    return cudaGetLastError();
}

enum { FILL_BLOCKS = 264, FILL_THREADS = 256, CHECK_THREADS = 128 };

extern "C" int overlap_fill(void *out, int64_t count, uint64_t seed, void *on) {
    cudaStream_t stream = (cudaStream_t)on;
    __nv_bfloat16 *to = (__nv_bfloat16 *)out;
    fill<<<FILL_BLOCKS, FILL_THREADS, 0, stream>>>(to, count, seed << 32);
    return cudaGetLastError();
}

extern "C" int overlap_route(int32_t *idx, float *weights, int64_t tokens, int top_k, int experts,
                             uint64_t seed, void *on) {
    cudaStream_t stream = (cudaStream_t)on;
    seed <<= 32;
    route<<<FILL_BLOCKS, FILL_THREADS, 0, stream>>>(idx, weights, tokens, top_k, experts, seed);
    return cudaGetLastError();
}

extern "C" int overlap_check(const GemmArgs *args, int samples, unsigned long long *wrong,
                             void *on) {
    cudaStream_t stream = (cudaStream_t)on;
    int blocks = (samples + CHECK_THREADS - 1) / CHECK_THREADS;
    check<<<blocks, CHECK_THREADS, 0, stream>>>(*args, samples, wrong);
    return cudaGetLastError();
}

extern "C" int overlap_compare(const void *a, const void *b, int64_t words,
                               unsigned long long *wrong, void *on) {
    cudaStream_t stream = (cudaStream_t)on;
    const uint32_t *x = (const uint32_t *)a, *y = (const uint32_t *)b;
    compare<<<FILL_BLOCKS, FILL_THREADS, 0, stream>>>(x, y, words, wrong);
    return cudaGetLastError();
}
