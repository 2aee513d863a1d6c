/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_SLOTS_H
#define BENCH_SLOTS_H

/**
 * What the contract says about slots, worked out by brute force from the routing of all ranks and
 * without a look at the library: which row every entry lands in, on every rank, and what every row
 * of this rank's receive buffer is.
 */

#include <stdbool.h>
#include <stdint.h>

#include "bench_options.h"
#include "bench_routing.h"

/** Rows checked for being left alone behind each slab's (expert, flat: the last slab's) end. */
enum { SLOTS_TAIL = 4 };

typedef enum RowState {
    ROW_SLOT = 1, /**< a token's row */
    ROW_PADDING,  /**< zero */
    ROW_TAIL,     /**< must keep what was in it */
    ROW_UNUSED    /**< far past the end: not looked at */
} RowState;

typedef struct Row {
    RowState state;
    int32_t rank; /**< the token's */
    int32_t token;
    int32_t k;      /**< flat: -1 */
    int32_t expert; /**< flat: -1 */
} Row;

typedef struct Slots {
    EpLayout layout;
    int rank, num_local; /**< this rank, its experts */
    int first_expert;
    int32_t *row_of;  /**< every entry of the routing: its row on the rank that owns its expert;
                           -1 where it has none */
    int64_t num_rows; /**< rows of this rank's receive buffer, tail and all */
    Row *rows;        /**< [num_rows] */
    int64_t rows_per_expert; /**< batched */
    int64_t recv_rows;       /**< end of the last slab within the capacity */
    int64_t needed_rows;     /**< the same without one */
    int64_t num_slots;       /**< live rows of state ROW_SLOT */
    int64_t dropped;         /**< entries (flat: rows) lost to the capacity on this rank */
    int64_t all_dropped;     /**< on all ranks */
    int32_t *counts, *padded, *offsets; /**< [num_local], [num_local], [num_local + 1] */
} Slots;

bool slots_make(const Options *options, const Routing *routing, int rank, Slots *out);
void slots_free(Slots *slots);

/** Make room for `capacity` rows, at least what is needed, without moving a slot. */
bool slots_reserve(Slots *slots, int64_t capacity);

/** Tag under which the contents of a slot are known, to the rank that made them and to the token's.
 */
int64_t slots_tag(EpLayout layout, int owner, int expert, int k);

#endif
