/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/device_step.h"

#include <math.h>
#include <time.h>

#include "tests/gpu/device_step_layout.h"
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

double gpu_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void silence_log(void) {
    setenv("LIBEP_LOG_FILE", "/dev/null", 1);
}

EpHandleConfig device_step_config(const Case *c) {
    EpHandleConfig config = case_handle_config(c);
    if (c->layout != EP_LAYOUT_BATCHED) config.max_recv_rows = c->capacity;
    config.alignment = c->alignment;
    config.overflow = (int32_t)c->overflow;
    return config;
}

EpHandle *device_step_handle(EpGroup *group, const Case *c) {
    EpHandleConfig config = device_step_config(c);
    return open_handle_with(group, &config);
}

static char *host_copy(size_t bytes) {
    char *copy = gpu_allocate_zeroed(1, bytes);
    CHECK(copy != NULL, "no pinned memory for %zu bytes", bytes);
    return copy;
}

void device_step_open(DeviceStep *gpu, EpGroup *group, EpHandle *handle, const Case *c, int rank,
                      cudaStream_t stream, void *device) {
    *gpu = (DeviceStep){
        .step = {group, handle, NULL, rank}, .c = *c, .stream = stream, .device = device};
    gpu->owns_stream = !stream;
    if (!stream) gpu->stream = new_stream();
    if (!device) REQUIRE_CUDA(cudaMalloc((void **)&gpu->device, device_step_bytes(c)));
    gpu->owns_device = !device;
    gpu->inputs = host_copy(device_step_inputs_size(c));
    gpu->poison = host_copy(device_step_outputs_size(c));
    gpu->expected = host_copy(device_step_outputs_size(c));
    gpu->got = host_copy(device_step_outputs_size(c));
    device_step_poison_copy(c, gpu->poison);
}

void device_step_new(DeviceStep *gpu, EpGroup *group, const Case *c, int rank) {
    device_step_open(gpu, group, device_step_handle(group, c), c, rank, NULL, NULL);
}

void device_step_close(DeviceStep *gpu) {
    if (gpu->owns_stream) CHECK_CUDA(cudaStreamDestroy(gpu->stream));
    if (gpu->drawn) world_free(gpu->drawn);
    if (gpu->owns_device) CHECK_CUDA(cudaFree(gpu->device));
    char *copies[] = {gpu->inputs, gpu->poison, gpu->expected, gpu->got};
    for (int i = 0; i < 4; i++)
        gpu_release(copies[i]);
    *gpu = (DeviceStep){.device = NULL};
}

/* ---- loading ------------------------------------------------------------------------------- */

