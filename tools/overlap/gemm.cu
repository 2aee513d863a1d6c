/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A GEMM of experts in plain CUDA, as an example of a kernel on both sides of a row's words.
 *
 * Blocks are persistent and take tiles of 128 x 128: all columns of a tile of rows, then the next
 * rows. A tile's rows are pieces of one expert (GemmOrder). Before a block loads them it waits for
 * their ready words (await_pieces); when it has stored its columns it adds to their done words
 * (release_pieces). So `expected` of a combine is the number of tiles of columns. Copies to shared
 * memory are cp.async, which are ordinary accesses: a kernel that loads by bulk copies executes
 * fence.proxy.async.global after the acquire.
 */
#include "tools/overlap/gemm.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

enum { THREADS = 256, STEP = 64, STAGES = 4, STAGE_BYTES = 2 * GEMM_TILE * STEP * 2 };

/* ---- words --------------------------------------------------------------------------------- */

__device__ __forceinline__ int load_acquire(const int32_t *word) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ unsigned long long now(void) {
    unsigned long long time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}

#define MOST_PIECES 4 /* of a tile */

/* Take the next tile and its pieces, a thread for each, and wait until their rows are there.
 * Returns 0 if none is left, or if rows do not come in time. By all threads: the barrier orders the
 * others' loads behind the acquires. */
__device__ int take_tile(const GemmArgs &a, int *pieces, int *column) {
    __shared__ int taken;
    int columns = a.n / GEMM_TILE, each = GEMM_TILE / a.block_rows, alive = 1;
    if (threadIdx.x == 0) taken = atomicAdd(a.taken, 1);
    __syncthreads();
    int tile = a.order.wave_end[a.first_wave] + taken / columns;
    *column = taken % columns * GEMM_TILE;
    if (tile >= a.order.wave_end[a.last_wave]) return 0;
    if ((int)threadIdx.x < each) {
        int piece = a.order.pieces[tile * each + threadIdx.x];
        unsigned long long start = now();
        while (a.ready && piece >= 0 && alive && !load_acquire(a.ready + piece))
            alive = now() - start < a.deadline_ns;
        pieces[threadIdx.x] = piece;
    }
    alive = __syncthreads_and(alive);
    if (!alive && threadIdx.x == 0) *a.late = 1;
    return alive;
}

/* Let others read the pieces, of which this block has stored its columns. The fence releases the
 * stores of all threads, which the barrier has ordered before it. */
__device__ void release_pieces(const GemmArgs &a, const int *pieces) {
    __syncthreads();
    int each = GEMM_TILE / a.block_rows, piece = -1;
    if (a.done && (int)threadIdx.x < each) piece = pieces[threadIdx.x];
    if (piece >= 0) __threadfence();
    if (piece >= 0) atomicAdd(a.done + piece, 1);
    __syncthreads();
}

/* ---- a tile -------------------------------------------------------------------------------- */

__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Rows of STEP elements are 8 chunks of 16 bytes, in another order in each row: so neither stores
 * nor loads of 8 rows meet in a bank. */
__device__ __forceinline__ uint32_t chunk_at(uint32_t base, int row, int chunk) {
    return base + (uint32_t)(row * STEP * 2 + (chunk ^ (row & 7)) * 16);
}

#define LOADS (GEMM_TILE * 8 / THREADS) /* of a thread, of 16 bytes, for each operand of a step */

/* Load a step of an operand. Load i of a thread is of row threadIdx.x / 8 + i * (THREADS / 8), from
 * from[i] on. */
__device__ __forceinline__ void load_operand(uint32_t to, const __nv_bfloat16 *const from[LOADS],
                                             int step) {
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        uint32_t at = chunk_at(to, (int)threadIdx.x / 8 + i * (THREADS / 8), threadIdx.x % 8);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at),
                     "l"(from[i] + step * STEP)
                     : "memory");
    }
}

