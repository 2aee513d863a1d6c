/* SPDX-License-Identifier: Apache-2.0 */
/* Steps in latency mode are captured once and replayed a thousand times, whole and in phases. Each
 * replay has new tokens, new routing and another T in the same buffers. The phases of two handles
 * are also interleaved on two streams. */
#include "tests/cases/run.h"
#include "tests/gpu/device_step.h"
#include "tests/gpu/devices.h"

enum { REPLAYS = 1000, TURNS = 300 };

static void reserve(void) {
    gpu_reserve((size_t)256 << 20);
}

TestSuite(gpu_replays, .init = reserve);

/* Small, since the oracle computes every replay. The capacity is too small for some of them.
 * Combines in phases get topk_weights. */
static Case replay_case(int ranks, EpLayout layout, int phases) {
    return case_complete((Case){.ranks = ranks,
                                .experts = 2 * ranks + 1,
                                .top_k = 3,
                                .hidden = 40,
                                .max_tokens = 9,
                                .counted = 1,
                                .biases = 2,
                                .weighted = 1,
                                .weights_at_combine = phases,
                                .scale_bytes = 12,
                                .masked_percent = 10,
                                .alignment = 4,
                                .capacity = 40,
                                .rows_per_expert = 12,
                                .overflow = EP_OVERFLOW_DROP,
                                .layout = layout,
                                .mode = EP_MODE_LATENCY,
                                .phases = phases});
}

/* ---- graphs -------------------------------------------------------------------------------- */

static void begin_capture(cudaStream_t stream) {
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
}

static cudaGraphExec_t end_capture(cudaStream_t stream) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    if (graph) CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    if (graph) CHECK_CUDA(cudaGraphDestroy(graph));
    return exec;
}

/* The graph also copies the inputs, since each send phase is followed by stores over them. So it
 * can be replayed twice without the host. */
static cudaGraphExec_t capture(DeviceStep *gpu) {
    begin_capture(gpu->stream);
    device_step_bring_inputs(gpu);
    device_step_issue(gpu, device_step_all(&gpu->c));
    return end_capture(gpu->stream);
}

/* A device step of a new handle, and its graph. */
typedef struct GraphStep {
    DeviceStep gpu;
    World *world;
    cudaGraphExec_t exec;
} GraphStep;

static bool graph_step_open(GraphStep *graph, EpGroup *group, const Case *c, int rank) {
    *graph = (GraphStep){.world = device_step_world(c, 0)};
    device_step_open(&graph->gpu, group, device_step_handle(group, c), c, rank, new_stream(), NULL);
    device_step_load(&graph->gpu, graph->world);
    return !check_failure()[0];
}

static void graph_step_close(GraphStep *graph) {
    if (graph->exec) CHECK_CUDA(cudaGraphExecDestroy(graph->exec));
    CHECK_CUDA(cudaStreamDestroy(graph->gpu.stream));
    device_step_close(&graph->gpu);
    world_free(graph->world);
}

static void graph_step_load(GraphStep *graph, int step) {
    world_free(graph->world);
    graph->world = device_step_world(&graph->gpu.c, step);
    check_note("step %d: %s", step, case_describe(&graph->world->c));
    device_step_load(&graph->gpu, graph->world);
}

static void graph_step_launch(GraphStep *graph, int times) {
    for (int i = 0; i < times; i++)
        CHECK_CUDA(cudaGraphLaunch(graph->exec, graph->gpu.stream));
    device_step_replayed(&graph->gpu, device_step_all(&graph->gpu.c));
}

/* ---- one graph ----------------------------------------------------------------------------- */

static void replay(const EpBootstrap *bootstrap, EpLayout layout, int phases) {
    Case c = replay_case(bootstrap->size, layout, phases);
    EpGroup *group = open_group(bootstrap, &c);
    GraphStep graph;
    REQUIRE(group && graph_step_open(&graph, group, &c, bootstrap->rank), "no handle");
    graph.exec = capture(&graph.gpu);
    REQUIRE(graph.exec, "no graph");
    for (int step = 0; step < REPLAYS && !check_failure()[0]; step++) {
        graph_step_load(&graph, step);
        graph_step_launch(&graph, 1);
        device_step_check(&graph.gpu);
    }
    CHECK_OK(ep_group_status(group, NULL));
    ep_group_destroy(group);
    graph_step_close(&graph);
}

