/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compiled once per instruction set; EP_ROWMATH names the table that this build defines. Sums work
 * on tiles: small enough that a tile's accumulators stay in registers or in the first-level cache,
 * large enough that rows are read in whole cache lines.
 */
#include "runtime/host/rowmath.h"

#include <math.h>
#include <string.h>

#include "runtime/dtype.h"
#include "runtime/quant.h"

#define TILE 128 /* a block of EP_SUM_QUANT, too */
#define CHAINS 64
#define DOT_PART 4096 /* elements, so that a chain adds up 64: errors grow with that number */

static inline float identity(float value) {
    return value;
}

/* Add a complete run to the total, which is +0 before the first. */
static inline void add_run(float *restrict total, const float *restrict part, int n, int first) {
    for (int i = 0; i < n; i++)
        total[i] = (first ? 0.0f : total[i]) + part[i];
}

/* Returns whether the sum of some run is rounded, or a term is quantised. Neither is so on one node
 * without sum_quant, and whole tiles are compiled without that. */
static inline int has_travelled(const EpTerm *terms, int count) {
    for (int j = 0; j < count; j++)
        if (terms[j].run >= EP_RUN_BEGINS_ROUNDED || terms[j].scales) return 1;
    return 0;
}

/* ---- quantised tiles ------------------------------------------------------------------------ */

static inline EpQuantScale find_scale(const float *x, int n) {
    uint32_t amax = EP_QUANT_LEAST_BITS;
    for (int i = 0; i < n; i++) {
        uint32_t magnitude = ep_quant_magnitude(x[i]);
        amax = magnitude > amax ? magnitude : amax;
    }
    return ep_quant_scale(ep_quant_format(EP_SUM_QUANT), amax);
}

/* Quantise the tile at element `at` of a row. */
static inline void quantise_tile(const float *restrict x, int64_t at, int n, uint8_t *restrict out,
                                 float *restrict scales) {
    EpQuantScale scale = find_scale(x, n);
    for (int i = 0; i < n; i++)
        out[at + i] = ep_e4m3_from_float(x[i] * scale.inverse);
    scales[at / TILE] = ep_quant_float(scale.stored);
}

/* Replace a tile by what its receiver makes of it. */
static inline void requantise_tile(float *restrict x, int n) {
    EpQuantScale scale = find_scale(x, n);
    for (int i = 0; i < n; i++)
        x[i] = ep_quant_float(scale.stored) *
               ep_float_from_e4m3(ep_e4m3_from_float(x[i] * scale.inverse));
}

static inline void start_codes(float *restrict part, const EpTerm *term, int64_t at, int n) {
    const uint8_t *codes = (const uint8_t *)term->row + at;
    float scale = term->scales[at / TILE];
    for (int i = 0; i < n; i++)
        part[i] = scale * ep_float_from_e4m3(codes[i]);
}

static inline void add_codes(float *restrict part, const EpTerm *term, int64_t at, int n) {
    const uint8_t *codes = (const uint8_t *)term->row + at;
    float scale = term->scales[at / TILE];
    for (int i = 0; i < n; i++)
        part[i] += scale * ep_float_from_e4m3(codes[i]);
}

/* ---- tiles in each type --------------------------------------------------------------------- */

static inline float load_element(EpType type, const void *row, int64_t at) {
    if (type == EP_TYPE_FP32) return ((const float *)row)[at];
    uint16_t half = ((const uint16_t *)row)[at];
    return type == EP_TYPE_BF16 ? ep_float_from_bf16(half) : ep_float_from_fp16(half);
}

static inline void store_element(EpType type, void *row, int64_t at, float value) {
    if (type == EP_TYPE_FP32)
        ((float *)row)[at] = value;
    else
        ((uint16_t *)row)[at] =
            type == EP_TYPE_BF16 ? ep_bf16_from_float(value) : ep_fp16_from_float(value);
}

/* Inlined for each type, so that its loop has no branches. */
static inline void write_elements(EpType type, void *out, int64_t at, const float *sum, int n,
                                  int accumulate) {
    for (int i = 0; i < n; i++)
        store_element(type, out, at + i,
                      (accumulate ? load_element(type, out, at + i) : 0.0f) + (0.0f + sum[i]));
}

static void write_tile(EpType type, void *out, int64_t at, const float *sum, int n,
                       int accumulate) {
    if (type == EP_TYPE_FP32)
        write_elements(EP_TYPE_FP32, out, at, sum, n, accumulate);
    else if (type == EP_TYPE_BF16)
        write_elements(EP_TYPE_BF16, out, at, sum, n, accumulate);
    else
        write_elements(EP_TYPE_FP16, out, at, sum, n, accumulate);
}

/* A run starts with the product instead of fmaf(weight, row, +0); they differ only in the sign of a
 * zero. A sum that starts from +0 has no negative zero, so the final addition of +0 makes zeros
 * positive. */
