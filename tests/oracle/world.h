/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_ORACLE_WORLD_H
#define TESTS_ORACLE_WORLD_H

/**
 * All facts of one step of a case: the inputs of all ranks, made from the seed, and the position of
 * every slot, found by a walk over experts, source ranks, tokens and k.
 */

#include "tests/cases/case.h"
#include "tests/harness/image.h"

/** Where the copy of (token, k) lies; row -1: nowhere. */
typedef struct Position {
    int rank;
    int64_t row;
} Position;

typedef enum RowKind {
    ROW_TAIL, /**< past the slabs: untouched, or zero with zero_tail */
    ROW_PADDING,
    ROW_FILLED
} RowKind;

/** The contents of a row of a receive buffer. In FLAT and RANK_MAJOR one row serves several k: then
 * k is -1. */
typedef struct Row {
    RowKind kind;
    int source, token, k;
} Row;

/** Inputs and plan of one rank. */
typedef struct RankWorld {
    /* inputs of prepare and dispatch */
    int tokens;          /**< tokens that are routed */
    int rows;            /**< rows (T) of the input tensors */
    int64_t *index;      /**< [rows][K] */
    int64_t *taken;      /**< [rows][K] the place, or physical expert, that the entry goes to, -1:
                              none */
    uint8_t *token;      /**< [rows][row bytes] */
    uint8_t *scale;      /**< [rows][scale bytes] */
    float global_scale;  /**< of NVFP4 */
    uint8_t *lost;       /**< [rows][K] entries whose node has no room for the token */
    float *weight;       /**< [rows][K] of dispatch or combine */
    uint8_t *sent;       /**< [rows][received row bytes]: tokens as they are delivered */
    uint8_t *sent_scale; /**< [rows][received scale bytes] */

    /* the plan */
    int first_expert, num_experts;
    int64_t *count, *padded; /**< [num_experts] */
    int64_t *offset;         /**< [num_experts + 1] */
    int64_t *from;           /**< [num_experts][ranks]: `count` by source */
    int64_t *from_rows;      /**< [ranks]: filled rows by source */
    int64_t recv_rows, needed_rows, dropped;
    int64_t buffer_rows; /**< rows of the receive buffers */
    Row *row;            /**< [buffer_rows] */
    Position *position;  /**< [rows][K] */

    /* inputs of the other three operations; NaN in rows that hold no slot */
    uint8_t *expert_out;     /**< [buffer_rows][sum bytes], also grad_recv_tokens */
    float *slot_weight;      /**< [buffer_rows] */
    float *grad_slot_weight; /**< [buffer_rows], FLAT and RANK_MAJOR: [buffer_rows][K] */
    uint8_t *grad_out;       /**< [rows][sum bytes] */
    uint8_t *bias[2];        /**< [rows][sum bytes] */
} RankWorld;

typedef struct World {
    Case c;
    RankWorld *rank; /**< [c.ranks] */
} World;

World *world_new(const Case *c);
void world_free(const World *world);

/** Returns the rank that owns a physical expert. */
int world_owner(const Case *c, int64_t expert);

/** Returns the expert that a place holds by the case's map, -1: none. */
int world_map(const Case *c, int place);

/** Returns whether a token is one of the case's strange ones. */
int world_is_strange(const World *world, int token);

/** Returns whether entry (token, k) of a rank gets a slot: it names an expert of the group, and if
 * duplicates are merged, no entry of the token at a lower k names it. */
int world_live(const World *world, int rank, int token, int k);

/** Returns whether dispatch and combine backward write a row of the receive buffer. */
int world_writes(const World *world, const Row *row);

/** Returns the floats per row of recv_topk_weights: K in FLAT and RANK_MAJOR, else 1. */
int world_row_weights(const Case *c);

#endif
