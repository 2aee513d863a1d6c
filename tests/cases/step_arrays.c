/* SPDX-License-Identifier: Apache-2.0 */
/* The arrays of a step: shapes, contents, and what is expected. */
#include <math.h>

#include "tests/cases/step.h"
#include "tests/oracle/expect.h"
#include "tests/oracle/number.h"
#include "tests/oracle/quant.h"

/* ---- shapes -------------------------------------------------------------------------------- */

/* Number of local experts, tokens and slots: the extents of a rank's arrays. */
typedef struct Extents {
    int64_t experts, tokens, slots;
} Extents;

/* Returns the largest extents on any rank. */
static Extents most(const Case *c) {
    int64_t experts = (case_physical(c) + c->ranks - 1) / c->ranks, rows = c->capacity;
    /* with exact sizes what all entries of all ranks take */
    if (!rows) rows = (int64_t)c->ranks * c->max_tokens * c->top_k + case_physical(c) * c->alignment;
    rows += c->spare_rows;
    if (c->layout == EP_LAYOUT_BATCHED) rows = experts * c->rows_per_expert;
    if (c->layout == EP_LAYOUT_RANK_MAJOR) rows = (int64_t)c->ranks * c->max_tokens;
    return (Extents){experts, c->max_tokens, rows};
}

static Extents extents_of(const Step *step) {
    const RankWorld *me = step_mine(step);
    return (Extents){me->num_experts, me->rows, me->buffer_rows};
}

static EpTensor by_row(const Case *c, Extents n, EpType type, int64_t columns) {
    int64_t block = case_block_rows(c), blocks = case_has_rows(c) ? c->ranks : n.experts;
    if (block) return ep_tensor_3d(NULL, type, blocks, block, columns);
    return ep_tensor_2d(NULL, type, n.slots, columns);
}

static EpTensor by_slot(const Case *c, Extents n) {
    EpTensor tensor = by_row(c, n, EP_TYPE_FP32, 1);
    tensor.ndim--;
    return tensor;
}

static EpTensor by_weight(const Case *c, Extents n) {
    return case_has_rows(c) ? by_row(c, n, EP_TYPE_FP32, c->top_k) : by_slot(c, n);
}

static EpTensor scales_of_rows(const Case *c, Extents n, EpType type, int64_t scales) {
    EpTensor tensor = by_row(c, n, type, scales);
    int last = tensor.ndim - 1;
    if (c->scale_order == EP_SCALES_BY_ROW) return tensor;
    if (c->scale_order == EP_SCALES_SWIZZLED) {
        tensor.shape[last] = (tensor.shape[last] + 3) / 4 * 4;
        tensor.shape[last - 1] = (tensor.shape[last - 1] + 127) / 128 * 128;
        return tensor;
    }
    tensor.shape[last] = tensor.shape[last - 1];
    tensor.shape[last - 1] = scales;
    return tensor;
}

static EpTensor input_shape(const Case *c, Extents n, StepInput input) {
    EpTensor weights = ep_tensor_2d(NULL, EP_TYPE_FP32, n.tokens, c->top_k);
    EpTensor sums = ep_tensor_2d(NULL, c->sum_type, n.tokens, c->hidden);
    const EpTensor shapes[INPUTS] = {
        [IN_INDEX] = ep_tensor_2d(NULL, c->index_type, n.tokens, c->top_k),
        [IN_COUNT] = ep_tensor_1d(NULL, c->index_type, 1),
        [IN_TOKENS] = ep_tensor_2d(NULL, c->row_type, n.tokens, c->hidden),
        [IN_WEIGHTS] = weights,
        [IN_SCALES] = ep_tensor_2d(NULL, EP_TYPE_UINT8, n.tokens, c->scale_bytes),
        [IN_GLOBAL_SCALE] = ep_tensor_1d(NULL, EP_TYPE_FP32, 1),
        [IN_EXPERT_OUT] = by_row(c, n, c->sum_type, c->hidden),
        [IN_SLOT_WEIGHTS] = by_slot(c, n),
        [IN_COMBINE_WEIGHTS] = weights,
        [IN_GRAD_SLOT_WEIGHTS] = by_weight(c, n),
        [IN_GRAD_OUT] = sums,
        [IN_BIAS0] = sums,
        [IN_BIAS1] = sums};
    EpTensor shape = shapes[input];
    int is_empty = input >= IN_BIAS0 && c->biases <= (int)input - IN_BIAS0;
    if (is_empty || (input == IN_COMBINE_WEIGHTS && !c->weights_at_combine)) shape.shape[0] = 0;
    return shape;
}

