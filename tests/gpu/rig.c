/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/rig.h"

#include <math.h>
#include <string.h>

#include "tests/gpu/arena.h"
#include "tests/oracle/expect.h"

/* ---- what lies where ----------------------------------------------------------------------- */

typedef enum RigInput {
    IN_INDEX,
    IN_COUNT,
    IN_TOKENS,
    IN_WEIGHTS,
    IN_SCALES,
    IN_EXPERT_OUT,
    IN_SLOT_WEIGHTS,
    IN_GRAD_SLOT_WEIGHTS,
    IN_GRAD_OUT,
    INPUTS
} RigInput;

typedef struct Output {
    const char *name;
    unsigned op;
} Output;

static const Output outputs[RIG_OUTPUTS] = {
    {"expert_counts", RIG_PREPARE},
    {"expert_padded", RIG_PREPARE},
    {"expert_offsets", RIG_PREPARE},
    {"totals", RIG_PREPARE},
    {"recv_tokens", RIG_DISPATCH},
    {"recv_topk_weights", RIG_DISPATCH},
    {"recv_scales", RIG_DISPATCH},
    {"recv_topk_idx", RIG_DISPATCH},
    {"out", RIG_COMBINE},
    {"grad_expert_out", RIG_COMBINE_BACKWARD},
    {"grad_slot_weights", RIG_COMBINE_BACKWARD},
    {"grad_tokens", RIG_DISPATCH_BACKWARD},
    {"grad_topk_weights", RIG_DISPATCH_BACKWARD},
};

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
        return n.slots * case_row_bytes(c);
    case OUT_WEIGHTS:
        return n.slots * (size_t)world_row_weights(c) * 4;
    case OUT_SCALES:
        return n.slots * (size_t)c->scale_bytes;
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
static size_t input_offset(const Case *c, int input) {
    size_t at = 16;
    for (int i = 0; i < input; i++)
        at += (input_bytes(c, (RigInput)i, most(c)) + 127) / 128 * 128;
    return at;
}

static size_t inputs_size(const Case *c) {
    return (input_offset(c, INPUTS) + 127) / 128 * 128;
}

static size_t output_offset(const Case *c, int output) {
    size_t at = 0;
    for (int i = 0; i < output; i++)
        at += image_room(output_bytes(c, (RigOutput)i, most(c)));
    return at;
}

static size_t outputs_size(const Case *c) {
    return output_offset(c, RIG_OUTPUTS);
}

size_t rig_bytes(const Case *c) {
    return inputs_size(c) + outputs_size(c);
}

static const RankWorld *mine(const Rig *rig) {
    return &rig->step.world->rank[rig->step.rank];
}

/* An output of the loaded world, in one of the host's copies. */
static Image image_of(const Rig *rig, char *copy, RigOutput output) {
    size_t bytes = output_bytes(&rig->c, output, extents_of(mine(rig)));
    return image_over(copy + output_offset(&rig->c, output), bytes, output_align(output));
}

Image rig_output(const Rig *rig, RigOutput output) {
    return image_of(rig, rig->got, output);
}

/* ---- life ---------------------------------------------------------------------------------- */

bool check_cuda(cudaError_t error, const char *file, int line, const char *call) {
    return check_that(error == cudaSuccess, file, line, call, "%s", cudaGetErrorString(error));
}

cudaStream_t new_stream(void) {
    cudaStream_t stream = NULL;
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

EpHandle *rig_handle(EpGroup *group, const Case *c) {
    EpHandleConfig config = case_handle_config(c);
    EpHandle *handle = NULL;
    if (c->layout != EP_LAYOUT_BATCHED) config.max_recv_rows = c->capacity;
    config.alignment = c->alignment;
    config.overflow = (int32_t)c->overflow;
    CHECK_OK(ep_handle_create(group, &config, NULL, 0, &handle));
    return handle;
}

static char *host_copy(size_t bytes) {
    char *copy = gpu_allocate_zeroed(1, bytes);
    CHECK(copy != NULL, "no pinned memory for %zu bytes", bytes);
    return copy;
}

void rig_open(Rig *rig, EpGroup *group, EpHandle *handle, const Case *c, int rank,
              cudaStream_t stream, void *device) {
    *rig = (Rig){.step = {group, handle, NULL, rank}, .c = *c, .stream = stream, .device = device};
    if (!device) REQUIRE_CUDA(cudaMalloc((void **)&rig->device, rig_bytes(c)));
    rig->owns_device = !device;
    rig->inputs = host_copy(inputs_size(c));
    rig->poison = host_copy(outputs_size(c));
    rig->expected = host_copy(outputs_size(c));
    rig->got = host_copy(outputs_size(c));
    for (int i = 0; i < RIG_OUTPUTS; i++)
        image_in(rig->poison + output_offset(c, i), output_bytes(c, (RigOutput)i, most(c)),
                 output_align((RigOutput)i));
}

void rig_close(Rig *rig) {
    if (rig->owns_device) CHECK_CUDA(cudaFree(rig->device));
    char *copies[] = {rig->inputs, rig->poison, rig->expected, rig->got};
    for (int i = 0; i < 4; i++)
        gpu_release(copies[i]);
    *rig = (Rig){.device = NULL};
}

/* ---- loading ------------------------------------------------------------------------------- */

static void put_integers(char *to, EpType type, const int64_t *values, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        int32_t narrow = (int32_t)values[i];
        if (type == EP_TYPE_INT64)
            memcpy(to + 8 * i, &values[i], 8);
        else
            memcpy(to + 4 * i, &narrow, 4);
    }
}

