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

/* Tiles of an expert and a wave, as listed by expert. */
typedef struct Group {
    int wave, expert, first, size;
    double at; /* ORDER_READY: when the last of its rows comes; ORDER_DONE: the first is wanted */
} Group;

static int compare_groups(const void *a, const void *b) {
    const Group *x = a, *y = b;
    if (x->wave != y->wave) return x->wave - y->wave;
    if (x->at != y->at) return x->at < y->at ? -1 : 1;
    return x->expert - y->expert;
}

typedef struct Listed {
    GemmTile *tiles;
    Group *groups;
    int num_tiles, num_groups;
} Listed;

/* Append an expert's tiles and groups. `each`: pieces of a tile. */
static void list_tiles(const Piece *pieces, int count, int expert, int each, int waves,
                       GemmOrder order, Listed *out) {
    int tiles = (count + each - 1) / each, last_wave = -1;
    for (int i = 0; i < tiles; i++) {
        int wave = order == ORDER_READY ? wave_of(i, tiles, waves)
                                        : waves - 1 - wave_of(tiles - 1 - i, tiles, waves);
        int begin = i * each, end = begin + each < count ? begin + each : count;
        GemmTile *tile = &out->tiles[out->num_tiles++];
        *tile = (GemmTile){.expert = expert};
        for (int p = 0; p < GEMM_PIECES; p++)
            tile->pieces[p] = begin + p < end && p < each ? pieces[begin + p].number : -1;
        if (wave != last_wave)
            out->groups[out->num_groups++] =
                (Group){wave, expert, out->num_tiles - 1, 0, pieces[begin].at};
        Group *group = &out->groups[out->num_groups - 1];
        group->size++, last_wave = wave;
        if (order == ORDER_READY) group->at = pieces[end - 1].at;
    }
}

static int emit_groups(Listed *listed, GemmTile *out) {
    int tiles = 0;
    qsort(listed->groups, (size_t)listed->num_groups, sizeof(*listed->groups), compare_groups);
    for (int g = 0; g < listed->num_groups; g++) {
        const Group *group = &listed->groups[g];
        for (int i = 0; i < group->size; i++) {
            out[tiles + i] = listed->tiles[group->first + i];
            out[tiles + i].group = tiles, out[tiles + i].size = group->size;
        }
        tiles += group->size;
    }
    return tiles;
}

int overlap_order(const int32_t *offsets, const int32_t *source_counts, int experts, int ranks,
                  int block_rows, int waves, GemmOrder order, GemmTile *out) {
    const size_t rows = (size_t)offsets[experts], tiles = rows / GEMM_ROWS + 1;
    Piece *pieces = bench_alloc(rows / (size_t)block_rows + 1, sizeof(*pieces), "pieces");
    Listed listed = {bench_alloc(tiles, sizeof(GemmTile), "tiles"),
                     bench_alloc(tiles, sizeof(Group), "groups of tiles"), 0, 0};
    int count = 0;
    if (pieces && listed.tiles && listed.groups) {
        for (int e = 0; e < experts; e++) {
            int found = list_pieces(source_counts + e * ranks, ranks, offsets[e], block_rows, order,
                                    pieces);
            list_tiles(pieces, found, e, GEMM_ROWS / block_rows, waves, order, &listed);
        }
        count = emit_groups(&listed, out);
    }
    free(pieces), free(listed.tiles), free(listed.groups);
    return count;
}
