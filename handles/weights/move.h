/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_WEIGHTS_MOVE_H
#define EP_HANDLES_WEIGHTS_MOVE_H

/**
 * Experts' weights from one placement to another (ep_weight_move). All ranks make the same plan
 * from the two maps: where each place gets its row from. Then each rank goes through the tensors,
 * slice by slice of their rows, and in each slice through the plan's batches. A backend moves the
 * rows of a batch between ranks, and copies rows within this one.
 *
 * In place, rows go to the workspace first, which has a slot for each place of the rank that
 * changes. Once all batches of a slice are there, they are copied to their places. A rank's rows
 * have then been read by all that get them, since a batch ends on a rank when what it sends has
 * left. The next slice reads other bytes.
 */

#include "runtime/group.h"
#include "runtime/op.h"

#define EP_MOVE_ROWS 256 /* most that a rank sends, and gets, in a batch: see EpPushedRows */

/** What each place gets. Equal on all ranks. */
typedef struct EpMovePlan {
    EpPlacement placement;
    int32_t *source; /**< [P] the place whose row it gets, itself: it stays; -1: it gets none */
    int32_t *twin;   /**< [P] the lower place of its rank that gets the same row from another rank,
                          and hands it on; -1: there is none */
    int32_t *slot;   /**< [P] its number among those of its rank that change and have no twin */
    int32_t *moved;  /**< [num_moved] places whose rows come from other ranks, ascending */
    int32_t num_moved;
    int32_t slots;   /**< the most of a rank */
    int32_t *counts; /**< [4 * R] for ep_move_batch */
} EpMovePlan;

typedef struct EpMovedTensor {
    char *rows, *out; /**< [L, row] */
    int64_t row;      /**< bytes */
} EpMovedTensor;

/** A checked call. */
typedef struct EpMove {
    EpGroup *group;
    EpMovePlan plan;
    int64_t fact[EP_OP_FACTS];
    const EpMovedTensor *tensors;
    int32_t num_tensors;
    int in_place;
    char *workspace;
    int64_t slot_bytes; /**< of a slot; in place */
    EpStream stream;
} EpMove;

/** Bytes of all rows of a tensor: of number i at from + i * from_step, where it goes at to + i *
 *  to_step. */
typedef struct EpMoveSlice {
    const char *from;
    char *to;
    int64_t from_step, to_step, bytes;
} EpMoveSlice;

/** Which rows this rank exchanges in a batch, by peer. */
typedef struct EpMoveRows {
    int32_t count;
    int32_t begin[EP_MAX_RANKS + 1]; /**< where those of each rank begin */
    int32_t row[EP_MOVE_ROWS];       /**< numbers of a slice's rows */
} EpMoveRows;

typedef struct EpMoveBatch {
    EpMoveRows sent, got;
    int32_t most; /**< rows from one rank to another, the most of all */
} EpMoveBatch;

/** What a backend does. The order of calls is the same on all ranks but for `copy`. */
typedef struct EpMover {
    void *context;
    int64_t most_bytes; /**< of a row in a slice */
    /** Exchange the rows of a batch, perhaps of none. Ranks call it for the same batches. */
    EpStatus (*exchange)(void *context, const EpMoveSlice *slice, const EpMoveBatch *batch);
    EpStatus (*copy)(void *context, void *to, const void *from, int64_t bytes);
} EpMover;

/** Run a move. */
EpStatus ep_move_run(const EpMove *move, const EpMover *mover);

#endif