static void fill_inputs(Rig *rig) {
    const RankWorld *me = mine(rig);
    const void *from[INPUTS] = {NULL,        NULL,           me->token,       me->weight,
                                me->scale,   me->expert_out, me->slot_weight, me->grad_slot_weight,
                                me->grad_out};
    int64_t count = me->tokens;
    put_integers(rig->inputs + input_offset(&rig->c, IN_INDEX), rig->c.index_type, me->index,
                 (int64_t)me->rows * rig->c.top_k);
    put_integers(rig->inputs + input_offset(&rig->c, IN_COUNT), rig->c.index_type, &count, 1);
    for (int i = IN_TOKENS; i < INPUTS; i++)
        memcpy(rig->inputs + input_offset(&rig->c, i), from[i],
               input_bytes(&rig->c, (RigInput)i, extents_of(me)));
}

static void expect_plan(Rig *rig) {
    const RankWorld *me = mine(rig);
    EpType type = rig->c.index_type, other = type == EP_TYPE_INT64 ? EP_TYPE_INT32 : EP_TYPE_INT64;
    int64_t totals[] = {me->recv_rows, me->needed_rows, me->dropped};
    const int64_t *values[] = {me->count, me->padded, me->offset, totals};
    int64_t n[] = {me->num_experts, me->num_experts, me->num_experts + 1, 3};
    for (int i = OUT_COUNTS; i <= OUT_TOTALS; i++) {
        Image image = image_of(rig, rig->expected, (RigOutput)i);
        put_integers((char *)image.data, i == OUT_COUNTS || i == OUT_OFFSETS ? type : other,
                     values[i], n[i]);
    }
}

static void expect_all(Rig *rig) {
    const World *world = rig->step.world;
    int rank = rig->step.rank;
    Image image[RIG_OUTPUTS];
    for (int i = 0; i < RIG_OUTPUTS; i++)
        image[i] = image_of(rig, rig->expected, (RigOutput)i);
    ExpectedRows rows = {image[OUT_TOKENS], image[OUT_WEIGHTS], image[OUT_SCALES],
                         image[OUT_INDEX]};
    expect_plan(rig);
    expect_dispatch(world, rank, &rows);
    expect_combine(world, rank, &image[OUT_SUMS]);
    expect_combine_backward(world, rank, &image[OUT_GRAD_ROWS]);
    expect_dispatch_backward(world, rank, &image[OUT_GRAD_TOKENS], &image[OUT_GRAD_WEIGHTS]);
}

void rig_load(Rig *rig, const World *world) {
    CHECK_CUDA(cudaStreamSynchronize(rig->stream));
    rig->step.world = world;
    fill_inputs(rig);
    memcpy(rig->expected, rig->poison, outputs_size(&rig->c));
    expect_all(rig);
    CHECK_CUDA(cudaMemcpyAsync(rig->device, rig->inputs, inputs_size(&rig->c), cudaMemcpyDefault,
                               rig->stream));
    rig_poison(rig);
    CHECK_CUDA(cudaStreamSynchronize(rig->stream));
}

void rig_poison(Rig *rig) {
    CHECK_CUDA(cudaMemcpyAsync(rig->device + inputs_size(&rig->c), rig->poison,
                               outputs_size(&rig->c), cudaMemcpyDefault, rig->stream));
    rig->issued = 0;
}

/* ---- operations ---------------------------------------------------------------------------- */

