/* SPDX-License-Identifier: Apache-2.0 */
#ifndef OVERLAP_GEMM_H
#define OVERLAP_GEMM_H

/** The kernels of ep_overlap: a GEMM of experts that waits for ready words and sets done words. */

#include <stdint.h>

#include "ep/ep.h"

#define GEMM_ROWS 128    /* of a tile; slabs are multiples of it */
#define GEMM_COLUMNS 256 /* of a tile */
#define GEMM_PIECES 4    /* of a tile, at most */

/**
 * The rows of a tile: pieces of one expert, which need not follow one another. A piece is the rows
 * of one word. Tiles of an expert that follow one another in the order of tiles are a group. Their
 * columns are taken together, so that weights are read once.
 */
typedef struct GemmTile {
    int32_t expert;
    int32_t group, size;         /* the group's first tile, and its tiles */
    int32_t pieces[GEMM_PIECES]; /* -1: none */
    int32_t unused;
} GemmTile;

/** out[rows, n] = in[rows, k] * weights[L, n, k]^T, in bf16; rows of slabs. n: a multiple of
 *  GEMM_COLUMNS; k: of 64. */
typedef struct GemmArgs {
    const void *in, *weights;
    void *out;
    int64_t rows; /* of `in` */
    const GemmTile *tiles;
    int32_t num_tiles;
    int32_t *taken; /* 0: blocks of all launches take columns of tiles from here */
    /* Blocks from number `stay` on leave once `leave_at` columns of tiles are taken. */
    int32_t stay, leave_at;
    int32_t experts, n, k;
    int32_t squares;      /* 1: out is the square of positive sums, 0 of others: the activation */
    int32_t block_rows;   /* of a piece and of both words: GEMM_ROWS / GEMM_PIECES or more */
    const int32_t *ready; /* NULL: all rows are there */
    int32_t *done;        /* NULL: nobody waits; n / GEMM_COLUMNS is added to each */
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

/** What the order of tiles serves. */
typedef enum GemmOrder {
    ORDER_READY, /* rows come in ascending order of their source's tokens */
    ORDER_DONE   /* they are wanted in that order */
} GemmOrder;

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Put tiles in order: by waves, then by the position of an expert's rows in the wave, then by
 * experts. Waves are parts of each expert's tiles: each has twice the tiles of the one before
 * (ORDER_READY: little is there at first) or half (ORDER_DONE: little is left at last). One wave is
 * the order of experts alone. source_counts [experts, ranks], all in the host's memory. Returns the
 * number of tiles; `out` has room for one per GEMM_ROWS rows of slabs.
 */
int overlap_order(const int32_t *offsets, const int32_t *source_counts, int experts, int ranks,
                  int block_rows, int waves, GemmOrder order, GemmTile *out);

/* Each returns a cudaError_t. */
int overlap_open(void);
int overlap_gemm(const GemmArgs *args, int blocks, void *stream);
/** Hold a stream until *word is at least `least`. */
int overlap_hold(const int32_t *word, int least, uint64_t deadline_ns, int32_t *late, void *stream);
/** Keep a stream busy. */
int overlap_spin(uint64_t ns, void *stream);
int overlap_watch(const WatchArgs *args, void *stream);
/** Fill bf16 with numbers from -1 to 1, or indices with distinct experts for each token. */
int overlap_fill(void *out, int64_t count, uint64_t seed, void *stream);
int overlap_route(int32_t *idx, float *weights, int64_t tokens, int top_k, int experts,
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
