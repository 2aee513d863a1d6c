/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "tools/common/util.h"
#include "tools/overlap/gemm.h"

/* Where a piece is among the tokens of its sources. A slab has the rows of one source after those
 * of another, so a piece may have the last rows of one and the first of the next. */
typedef struct Piece {
    int number;
    double at; /* 0 .. 1: ORDER_READY: of its last row; ORDER_DONE: of its first one */
} Piece;

static int compare_pieces(const void *a, const void *b) {
    const Piece *x = a, *y = b;
    if (x->at != y->at) return x->at < y->at ? -1 : 1;
    return x->number - y->number;
}

/* Rows `begin` to before `end` of a slab, over all sources that have some of them. */
static double position(const int32_t *counts, int ranks, int begin, int end, GemmOrder order) {
    double first = 1, last = 0;
    for (int s = 0; s < ranks; begin -= counts[s], end -= counts[s], s++) {
        if (end <= 0 || begin >= counts[s]) continue;
        double from = (double)(begin > 0 ? begin : 0) / counts[s];
        double to = (double)(end < counts[s] ? end : counts[s]) / counts[s];
        if (from < first) first = from;
        if (to > last) last = to;
    }
    return order == ORDER_READY ? last : first;
}

/* Lists an expert's pieces that have a row. Returns their number. */
static int list_pieces(const int32_t *counts, int ranks, int slab, int rows, GemmOrder order,
                       Piece *out) {
    int all = 0, pieces;
    for (int s = 0; s < ranks; s++)
        all += counts[s];
    pieces = (all + rows - 1) / rows;
    for (int i = 0; i < pieces; i++)
        out[i] = (Piece){slab / rows + i, position(counts, ranks, i * rows, (i + 1) * rows, order)};
    qsort(out, (size_t)pieces, sizeof(*out), compare_pieces);
    return pieces;
}

/* The wave of tile i of n: waves of 1, 2, 4 .. parts. */
static int wave_of(int i, int n, int waves) {
    int64_t parts = ((int64_t)1 << waves) - 1;
    int wave = 0;
    while (wave < waves - 1 && (i + 1) * parts > n * (((int64_t)2 << wave) - 1))
        wave++;
    return wave;
}

/* Append those tiles of an expert that are of a wave. Returns how many. */
static int add_tiles(const Piece *pieces, int count, int expert, int each, int waves, int wave,
                     GemmOrder order, int first, GemmTile *out) {
    int tiles = (count + each - 1) / each, size = 0;
    for (int i = 0; i < tiles; i++) {
        int own = order == ORDER_READY ? wave_of(i, tiles, waves)
                                       : waves - 1 - wave_of(tiles - 1 - i, tiles, waves);
        if (own != wave) continue;
        GemmTile *tile = &out[first + size++];
        tile->expert = expert, tile->group = first, tile->unused = 0;
        for (int p = 0; p < GEMM_PIECES; p++)
            tile->pieces[p] = p < each && i * each + p < count ? pieces[i * each + p].number : -1;
    }
    for (int i = 0; i < size; i++)
        out[first + i].size = size;
    return size;
}

int overlap_order(const int32_t *offsets, const int32_t *source_counts, int experts, int ranks,
                  int block_rows, int waves, GemmOrder order, GemmTile *out) {
    int tiles = 0, most = offsets[experts] / block_rows;
    Piece *pieces = bench_alloc((size_t)most + 1, sizeof(*pieces), "pieces");
    for (int wave = 0; pieces && wave < waves; wave++)
        for (int e = 0; e < experts; e++) {
            int count = list_pieces(source_counts + e * ranks, ranks, offsets[e], block_rows, order,
                                    pieces);
            tiles +=
                add_tiles(pieces, count, e, GEMM_ROWS / block_rows, waves, wave, order, tiles, out);
        }
    free(pieces);
    return tiles;
}