#define DEFINE_ROW_FUNCTIONS(name, element, to_float, from_float)                                  \
    static inline void round_tile_##name(float *restrict part, int n) {                            \
        for (int i = 0; i < n; i++)                                                                \
            part[i] = to_float(from_float(part[i]));                                               \
    }                                                                                              \
    static inline void start_tile_##name(float *restrict part, const element *restrict row,        \
                                         float weight, int n) {                                    \
        for (int i = 0; i < n; i++)                                                                \
            part[i] = weight * to_float(row[i]);                                                   \
    }                                                                                              \
    static inline void add_tile_##name(float *restrict part, const element *restrict row,          \
                                       float weight, int n) {                                      \
        for (int i = 0; i < n; i++)                                                                \
            part[i] = fmaf(weight, to_float(row[i]), part[i]);                                     \
    }                                                                                              \
    static inline void end_run_##name(float *restrict part, EpRun run, int n) {                    \
        if (run == EP_RUN_BEGINS_ROUNDED) round_tile_##name(part, n);                              \
        if (run == EP_RUN_BEGINS_QUANTISED) requantise_tile(part, n);                              \
    }                                                                                              \
    /* Sum a tile into `part` or `total`. Returns the one that has the sum. */                     \
    static inline const float *add_tiles_##name(float *restrict total, float *restrict part,       \
                                                const EpTerm *terms, int count, int64_t at, int n, \
                                                int travelled) {                                   \
        EpRun run = EP_RUN_BEGINS;                                                                 \
        int runs = 0;                                                                              \
        for (int j = 0; j < count; j++) {                                                          \
            const element *row = (const element *)terms[j].row + at;                               \
            int is_codes = travelled && terms[j].scales;                                           \
            if (terms[j].run == EP_RUN_GOES_ON) {                                                  \
                if (is_codes)                                                                      \
                    add_codes(part, &terms[j], at, n);                                             \
                else                                                                               \
                    add_tile_##name(part, row, terms[j].weight, n);                                \
                continue;                                                                          \
            }                                                                                      \
            if (travelled) end_run_##name(part, run, n);                                           \
            if (runs++) add_run(total, part, n, runs == 2);                                        \
            run = terms[j].run;                                                                    \
            if (is_codes)                                                                          \
                start_codes(part, &terms[j], at, n);                                               \
            else                                                                                   \
                start_tile_##name(part, row, terms[j].weight, n);                                  \
        }                                                                                          \
        if (travelled) end_run_##name(part, run, n);                                               \
        if (runs > 1) add_run(total, part, n, 0);                                                  \
        return runs > 1 ? total : part;                                                            \
    }                                                                                              \
    static inline void sum_tile_##name(element *restrict out, const EpTerm *terms, int count,      \
                                       int64_t at, int n, int travelled) {                         \
        float total[TILE], part[TILE];                                                             \
        const float *sum = add_tiles_##name(total, part, terms, count, at, n, travelled);          \
        for (int i = 0; i < n; i++)                                                                \
            out[at + i] = from_float(sum[i] + 0.0f);                                               \
    }                                                                                              \
    static void sum_##name(element *restrict out, int64_t n, const EpTerm *terms, int count) {     \
        int64_t at = 0;                                                                            \
        int travelled = has_travelled(terms, count);                                               \
        if (count == 0) memset(out, 0, (size_t)n * sizeof(element));                               \
        if (count == 0) return;                                                                    \
        for (; !travelled && at + TILE <= n; at += TILE)                                           \
            sum_tile_##name(out, terms, count, at, TILE, 0);                                       \
        for (; at < n; at += TILE) {                                                               \
            int left = (int)(n - at < TILE ? n - at : TILE);                                       \
            sum_tile_##name(out, terms, count, at, left, travelled);                               \
        }                                                                                          \
    }                                                                                              \
    static void quantise_##name(uint8_t *out, float *scales, int64_t n, const EpTerm *terms,       \
                                int count) {                                                       \
        float total[TILE], part[TILE] = {0};                                                       \
        for (int64_t at = 0; at < n; at += TILE) {                                                 \
            int left = (int)(n - at < TILE ? n - at : TILE);                                       \
            const float *sum = add_tiles_##name(total, part, terms, count, at, left, 0);           \
            quantise_tile(sum, at, left, out, scales);                                             \
        }                                                                                          \
    }                                                                                              \
    static void reduce_##name(const EpTerm *terms, int count, EpType out_type, int accumulate,     \
                              void *out, int64_t n) {                                              \
        float total[TILE], part[TILE] = {0};                                                       \
        int travelled = has_travelled(terms, count);                                               \
        for (int64_t at = 0; at < n; at += TILE) {                                                 \
            int left = (int)(n - at < TILE ? n - at : TILE);                                       \
            const float *sum = add_tiles_##name(total, part, terms, count, at, left, travelled);   \
            write_tile(out_type, out, at, sum, left, accumulate);                                  \
        }                                                                                          \
    }                                                                                              \
    static void scale_##name(element *restrict out, const element *restrict row, float weight,     \
                             int64_t n) {                                                          \
        for (int64_t i = 0; i < n; i++)                                                            \
            out[i] = from_float(weight * to_float(row[i]));                                        \
    }                                                                                              \
    static float dot_##name(const element *restrict a, const element *restrict b, int64_t n) {     \
        float chain[CHAINS], total[CHAINS] = {0};                                                  \
        for (int64_t at = 0; at < n; at += DOT_PART) {                                             \
            int64_t end = at + DOT_PART < n ? at + DOT_PART : n, first = at;                       \
            memset(chain, 0, sizeof(chain));                                                       \
            for (; first + CHAINS <= end; first += CHAINS)                                         \
                for (int i = 0; i < CHAINS; i++)                                                   \
                    chain[i] = fmaf(to_float(a[first + i]), to_float(b[first + i]), chain[i]);     \
            for (int i = 0; first + i < end; i++)                                                  \
                chain[i] = fmaf(to_float(a[first + i]), to_float(b[first + i]), chain[i]);         \
            for (int i = 0; i < CHAINS; i++)                                                       \
                total[i] += chain[i];                                                              \
        }                                                                                          \
        for (int width = CHAINS / 2; width > 0; width /= 2)                                        \
            for (int i = 0; i < width; i++)                                                        \
                total[i] += total[i + width];                                                      \
        return total[0];                                                                           \
    }

