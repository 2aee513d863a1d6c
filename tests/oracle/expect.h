/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_ORACLE_EXPECT_H
#define TESTS_ORACLE_EXPECT_H

/**
 * What the operations have to write on one rank. Each function writes into poisoned images just
 * the bytes that the library has to write.
 */

#include "tests/oracle/world.h"

typedef struct ExpectedRows {
    Image tokens, weights, scales, index; /**< index: FLAT's local experts */
} ExpectedRows;

void expect_dispatch(const World *world, int rank, ExpectedRows *out);

/** out[rows, H] of a combine; slot weights are used where the case is weighted. */
void expect_combine(const World *world, int rank, Image *out);

/** grad_tokens[rows, H] and grad_topk_weights[rows, K]. */
void expect_dispatch_backward(const World *world, int rank, Image *tokens, Image *weights);

/** grad_expert_out[buffer_rows, H]. */
void expect_combine_backward(const World *world, int rank, Image *rows);

/** The dot product of a slot, in double, and the sum of its products' magnitudes. */
double expect_slot_gradient(const World *world, int rank, int64_t row, double *magnitude);

#endif
