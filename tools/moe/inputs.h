/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_INPUTS_H
#define MOE_INPUTS_H

/**
 * Contents of the layer's inputs, functions of the seed and an element's place in the whole tensor.
 * So each rank makes its own part, and the reference makes the whole.
 */

#include <stdint.h>

#include "tools/moe/mesh.h"

/** The inputs; the first NUM_WEIGHTS are the weights. */
typedef enum InputId { INPUT_TOKENS = NUM_WEIGHTS, INPUT_GRAD_OUT, NUM_INPUTS } InputId;

/** Elements begin .. begin + count - 1 of input `id` (an InputId or a WeightId), each exactly a
 *  number of options->type. For tokens and grad_out, element (t, h) of a rank is at
 *  moe_token_at(rank, t) * H + h. */
void moe_input(const MoeOptions *options, int id, int64_t begin, int64_t count, float *out);

int64_t moe_token_at(int rank, int64_t token);

/** Number of tokens of a rank. */
int64_t moe_tokens_of(const MoeOptions *options, int ranks, int rank);

/** This token of each rank is zero. All its logits are equal, so its experts are 0 .. K - 1. */
enum { MOE_ZERO_TOKEN = 1 };

#endif