/* Every second seed passes offsets without their end, unless a graph may serve several seeds. */
static EpTensor output_shape(const Case *c, Extents n, StepOutput output) {
    EpType type = c->index_type, other = type == EP_TYPE_INT64 ? EP_TYPE_INT32 : EP_TYPE_INT64;
    int has_end = c->counted || c->seed % 2 == 0;
    EpTensor sums = ep_tensor_2d(NULL, c->sum_type, n.tokens, c->hidden);
    const QuantForm *grads = quant_form(c->grad_quant);
    int64_t grad_scales = grads->bits ? quant_scales(c->grad_quant, c->hidden) : 0;
    const EpTensor shapes[STEP_OUTPUTS] = {
        [OUT_COUNTS] = ep_tensor_1d(NULL, type, n.experts),
        [OUT_PADDED] = ep_tensor_1d(NULL, other, n.experts),
        [OUT_OFFSETS] = ep_tensor_1d(NULL, type, n.experts + has_end),
        [OUT_TOTALS] = ep_tensor_1d(NULL, other, 3),
        [OUT_RECV_ROWS] = ep_tensor_1d(NULL, type, 1),
        [OUT_NEEDED_ROWS] = ep_tensor_1d(NULL, other, 1),
        [OUT_DROPPED] = ep_tensor_1d(NULL, type, 1),
        [OUT_SOURCE_ROWS] = ep_tensor_1d(NULL, other, c->ranks),
        [OUT_SOURCES] = ep_tensor_2d(NULL, other, n.experts, c->ranks),
        [OUT_TOKENS] = by_row(c, n, case_recv_type(c), case_recv_width(c)),
        [OUT_WEIGHTS] = by_weight(c, n),
        [OUT_SCALES] = scales_of_rows(c, n, case_scale_type(c), case_scales(c)),
        [OUT_INDEX] = by_row(c, n, type, c->top_k),
        [OUT_SUMS] = sums,
        [OUT_GRAD_ROWS] = by_row(c, n, case_grad_type(c), c->hidden),
        [OUT_GRAD_SLOTS] = by_slot(c, n),
        [OUT_GRAD_SCALES] = scales_of_rows(c, n, grads->scale_type, grad_scales),
        [OUT_GRAD_TOKENS] = sums,
        [OUT_GRAD_WEIGHTS] = ep_tensor_2d(NULL, EP_TYPE_FP32, n.tokens, c->top_k)};
    return shapes[output];
}

size_t step_bytes(EpTensor tensor) {
    size_t bytes = ep_type_bytes(tensor.type);
    for (int i = 0; i < tensor.ndim; i++)
        bytes *= (size_t)tensor.shape[i];
    return bytes;
}

size_t case_input_bytes(const Case *c, StepInput input) {
    return step_bytes(input_shape(c, most(c), input));
}

size_t case_output_bytes(const Case *c, StepOutput output) {
    EpTensor tensor = output_shape(c, most(c), output);
    return step_bytes(tensor) + (output == OUT_OFFSETS ? ep_type_bytes(tensor.type) : 0);
}

size_t case_output_align(const Case *c, StepOutput output) {
    static const unsigned rows =
        1u << OUT_TOKENS | 1u << OUT_SUMS | 1u << OUT_GRAD_ROWS | 1u << OUT_GRAD_TOKENS;
    size_t bytes = ep_type_bytes(output_shape(c, most(c), output).type);
    return rows >> output & 1 ? 16 : bytes < 4 ? 4 : bytes;
}

EpTensor step_output(const Step *step, StepOutput output) {
    return output_shape(&step->world->c, extents_of(step), output);
}

EpTensor step_rows(const Step *step, const void *data, EpType type, int64_t columns) {
    EpTensor tensor = by_row(&step->world->c, extents_of(step), type, columns);
    tensor.data = (void *)data;
    return tensor;
}

EpTensor step_recv_tokens(const Step *step, void *data) {
    EpTensor tensor = step_output(step, OUT_TOKENS);
    tensor.data = data;
    return tensor;
}

/* ---- inputs -------------------------------------------------------------------------------- */

