/* SPDX-License-Identifier: Apache-2.0 */
/* Three plans of one handle are alive at once, in memory that the calls name. Each is moved between
 * the parts of its step. The parts are captured, once for each place of the plan, and replayed with
 * new tokens, new routing and another T, after the handle is gone. The same steps run without
 * graphs, too. */
#include "tests/gpu/device_step.h"

enum { STEPS = 3, PLACES = 2, REPLAYS = 40, ROUNDS = 6, PLAN_ALIGNMENT = 64 };

GpuSuite(gpu_plans, 320);
GpuSuite(gpu_plan_graphs, 320);

/* No size is a multiple of a block's part of the work or of a cache line. The capacity is too small
 * for some steps. */
static Case plan_case(int ranks, EpLayout layout, EpMode mode, int phases) {
    int latency = mode == EP_MODE_LATENCY;
    Case c = {.ranks = ranks, .experts = 4 * ranks + 1, .top_k = 3, .hidden = 136};
    c.max_tokens = latency ? 11 : 149, c.counted = 1, c.weighted = 1, c.scale_bytes = 12;
    c.masked_percent = 10, c.alignment = 4, c.capacity = latency ? 60 : 500;
    c.overflow = EP_OVERFLOW_DROP, c.layout = layout, c.mode = mode, c.phases = phases, c.named = 1;
    return case_complete(c);
}

/* ---- a step and its plan ------------------------------------------------------------------- */

/* The parts of a step. Between them its plan may be moved. */
typedef enum Part { DISPATCH, COMBINE, BACKWARD, PARTS } Part;

typedef struct PlanStep {
    DeviceStep gpu;
    char *memory; /* both places */
    EpTensor plan;
    int place;
    cudaGraphExec_t exec[PARTS][PLACES]; /* NULL: the part is called */
} PlanStep;

static size_t place_offset(const PlanStep *step, int place) {
    size_t bytes = (size_t)step->plan.shape[0];
    return PLAN_ALIGNMENT + (size_t)place * (bytes / PLAN_ALIGNMENT + 2) * PLAN_ALIGNMENT;
}

static void put_plan(PlanStep *step, int place) {
    step->place = place;
    step->plan.data = step->memory + place_offset(step, place);
}

/* The operations of a part in the case's mode; 0: it has none. */
static unsigned part_ops(const PlanStep *step, Part part) {
    static const unsigned ops[PARTS] = {
        STEP_PREPARE | STEP_DISPATCH | STEP_DISPATCH_SEND | STEP_DISPATCH_WAIT,
        STEP_COMBINE | STEP_COMBINE_SEND | STEP_COMBINE_WAIT, STEP_BACKWARD};
    return ops[part] & device_step_all(&step->gpu.c);
}

static void step_open(PlanStep *step, EpGroup *group, EpHandle *handle, const Case *c, int rank,
                      cudaStream_t stream) {
    EpHandleConfig config = case_handle_config(c);
    size_t bytes = 0;
    *step = (PlanStep){.memory = NULL};
    REQUIRE_OK(ep_handle_memory(group, &config, &bytes));
    step->plan = ep_tensor_1d(NULL, EP_TYPE_UINT8, (int64_t)bytes);
    size_t all = place_offset(step, PLACES);
    REQUIRE_CUDA(cudaMalloc((void **)&step->memory, all));
    CHECK_CUDA(cudaMemsetAsync(step->memory, 0x5a, all, stream));
    put_plan(step, 0);
    device_step_open(&step->gpu, group, handle, c, rank, stream, NULL);
    step->gpu.step.plan = &step->plan;
    device_step_draw_step(&step->gpu, 0);
}

/* The plan's memory goes before the group does. */
static void step_close(PlanStep *step) {
    for (int i = 0; i < PARTS * PLACES; i++)
        if (step->exec[i / PLACES][i % PLACES])
            CHECK_CUDA(cudaGraphExecDestroy(step->exec[i / PLACES][i % PLACES]));
    CHECK_CUDA(cudaFree(step->memory));
    device_step_close(&step->gpu);
}

/* Enqueue: move the plan's bytes to its other place, and overwrite them where they were. */
static void step_move_plan(PlanStep *step) {
    size_t bytes = (size_t)step->plan.shape[0];
    char *old = step->plan.data;
    put_plan(step, !step->place);
    CHECK_CUDA(cudaMemcpyAsync(step->plan.data, old, bytes, cudaMemcpyDefault, step->gpu.stream));
    CHECK_CUDA(cudaMemsetAsync(old, 0xdd, bytes, step->gpu.stream));
}

