/* SPDX-License-Identifier: Apache-2.0 */
#ifndef OVERLAP_GEMM_H
#define OVERLAP_GEMM_H

/** The kernels of ep_overlap: a GEMM of experts that waits for ready words and sets done words. */

#include <stdint.h>

#include "ep/ep.h"

#define GEMM_TILE 128 /* rows and columns of a tile; slabs are multiples of it */

/**
 * The order in which a GEMM takes rows. Rows lie in pieces, the blocks that have a word each, and a
 * tile has GEMM_TILE rows: pieces of one expert, which need not follow one another. Tiles come in
 * waves: those of a wave have rows of the same part of their sources' tokens.
 */
typedef struct GemmOrder {
    int32_t *pieces;   /* [tiles, GEMM_TILE / piece rows]; -1: none */
    int32_t *wave_end; /* [waves + 1] tiles of the waves before */
    int32_t *scratch;  /* [2, pieces] */
} GemmOrder;

/** out[rows, n] = in[rows, k] * weights[L, n, k]^T, in bf16; rows of slabs. n: a multiple of
 *  GEMM_TILE; k: of 64. */
typedef struct GemmArgs {
    const void *in, *weights;
    void *out;
    const int32_t *offsets; /* [experts + 1] of slabs */
    GemmOrder order;
    int32_t first_wave, last_wave; /* tiles of waves first_wave to before last_wave */
    int32_t *taken;                /* 0: blocks of all launches take their tiles from here */
    int32_t experts, n, k;
    int32_t squares;      /* 1: out is the square of positive sums, 0 of others: the activation */
    int32_t block_rows;   /* of a piece and of both words */
    const int32_t *ready; /* NULL: all rows are there */
    int32_t *done;        /* NULL: nobody waits; n / GEMM_TILE is added to each */
    uint64_t deadline_ns;
    int32_t *late; /* becomes 1 if a word did not come in time */
} GemmArgs;

/** What a watcher measures: when all rows of a block are there, and when its word is. */
typedef struct WatchArgs {
    const uint32_t *rows; /* block 0, filled with `poison` before */
    int32_t row_words, num_rows;
    uint32_t poison;
    const int32_t *word;
    uint64_t deadline_ns;
    unsigned long long *times; /* [2]: rows, word */
} WatchArgs;

#ifdef __cplusplus
extern "C" {
#endif

/* Each returns a cudaError_t. */
int overlap_open(void);
int overlap_gemm(const GemmArgs *args, int blocks, void *stream);
int overlap_watch(const WatchArgs *args, void *stream);
/** Order pieces by wave, then by expert: rows of lower tokens come, and are wanted, first.
 *  source_counts [experts, ranks]. */
int overlap_order(const int32_t *offsets, const int32_t *source_counts, int experts, int ranks,
                  int block_rows, int waves, const GemmOrder *order, void *stream);
/** Fill bf16 with numbers from -1 to 1, or indices with distinct experts for each token. */
int overlap_fill(void *out, int64_t count, uint64_t seed, void *stream);
int overlap_route(int32_t *topk_idx, float *weights, int64_t tokens, int top_k, int experts,
                  uint64_t seed, void *stream);
/** Add to *wrong how many of `samples` elements of a GEMM's output are not near plain sums. */
int overlap_check(const GemmArgs *args, int samples, unsigned long long *wrong, void *stream);
/** Add the number of 32-bit words that differ to *wrong. */
int overlap_compare(const void *a, const void *b, int64_t words, unsigned long long *wrong,
                    void *stream);

#ifdef __cplusplus
}
#endif

#endif
