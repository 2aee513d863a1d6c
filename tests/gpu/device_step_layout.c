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
    size_t entries = n.tokens * (size_t)c->top_k;
    const size_t bytes[INPUTS] = {[IN_INDEX] = entries * index_bytes(c),
                                  [IN_COUNT] = 8,
                                  [IN_TOKENS] = n.tokens * case_row_bytes(c),
                                  [IN_WEIGHTS] = entries * 4,
                                  [IN_SCALES] = n.tokens * (size_t)c->scale_bytes,
                                  [IN_EXPERT_OUT] = n.slots * case_sum_bytes(c),
                                  [IN_SLOT_WEIGHTS] = n.slots * 4,
                                  [IN_COMBINE_WEIGHTS] = c->weights_at_combine ? entries * 4 : 0,
                                  [IN_GRAD_SLOT_WEIGHTS] =
                                      n.slots * (size_t)world_row_weights(c) * 4,
                                  [IN_GRAD_OUT] = n.tokens * case_sum_bytes(c),
                                  [IN_BIAS0] = c->biases > 0 ? n.tokens * case_sum_bytes(c) : 0,
                                  [IN_BIAS1] = c->biases > 1 ? n.tokens * case_sum_bytes(c) : 0};
    return bytes[input];
}

static size_t output_bytes(const Case *c, StepOutput output, Extents n) {
    size_t k = (size_t)c->top_k, narrow = index_bytes(c), other = 12 - narrow;
    const size_t bytes[STEP_OUTPUTS] = {[OUT_COUNTS] = n.experts * narrow,
                                        [OUT_PADDED] = n.experts * other,
                                        [OUT_OFFSETS] = (n.experts + 1) * narrow,
                                        [OUT_TOTALS] = 3 * other,
                                        [OUT_TOKENS] = n.slots * case_recv_bytes(c),
                                        [OUT_WEIGHTS] = n.slots * (size_t)world_row_weights(c) * 4,
                                        [OUT_SCALES] = n.slots * case_recv_scale_bytes(c),
                                        [OUT_INDEX] = case_has_rows(c) ? n.slots * k * narrow : 0,
                                        [OUT_SUMS] = n.tokens * case_sum_bytes(c),
                                        [OUT_GRAD_ROWS] = n.slots * case_sum_bytes(c),
                                        [OUT_GRAD_SLOTS] = n.slots * 4,
                                        [OUT_GRAD_TOKENS] = n.tokens * case_sum_bytes(c),
                                        [OUT_GRAD_WEIGHTS] = n.tokens * k * 4};
    return bytes[output];
}

/* Returns the least alignment that the public header accepts. */
static size_t output_align(StepOutput output) {
    static const size_t aligns[STEP_OUTPUTS] = {8, 8, 8, 8, 16, 4, 4, 8, 16, 16, 4, 16, 4};
    return aligns[output];
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