EpTensor step_input(const Step *step, StepInput input) {
    const RankWorld *me = step_mine(step);
    void *const data[INPUTS] = {
        [IN_TOKENS] = me->token,           [IN_WEIGHTS] = me->weight,
        [IN_SCALES] = me->scale,           [IN_GLOBAL_SCALE] = (void *)&me->global_scale,
        [IN_EXPERT_OUT] = me->expert_out,  [IN_SLOT_WEIGHTS] = me->slot_weight,
        [IN_COMBINE_WEIGHTS] = me->weight, [IN_GRAD_SLOT_WEIGHTS] = me->grad_slot_weight,
        [IN_GRAD_OUT] = me->grad_out,      [IN_BIAS0] = me->bias[0],
        [IN_BIAS1] = me->bias[1]};
    EpTensor tensor = input_shape(&step->world->c, extents_of(step), input);
    tensor.data = data[input];
    return tensor;
}

static void put_integers(void *to, EpType type, const int64_t *values, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (type == EP_TYPE_INT64)
            memcpy((char *)to + 8 * i, &values[i], 8);
        else
            memcpy((char *)to + 4 * i, &(int32_t){(int32_t)values[i]}, 4);
}

void step_fill(const Step *step, StepInput input, void *to) {
    const RankWorld *me = step_mine(step);
    EpTensor from = step_input(step, input);
    int64_t count = me->tokens;
    if (input == IN_INDEX)
        put_integers(to, from.type, me->index, (int64_t)me->rows * step->world->c.top_k);
    else if (input == IN_COUNT)
        put_integers(to, from.type, &count, 1);
    else if (step_bytes(from) > 0)
        memcpy(to, from.data, step_bytes(from));
}

/* ---- outputs ------------------------------------------------------------------------------- */

#define DISPATCHED (STEP_DISPATCH | STEP_DISPATCH_WAIT)
#define COMBINED (STEP_COMBINE | STEP_COMBINE_WAIT)

static const struct {
    const char *name;
    unsigned writers;
} arrays[STEP_ARRAYS] = {[IN_INDEX] = {"topk_idx", 0},
                         [IN_COUNT] = {"num_tokens", 0},
                         [IN_TOKENS] = {"tokens", 0},
                         [IN_WEIGHTS] = {"topk_weights", 0},
                         [IN_SCALES] = {"scales", 0},
                         [IN_GLOBAL_SCALE] = {"extras.global_scale", 0},
                         [IN_EXPERT_OUT] = {"expert_out", 0},
                         [IN_SLOT_WEIGHTS] = {"slot_weights", 0},
                         [IN_COMBINE_WEIGHTS] = {"topk_weights", 0},
                         [IN_GRAD_SLOT_WEIGHTS] = {"grad_slot_weights", 0},
                         [IN_GRAD_OUT] = {"grad_out", 0},
                         [IN_BIAS0] = {"extras.bias0", 0},
                         [IN_BIAS1] = {"extras.bias1", 0},
                         [OUT_COUNTS] = {"expert_counts", STEP_PREPARE},
                         [OUT_PADDED] = {"expert_padded", STEP_PREPARE},
                         [OUT_OFFSETS] = {"expert_offsets", STEP_PREPARE},
                         [OUT_TOTALS] = {"totals", STEP_PREPARE},
                         [OUT_RECV_ROWS] = {"recv_rows", STEP_PREPARE},
                         [OUT_NEEDED_ROWS] = {"needed_rows", STEP_PREPARE},
                         [OUT_DROPPED] = {"dropped_slots", STEP_PREPARE},
                         [OUT_SOURCE_ROWS] = {"source_rows", STEP_PREPARE},
                         [OUT_SOURCES] = {"source_counts", STEP_PREPARE},
                         [OUT_TOKENS] = {"recv_tokens", DISPATCHED},
                         [OUT_WEIGHTS] = {"recv_topk_weights", DISPATCHED},
                         [OUT_SCALES] = {"recv_scales", DISPATCHED},
                         [OUT_INDEX] = {"recv_topk_idx", DISPATCHED},
                         [OUT_SUMS] = {"out", COMBINED},
                         [OUT_GRAD_ROWS] = {"grad_expert_out", STEP_COMBINE_BACKWARD},
                         [OUT_GRAD_SLOTS] = {"grad_slot_weights", STEP_COMBINE_BACKWARD},
                         [OUT_GRAD_SCALES] = {"extras.grad_scales", STEP_COMBINE_BACKWARD},
                         [OUT_GRAD_TOKENS] = {"grad_tokens", STEP_DISPATCH_BACKWARD},
                         [OUT_GRAD_WEIGHTS] = {"grad_topk_weights", STEP_DISPATCH_BACKWARD},
                         [EXPERT_TOKENS] = {"extras.expert_tokens", 0},
                         [PEER_ROWS] = {"extras.peer_rows", 0},
                         [PEER_BYTES] = {"extras.peer_bytes", 0},
                         [PEER_WAIT] = {"extras.peer_wait_ns", 0},
                         [LONGEST_WAIT] = {"extras.peer_longest_wait_ns", 0},
                         [READY_WORDS] = {"extras.ready", 0},
                         [DONE_WORDS] = {"extras.done", 0}};

