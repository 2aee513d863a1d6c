/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_ORACLE_EXPECT_H
#define TESTS_ORACLE_EXPECT_H

/**
 * The expected outputs of the operations on one rank. Each function writes into poisoned images
 * exactly the bytes that the library must write.
 */

#include "tests/oracle/world.h"

typedef struct ExpectedRows {
    Image tokens, weights, scales, index; /**< index: the local experts of FLAT */
} ExpectedRows;

void expect_dispatch(const World *world, int rank, ExpectedRows *out);

/** Writes out[rows, H] of a combine, with slot weights where the case is weighted, or with the
 * weights of the tokens' ranks. */
void expect_combine(const World *world, int rank, Image *out);

/** Writes grad_tokens[rows, H] and grad_topk_weights[rows, K]. */
void expect_dispatch_backward(const World *world, int rank, Image *tokens, Image *weights);

/** Writes grad_expert_out[buffer_rows, H], and its scales where it is quantised. */
void expect_combine_backward(const World *world, int rank, Image *rows, Image *scales);

/** Returns the number of (token, rank) rows from one rank to another, lost ones included; or
 *  `slots`: of their entries that have one. */
int64_t expect_rows(const World *world, int from, int to, int slots);

/** Returns how many rows a rank hands to another where relays pass them on from node to node. */
int64_t expect_relayed_rows(const World *world, int from, int to, int slots);

/** Returns the dot product of a slot, in double, and the sum of its products' magnitudes. */
double expect_slot_gradient(const World *world, int rank, int64_t row, double *magnitude);

#endif