static EpTensor from(const Rig *rig, EpTensor tensor, RigInput input) {
    tensor.data = rig->device + input_offset(&rig->c, (int)input);
    return tensor;
}

static EpTensor into(const Rig *rig, EpTensor tensor, RigOutput output) {
    tensor.data =
        rig->device + inputs_size(&rig->c) + output_offset(&rig->c, (int)output) +
        (image_of(rig, rig->poison, output).data - image_of(rig, rig->poison, output).base);
    return tensor;
}

/* Rows of a receive buffer of the caller's; and the shape of recv_topk_weights and its gradient. */
static EpTensor rows_of(const Rig *rig, EpType type) {
    return step_rows(&rig->step, NULL, type, rig->c.hidden);
}

static EpTensor weights_of(const Rig *rig) {
    if (rig->c.layout != EP_LAYOUT_FLAT) return step_slot_weights(&rig->step);
    return step_rows(&rig->step, NULL, EP_TYPE_FP32, rig->c.top_k);
}

static EpStatus issue_prepare(const Rig *rig) {
    const Case *c = &rig->c;
    const RankWorld *me = mine(rig);
    EpType type = c->index_type, other = type == EP_TYPE_INT64 ? EP_TYPE_INT32 : EP_TYPE_INT64;
    EpTensor index = from(rig, ep_tensor_2d(NULL, type, me->rows, c->top_k), IN_INDEX);
    EpTensor count = from(rig, ep_tensor_1d(NULL, type, 1), IN_COUNT);
    EpTensor counts = into(rig, ep_tensor_1d(NULL, type, me->num_experts), OUT_COUNTS);
    EpTensor padded = into(rig, ep_tensor_1d(NULL, other, me->num_experts), OUT_PADDED);
    EpTensor offsets = into(rig, ep_tensor_1d(NULL, type, me->num_experts + 1), OUT_OFFSETS);
    EpTensor totals = into(rig, ep_tensor_1d(NULL, other, 3), OUT_TOTALS);
    EpPlanTensors plan = {sizeof(plan), &counts, &padded, &offsets, &totals};
    return ep_prepare(rig->step.handle, &index, c->counted ? &count : NULL, rig->stream, &plan);
}

static EpStatus issue_dispatch(const Rig *rig) {
    const Case *c = &rig->c;
    const Step *step = &rig->step;
    EpTensor tokens = from(rig, step_tokens(step), IN_TOKENS);
    EpTensor weights = from(rig, step_weights(step), IN_WEIGHTS);
    EpTensor scales = from(rig, step_scales(step), IN_SCALES);
    EpTensor recv_tokens = into(rig, rows_of(rig, c->row_type), OUT_TOKENS);
    EpTensor recv_weights = into(rig, weights_of(rig), OUT_WEIGHTS);
    EpTensor recv_scales =
        into(rig, step_rows(step, NULL, EP_TYPE_UINT8, c->scale_bytes), OUT_SCALES);
    EpTensor recv_index = into(rig, step_rows(step, NULL, c->index_type, c->top_k), OUT_INDEX);
    return ep_dispatch(step->handle, &tokens, c->weighted ? &weights : NULL,
                       c->scale_bytes ? &scales : NULL, rig->stream, &recv_tokens,
                       c->weighted ? &recv_weights : NULL, c->scale_bytes ? &recv_scales : NULL,
                       c->layout == EP_LAYOUT_FLAT ? &recv_index : NULL);
}

static EpStatus issue_combine(const Rig *rig) {
    EpTensor rows = from(rig, step_expert_out(&rig->step), IN_EXPERT_OUT);
    EpTensor weights = from(rig, step_slot_weights(&rig->step), IN_SLOT_WEIGHTS);
    EpTensor out = into(rig, step_grad_out(&rig->step), OUT_SUMS);
    return ep_combine(rig->step.handle, &rows, rig->c.weighted ? &weights : NULL, rig->stream,
                      &out);
}

static EpStatus issue_combine_backward(const Rig *rig) {
    int weighted = rig->c.weighted;
    EpTensor grad_out = from(rig, step_grad_out(&rig->step), IN_GRAD_OUT);
    EpTensor weights = from(rig, step_slot_weights(&rig->step), IN_SLOT_WEIGHTS);
    EpTensor expert_out = from(rig, step_expert_out(&rig->step), IN_EXPERT_OUT);
    EpTensor rows = into(rig, rows_of(rig, rig->c.sum_type), OUT_GRAD_ROWS);
    EpTensor slots = into(rig, step_slot_weights(&rig->step), OUT_GRAD_SLOTS);
    return ep_combine_backward(rig->step.handle, &grad_out, weighted ? &weights : NULL,
                               weighted ? &expert_out : NULL, rig->stream, &rows,
                               weighted ? &slots : NULL);
}

