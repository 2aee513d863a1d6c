/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/rig.h"

#include <math.h>
#include <string.h>

#include "tests/gpu/arena.h"
#include "tests/gpu/rig_map.h"
#include "tests/oracle/expect.h"

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
    rig->inputs = host_copy(rig_inputs_size(c));
    rig->poison = host_copy(rig_outputs_size(c));
    rig->expected = host_copy(rig_outputs_size(c));
    rig->got = host_copy(rig_outputs_size(c));
    rig_poison_copy(c, rig->poison);
}

void rig_close(Rig *rig) {
    if (rig->owns_device) CHECK_CUDA(cudaFree(rig->device));
    char *copies[] = {rig->inputs, rig->poison, rig->expected, rig->got};
    for (int i = 0; i < 4; i++)
        gpu_release(copies[i]);
    *rig = (Rig){.device = NULL};
}

/* ---- loading ------------------------------------------------------------------------------- */

World *rig_world(const Case *shape, int step) {
    static const Spread spreads[] = {SPREAD_RANDOM, SPREAD_RANDOM, SPREAD_FULL, SPREAD_RANDOM,
                                     SPREAD_HOLE,   SPREAD_RANDOM, SPREAD_NONE, SPREAD_ALONE};
    Case c = *shape;
    c.seed = (uint64_t)step;
    c.spread = spreads[step % 8];
    c.routing = step % 3 ? ROUTING_UNIFORM : ROUTING_SKEWED;
    return world_new(&c);
}

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
    const RankWorld *me = rig_rank(rig);
    const void *from[INPUTS] = {NULL,        NULL,           me->token,       me->weight,
                                me->scale,   me->expert_out, me->slot_weight, me->grad_slot_weight,
                                me->grad_out};
    int64_t count = me->tokens;
    put_integers(rig->inputs + rig_input_offset(&rig->c, IN_INDEX), rig->c.index_type, me->index,
                 (int64_t)me->rows * rig->c.top_k);
    put_integers(rig->inputs + rig_input_offset(&rig->c, IN_COUNT), rig->c.index_type, &count, 1);
    for (int i = IN_TOKENS; i < INPUTS; i++)
        memcpy(rig->inputs + rig_input_offset(&rig->c, i), from[i],
               rig_input_bytes(rig, (RigInput)i));
}

static void expect_plan(Rig *rig) {
    const RankWorld *me = rig_rank(rig);
    EpType type = rig->c.index_type, other = type == EP_TYPE_INT64 ? EP_TYPE_INT32 : EP_TYPE_INT64;
    int64_t totals[] = {me->recv_rows, me->needed_rows, me->dropped};
    const int64_t *values[] = {me->count, me->padded, me->offset, totals};
    int64_t n[] = {me->num_experts, me->num_experts, me->num_experts + 1, 3};
    for (int i = OUT_COUNTS; i <= OUT_TOTALS; i++) {
        Image image = rig_image(rig, rig->expected, (RigOutput)i);
        put_integers((char *)image.data, i == OUT_COUNTS || i == OUT_OFFSETS ? type : other,
                     values[i], n[i]);
    }
}

static void expect_all(Rig *rig) {
    const World *world = rig->step.world;
    int rank = rig->step.rank;
    Image image[RIG_OUTPUTS];
    for (int i = 0; i < RIG_OUTPUTS; i++)
        image[i] = rig_image(rig, rig->expected, (RigOutput)i);
    ExpectedRows rows = {image[OUT_TOKENS], image[OUT_WEIGHTS], image[OUT_SCALES],
                         image[OUT_INDEX]};
    expect_plan(rig);
    expect_dispatch(world, rank, &rows);
    expect_combine(world, rank, &image[OUT_SUMS]);
    if (rig->c.mode == EP_MODE_LATENCY) return;
    expect_combine_backward(world, rank, &image[OUT_GRAD_ROWS]);
    expect_dispatch_backward(world, rank, &image[OUT_GRAD_TOKENS], &image[OUT_GRAD_WEIGHTS]);
}

void rig_load(Rig *rig, const World *world) {
    CHECK_CUDA(cudaStreamSynchronize(rig->stream));
    rig->step.world = world;
    fill_inputs(rig);
    memcpy(rig->expected, rig->poison, rig_outputs_size(&rig->c));
    expect_all(rig);
    rig_bring_inputs(rig);
    rig_poison(rig);
    CHECK_CUDA(cudaStreamSynchronize(rig->stream));
}

