/* SPDX-License-Identifier: Apache-2.0 */
#ifndef COMMON_DATA_H
#define COMMON_DATA_H

/**
 * Contents and number formats. Every row is a function of (seed, kind, rank, token, tag) and the
 * column, so that the rank that receives it can recompute it cheaply. The tools have their own
 * conversions and quantisation, so that an error in the library's shows.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ep/ep.h"

/* Hot loops are compiled for several instruction sets and dispatched at run time. Sanitizers do
 * not support that, nor does gcc before 12. */
#if defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define BENCH_CLONES target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")
#define BENCH_WIDE __attribute__((BENCH_CLONES, optimize("O3")))
#else
#define BENCH_WIDE
#endif

/* ---- hashing ------------------------------------------------------------------------------- */

/* Kernels hash, too. */
#ifdef __CUDACC__
#define DATA_HOST_DEVICE __host__ __device__
#else
#define DATA_HOST_DEVICE
#endif

/** splitmix64's finalizer: a good 64-bit hash of one word. */
static inline DATA_HOST_DEVICE uint64_t hash_word(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static inline DATA_HOST_DEVICE uint64_t hash_add(uint64_t hash, int64_t value) {
    return hash_word(hash ^ (uint64_t)value);
}

/** A number in [0, 1). */
static inline DATA_HOST_DEVICE double hash_unit(uint64_t hash) {
    return (double)(hash >> 11) * 0x1p-53;
}

/* ---- contents ------------------------------------------------------------------------------ */

typedef enum DataKind {
    DATA_TOKEN = 1,   /**< tokens[t], also grad_out[t] */
    DATA_SCALE,       /**< scales[t] */
    DATA_TOPK_WEIGHT, /**< topk_weights[t, k] */
    DATA_SLOT,        /**< expert_out[slot], also grad_recv_tokens[slot] */
    DATA_ROW_WEIGHT,  /**< slot_weights[row] of the flat and rank-major layouts */
    DATA_SLOT_GRAD    /**< grad_slot_weights[slot] given to dispatch_backward */
} DataKind;

/** Identity of a row or a number. `tag` holds what `rank` and `token` do not determine. */
uint64_t data_id(int64_t seed, DataKind kind, int rank, int64_t token, int64_t tag);

/** Fill a row with finite numbers of magnitude 1/8 to 2 and either sign; other types: any bytes. */
void data_row(EpType type, uint64_t id, void *row, size_t bytes);

/** A weight in (0, 1], a multiple of 2^-24. */
float data_weight(uint64_t id);

/* ---- arithmetic ---------------------------------------------------------------------------- */

/** Convert between the formats of rows and float; rounding is to nearest even. */
void data_to_float(EpType type, const void *row, float *out, int64_t count);
void data_from_float(EpType type, const float *in, void *row, int64_t count);

/** acc += x, and acc = fmaf(w, x, acc), element by element. */
void data_add(float *acc, const float *x, int64_t count);
void data_fma(float *acc, float w, const float *x, int64_t count);

/** acc = fmaf(w, x, acc), where x is a row of the given type. */
void data_fma_row(EpType type, float *acc, float w, const void *row, int64_t count);

/** x *= w, each product rounded. */
void data_scale(float *x, float w, int64_t count);

/* ---- quantisation, as the contract defines it ---------------------------------------------- */

/** A way to quantise: one line each in data.c. The choices of --quant are option_quants. */
typedef struct QuantFormat {
    EpQuant quant;
    int bits; /**< of a code; 0: nothing is quantised */
    EpType type, scale_type;
    int block;     /**< elements that share a scale */
    bool is_power; /**< the scale is a power of two */
    bool has_tiles;
} QuantFormat;

/** The global scale of NVFP4: 448 * 6 / 2, since elements of data_row are below 2. */
#define DATA_GLOBAL_SCALE 1344.0f

#define OPTION_QUANTS "none|fp8|fp8-ue8m0|mxfp8|fp8-pow2"

const QuantFormat *quant_format(int64_t quant);

/** Number of scales of a row, and bytes of its codes. */
int64_t quant_scales(EpQuant quant, int64_t elements);
int64_t quant_bytes(EpQuant quant, int64_t elements);

/** Quantise `count` finite numbers into codes and scales; NVFP4 by DATA_GLOBAL_SCALE. */
void quant_row(EpQuant quant, const float *row, int64_t count, void *out, void *scales);
/** The number of a code: 4 bits of exponent with bias 7, 3 of mantissa, no infinities. */
float e4m3_value(uint8_t code);

/** The floats that rows of EP_QUANT_FP8 stand for: scale times value, rounded. */
void quant_to_float(const void *row, const void *scales, int64_t count, float *out);

#endif