__device__ __forceinline__ void load_matrices(uint32_t at, uint32_t x[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}

__device__ __forceinline__ void multiply(float c[4], const uint32_t a[4], const uint32_t *b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Multiply what a stage holds. A warp has 64 x 32 of the tile. */
__device__ __forceinline__ void multiply_stage(uint32_t stage, float sum[4][4][4]) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int row = warp / 4 * 64 + lane % 16, column = warp % 4 * 32 + lane % 8 + lane / 16 * 8;
    uint32_t second = stage + STAGE_BYTES / 2;
#pragma unroll
    for (int k = 0; k < STEP / 16; k++) {
        uint32_t a[4][4], b[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            load_matrices(chunk_at(stage, row + i * 16, k * 2 + lane / 16), a[i]);
#pragma unroll
        for (int j = 0; j < 2; j++)
            load_matrices(chunk_at(second, column + j * 16, k * 2 + lane / 8 % 2), b[j]);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                multiply(sum[i][j], a[i], &b[j / 2][j % 2 * 2]);
    }
}

__device__ __forceinline__ float activate(float x, int squares) {
    return squares ? (x > 0 ? x * x : 0) : x;
}

/* Returns the row of slabs that row i of a tile is; negative: none. */
__device__ __forceinline__ int row_of(const GemmArgs &a, const int *pieces, int i) {
    return pieces[i / a.block_rows] * a.block_rows + i % a.block_rows;
}

__device__ __forceinline__ void store_tile(const GemmArgs &a, const int *pieces, int column,
                                           const float sum[4][4][4]) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __nv_bfloat16 *out = (__nv_bfloat16 *)a.out;
    column += warp % 4 * 32 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int row = row_of(a, pieces, warp / 4 * 64 + lane / 4 + i * 8);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float *x = &sum[i / 2][j][i % 2 * 2];
            if (row >= 0)
                *(__nv_bfloat162 *)(out + (int64_t)row * a.n + column + j * 8) =
                    __floats2bfloat162_rn(activate(x[0], a.squares), activate(x[1], a.squares));
        }
    }
}