DEFINE_ROW_FUNCTIONS(bf16, uint16_t, ep_float_from_bf16, ep_bf16_from_float)
DEFINE_ROW_FUNCTIONS(fp16, uint16_t, ep_float_from_fp16, ep_fp16_from_float)
DEFINE_ROW_FUNCTIONS(fp32, float, identity, identity)

static void sum(EpType type, void *out, int64_t n, const EpTerm *terms, int count) {
    if (type == EP_TYPE_BF16)
        sum_bf16(out, n, terms, count);
    else if (type == EP_TYPE_FP16)
        sum_fp16(out, n, terms, count);
    else
        sum_fp32(out, n, terms, count);
}

static void sum_quantised(EpType type, uint8_t *out, float *scales, int64_t n, const EpTerm *terms,
                          int count) {
    if (type == EP_TYPE_BF16)
        quantise_bf16(out, scales, n, terms, count);
    else if (type == EP_TYPE_FP16)
        quantise_fp16(out, scales, n, terms, count);
    else
        quantise_fp32(out, scales, n, terms, count);
}

static void reduce(EpType type, const EpTerm *terms, int count, EpType out_type, int accumulate,
                   void *out, int64_t n) {
    if (type == EP_TYPE_BF16)
        reduce_bf16(terms, count, out_type, accumulate, out, n);
    else if (type == EP_TYPE_FP16)
        reduce_fp16(terms, count, out_type, accumulate, out, n);
    else
        reduce_fp32(terms, count, out_type, accumulate, out, n);
}

/* Inlined for each type, as write_elements is. */
static inline void finish_elements(EpType type, void *out, const float *sum,
                                   const void *const *bias, int count, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float value = sum[i];
        for (int b = 0; b < count; b++)
            value += load_element(type, bias[b], i);
        store_element(type, out, i, value);
    }
}

static void finish(EpType type, void *out, const float *sum, const void *const *bias, int count,
                   int64_t n) {
    if (type == EP_TYPE_BF16)
        finish_elements(EP_TYPE_BF16, out, sum, bias, count, n);
    else if (type == EP_TYPE_FP16)
        finish_elements(EP_TYPE_FP16, out, sum, bias, count, n);
    else
        finish_elements(EP_TYPE_FP32, out, sum, bias, count, n);
}

static void scale(EpType type, void *out, const void *row, float weight, int64_t n) {
    if (type == EP_TYPE_BF16)
        scale_bf16(out, row, weight, n);
    else if (type == EP_TYPE_FP16)
        scale_fp16(out, row, weight, n);
    else
        scale_fp32(out, row, weight, n);
}

static float dot(EpType type, const void *a, const void *b, int64_t n) {
    if (type == EP_TYPE_BF16) return dot_bf16(a, b, n);
    if (type == EP_TYPE_FP16) return dot_fp16(a, b, n);
    return dot_fp32(a, b, n);
}

#define STRING(x) #x
#define NAME_OF(x) STRING(x)

extern const EpRowMath EP_ROWMATH;
const EpRowMath EP_ROWMATH = {NAME_OF(EP_ROWMATH), sum, sum_quantised, reduce, finish, scale, dot};
