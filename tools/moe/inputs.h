/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_INPUTS_H
#define MOE_INPUTS_H

/**
 * Contents of the layer's inputs, functions of the seed and an element's place in the whole tensor.
 * So each rank makes its own part, and the reference makes the whole.
 */

#include <stdint.h>

#include "tools/common/data.h"
#include "tools/moe/mesh.h"

/** The inputs; the first NUM_WEIGHTS are the weights. */
typedef enum InputId {
    INPUT_TOKENS = NUM_WEIGHTS,
    INPUT_GRAD_OUT,
    INPUT_SHARED_W1, /**< [H, 2S], of the shared expert */
    INPUT_SHARED_W2, /**< [S, H] */
    NUM_INPUTS
} InputId;

/** What an input's elements are made of, for the host and for kernels. */
typedef struct Contents {
    uint64_t hash; /**< of the seed and the input */
    float scale;
    int64_t width;  /**< of the rows in which blocks lie; 0: all elements have one magnitude */
    int64_t rows;   /**< of a block */
    int64_t hidden; /**< of tokens, one of which is zero; 0: none is */
} Contents;

/** A block of a whole tensor: element (i, j, k) is that at begin + i * pitch[0] + j * pitch[1] + k.
 */
typedef struct Part {
    int64_t begin, pitch[2], shape[3];
} Part;

enum { CONTENTS_BLOCK = 128 }; /* elements of a row that have one magnitude */

/** This token of each rank is zero. All its logits are equal, so its experts are 0 .. K - 1. */
enum { MOE_ZERO_TOKEN = 1 };

Contents moe_contents(const MoeOptions *options, int id);

/** Blocks that share a scale have different magnitudes, of tokens in each row and of the experts'
 * weights in each tile, so that a product with the scale of another block is wrong. The mean square
 * of the factors is 1. */
static inline DATA_HOST_DEVICE float contents_magnitude(const Contents *c, int64_t at) {
    if (!c->width) return 1;
    const int64_t row = at / c->width, column = at % c->width;
    const uint64_t hash = hash_add(hash_add(c->hash, row / c->rows), column / CONTENTS_BLOCK);
    return 1.735f / (float)(1 << (int)(hash_unit(hash) * 4));
}

/** Before it is rounded to the input's type. */
static inline DATA_HOST_DEVICE float contents_value(const Contents *c, int64_t at,
                                                    float magnitude) {
    const bool zero = c->hidden && at / c->hidden % (1 << 24) == MOE_ZERO_TOKEN;
    const float unit = (float)hash_unit(hash_add(c->hash, at));
    return zero ? 0 : (unit * 2 - 1) * c->scale * magnitude;
}

static inline DATA_HOST_DEVICE int64_t part_at(const Part *p, int64_t line) {
    return p->begin + line / p->shape[1] * p->pitch[0] + line % p->shape[1] * p->pitch[1];
}

/** Elements at .. at + count - 1, not rounded. */
void contents_floats(const Contents *contents, int64_t at, int64_t count, float *out);

/** Elements begin .. begin + count - 1 of input `id` (an InputId or a WeightId), each exactly a
 *  number of options->type. For tokens and grad_out, element (t, h) of a rank is at
 *  moe_token_at(rank, t) * H + h. */
void moe_input(const MoeOptions *options, int id, int64_t begin, int64_t count, float *out);

int64_t moe_token_at(int rank, int64_t token);

/** Number of tokens of a rank. */
int64_t moe_tokens_of(const MoeOptions *options, int ranks, int rank);

#endif
