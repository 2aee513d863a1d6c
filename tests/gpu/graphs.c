/* SPDX-License-Identifier: Apache-2.0 */
/* All five operations in one graph, replayed with new tokens, new routing and another T in the same
 * buffers. */
#include "tests/cases/run.h"
#include "tests/gpu/device_step.h"
#include "tests/gpu/devices.h"

enum { REPLAYS = 100 };

static void reserve(void) {
    gpu_reserve((size_t)320 << 20);
}

TestSuite(gpu_graphs, .init = reserve);

/* No size is a multiple of a block's part of the work or of a cache line. The capacity is too small
 * for some steps. */
static Case graph_case(int ranks, EpLayout layout) {
    return case_complete((Case){.ranks = ranks,
                                .experts = 4 * ranks + 1,
                                .top_k = 4,
                                .hidden = 136,
                                .max_tokens = 299,
                                .counted = 1,
                                .biases = 2,
                                .weighted = 1,
                                .scale_bytes = 12,
                                .masked_percent = 10,
                                .alignment = 8,
                                .capacity = 950,
                                .rows_per_expert = 160,
                                .overflow = EP_OVERFLOW_DROP,
                                .layout = layout});
}

static cudaGraphExec_t capture(DeviceStep *gpu) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    CHECK_CUDA(cudaStreamBeginCapture(gpu->stream, cudaStreamCaptureModeThreadLocal));
    device_step_issue(gpu, STEP_ALL);
    CHECK_CUDA(cudaStreamEndCapture(gpu->stream, &graph));
    if (graph) CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    if (graph) CHECK_CUDA(cudaGraphDestroy(graph));
    return exec;
}

/* Replay the graph; every tenth step makes the calls without it. */
static void run_step(DeviceStep *gpu, cudaGraphExec_t exec, int step) {
    World *world = device_step_world(&gpu->c, step);
    check_note("step %d: %s", step, case_describe(&world->c));
    device_step_load(gpu, world);
    if (step % 10 == 9) {
        device_step_issue(gpu, STEP_ALL);
    } else {
        CHECK_CUDA(cudaGraphLaunch(exec, gpu->stream));
        device_step_replayed(gpu, STEP_ALL);
    }
    device_step_check(gpu);
    world_free(world);
}

static void replay_layout(EpGroup *group, int rank, const Case *c) {
    DeviceStep gpu;
    cudaStream_t stream = new_stream();
    World *first = device_step_world(c, 0);
    device_step_open(&gpu, group, device_step_handle(group, c), c, rank, stream, NULL);
    device_step_load(&gpu, first);
    CHECK_CUDA(cudaStreamSynchronize(stream));
    cudaGraphExec_t exec = capture(&gpu);
    REQUIRE(exec, "no graph");
    for (int step = 0; step < REPLAYS; step++)
        run_step(&gpu, exec, step);
    CHECK_OK(ep_group_status(group, NULL));
    CHECK_CUDA(cudaGraphExecDestroy(exec));
    device_step_close(&gpu);
    CHECK_CUDA(cudaStreamDestroy(stream));
    world_free(first);
}

static void replay(const EpBootstrap *bootstrap, EpLayout layout) {
    Case c = graph_case(bootstrap->size, layout);
    EpGroup *group = open_group(bootstrap, &c);
    if (group) replay_layout(group, bootstrap->rank, &c);
    ep_group_destroy(group);
}

#define REPLAY(name, ranks, layout)            \
    ThreadTest(gpu_graphs, name, ranks) {      \
        replay(bootstrap, EP_LAYOUT_##layout); \
    }
REPLAY(expert_major_1, 1, EXPERT_MAJOR)
REPLAY(expert_major_2, 2, EXPERT_MAJOR)
REPLAY(expert_major_4, 4, EXPERT_MAJOR)
REPLAY(flat_2, 2, FLAT)
REPLAY(flat_4, 4, FLAT)
REPLAY(batched_2, 2, BATCHED)
REPLAY(batched_4, 4, BATCHED)

/* ---- graphs and plain calls ---- */

/* Replay two graphs of two handles by turns on two streams, with plain calls on a third. A group
 * keeps the order of its calls across streams, provided that the caller orders the replays. */
static void replay_and_call(EpGroup *group, const Case *c, DeviceStep *gpu, cudaGraphExec_t *exec) {
    for (int step = 0; step < 12; step++) {
        int which = step % 3;
        World *world = device_step_world(c, step);
        check_note("step %d: %s", step, case_describe(&world->c));
        device_step_load(&gpu[which], world);
        if (which == 2) device_step_issue(&gpu[2], STEP_ALL);
        if (which < 2) CHECK_CUDA(cudaGraphLaunch(exec[which], gpu[which].stream));
        if (which < 2) device_step_replayed(&gpu[which], STEP_ALL);
        device_step_check(&gpu[which]);
        world_free(world);
    }
    CHECK_OK(ep_group_status(group, NULL));
}

static void graphs_and_calls(const EpBootstrap *bootstrap) {
    Case c = graph_case(bootstrap->size, EP_LAYOUT_EXPERT_MAJOR);
    EpGroup *group = open_group(bootstrap, &c);
    REQUIRE(group, "no group");
    World *first = device_step_world(&c, 0);
    DeviceStep gpu[3];
    cudaGraphExec_t exec[3] = {NULL};
    for (int i = 0; i < 3; i++) {
        device_step_open(&gpu[i], group, device_step_handle(group, &c), &c, bootstrap->rank,
                         new_stream(), NULL);
        device_step_load(&gpu[i], first);
        CHECK_CUDA(cudaStreamSynchronize(gpu[i].stream));
        if (i < 2) exec[i] = capture(&gpu[i]);
    }
    REQUIRE(exec[0] && exec[1], "no graphs");
    replay_and_call(group, &c, gpu, exec);
    for (int i = 0; i < 3; i++) {
        if (exec[i]) CHECK_CUDA(cudaGraphExecDestroy(exec[i]));
        CHECK_CUDA(cudaStreamDestroy(gpu[i].stream));
        device_step_close(&gpu[i]);
    }
    world_free(first);
    ep_group_destroy(group);
}

ThreadTest(gpu_graphs, and_plain_calls_1, 1) {
    graphs_and_calls(bootstrap);
}
ThreadTest(gpu_graphs, and_plain_calls_2, 2) {
    graphs_and_calls(bootstrap);
}
ThreadTest(gpu_graphs, and_plain_calls_4, 4) {
    graphs_and_calls(bootstrap);
}