static EpStatus issue_dispatch_backward(const Rig *rig) {
    int weighted = rig->c.weighted;
    EpTensor rows = from(rig, step_expert_out(&rig->step), IN_EXPERT_OUT);
    EpTensor slots = from(rig, weights_of(rig), IN_GRAD_SLOT_WEIGHTS);
    EpTensor tokens = into(rig, step_grad_out(&rig->step), OUT_GRAD_TOKENS);
    EpTensor weights = into(rig, step_weights(&rig->step), OUT_GRAD_WEIGHTS);
    return ep_dispatch_backward(rig->step.handle, &rows, weighted ? &slots : NULL, rig->stream,
                                &tokens, weighted ? &weights : NULL);
}

EpStatus rig_try(const Rig *rig, RigOp op) {
    switch (op) {
    case RIG_PREPARE:
        return issue_prepare(rig);
    case RIG_DISPATCH:
        return issue_dispatch(rig);
    case RIG_COMBINE:
        return issue_combine(rig);
    case RIG_COMBINE_BACKWARD:
        return issue_combine_backward(rig);
    default:
        return issue_dispatch_backward(rig);
    }
}

void rig_issue(Rig *rig, unsigned ops) {
    for (unsigned op = RIG_PREPARE; op <= RIG_DISPATCH_BACKWARD; op <<= 1)
        if (ops & op) CHECK_OK(rig_try(rig, (RigOp)op));
    rig_replayed(rig, ops);
}

void rig_replayed(Rig *rig, unsigned ops) {
    rig->issued |= ops;
}

/* ---- checking ------------------------------------------------------------------------------ */

static int asked_for(const Rig *rig, RigOutput output) {
    const Case *c = &rig->c;
    if (!(rig->issued & outputs[output].op)) return 0;
    if (output == OUT_WEIGHTS || output == OUT_GRAD_SLOTS || output == OUT_GRAD_WEIGHTS)
        return c->weighted;
    if (output == OUT_SCALES) return c->scale_bytes > 0;
    return output != OUT_INDEX || c->layout == EP_LAYOUT_FLAT;
}

/* Dot products are right within 1e-5 of their terms' magnitudes; what is so, is expected. */
static void accept_dots(Rig *rig) {
    Image got = image_of(rig, rig->got, OUT_GRAD_SLOTS);
    Image expected = image_of(rig, rig->expected, OUT_GRAD_SLOTS);
    for (int64_t row = 0; row < mine(rig)->buffer_rows; row++) {
        float value;
        double magnitude, exact;
        if (mine(rig)->row[row].kind == ROW_TAIL && !rig->c.zero_tail) continue;
        memcpy(&value, got.data + row * 4, 4);
        exact = expect_slot_gradient(rig->step.world, rig->step.rank, row, &magnitude);
        CHECK(fabs(value - exact) <= 1e-5 * magnitude, "row %lld: %.9g instead of %.9g",
              (long long)row, (double)value, exact);
        memcpy(expected.data + row * 4, &value, 4);
    }
}

static void check_output(const Rig *rig, RigOutput output) {
    int asked = asked_for(rig, output);
    Image got = image_of(rig, rig->got, output);
    Image expected = image_of(rig, asked ? rig->expected : rig->poison, output);
    size_t rows = (size_t)(output >= OUT_TOKENS && output <= OUT_INDEX ? mine(rig)->buffer_rows
                                                                       : mine(rig)->rows);
    image_check_equal(&got, &expected, rows ? got.bytes / rows : 0, outputs[output].name);
}

void rig_check(Rig *rig) {
    REQUIRE_CUDA(cudaStreamSynchronize(rig->stream));
    REQUIRE_CUDA(cudaMemcpyAsync(rig->got, rig->device + inputs_size(&rig->c),
                                 outputs_size(&rig->c), cudaMemcpyDefault, rig->stream));
    REQUIRE_CUDA(cudaStreamSynchronize(rig->stream));
    if (asked_for(rig, OUT_GRAD_SLOTS)) accept_dots(rig);
    for (int i = 0; i < RIG_OUTPUTS; i++)
        check_output(rig, (RigOutput)i);
}