static void step_run(PlanStep *step, Part part) {
    cudaGraphExec_t exec = step->exec[part][step->place];
    unsigned ops = part_ops(step, part);
    if (exec)
        device_step_launch(&step->gpu, exec, ops);
    else
        device_step_issue(&step->gpu, ops);
}

static void step_capture(PlanStep *step, Part part, int place) {
    if (!part_ops(step, part)) return;
    put_plan(step, place);
    step->exec[part][place] = device_step_capture(&step->gpu, part_ops(step, part));
}

/* ---- three steps --------------------------------------------------------------------------- */

typedef struct PlanSet {
    EpGroup *group;
    EpHandle *handle;
    cudaStream_t stream;
    PlanStep step[STEPS];
    int rank;
} PlanSet;

static void set_open(PlanSet *set, const EpBootstrap *bootstrap, const Case *c) {
    *set = (PlanSet){.group = open_group(bootstrap, c), .rank = bootstrap->rank};
    set->handle = open_handle(set->group, c);
    set->stream = new_stream();
    for (int i = 0; i < STEPS; i++)
        step_open(&set->step[i], set->group, set->handle, c, set->rank, set->stream);
}

static void set_close(PlanSet *set) {
    for (int i = 0; i < STEPS; i++)
        step_close(&set->step[i]);
    ep_group_destroy(set->group);
    CHECK_CUDA(cudaStreamDestroy(set->stream));
}

/* The handle may go: graphs refer to the group and the plans alone. */
static void set_capture(PlanSet *set) {
    for (int i = 0; i < STEPS * PARTS * PLACES; i++)
        step_capture(&set->step[i % STEPS], (Part)(i / STEPS / PLACES), i / STEPS % PLACES);
    ep_handle_destroy(set->handle);
    set->handle = NULL;
}

/* All plans are made before the first is used. Ranks keep the order of operations, but each moves
 * plans of its own choice. */
static void run_round(PlanSet *set, int round) {
    for (int i = 0; i < STEPS; i++)
        device_step_draw_step(&set->step[i].gpu, STEPS * round + i);
    for (int part = 0; part < PARTS; part++)
        for (int i = 0; i < STEPS; i++) {
            PlanStep *step = &set->step[(i + part * round) % STEPS];
            if (part > 0 && (round * part + i + set->rank) % 2) step_move_plan(step);
            step_run(step, (Part)part);
        }
    for (int i = 0; i < STEPS; i++) {
        check_note("round %d, step %d: %s", round, i, case_describe(&set->step[i].gpu.drawn->c));
        device_step_check(&set->step[i].gpu);
    }
}

static void moved(const EpBootstrap *bootstrap, Case c, int with_graphs) {
    PlanSet set;
    set_open(&set, bootstrap, &c);
    if (with_graphs) set_capture(&set);
    /* What instantiates graphs may wait for kernels of other ranks of the process. */
    CHECK_OK(bootstrap->barrier(bootstrap->context, 60));
    int rounds = with_graphs ? REPLAYS : ROUNDS;
    for (int round = 0; round < rounds && !check_failure()[0]; round++)
        run_round(&set, round);
    CHECK_OK(ep_group_status(set.group, NULL));
    set_close(&set);
}

#define THROUGHPUT(layout) plan_case(bootstrap->size, EP_LAYOUT_##layout, EP_MODE_THROUGHPUT, 0)
#define LATENCY(layout, phases) \
    plan_case(bootstrap->size, EP_LAYOUT_##layout, EP_MODE_LATENCY, phases)

RankTests(gpu_plans, expert_major, moved(bootstrap, THROUGHPUT(EXPERT_MAJOR), 0));
RankTests(gpu_plans, flat, moved(bootstrap, THROUGHPUT(FLAT), 0));
LatencyTests(gpu_plans, latency, moved(bootstrap, LATENCY(EXPERT_MAJOR, 0), 0));
LatencyTests(gpu_plans, latency_phases, moved(bootstrap, LATENCY(FLAT, 1), 0));
RankTests(gpu_plan_graphs, expert_major, moved(bootstrap, THROUGHPUT(EXPERT_MAJOR), 1));
RankTests(gpu_plan_graphs, flat, moved(bootstrap, THROUGHPUT(FLAT), 1));
LatencyTests(gpu_plan_graphs, latency, moved(bootstrap, LATENCY(EXPERT_MAJOR, 0), 1));
LatencyTests(gpu_plan_graphs, latency_phases, moved(bootstrap, LATENCY(FLAT, 1), 1));
