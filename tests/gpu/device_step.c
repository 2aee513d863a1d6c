/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/device_step.h"

bool check_cuda(cudaError_t error, const char *file, int line, const char *call) {
    return check_that(error == cudaSuccess, file, line, call, "%s", cudaGetErrorString(error));
}

cudaStream_t new_stream(void) {
    cudaStream_t stream = NULL;
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

static char *host_copy(size_t bytes) {
    char *copy = gpu_allocate_zeroed(1, bytes);
    CHECK(copy != NULL, "no pinned memory for %zu bytes", bytes);
    return copy;
}

/* ---- where the arrays lie: offsets depend on the case alone ---------------------------------- */

/* Inputs are aligned to 16 bytes and no more. */
static size_t input_offset(const Case *c, int input) {
    size_t at = 16;
    for (int i = 0; i < input; i++)
        at += (case_input_bytes(c, (StepInput)i) + 127) / 128 * 128;
    return at;
}

static size_t output_offset(const Case *c, int output) {
    size_t at = 0;
    for (int i = OUT_COUNTS; i < output; i++)
        at += image_room(case_output_bytes(c, (StepOutput)i));
    return at;
}

size_t device_step_inputs_size(const Case *c) {
    return (input_offset(c, INPUTS) + 127) / 128 * 128;
}

size_t device_step_outputs_size(const Case *c) {
    return output_offset(c, STEP_OUTPUTS);
}

size_t device_step_bytes(const Case *c) {
    return device_step_inputs_size(c) + device_step_outputs_size(c);
}

const RankWorld *device_step_rank(const DeviceStep *gpu) {
    return step_mine(&gpu->step);
}

Image device_step_image(const DeviceStep *gpu, char *copy, StepOutput output) {
    size_t bytes = step_bytes(step_output(&gpu->step, output));
    return image_over(copy + output_offset(&gpu->c, output), bytes,
                      case_output_align(&gpu->c, output));
}

EpTensor device_step_from(const DeviceStep *gpu, StepInput input) {
    EpTensor tensor = step_input(&gpu->step, input);
    tensor.data = gpu->memory.in[input];
    return tensor;
}

EpTensor device_step_into(const DeviceStep *gpu, StepOutput output) {
    EpTensor tensor = step_output(&gpu->step, output);
    tensor.data = gpu->memory.out[output];
    return tensor;
}

/* Find the arrays in device memory, and poison all outputs on the host, each at its largest size.
 */
static void place(DeviceStep *gpu) {
    const Case *c = &gpu->c;
    char *outputs = gpu->device + device_step_inputs_size(c);
    for (StepInput i = 0; i < INPUTS; i++)
        gpu->memory.in[i] = gpu->device + input_offset(c, i);
    for (StepOutput i = OUT_COUNTS; i < STEP_OUTPUTS; i++) {
        Image image = image_in(gpu->poison + output_offset(c, i), case_output_bytes(c, i),
                               case_output_align(c, i));
        gpu->memory.out[i] = outputs + ((char *)image.data - gpu->poison);
    }
}

/* ---- life ---------------------------------------------------------------------------------- */

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
    place(gpu);
}

void device_step_new(DeviceStep *gpu, EpGroup *group, const Case *c, int rank) {
    device_step_open(gpu, group, open_handle(group, c), c, rank, NULL, NULL);
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
    c.map_seed += step;
    return world_new(&c);
}

/* All outputs at once: those of operations that are not issued are never looked at. */
static void expect_all(DeviceStep *gpu) {
    Image image[STEP_OUTPUTS];
    for (StepOutput i = OUT_COUNTS; i < STEP_OUTPUTS; i++)
        image[i] = device_step_image(gpu, gpu->expected, i);
    step_expect(&gpu->step, gpu->c.mode == EP_MODE_LATENCY ? STEP_FORWARD : STEP_ALL, image);
}

