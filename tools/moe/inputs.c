/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moe/inputs.h"

#include <math.h>

#include "tools/common/data.h"

/* Weights are scaled by the length of the sums in which they are, so that no tensor of the layer
 * grows or vanishes. The router's are larger: tokens then prefer some experts. */
static float scale_of(const MoeOptions *o, int id) {
    switch (id) {
    case WEIGHT_ROUTER:
        return 4 / sqrtf((float)o->hidden);
    case WEIGHT_W1:
        return 3 / sqrtf((float)o->hidden);
    case WEIGHT_W2:
        return 3 / sqrtf((float)o->ffn);
    default:
        return 1;
    }
}

int64_t moe_token_at(int rank, int64_t token) {
    return ((int64_t)rank << 24) + token;
}

/* Each rank's second token is zero: all its logits are equal, and the tie rule decides. */
static int is_zero(const MoeOptions *o, int id, int64_t at) {
    return id == INPUT_TOKENS && (at / o->hidden) % (1 << 24) == MOE_ZERO_TOKEN;
}

/* Blocks that share a scale have different magnitudes, of tokens in each row and of the experts'
 * weights in each tile, so that a product with the scale of another block is wrong. `left` counts
 * the elements up to the next block. The mean square of the factors is 1. */
static float magnitude_of(const MoeOptions *o, uint64_t hash, int id, int64_t at, int64_t *left) {
    enum { BLOCK = 128 };
    const int64_t width = id == WEIGHT_W1 ? 2 * o->ffn : o->hidden;
    const int64_t row = at / width, column = at % width;
    const bool tiles = id == WEIGHT_W1 || id == WEIGHT_W2;
    const int64_t end = (column / BLOCK + 1) * BLOCK;
    *left = (end < width ? end : width) - column;
    hash = hash_add(hash_add(hash, tiles ? row / BLOCK : row), column / BLOCK);
    return id == WEIGHT_ROUTER ? 1 : 1.735f / (float)(1 << (int)(hash_unit(hash) * 4));
}

void moe_input(const MoeOptions *options, int id, int64_t begin, int64_t count, float *out) {
    EpType type = (EpType)options->type;
    const uint64_t hash = hash_add(hash_word((uint64_t)options->run.seed), id);
    const float scale = scale_of(options, id);
    float magnitude = 1;
    for (int64_t i = 0, left = 0; i < count; i++, left--) {
        if (left == 0) magnitude = magnitude_of(options, hash, id, begin + i, &left);
        float value = ((float)hash_unit(hash_add(hash, begin + i)) * 2 - 1) * scale * magnitude;
        uint16_t narrow;
        if (type != EP_TYPE_FP32) {
            data_from_float(type, &value, &narrow, 1);
            data_to_float(type, &narrow, &value, 1);
        }
        out[i] = is_zero(options, id, begin + i) ? 0 : value;
    }
}

/* Uneven as in ep_bench. */
int64_t moe_tokens_of(const MoeOptions *options, int ranks, int rank) {
    int64_t size = options->tokens;
    if (rank >= ranks - options->idle) return 0;
    return size - (options->uneven ? size * ((rank * 37) % 64) / 128 : 0);
}
