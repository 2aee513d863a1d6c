/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/rig_map.h"

/* Extents of a rank's arrays. */
typedef struct Extents {
    size_t experts, tokens, slots;
} Extents;

static Extents most(const Case *c) {
    size_t experts = (size_t)(c->experts + c->ranks - 1) / (size_t)c->ranks;
    size_t slots = c->layout == EP_LAYOUT_BATCHED ? experts * (size_t)c->rows_per_expert
                                                  : (size_t)(c->capacity + c->spare_rows);
    return (Extents){experts, (size_t)c->max_tokens, slots};
}

static Extents extents_of(const RankWorld *me) {
    return (Extents){(size_t)me->num_experts, (size_t)me->rows, (size_t)me->buffer_rows};
}

static size_t index_bytes(const Case *c) {
    return c->index_type == EP_TYPE_INT64 ? 8 : 4;
}

static size_t input_bytes(const Case *c, RigInput input, Extents n) {
    size_t k = (size_t)c->top_k;
    switch (input) {
    case IN_INDEX:
        return n.tokens * k * index_bytes(c);
    case IN_COUNT:
        return 8;
    case IN_TOKENS:
        return n.tokens * case_row_bytes(c);
    case IN_WEIGHTS:
        return n.tokens * k * 4;
    case IN_SCALES:
        return n.tokens * (size_t)c->scale_bytes;
    case IN_EXPERT_OUT:
        return n.slots * case_sum_bytes(c);
    case IN_SLOT_WEIGHTS:
        return n.slots * 4;
    case IN_GRAD_SLOT_WEIGHTS:
        return n.slots * (size_t)world_row_weights(c) * 4;
    default:
        return n.tokens * case_sum_bytes(c);
    }
}

static size_t output_bytes(const Case *c, RigOutput output, Extents n) {
    size_t k = (size_t)c->top_k, narrow = index_bytes(c), other = 12 - narrow;
    switch (output) {
    case OUT_COUNTS:
        return n.experts * narrow;
    case OUT_PADDED:
        return n.experts * other;
    case OUT_OFFSETS:
        return (n.experts + 1) * narrow;
    case OUT_TOTALS:
        return 3 * other;
    case OUT_TOKENS:
        return n.slots * case_recv_bytes(c);
    case OUT_WEIGHTS:
        return n.slots * (size_t)world_row_weights(c) * 4;
    case OUT_SCALES:
        return n.slots * case_recv_scale_bytes(c);
    case OUT_INDEX:
        return c->layout == EP_LAYOUT_FLAT ? n.slots * k * narrow : 0;
    case OUT_GRAD_ROWS:
        return n.slots * case_sum_bytes(c);
    case OUT_GRAD_SLOTS:
        return n.slots * 4;
    case OUT_GRAD_WEIGHTS:
        return n.tokens * k * 4;
    default:
        return n.tokens * case_sum_bytes(c);
    }
}

/* What the header promises to accept, and no more. */
static size_t output_align(RigOutput output) {
    switch (output) {
    case OUT_TOKENS:
    case OUT_SUMS:
    case OUT_GRAD_ROWS:
    case OUT_GRAD_TOKENS:
        return 16;
    case OUT_WEIGHTS:
    case OUT_SCALES:
    case OUT_GRAD_SLOTS:
    case OUT_GRAD_WEIGHTS:
        return 4;
    default:
        return 8;
    }
}

/* Inputs, too, are aligned to 16 bytes and no more. */
size_t rig_input_offset(const Case *c, int input) {
    size_t at = 16;
    for (int i = 0; i < input; i++)
        at += (input_bytes(c, (RigInput)i, most(c)) + 127) / 128 * 128;
    return at;
}

size_t rig_inputs_size(const Case *c) {
    return (rig_input_offset(c, INPUTS) + 127) / 128 * 128;
}

size_t rig_output_offset(const Case *c, int output) {
    size_t at = 0;
    for (int i = 0; i < output; i++)
        at += image_room(output_bytes(c, (RigOutput)i, most(c)));
    return at;
}

size_t rig_outputs_size(const Case *c) {
    return rig_output_offset(c, RIG_OUTPUTS);
}

size_t rig_bytes(const Case *c) {
    return rig_inputs_size(c) + rig_outputs_size(c);
}

const RankWorld *rig_rank(const Rig *rig) {
    return &rig->step.world->rank[rig->step.rank];
}

/* An output of the loaded world, in one of the host's copies. */
Image rig_image(const Rig *rig, char *copy, RigOutput output) {
    size_t bytes = output_bytes(&rig->c, output, extents_of(rig_rank(rig)));
    return image_over(copy + rig_output_offset(&rig->c, output), bytes, output_align(output));
}

size_t rig_input_bytes(const Rig *rig, RigInput input) {
    return input_bytes(&rig->c, input, extents_of(rig_rank(rig)));
}

void rig_poison_copy(const Case *c, char *copy) {
    for (int i = 0; i < RIG_OUTPUTS; i++)
        image_in(copy + rig_output_offset(c, i), output_bytes(c, (RigOutput)i, most(c)),
                 output_align((RigOutput)i));
}