void device_step_load(DeviceStep *gpu, const World *world) {
    CHECK_CUDA(cudaStreamSynchronize(gpu->stream));
    gpu->step.world = world;
    for (StepInput i = 0; i < INPUTS; i++)
        step_fill(&gpu->step, i, gpu->inputs + input_offset(&gpu->c, i));
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

static int asked_for(const DeviceStep *gpu, StepOutput output) {
    if (gpu->without_plan && output <= OUT_SOURCES) return 0;
    return (gpu->issued & case_writers(&gpu->c, output)) && case_asks(&gpu->c, output);
}

void device_step_fetch(const DeviceStep *gpu) {
    REQUIRE_CUDA(cudaStreamSynchronize(gpu->stream));
    REQUIRE_CUDA(cudaMemcpyAsync(gpu->got, gpu->device + device_step_inputs_size(&gpu->c),
                                 device_step_outputs_size(&gpu->c), cudaMemcpyDefault,
                                 gpu->stream));
    REQUIRE_CUDA(cudaStreamSynchronize(gpu->stream));
}

void device_step_check(DeviceStep *gpu) {
    device_step_fetch(gpu);
    for (StepOutput i = OUT_COUNTS; i < STEP_OUTPUTS; i++) {
        Image got = device_step_image(gpu, gpu->got, i);
        Image expected = device_step_image(gpu, gpu->expected, i);
        Image poison = device_step_image(gpu, gpu->poison, i);
        if (asked_for(gpu, i))
            step_compare(&gpu->step, i, &got, &expected);
        else
            image_check_equal(&got, &poison, 0, "an output that was not asked for");
    }
}

void device_step_check_equal(const DeviceStep *a, const DeviceStep *b, int dots, const char *what) {
    for (int i = OUT_COUNTS; i < STEP_OUTPUTS; i++) {
        Image left = device_step_image(a, a->got, (StepOutput)i);
        Image right = device_step_image(b, b->got, (StepOutput)i);
        if (dots || i != OUT_GRAD_SLOTS) image_check_equal(&left, &right, 0, what);
    }
}

void device_step_run(EpGroup *group, const Case *c, int rank, void *device) {
    DeviceStep gpu;
    EpHandle *handle = open_handle(group, c);
    device_step_open(&gpu, group, handle, c, rank, NULL, device);
    device_step_draw(&gpu, c);
    device_step_issue(&gpu, device_step_all(c));
    device_step_check(&gpu);
    CHECK_OK(ep_group_status(group, NULL));
    ep_handle_destroy(handle);
    device_step_close(&gpu);
}

/* ---- calls --------------------------------------------------------------------------------- */

EpStatus device_step_try(const DeviceStep *gpu, StepOp op) {
    gpu_only_enqueue(1);
    EpStatus status = step_call(&gpu->step, &gpu->memory, op, gpu->stream);
    gpu_only_enqueue(0);
    return status;
}

/* Overwrite inputs after their send phase, to show that they are not read any more. An index of
 * 0x77777777 would be reported as a routing error. */
static void spoil(DeviceStep *gpu, StepInput first, StepInput last) {
    size_t begin = input_offset(&gpu->c, first), end = input_offset(&gpu->c, last + 1);
    CHECK_CUDA(cudaMemsetAsync(gpu->device + begin, 0x77, end - begin, gpu->stream));
    gpu->spoilt = 1;
}

void device_step_issue(DeviceStep *gpu, unsigned ops) {
    for (unsigned op = STEP_PREPARE; op <= STEP_COMBINE_WAIT; op <<= 1) {
        if (!(ops & op)) continue;
        CHECK_OK(device_step_try(gpu, (StepOp)op));
        if (op == STEP_DISPATCH_SEND) spoil(gpu, IN_INDEX, IN_SCALES);
        if (op == STEP_COMBINE_SEND) spoil(gpu, IN_EXPERT_OUT, IN_COMBINE_WEIGHTS);
    }
    device_step_replayed(gpu, ops);
}

void device_step_replayed(DeviceStep *gpu, unsigned ops) {
    gpu->issued |= ops;
    gpu->spoilt |= (ops & STEP_SENDS) != 0;
}

unsigned device_step_all(const Case *c) {
    if (c->mode != EP_MODE_LATENCY) return STEP_ALL;
    return c->phases ? STEP_PHASES : STEP_FORWARD;
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
