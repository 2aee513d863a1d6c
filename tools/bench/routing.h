/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_ROUTING_H
#define BENCH_ROUTING_H

/**
 * Every rank holds the routing of all ranks and derives from it what each slot must contain. The
 * routing is generated identically on every rank, or rank 0 reads it from a trace file and
 * broadcasts it.
 */

#include <stdbool.h>
#include <stdint.h>

#include "tools/bench/options.h"
#include "tools/common/util.h"
#include "tools/common/world.h"

/* ---- routing (routing.c) ------------------------------------------------------------------- */

typedef struct Routing {
    int num_ranks, top_k, num_experts;
    int64_t *tokens;    /**< [num_ranks] */
    int64_t *first;     /**< [num_ranks + 1] number of tokens of the ranks before this one */
    int32_t *experts;   /**< [first[num_ranks], top_k]; negative: no expert */
    int32_t *named; /**< with a placement: the same, as calls name them, while `experts` are physical
                         ones; else NULL */
    int64_t max_tokens; /**< maximum of tokens[] */
    Pool pool;
} Routing;

/** Collective. `size` is the sweep's number of tokens; a trace file ignores it. */
bool routing_make(World *world, const Options *options, int64_t size, Routing *out);

/** Allocate for the given token counts, which are copied. The indices are zero. */
bool routing_alloc(Routing *routing, int num_ranks, int top_k, int num_experts,
                   const int64_t *tokens);
void routing_free(Routing *routing);

/** The top_k indices of a token. */
static inline const int32_t *routing_row(const Routing *routing, int rank, int64_t token) {
    return &routing->experts[(routing->first[rank] + token) * routing->top_k];
}

/** Expert placement: contiguous blocks; the first E % R ranks own one expert more. */
int routing_first_expert(const Routing *routing, int rank);
int routing_owner(const Routing *routing, int expert);

/* ---- trace files (trace.c) ----------------------------------------------------------------- */

/**
 * A trace file holds the routing of one step of all ranks, as text:
 *
 *     ep-routing 1
 *     experts 256 top_k 8 ranks 4
 *     tokens 3                             rank 0 brings 3 tokens:
 *     12 200 3 77 45 130 9 61              one line each, top_k indices, negative: no expert
 *     ...
 *     tokens 0                             rank 1 brings none
 *     ...
 *
 * Line 1 is the magic word and the version of the format. Line 2 gives the shape. Then each rank,
 * in order, has a line with its number of tokens and one line per token. Numbers are decimal and
 * separated by blanks. Every line ends in a newline, and nothing follows the last line. An index is
 * less than the number of experts; a line may name an expert twice.
 */

/** The shape that a trace must have; 0: any, which then becomes the trace's. */
typedef struct TraceShape {
    int num_ranks, top_k, num_experts;
} TraceShape;

/** Read `path`. False, with a message that names file and line, if the file is invalid. */
bool trace_read(const char *path, TraceShape *shape, Routing *out);

/** Write `path` through a temporary file beside it. */
bool trace_write(const char *path, const Routing *routing);

/* ---- slots (slots.c) ----------------------------------------------------------------------- */

/**
 * The slots that the contract defines, computed by brute force from the routing of all ranks and
 * independent of the library: the row of every entry on every rank, and the content of every row of
 * this rank's receive buffer.
 */

/** Number of rows after the end of each slab (flat: of the last slab; rank-major: of each source's
 *  rows) that must stay unchanged. */
enum { SLOTS_TAIL = 4 };

typedef enum RowState {
    ROW_SLOT = 1, /**< a token's row */
    ROW_PADDING,  /**< zero */
    ROW_TAIL,     /**< must keep its content */
    ROW_UNUSED    /**< far past the end: not checked */
} RowState;

typedef struct Row {
    RowState state;
    int32_t rank; /**< source rank of the token */
    int32_t token;
    int32_t k;      /**< -1 if one row holds all of the token's entries */
    int32_t expert; /**< likewise */
} Row;

typedef struct Slots {
    EpLayout layout;
    int rank, num_local; /**< this rank and its number of experts */
    int first_expert;
    int32_t *row_of;     /**< per entry of the routing: its row on the rank that owns its expert, or
                              -1 */
    int64_t num_rows;    /**< rows of this rank's receive buffer, the tail included */
    Row *rows;           /**< [num_rows] */
    int64_t block_rows;  /**< of a slab or block of fixed size, else 0 */
    int64_t recv_rows;   /**< end of the last slab within the capacity */
    int64_t needed_rows; /**< end of the last slab without a capacity */
    int64_t num_slots;   /**< rows of state ROW_SLOT */
    int64_t dropped; /**< entries (flat: rows) lost to the capacity or on the way, on this rank */
    int64_t all_dropped; /**< on all ranks */
    Pool pool;
    int32_t *counts, *padded, *offsets; /**< [num_local], [num_local], [num_local + 1] */
} Slots;

/** `nodes` [R]: the node of each rank, where messages between nodes have fewer places than tokens
 *  (--node-rows); else NULL. */
bool slots_make(const Options *options, const Routing *routing, const int32_t *nodes, int rank,
                Slots *out);
void slots_free(Slots *slots);

/** Extend the rows to `capacity`, at least what is needed, without moving a slot. */
bool slots_reserve(Slots *slots, int64_t capacity);

/** Whether one row holds all entries of a (token, rank). */
bool slots_has_rows(EpLayout layout);

/** Tag of a slot's contents, known to the rank that makes them and to the token's rank. */
int64_t slots_tag(EpLayout layout, int owner, int expert, int k);

#endif
