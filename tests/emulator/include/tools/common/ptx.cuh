/* SPDX-License-Identifier: Apache-2.0 */
#ifndef COMMON_PTX_CUH
#define COMMON_PTX_CUH

/**
 * Replaces tools/common/ptx.cuh: the same instructions, emulated.
 */

#include <vector>

#include "runtime/cuda/ptx.cuh"

/* ---- words ---- */

static inline void __nanosleep(unsigned) {}

static inline void store_release(uint32_t *address, uint32_t value) {
    emulated_store(address, value, __ATOMIC_RELEASE);
}

static inline uint32_t load_acquire(const uint32_t *address) {
    return emulated_load(address, __ATOMIC_ACQUIRE);
}

static inline uint32_t count_up(uint32_t *address) {
    return atomicAdd(address, 1u);
}

/* ---- copies and loads: until they are made their places hold NaN ---- */

struct EmulatedCopy {
    char *to;
    const void *from;
    int bytes;
};

/* Of each thread of the block. */
static thread_local std::vector<EmulatedCopy> emulated_copies[1024];

static inline void emulated_copy(uint32_t to, const void *from, int bytes) {
    if (to % bytes || (uintptr_t)from % bytes) emulated_die("an unaligned copy");
    if (!emulated_reaches(from, bytes)) emulated_die("a copy reads out of reach");
    const EmulatedCopy copy = {(char *)emulated_generic(to), from, bytes};
    memset(copy.to, 0xff, bytes);
    emulated_copies[threadIdx.x].push_back(copy);
}

static inline void copy_4(uint32_t to, const void *from) {
    emulated_copy(to, from, 4);
}

static inline void copy_16(uint32_t to, const void *from) {
    emulated_copy(to, from, 16);
}

static inline void copies_arrive(uint64_t *arrival) {
    for (const EmulatedCopy &copy : emulated_copies[threadIdx.x])
        memcpy(copy.to, copy.from, copy.bytes);
    emulated_copies[threadIdx.x].clear();
    emulated_mbarrier_arrive(arrival, 0);
}

static inline int same_for_warp(int x) {
    return x;
}

struct TensorMap {
    const char *data;
    int64_t rows, columns;
    int box_rows;
};

static inline bool tensor_map_make(const void *data, int64_t rows, int64_t columns, int box_rows,
                                   TensorMap *out) {
    *out = {(const char *)data, rows, columns, box_rows};
    return (uintptr_t)data % 16 == 0 && columns % 16 == 0;
}

/* In pieces of 16 bytes, which change places by the lowest bits of the row's address. */
static inline void tensor_load(uint32_t to, const TensorMap *map, int column, int row,
                               uint64_t *arrival) {
    if (to % 1024) emulated_die("a load of a box to %u", to);
    for (int i = 0; i < map->box_rows * 8; i++) {
        const int64_t line = row + i / 8, at = column + i % 8 * 16;
        char *place =
            (char *)emulated_generic(to + (uint32_t)(i / 8 * 128 + (i % 8 ^ i / 8 % 8) * 16));
        memset(place, 0xff, 16);
        if (line < map->rows && at < map->columns) {
            emulated_bulk_load(place, map->data + line * map->columns + at, 16, arrival);
        } else {
            memset(place, 0, 16);
            emulated_mbarrier_complete(arrival, 16);
        }
    }
}

static inline void tensor_load_all(uint32_t to, const TensorMap *map, int column, int row,
                                   uint64_t *arrival) {
    tensor_load(to, map, column, row, arrival);
}

static inline void arrival_arrive_at(uint64_t *arrival, uint32_t rank) {
    (void)rank;
    emulated_mbarrier_arrive(arrival, 0);
}

static inline void arrival_store_at(uint32_t *word, uint32_t value, uint64_t *arrival,
                                    uint32_t rank) {
    (void)rank;
    *word = value;
    emulated_mbarrier_complete(arrival, sizeof(value));
}

/* ---- clusters: of one block here ---- */

enum { CLUSTER = 1 };

static inline uint32_t cluster_rank(void) {
    return 0;
}

static inline void cluster_begin(void) {
    __syncthreads();
}

static inline void cluster_end(void) {}

