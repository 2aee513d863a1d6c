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
    case INPUT_SHARED_W1:
        return 3 / sqrtf((float)o->hidden);
    case WEIGHT_W2:
        return 3 / sqrtf((float)o->ffn);
    case INPUT_SHARED_W2:
        return 3 / sqrtf((float)o->shared);
    default:
        return 1;
    }
}

int64_t moe_token_at(int rank, int64_t token) {
    return ((int64_t)rank << 24) + token;
}

Contents moe_contents(const MoeOptions *o, int id) {
    const bool tiles = id == WEIGHT_W1 || id == WEIGHT_W2;
    const bool even = id == WEIGHT_ROUTER || id == INPUT_SHARED_W1 || id == INPUT_SHARED_W2;
    return (Contents){.hash = hash_add(hash_word((uint64_t)o->run.seed), id),
                      .scale = scale_of(o, id),
                      .width = even              ? 0
                               : id == WEIGHT_W1 ? 2 * o->ffn
                                                 : o->hidden,
                      .rows = tiles ? CONTENTS_BLOCK : 1,
                      .hidden = id == INPUT_TOKENS ? o->hidden : 0};
}

/* Elements up to the end of a row's block, all of one magnitude. */
static int64_t piece_of(const Contents *c, int64_t at, int64_t count) {
    if (!c->width) return count;
    const int64_t column = at % c->width, end = (column / CONTENTS_BLOCK + 1) * CONTENTS_BLOCK;
    const int64_t left = (end < c->width ? end : c->width) - column;
    return left < count ? left : count;
}

void contents_floats(const Contents *c, int64_t at, int64_t count, float *out) {
    for (int64_t i = 0, piece; i < count; i += piece) {
        const float magnitude = contents_magnitude(c, at + i);
        piece = piece_of(c, at + i, count - i);
        for (int64_t j = i; j < i + piece; j++)
            out[j] = contents_value(c, at + j, magnitude);
    }
}

void moe_input(const MoeOptions *options, int id, int64_t begin, int64_t count, float *out) {
    const EpType type = (EpType)options->type;
    const Contents c = moe_contents(options, id);
    uint16_t narrow[CONTENTS_BLOCK];
    contents_floats(&c, begin, count, out);
    for (int64_t i = 0; type != EP_TYPE_FP32 && i < count; i += CONTENTS_BLOCK) {
        const int64_t piece = count - i < CONTENTS_BLOCK ? count - i : CONTENTS_BLOCK;
        data_from_float(type, out + i, narrow, piece);
        data_to_float(type, narrow, out + i, piece);
    }
}

/* Uneven as in ep_bench. */
int64_t moe_tokens_of(const MoeOptions *options, int ranks, int rank) {
    int64_t size = options->tokens;
    if (rank >= ranks - options->idle) return 0;
    return size - (options->uneven ? size * ((rank * 37) % 64) / 128 : 0);
}