const char *step_array_name(int array) {
    return arrays[array].name;
}

int case_asks(const Case *c, StepOutput output) {
    if (output == OUT_WEIGHTS || output == OUT_GRAD_SLOTS || output == OUT_GRAD_WEIGHTS)
        return c->weighted;
    if (output == OUT_SCALES) return case_scales(c) > 0;
    if (output == OUT_GRAD_SCALES) return case_grad_scale_bytes(c) > 0;
    return output != OUT_INDEX || case_has_rows(c);
}

unsigned case_writers(const Case *c, StepOutput output) {
    unsigned writers = arrays[output].writers;
    return writers == STEP_PREPARE && c->mode == EP_MODE_LATENCY ? DISPATCHED : writers;
}

static void expect_plan(const Step *step, const Image *out) {
    const RankWorld *me = step_mine(step);
    int64_t totals[] = {me->recv_rows, me->needed_rows, me->dropped};
    const int64_t *const values[] = {me->count,    me->padded,     me->offset,
                                     totals,       &me->recv_rows, &me->needed_rows,
                                     &me->dropped, me->from_rows,  me->from};
    for (int i = OUT_COUNTS; i <= OUT_SOURCES; i++) {
        EpTensor t = step_output(step, (StepOutput)i);
        int64_t n = (int64_t)(step_bytes(t) / ep_type_bytes(t.type));
        if (out[i].base) put_integers(out[i].data, t.type, values[i - OUT_COUNTS], n);
    }
}

void step_expect(const Step *step, unsigned ops, Image *out) {
    const World *world = step->world;
    ExpectedRows rows = {out[OUT_TOKENS], out[OUT_WEIGHTS], out[OUT_SCALES], out[OUT_INDEX]};
    if (ops & STEP_PREPARE) expect_plan(step, out);
    if (ops & DISPATCHED) expect_dispatch(world, step->rank, &rows);
    if (ops & COMBINED) expect_combine(world, step->rank, &out[OUT_SUMS]);
    if (ops & STEP_COMBINE_BACKWARD)
        expect_combine_backward(world, step->rank, &out[OUT_GRAD_ROWS], &out[OUT_GRAD_SCALES]);
    if (ops & STEP_DISPATCH_BACKWARD)
        expect_dispatch_backward(world, step->rank, &out[OUT_GRAD_TOKENS], &out[OUT_GRAD_WEIGHTS]);
}

static void accept_dots(const Step *step, const Image *got, const Image *expected) {
    const RankWorld *me = step_mine(step);
    for (int64_t row = 0; row < me->buffer_rows; row++) {
        float value;
        double magnitude, exact;
        if (!world_writes(step->world, &me->row[row])) continue;
        memcpy(&value, got->data + row * 4, 4);
        exact = expect_slot_gradient(step->world, step->rank, row, &magnitude);
        CHECK(isnan(exact) ? isnan(value) : fabs(value - exact) <= 1e-5 * magnitude,
              "row %lld: %.9g instead of %.9g", (long long)row, (double)value, exact);
        memcpy(expected->data + row * 4, &value, 4);
    }
}

/* A NaN may have any bits. */
static void accept_nans(EpType type, const Image *got, const Image *expected) {
    size_t size = ep_type_bytes(type);
    for (size_t i = 0; i < got->bytes / size; i++)
        if (isnan(number_get(expected->data, type, (int64_t)i)) &&
            isnan(number_get(got->data, type, (int64_t)i)))
            memcpy(expected->data + i * size, got->data + i * size, size);
}

void step_compare(const Step *step, StepOutput output, const Image *got, Image *expected) {
    const RankWorld *me = step_mine(step);
    int is_received = output >= OUT_TOKENS && output <= OUT_INDEX;
    size_t rows = (size_t)(is_received ? me->buffer_rows : me->rows);
    int is_sum = output == OUT_SUMS || output == OUT_GRAD_TOKENS ||
                 (output == OUT_GRAD_ROWS && !case_grad_scale_bytes(&step->world->c));
    if (output == OUT_GRAD_SLOTS) accept_dots(step, got, expected);
    if (is_sum && step->world->c.strange) accept_nans(step->world->c.sum_type, got, expected);
    image_check_equal(got, expected, rows ? got->bytes / rows : 0, arrays[output].name);
}
