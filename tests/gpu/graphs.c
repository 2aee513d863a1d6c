/* SPDX-License-Identifier: Apache-2.0 */
/* All five operations captured into one graph, which is then replayed over new tokens, new routing
 * and another T in the same buffers. */
#include "tests/cases/run.h"
#include "tests/gpu/arena.h"
#include "tests/gpu/rig.h"

enum { REPLAYS = 100 };

static void reserve(void) {
    gpu_reserve((size_t)320 << 20);
}

TestSuite(gpu_graphs, .init = reserve);

/* No size is a multiple of a block's share or of a cache line, and the capacity is too small for
 * some of the steps. */
static Case graph_case(int ranks, EpLayout layout) {
    return case_complete((Case){.ranks = ranks,
                                .experts = 4 * ranks + 1,
                                .top_k = 4,
                                .hidden = 136,
                                .max_tokens = 299,
                                .counted = 1,
                                .weighted = 1,
                                .scale_bytes = 12,
                                .masked_percent = 10,
                                .alignment = 8,
                                .capacity = 950,
                                .rows_per_expert = 160,
                                .overflow = EP_OVERFLOW_DROP,
                                .layout = layout});
}

static cudaGraphExec_t capture(Rig *rig) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    CHECK_CUDA(cudaStreamBeginCapture(rig->stream, cudaStreamCaptureModeThreadLocal));
    rig_issue(rig, RIG_ALL);
    CHECK_CUDA(cudaStreamEndCapture(rig->stream, &graph));
    if (graph) CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    if (graph) CHECK_CUDA(cudaGraphDestroy(graph));
    return exec;
}

/* Replays, and now and then the same calls without the graph. */
static void run_step(Rig *rig, cudaGraphExec_t exec, int step) {
    World *world = rig_world(&rig->c, step);
    check_note("step %d: %s", step, case_describe(&world->c));
    rig_load(rig, world);
    if (step % 10 == 9) {
        rig_issue(rig, RIG_ALL);
    } else {
        CHECK_CUDA(cudaGraphLaunch(exec, rig->stream));
        rig_replayed(rig, RIG_ALL);
    }
    rig_check(rig);
    world_free(world);
}

static void replay_layout(EpGroup *group, int rank, const Case *c) {
    Rig rig;
    cudaStream_t stream = new_stream();
    World *first = rig_world(c, 0);
    rig_open(&rig, group, rig_handle(group, c), c, rank, stream, NULL);
    rig_load(&rig, first);
    CHECK_CUDA(cudaStreamSynchronize(stream));
    cudaGraphExec_t exec = capture(&rig);
    REQUIRE(exec, "no graph");
    for (int step = 0; step < REPLAYS; step++)
        run_step(&rig, exec, step);
    CHECK_OK(ep_group_status(group, NULL));
    CHECK_CUDA(cudaGraphExecDestroy(exec));
    rig_close(&rig);
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

/* Two graphs of two handles replayed by turns on two streams, and plain calls on a third: calls of
 * a group keep their order whatever the stream, once the caller has ordered what it replays. */
static void mix(EpGroup *group, const Case *c, Rig *rig, cudaGraphExec_t *exec) {
    for (int step = 0; step < 12; step++) {
        int which = step % 3;
        World *world = rig_world(c, step);
        check_note("step %d: %s", step, case_describe(&world->c));
        rig_load(&rig[which], world);
        if (which == 2) rig_issue(&rig[2], RIG_ALL);
        if (which < 2) CHECK_CUDA(cudaGraphLaunch(exec[which], rig[which].stream));
        if (which < 2) rig_replayed(&rig[which], RIG_ALL);
        rig_check(&rig[which]);
        world_free(world);
    }
    CHECK_OK(ep_group_status(group, NULL));
}

static void graphs_and_calls(const EpBootstrap *bootstrap) {
    Case c = graph_case(bootstrap->size, EP_LAYOUT_EXPERT_MAJOR);
    EpGroup *group = open_group(bootstrap, &c);
    REQUIRE(group, "no group");
    World *first = rig_world(&c, 0);
    Rig rig[3];
    cudaGraphExec_t exec[3] = {NULL};
    for (int i = 0; i < 3; i++) {
        rig_open(&rig[i], group, rig_handle(group, &c), &c, bootstrap->rank, new_stream(), NULL);
        rig_load(&rig[i], first);
        CHECK_CUDA(cudaStreamSynchronize(rig[i].stream));
        if (i < 2) exec[i] = capture(&rig[i]);
    }
    REQUIRE(exec[0] && exec[1], "no graphs");
    mix(group, &c, rig, exec);
    for (int i = 0; i < 3; i++) {
        if (exec[i]) CHECK_CUDA(cudaGraphExecDestroy(exec[i]));
        CHECK_CUDA(cudaStreamDestroy(rig[i].stream));
        rig_close(&rig[i]);
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
