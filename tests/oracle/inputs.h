/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_ORACLE_INPUTS_H
#define TESTS_ORACLE_INPUTS_H

/**
 * The random inputs of a world, for world_new.
 */

#include "tests/oracle/world.h"

/** Make tokens, indices, weights, scales and grad_out of one rank. */
void inputs_make_tokens(World *world, int rank);

/** Make the weights of entries without a slot NaN, where combine gets topk_weights. */
void inputs_spoil_weights(World *world, int rank);

/** Make expert_out and weights of the rows that the plan assigned to the rank. */
void inputs_make_rows(World *world, int rank);

#endif