template <typename Args>
static inline cudaError_t cluster_launch(void (*kernel)(const Args &), unsigned blocks,
                                         unsigned threads, int shared_bytes, cudaStream_t stream,
                                         const Args &args) {
    emulated_launch(emulated_grid(blocks, threads, shared_bytes, stream), kernel, args);
    return cudaGetLastError();
}

/* ---- matrix units ---- */

template <int COUNT> static inline void registers_give(void) {}
template <int COUNT> static inline void registers_take(void) {}
static inline void products_begin(void) {}
static inline void products_commit(void) {}
template <int YOUNGEST> static inline void products_wait(void) {}
static inline void keep_register(float &) {}

static inline float emulated_e4m3(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float magnitude = (code & 0x7f) == 0x7f ? NAN
                            : exponent            ? ldexpf((float)(8 + mantissa), exponent - 10)
                                                  : ldexpf((float)mantissa, -9);
    return code & 0x80 ? -magnitude : magnitude;
}

/* Byte k of a row of a matrix as its descriptor says: rows of 128 bytes, eight of them together,
 * whose pieces of 16 bytes change places by the lowest bits of the row's address. */
static inline const uint8_t *emulated_at(uint64_t matrix, int row, int k) {
    if (matrix >> 62 != 1) emulated_die("a matrix without swizzled rows of 128 bytes");
    uint32_t at = (uint32_t)(matrix & 0x3fff) << 4;
    at += (uint32_t)(row / 8) * ((uint32_t)(matrix >> 32 & 0x3fff) << 4);
    at += (uint32_t)(row % 8) * 128 + (uint32_t)k;
    at ^= (at >> 7 & 7) << 4;
    return (const uint8_t *)emulated_shared() + at;
}

static inline float emulated_value(const uint8_t *code) {
    static const struct Values {
        float of[256];
        Values() {
            for (int i = 0; i < 256; i++)
                of[i] = emulated_e4m3((uint8_t)i);
        }
    } values;
    return values.of[*code];
}

static inline float emulated_bf16(const uint8_t *at) {
    return __uint_as_float((uint32_t) * (const uint16_t *)at << 16);
}

/* K elements of a row, which have two pieces of 16 bytes. */
template <int K, float (*VALUE)(const uint8_t *)>
static inline void emulated_row(uint64_t matrix, int row, float *out) {
    for (int piece = 0; piece < 2; piece++) {
        const uint8_t *at = emulated_at(matrix, row, 16 * piece);
        for (int k = 0; k < K / 2; k++)
            *out++ = VALUE(at + 32 / K * k);
    }
}

/* Each thread computes its own elements: of rows and columns of K elements. Sums of four columns are
 * computed at a time. */
template <int K, int COLUMNS, float (*VALUE)(const uint8_t *)>
static inline void emulated_multiply(float *d, uint64_t a, uint64_t b, int add) {
    typedef float Four __attribute__((vector_size(16)));
    const int thread = (int)threadIdx.x % 128, lane = thread % 32;
    float rows[2][K], others[4][K];
    for (int r = 0; r < 2; r++)
        emulated_row<K, VALUE>(a, thread / 32 * 16 + lane / 4 + r * 8, rows[r]);
    for (int column = 0; column < COLUMNS / 4; column += 4) {
        Four sum[2] = {};
        for (int c = 0; c < 4; c++)
            emulated_row<K, VALUE>(b, (column + c) / 2 * 8 + lane % 4 * 2 + c % 2, others[c]);
        for (int k = 0; k < K; k++) {
            const Four other = {others[0][k], others[1][k], others[2][k], others[3][k]};
            sum[0] += rows[0][k] * other, sum[1] += rows[1][k] * other;
        }
        for (int i = 0; i < 8; i++) {
            float &to = d[column * 2 + i / 4 * 4 + i % 4];
            const float term = sum[i % 4 / 2][i / 4 * 2 + i % 2];
            to = add ? to + term : term;
        }
    }
}

static inline void multiply_e4m3(float (&d)[64], uint64_t a, uint64_t b, int add) {
    emulated_multiply<32, 128, emulated_value>(d, a, b, add);
}

static inline void multiply_bf16(float (&d)[128], uint64_t a, uint64_t b, int add) {
    emulated_multiply<16, 256, emulated_bf16>(d, a, b, add);
}

#endif