#define REPLAY(name, ranks, layout, phases)            \
    ThreadTest(gpu_replays, name, ranks) {             \
        GPU_NEEDS_LATENCY();                           \
        replay(bootstrap, EP_LAYOUT_##layout, phases); \
    }
REPLAY(expert_major_1, 1, EXPERT_MAJOR, 0)
REPLAY(expert_major_2, 2, EXPERT_MAJOR, 0)
REPLAY(expert_major_4, 4, EXPERT_MAJOR, 0)
REPLAY(batched_phases_1, 1, BATCHED, 1)
REPLAY(batched_phases_2, 2, BATCHED, 1)
REPLAY(batched_phases_4, 4, BATCHED, 1)
REPLAY(rank_major_1, 1, RANK_MAJOR, 0)
REPLAY(rank_major_4, 4, RANK_MAJOR, 0)
REPLAY(rank_major_phases_2, 2, RANK_MAJOR, 1)

/* ---- several graphs by turns --------------------------------------------------------------- */

enum { GRAPHS = 8 };

/* Replay one graph up to three times without waiting, so that ranks are not in step; every fifth
 * turn makes the calls without the graph. */
static void run_turn(GraphStep *graph, int step) {
    graph_step_load(graph, step);
    if (step % 5 == 4)
        device_step_issue(&graph->gpu, device_step_all(&graph->gpu.c));
    else
        graph_step_launch(graph, 1 + step % 3);
    device_step_check(&graph->gpu);
}

/* One graph for each layout, whole and in phases, replayed by turns. */
static void by_turns(const EpBootstrap *bootstrap) {
    GraphStep graphs[GRAPHS];
    Case widest = replay_case(bootstrap->size, EP_LAYOUT_EXPERT_MAJOR, 0);
    EpGroup *group = open_group(bootstrap, &widest);
    REQUIRE(group, "no group");
    for (int i = 0; i < GRAPHS; i++) {
        Case c = replay_case(bootstrap->size, (EpLayout)(1 + i % 4), i >= 4);
        REQUIRE(graph_step_open(&graphs[i], group, &c, bootstrap->rank), "no handle");
    }
    for (int i = 0; i < GRAPHS; i++) {
        graphs[i].exec = capture(&graphs[i].gpu);
        REQUIRE(graphs[i].exec, "no graph");
    }
    for (int step = 0; step < TURNS && !check_failure()[0]; step++)
        run_turn(&graphs[step * 7 % 11 % GRAPHS], step);
    CHECK_OK(ep_group_status(group, NULL));
    ep_group_destroy(group);
    for (int i = 0; i < GRAPHS; i++)
        graph_step_close(&graphs[i]);
}

ThreadTest(gpu_replays, by_turns_1, 1) {
    GPU_NEEDS_LATENCY();
    by_turns(bootstrap);
}
ThreadTest(gpu_replays, by_turns_2, 2) {
    GPU_NEEDS_LATENCY();
    by_turns(bootstrap);
}
ThreadTest(gpu_replays, by_turns_4, 4) {
    GPU_NEEDS_LATENCY();
    by_turns(bootstrap);
}

/* ---- phases of two handles on two streams -------------------------------------------------- */

/* Send phases have one order on all ranks; receive phases have another order on odd ranks. */
static void interleave(DeviceStep *a, DeviceStep *b, int swapped) {
    DeviceStep *first = swapped ? b : a, *second = swapped ? a : b;
    device_step_issue(a, STEP_PREPARE);
    device_step_issue(b, STEP_PREPARE);
    device_step_issue(a, STEP_DISPATCH_SEND);
    device_step_issue(b, STEP_DISPATCH_SEND);
    device_step_issue(first, STEP_DISPATCH_WAIT);
    device_step_issue(second, STEP_DISPATCH_WAIT);
    device_step_issue(b, STEP_COMBINE_SEND);
    device_step_issue(a, STEP_COMBINE_SEND);
    device_step_issue(first, STEP_COMBINE_WAIT);
    device_step_issue(second, STEP_COMBINE_WAIT);
}

/* Capture both streams: b's stream forks from the capture of a's stream and joins it at the end. */
static cudaGraphExec_t capture_two(DeviceStep *a, DeviceStep *b, int swapped) {
    cudaEvent_t forked, joined;
    CHECK_CUDA(cudaEventCreateWithFlags(&forked, cudaEventDisableTiming));
    CHECK_CUDA(cudaEventCreateWithFlags(&joined, cudaEventDisableTiming));
    begin_capture(a->stream);
    CHECK_CUDA(cudaEventRecord(forked, a->stream));
    CHECK_CUDA(cudaStreamWaitEvent(b->stream, forked, 0));
    interleave(a, b, swapped);
    CHECK_CUDA(cudaEventRecord(joined, b->stream));
    CHECK_CUDA(cudaStreamWaitEvent(a->stream, joined, 0));
    cudaGraphExec_t exec = end_capture(a->stream);
    CHECK_CUDA(cudaEventDestroy(forked));
    CHECK_CUDA(cudaEventDestroy(joined));
    return exec;
}

static void run_two(GraphStep *a, GraphStep *b, int swapped, int step) {
    graph_step_load(a, 2 * step);
    graph_step_load(b, 2 * step + 1);
    if (!a->exec || step % 5 == 4) {
        interleave(&a->gpu, &b->gpu, swapped);
    } else {
        CHECK_CUDA(cudaGraphLaunch(a->exec, a->gpu.stream));
        CHECK_CUDA(cudaStreamSynchronize(a->gpu.stream));
        device_step_replayed(&a->gpu, STEP_PHASES);
        device_step_replayed(&b->gpu, STEP_PHASES);
    }
    device_step_check(&a->gpu);
    device_step_check(&b->gpu);
}

static void two_streams(const EpBootstrap *bootstrap, int with_graph, int steps) {
    GraphStep a, b;
    Case c = replay_case(bootstrap->size, EP_LAYOUT_EXPERT_MAJOR, 1);
    Case d = replay_case(bootstrap->size, EP_LAYOUT_BATCHED, 1);
    int rank = bootstrap->rank, swapped = rank % 2;
    EpGroup *group = open_group(bootstrap, &c);
    REQUIRE(group && graph_step_open(&a, group, &c, rank) && graph_step_open(&b, group, &d, rank),
            "no handle");
    if (with_graph) {
        a.exec = capture_two(&a.gpu, &b.gpu, swapped);
        REQUIRE(a.exec, "no graph");
    }
    for (int step = 0; step < steps && !check_failure()[0]; step++)
        run_two(&a, &b, swapped, step);
    CHECK_OK(ep_group_status(group, NULL));
    ep_group_destroy(group);
    graph_step_close(&a);
    graph_step_close(&b);
}

#define TWO_STREAMS(suite, name, ranks, with_graph, steps) \
    ThreadTest(suite, name, ranks) {                       \
        GPU_NEEDS_LATENCY();                               \
        two_streams(bootstrap, with_graph, steps);         \
    }
TWO_STREAMS(gpu_replays, two_streams_1, 1, 1, TURNS)
TWO_STREAMS(gpu_replays, two_streams_2, 2, 1, REPLAYS)
TWO_STREAMS(gpu_replays, two_streams_4, 4, 1, REPLAYS)
TWO_STREAMS(gpu_latency, two_streams_1, 1, 0, 40)
TWO_STREAMS(gpu_latency, two_streams_2, 2, 0, 40)
TWO_STREAMS(gpu_latency, two_streams_4, 4, 0, 40)
