/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_ORACLE_INPUTS_H
#define TESTS_ORACLE_INPUTS_H

/**
 * The random inputs of a world. Inner parts of world_new.
 */

#include "tests/oracle/world.h"

/** Tokens, indices, weights, scales, grad_out of one rank. */
void inputs_make_tokens(World *world, int rank);

/** expert_out and weights for the rows that the plan gave the rank. */
void inputs_make_rows(World *world, int rank);

#endif
