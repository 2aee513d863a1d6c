/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/device_step_layout.h"

/* Number of local experts, tokens and slots: the extents of a rank's arrays. */
typedef struct Extents {
    size_t experts, tokens, slots;
} Extents;

/* Returns the largest extents on any rank. */
static Extents most(const Case *c) {
    size_t experts = (size_t)(c->experts + c->ranks - 1) / (size_t)c->ranks;
    int64_t rows = c->capacity; /* or with exact sizes what all entries of all ranks take */
    if (!rows) rows = (int64_t)c->ranks * c->max_tokens * c->top_k + c->experts * c->alignment;
    size_t slots = c->layout == EP_LAYOUT_BATCHED ? experts * (size_t)c->rows_per_expert
                                                  : (size_t)(rows + c->spare_rows);
    if (c->layout == EP_LAYOUT_RANK_MAJOR) slots = (size_t)c->ranks * (size_t)c->max_tokens;
    return (Extents){experts, (size_t)c->max_tokens, slots};
}

static Extents extents_of(const RankWorld *me) {
    return (Extents){(size_t)me->num_experts, (size_t)me->rows, (size_t)me->buffer_rows};
}

static size_t index_bytes(const Case *c) {
    return c->index_type == EP_TYPE_INT64 ? 8 : 4;
}

static size_t input_bytes(const Case *c, StepInput input, Extents n) {
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
    case IN_COMBINE_WEIGHTS:
        return c->weights_at_combine ? n.tokens * k * 4 : 0;
    case IN_GRAD_SLOT_WEIGHTS:
        return n.slots * (size_t)world_row_weights(c) * 4;
    case IN_BIAS0:
    case IN_BIAS1:
        return c->biases > (int)(input - IN_BIAS0) ? n.tokens * case_sum_bytes(c) : 0;
    default:
        return n.tokens * case_sum_bytes(c);
    }
}

static size_t output_bytes(const Case *c, StepOutput output, Extents n) {
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
        return case_has_rows(c) ? n.slots * k * narrow : 0;
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

/* Returns the least alignment that the public header accepts. */
static size_t output_align(StepOutput output) {
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

/* Inputs are aligned to 16 bytes and no more. */
size_t device_step_input_offset(const Case *c, int input) {
    size_t at = 16;
    for (int i = 0; i < input; i++)
        at += (input_bytes(c, (StepInput)i, most(c)) + 127) / 128 * 128;
    return at;
}

size_t device_step_inputs_size(const Case *c) {
    return (device_step_input_offset(c, INPUTS) + 127) / 128 * 128;
}

size_t device_step_output_offset(const Case *c, int output) {
    size_t at = 0;
    for (int i = 0; i < output; i++)
        at += image_room(output_bytes(c, (StepOutput)i, most(c)));
    return at;
}

size_t device_step_outputs_size(const Case *c) {
    return device_step_output_offset(c, STEP_OUTPUTS);
}

size_t device_step_bytes(const Case *c) {
    return device_step_inputs_size(c) + device_step_outputs_size(c);
}

const RankWorld *device_step_rank(const DeviceStep *gpu) {
    return &gpu->step.world->rank[gpu->step.rank];
}

Image device_step_image(const DeviceStep *gpu, char *copy, StepOutput output) {
    size_t bytes = output_bytes(&gpu->c, output, extents_of(device_step_rank(gpu)));
    return image_over(copy + device_step_output_offset(&gpu->c, output), bytes,
                      output_align(output));
}

size_t device_step_input_bytes(const DeviceStep *gpu, StepInput input) {
    return input_bytes(&gpu->c, input, extents_of(device_step_rank(gpu)));
}

void device_step_poison_copy(const Case *c, char *copy) {
    for (int i = 0; i < STEP_OUTPUTS; i++)
        image_in(copy + device_step_output_offset(c, i), output_bytes(c, (StepOutput)i, most(c)),
                 output_align((StepOutput)i));
}
