/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_DATA_H
#define BENCH_DATA_H

/**
 * Contents and number formats. Every row is a function of (seed, kind, rank, token, tag) and the
 * column, cheap enough to be recomputed wherever it must have arrived. Conversions are the bench's
 * own, so that a mistake in the library's shows.
 */

#include <stddef.h>
#include <stdint.h>

#include "ep/ep.h"

/* Hot loops are compiled for several processors and the one at hand picks; sanitizers do not get
 * along with that. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define BENCH_CLONES target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")
#define BENCH_WIDE __attribute__((BENCH_CLONES, optimize("O3")))
#else
#define BENCH_WIDE
#endif

typedef enum DataKind {
    DATA_TOKEN = 1,   /**< tokens[t], also grad_out[t] */
    DATA_SCALE,       /**< scales[t] */
    DATA_TOPK_WEIGHT, /**< topk_weights[t, k] */
    DATA_SLOT,        /**< expert_out[slot], also grad_recv_tokens[slot] */
    DATA_ROW_WEIGHT,  /**< slot_weights[row] of the flat layout */
    DATA_SLOT_GRAD    /**< grad_slot_weights[slot] given to dispatch_backward */
} DataKind;

/** Identity of a row or a number. `tag` tells what `rank` and `token` leave open. */
uint64_t data_id(int64_t seed, DataKind kind, int rank, int64_t token, int64_t tag);

/** A row of finite numbers, magnitude 1/8 to 2, either sign; any bytes for other types. */
void data_row(EpType type, uint64_t id, void *row, size_t bytes);

/** In (0, 1], a multiple of 2^-24. */
float data_weight(uint64_t id);

/** Between the formats of rows and float; rounding is to nearest even. */
void data_to_float(EpType type, const void *row, float *out, int64_t count);
void data_from_float(EpType type, const float *in, void *row, int64_t count);

/** acc += x, and acc = fmaf(w, x, acc), element by element. */
void data_add(float *acc, const float *x, int64_t count);
void data_fma(float *acc, float w, const float *x, int64_t count);

/** The same straight from a row. */
void data_fma_row(EpType type, float *acc, float w, const void *row, int64_t count);

/** x *= w, each product rounded. */
void data_scale(float *x, float w, int64_t count);

#endif