void rig_bring_inputs(Rig *rig) {
    CHECK_CUDA(cudaMemcpyAsync(rig->device, rig->inputs, rig_inputs_size(&rig->c),
                               cudaMemcpyDefault, rig->stream));
    rig->spoilt = 0;
}

void rig_poison(Rig *rig) {
    if (rig->spoilt) rig_bring_inputs(rig);
    CHECK_CUDA(cudaMemcpyAsync(rig->device + rig_inputs_size(&rig->c), rig->poison,
                               rig_outputs_size(&rig->c), cudaMemcpyDefault, rig->stream));
    rig->issued = 0;
}

/* ---- checking ------------------------------------------------------------------------------ */

typedef struct Output {
    const char *name;
    unsigned op;
} Output;

#define DISPATCHED (RIG_DISPATCH | RIG_DISPATCH_WAIT)

static const Output outputs[RIG_OUTPUTS] = {
    {"expert_counts", RIG_PREPARE},
    {"expert_padded", RIG_PREPARE},
    {"expert_offsets", RIG_PREPARE},
    {"totals", RIG_PREPARE},
    {"recv_tokens", DISPATCHED},
    {"recv_topk_weights", DISPATCHED},
    {"recv_scales", DISPATCHED},
    {"recv_topk_idx", DISPATCHED},
    {"out", RIG_COMBINE | RIG_COMBINE_WAIT},
    {"grad_expert_out", RIG_COMBINE_BACKWARD},
    {"grad_slot_weights", RIG_COMBINE_BACKWARD},
    {"grad_tokens", RIG_DISPATCH_BACKWARD},
    {"grad_topk_weights", RIG_DISPATCH_BACKWARD},
};

Image rig_output(const Rig *rig, RigOutput output) {
    return rig_image(rig, rig->got, output);
}

static int asked_for(const Rig *rig, RigOutput output) {
    const Case *c = &rig->c;
    int dispatches = output <= OUT_TOTALS && c->mode == EP_MODE_LATENCY;
    if (!(rig->issued & (dispatches ? DISPATCHED : outputs[output].op))) return 0;
    if (output == OUT_WEIGHTS || output == OUT_GRAD_SLOTS || output == OUT_GRAD_WEIGHTS)
        return c->weighted;
    if (output == OUT_SCALES) return case_scales(c) > 0;
    return output != OUT_INDEX || c->layout == EP_LAYOUT_FLAT;
}

/* Dot products are right within 1e-5 of their terms' magnitudes; what is so, is expected. */
static void accept_dots(Rig *rig) {
    Image got = rig_image(rig, rig->got, OUT_GRAD_SLOTS);
    Image expected = rig_image(rig, rig->expected, OUT_GRAD_SLOTS);
    for (int64_t row = 0; row < rig_rank(rig)->buffer_rows; row++) {
        float value;
        double magnitude, exact;
        if (rig_rank(rig)->row[row].kind == ROW_TAIL && !rig->c.zero_tail) continue;
        memcpy(&value, got.data + row * 4, 4);
        exact = expect_slot_gradient(rig->step.world, rig->step.rank, row, &magnitude);
        CHECK(fabs(value - exact) <= 1e-5 * magnitude, "row %lld: %.9g instead of %.9g",
              (long long)row, (double)value, exact);
        memcpy(expected.data + row * 4, &value, 4);
    }
}

static void check_output(const Rig *rig, RigOutput output) {
    int asked = asked_for(rig, output);
    Image got = rig_image(rig, rig->got, output);
    Image expected = rig_image(rig, asked ? rig->expected : rig->poison, output);
    size_t rows = (size_t)(output >= OUT_TOKENS && output <= OUT_INDEX ? rig_rank(rig)->buffer_rows
                                                                       : rig_rank(rig)->rows);
    image_check_equal(&got, &expected, rows ? got.bytes / rows : 0, outputs[output].name);
}

void rig_check(Rig *rig) {
    REQUIRE_CUDA(cudaStreamSynchronize(rig->stream));
    REQUIRE_CUDA(cudaMemcpyAsync(rig->got, rig->device + rig_inputs_size(&rig->c),
                                 rig_outputs_size(&rig->c), cudaMemcpyDefault, rig->stream));
    REQUIRE_CUDA(cudaStreamSynchronize(rig->stream));
    if (asked_for(rig, OUT_GRAD_SLOTS)) accept_dots(rig);
    for (int i = 0; i < RIG_OUTPUTS; i++)
        check_output(rig, (RigOutput)i);
}