__device__ void compute_tile(const GemmArgs &a, int expert, const int *pieces, int column) {
    extern __shared__ __align__(128) char memory[];
    uint32_t base = shared_address(memory);
    const __nv_bfloat16 *rows[LOADS], *weights[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        int row = (int)threadIdx.x / 8 + i * (THREADS / 8), chunk = (int)threadIdx.x % 8 * 8;
        int64_t in = (int64_t)max(0, row_of(a, pieces, row)) * a.k + chunk;
        rows[i] = (const __nv_bfloat16 *)a.in + in;
        in = ((int64_t)expert * a.n + column + row) * a.k + chunk;
        weights[i] = (const __nv_bfloat16 *)a.weights + in;
    }
    float sum[4][4][4] = {};
    int steps = a.k / STEP;
    auto load = [&](int step) {
        uint32_t to = base + step % STAGES * STAGE_BYTES;
        if (step < steps) load_operand(to, rows, step);
        if (step < steps) load_operand(to + STAGE_BYTES / 2, weights, step);
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    for (int step = 0; step < STAGES - 1; step++)
        load(step);
    for (int step = 0; step < steps; step++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();
        load(step + STAGES - 1);
        multiply_stage(base + step % STAGES * STAGE_BYTES, sum);
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    store_tile(a, pieces, column, sum);
}

__device__ __forceinline__ int expert_of(const GemmArgs &a, int row) {
    int low = 0, high = a.experts - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (a.offsets[middle + 1] > row)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

__global__ void __launch_bounds__(THREADS, 1) gemm(const __grid_constant__ GemmArgs a) {
    __shared__ int pieces[MOST_PIECES];
    int column;
    while (take_tile(a, pieces, &column)) {
        compute_tile(a, expert_of(a, pieces[0] * a.block_rows), pieces, column);
        release_pieces(a, pieces);
    }
}

/* ---- the order of tiles -------------------------------------------------------------------- */

/* Returns the part, 0 .. waves - 1, of its source's tokens that the last row of a piece has, at
 * most over its sources: when the piece can be complete. Padding belongs to nobody. */
__device__ int wave_of(const int32_t *offsets, const int32_t *source_counts, int expert, int ranks,
                       int waves, int row, int rows) {
    int begin = offsets[expert], most = 0;
    for (int s = 0; s < ranks; s++) {
        int count = source_counts[expert * ranks + s];
        int last = min(row + rows, begin + count) - begin; /* rows of this source until then */
        if (last > 0 && begin + count > row) most = max(most, (last - 1) * waves / count);
        begin += count;
    }
    return most;
}

/* By one block. A piece's key is its wave and expert; pieces of a key are dealt to tiles in turn.
 */
__global__ void order_pieces(const int32_t *offsets, const int32_t *source_counts, int experts,
                             int ranks, int rows, int waves, const GemmOrder order) {
    int pieces = offsets[experts] / rows, each = GEMM_TILE / rows;
    int32_t *key = order.scratch, *place = key + pieces;
    GemmArgs a = {};
    a.offsets = offsets, a.experts = experts;
    for (int i = threadIdx.x; i < pieces; i += blockDim.x) {
        int expert = expert_of(a, i * rows);
        int wave = wave_of(offsets, source_counts, expert, ranks, waves, i * rows, rows);
        key[i] = wave * experts + expert;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < pieces; i += blockDim.x) {
        place[i] = 0;
        for (int other = 0; other < i; other++)
            place[i] += key[other] == key[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < pieces + waves + 1; i += blockDim.x) {
        int own = i < pieces ? key[i] : (i - pieces) * experts, tiles = 0, last = 1;
        for (int other = 0; other < pieces; other++) {
            int is_before = key[other] < own || (i < pieces && key[other] == own && other <= i);
            tiles += is_before && place[other] % each == 0;
            last &= !(i < pieces && key[other] == own && other > i);
        }
        if (i >= pieces) order.wave_end[i - pieces] = tiles;
        if (i >= pieces) continue;
        int32_t *at = order.pieces + (tiles - 1) * each + place[i] % each;
        *at = i;
        for (int more = 1; last && place[i] % each + more < each; more++)
            at[more] = -1;
    }
}

/* ---- a watcher ----------------------------------------------------------------------------- */

/* A thread for each row looks at four of its words, the last thread at the block's word. */
__global__ void watch(const WatchArgs a) {
    unsigned long long start = now(), time = 0;
    int is_word = threadIdx.x == blockDim.x - 1;
    volatile const uint32_t *row = a.rows + (int64_t)threadIdx.x * a.row_words;
    while (!time && now() - start < a.deadline_ns) {
        int here = is_word && load_acquire(a.word);
        if (!is_word && (int)threadIdx.x < a.num_rows) {
            here = 1;
            for (int i = 1; i <= 4; i++)
                here &= row[a.row_words * i / 4 - 1] != a.poison;
        }
        if (here) time = now();
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
        out[i] = __float2bfloat16((float)(hash(seed + i) >> 8) * 0x1p-23f - 1);
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
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x), rows = a.offsets[a.experts];
    if (i >= samples || !rows) return;
    int row = (int)(hash(2 * i) % (uint32_t)rows), column = (int)(hash(2 * i + 1) % (uint32_t)a.n);
    const __nv_bfloat16 *x = (const __nv_bfloat16 *)a.in + (int64_t)row * a.k;
    const __nv_bfloat16 *w =
        (const __nv_bfloat16 *)a.weights + ((int64_t)expert_of(a, row) * a.n + column) * a.k;
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
    return cudaFuncSetAttribute(gemm, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                STAGES * STAGE_BYTES);
}

extern "C" int overlap_gemm(const GemmArgs *args, int blocks, void *stream) {
    gemm<<<blocks, THREADS, STAGES * STAGE_BYTES, (cudaStream_t)stream>>>(*args);
    return cudaGetLastError();
}

extern "C" int overlap_watch(const WatchArgs *args, void *stream) {
    watch<<<1, 1 + args->num_rows, 0, (cudaStream_t)stream>>>(*args);
    return cudaGetLastError();
}

extern "C" int overlap_order(const int32_t *offsets, const int32_t *source_counts, int experts,
                             int ranks, int block_rows, int waves, const GemmOrder *order,
                             void *stream) {
    order_pieces<<<1, 1024, 0, (cudaStream_t)stream>>>(offsets, source_counts, experts, ranks,
                                                       block_rows, waves, *order);
    return cudaGetLastError();
}

extern "C" int overlap_fill(void *out, int64_t count, uint64_t seed, void *stream) {
    fill<<<264, 256, 0, (cudaStream_t)stream>>>((__nv_bfloat16 *)out, count, seed << 32);
    return cudaGetLastError();
}

extern "C" int overlap_route(int32_t *topk_idx, float *weights, int64_t tokens, int top_k,
                             int experts, uint64_t seed, void *stream) {
    route<<<264, 256, 0, (cudaStream_t)stream>>>(topk_idx, weights, tokens, top_k, experts,
                                                 seed << 32);
    return cudaGetLastError();
}

extern "C" int overlap_check(const GemmArgs *args, int samples, unsigned long long *wrong,
                             void *stream) {
    check<<<(samples + 127) / 128, 128, 0, (cudaStream_t)stream>>>(*args, samples, wrong);
    return cudaGetLastError();
}

extern "C" int overlap_compare(const void *a, const void *b, int64_t words,
                               unsigned long long *wrong, void *stream) {
    compare<<<264, 256, 0, (cudaStream_t)stream>>>((const uint32_t *)a, (const uint32_t *)b, words,
                                                   wrong);
    return cudaGetLastError();
}