World *device_step_world(const Case *shape, int step) {
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

static void fill_inputs(DeviceStep *gpu) {
    const RankWorld *me = device_step_rank(gpu);
    const void *from[INPUTS] = {[IN_TOKENS] = me->token,
                                [IN_WEIGHTS] = me->weight,
                                [IN_SCALES] = me->scale,
                                [IN_EXPERT_OUT] = me->expert_out,
                                [IN_SLOT_WEIGHTS] = me->slot_weight,
                                [IN_COMBINE_WEIGHTS] = me->weight,
                                [IN_GRAD_SLOT_WEIGHTS] = me->grad_slot_weight,
                                [IN_GRAD_OUT] = me->grad_out,
                                [IN_BIAS0] = me->bias[0],
                                [IN_BIAS1] = me->bias[1]};
    int64_t count = me->tokens;
    put_integers(gpu->inputs + device_step_input_offset(&gpu->c, IN_INDEX), gpu->c.index_type,
                 me->index, (int64_t)me->rows * gpu->c.top_k);
    put_integers(gpu->inputs + device_step_input_offset(&gpu->c, IN_COUNT), gpu->c.index_type,
                 &count, 1);
    for (int i = IN_TOKENS; i < INPUTS; i++)
        memcpy(gpu->inputs + device_step_input_offset(&gpu->c, i), from[i],
               device_step_input_bytes(gpu, (StepInput)i));
}

static void expect_plan(DeviceStep *gpu) {
    const RankWorld *me = device_step_rank(gpu);
    EpType type = gpu->c.index_type, other = type == EP_TYPE_INT64 ? EP_TYPE_INT32 : EP_TYPE_INT64;
    int64_t totals[] = {me->recv_rows, me->needed_rows, me->dropped};
    const int64_t *values[] = {me->count, me->padded, me->offset, totals};
    int64_t n[] = {me->num_experts, me->num_experts, me->num_experts + 1, 3};
    for (int i = OUT_COUNTS; i <= OUT_TOTALS; i++) {
        Image image = device_step_image(gpu, gpu->expected, (StepOutput)i);
        put_integers((char *)image.data, i == OUT_COUNTS || i == OUT_OFFSETS ? type : other,
                     values[i], n[i]);
    }
}

static void expect_all(DeviceStep *gpu) {
    const World *world = gpu->step.world;
    int rank = gpu->step.rank;
    Image image[STEP_OUTPUTS];
    for (int i = 0; i < STEP_OUTPUTS; i++)
        image[i] = device_step_image(gpu, gpu->expected, (StepOutput)i);
    ExpectedRows rows = {image[OUT_TOKENS], image[OUT_WEIGHTS], image[OUT_SCALES],
                         image[OUT_INDEX]};
    expect_plan(gpu);
    expect_dispatch(world, rank, &rows);
    expect_combine(world, rank, &image[OUT_SUMS]);
    if (gpu->c.mode == EP_MODE_LATENCY) return;
    expect_combine_backward(world, rank, &image[OUT_GRAD_ROWS]);
    expect_dispatch_backward(world, rank, &image[OUT_GRAD_TOKENS], &image[OUT_GRAD_WEIGHTS]);
}

void device_step_load(DeviceStep *gpu, const World *world) {
    CHECK_CUDA(cudaStreamSynchronize(gpu->stream));
    gpu->step.world = world;
    fill_inputs(gpu);
    memcpy(gpu->expected, gpu->poison, device_step_outputs_size(&gpu->c));
    expect_all(gpu);
    device_step_bring_inputs(gpu);
    device_step_poison(gpu);
    CHECK_CUDA(cudaStreamSynchronize(gpu->stream));
}

static void load_own(DeviceStep *gpu, World *world) {
    check_note("%s", case_describe(&world->c));
    device_step_load(gpu, world);
    if (gpu->drawn) world_free(gpu->drawn);
    gpu->drawn = world;
}

void device_step_draw(DeviceStep *gpu, const Case *c) {
    load_own(gpu, world_new(c));
}

void device_step_draw_step(DeviceStep *gpu, int step) {
    load_own(gpu, device_step_world(&gpu->c, step));
}

void device_step_bring_inputs(DeviceStep *gpu) {
    CHECK_CUDA(cudaMemcpyAsync(gpu->device, gpu->inputs, device_step_inputs_size(&gpu->c),
                               cudaMemcpyDefault, gpu->stream));
    gpu->spoilt = 0;
}

void device_step_poison(DeviceStep *gpu) {
    if (gpu->spoilt) device_step_bring_inputs(gpu);
    CHECK_CUDA(cudaMemcpyAsync(gpu->device + device_step_inputs_size(&gpu->c), gpu->poison,
                               device_step_outputs_size(&gpu->c), cudaMemcpyDefault, gpu->stream));
    gpu->issued = 0;
}

/* ---- checking ------------------------------------------------------------------------------ */

typedef struct Output {
    const char *name;
    unsigned op;
} Output;

#define DISPATCHED (STEP_DISPATCH | STEP_DISPATCH_WAIT)

static const Output outputs[STEP_OUTPUTS] = {
    {"expert_counts", STEP_PREPARE},
    {"expert_padded", STEP_PREPARE},
    {"expert_offsets", STEP_PREPARE},
    {"totals", STEP_PREPARE},
    {"recv_tokens", DISPATCHED},
    {"recv_topk_weights", DISPATCHED},
    {"recv_scales", DISPATCHED},
    {"recv_topk_idx", DISPATCHED},
    {"out", STEP_COMBINE | STEP_COMBINE_WAIT},
    {"grad_expert_out", STEP_COMBINE_BACKWARD},
    {"grad_slot_weights", STEP_COMBINE_BACKWARD},
    {"grad_tokens", STEP_DISPATCH_BACKWARD},
    {"grad_topk_weights", STEP_DISPATCH_BACKWARD},
};

Image device_step_output(const DeviceStep *gpu, StepOutput output) {
    return device_step_image(gpu, gpu->got, output);
}

static int asked_for(const DeviceStep *gpu, StepOutput output) {
    const Case *c = &gpu->c;
    if (gpu->without_plan && output <= OUT_TOTALS) return 0;
    int dispatches = output <= OUT_TOTALS && c->mode == EP_MODE_LATENCY;
    if (!(gpu->issued & (dispatches ? DISPATCHED : outputs[output].op))) return 0;
    if (output == OUT_WEIGHTS || output == OUT_GRAD_SLOTS || output == OUT_GRAD_WEIGHTS)
        return c->weighted;
    if (output == OUT_SCALES) return case_scales(c) > 0;
    return output != OUT_INDEX || case_has_rows(c);
}

/* Check dot products within 1e-5 of the sum of their terms' magnitudes, and copy those received
 * into the expected bytes. */
static void accept_dots(DeviceStep *gpu) {
    Image got = device_step_image(gpu, gpu->got, OUT_GRAD_SLOTS);
    Image expected = device_step_image(gpu, gpu->expected, OUT_GRAD_SLOTS);
    for (int64_t row = 0; row < device_step_rank(gpu)->buffer_rows; row++) {
        float value;
        double magnitude, exact;
        if (!world_writes(gpu->step.world, &device_step_rank(gpu)->row[row])) continue;
        memcpy(&value, got.data + row * 4, 4);
        exact = expect_slot_gradient(gpu->step.world, gpu->step.rank, row, &magnitude);
        CHECK(fabs(value - exact) <= 1e-5 * magnitude, "row %lld: %.9g instead of %.9g",
              (long long)row, (double)value, exact);
        memcpy(expected.data + row * 4, &value, 4);
    }
}

static void check_output(const DeviceStep *gpu, StepOutput output) {
    int asked = asked_for(gpu, output);
    Image got = device_step_image(gpu, gpu->got, output);
    Image expected = device_step_image(gpu, asked ? gpu->expected : gpu->poison, output);
    size_t rows =
        (size_t)(output >= OUT_TOKENS && output <= OUT_INDEX ? device_step_rank(gpu)->buffer_rows
                                                             : device_step_rank(gpu)->rows);
    image_check_equal(&got, &expected, rows ? got.bytes / rows : 0, outputs[output].name);
}

void device_step_check(DeviceStep *gpu) {
    REQUIRE_CUDA(cudaStreamSynchronize(gpu->stream));
    REQUIRE_CUDA(cudaMemcpyAsync(gpu->got, gpu->device + device_step_inputs_size(&gpu->c),
                                 device_step_outputs_size(&gpu->c), cudaMemcpyDefault,
                                 gpu->stream));
    REQUIRE_CUDA(cudaStreamSynchronize(gpu->stream));
    if (asked_for(gpu, OUT_GRAD_SLOTS)) accept_dots(gpu);
    for (int i = 0; i < STEP_OUTPUTS; i++)
        check_output(gpu, (StepOutput)i);
}

void device_step_check_equal(const DeviceStep *a, const DeviceStep *b, int dots, const char *what) {
    for (int i = 0; i < STEP_OUTPUTS; i++) {
        Image left = device_step_output(a, (StepOutput)i);
        Image right = device_step_output(b, (StepOutput)i);
        if (dots || i != OUT_GRAD_SLOTS) image_check_equal(&left, &right, 0, what);
    }
}

void device_step_run(EpGroup *group, const Case *c, int rank, void *device) {
    DeviceStep gpu;
    EpHandle *handle = device_step_handle(group, c);
    device_step_open(&gpu, group, handle, c, rank, NULL, device);
    device_step_draw(&gpu, c);
    device_step_issue(&gpu, device_step_all(c));
    device_step_check(&gpu);
    CHECK_OK(ep_group_status(group, NULL));
    ep_handle_destroy(handle);
    device_step_close(&gpu);
}

/* ---- graphs -------------------------------------------------------------------------------- */

void graph_begin(cudaStream_t stream) {
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
}

cudaGraphExec_t graph_end(cudaStream_t stream) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    if (graph) CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    if (graph) CHECK_CUDA(cudaGraphDestroy(graph));
    CHECK(exec, "no graph");
    return exec;
}

void graph_discard(cudaStream_t stream) {
    cudaGraph_t graph = NULL;
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    if (graph) CHECK_CUDA(cudaGraphDestroy(graph));
}

cudaGraphExec_t device_step_capture(DeviceStep *gpu, unsigned ops) {
    graph_begin(gpu->stream);
    device_step_issue(gpu, ops);
    return graph_end(gpu->stream);
}

void device_step_launch(DeviceStep *gpu, cudaGraphExec_t exec, unsigned ops) {
    CHECK_CUDA(cudaGraphLaunch(exec, gpu->stream));
    device_step_replayed(gpu, ops);
}
