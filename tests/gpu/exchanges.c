/* SPDX-License-Identifier: Apache-2.0 */
/* Exchanges between nodes that repeat are captured once and replayed: with the same bytes, without
 * mixing up sizes, up to a limit, and no later than others where a rank fails. The emulated NCCL
 * never ends an exchange that is replayed on one rank and called on another. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bootstrap/cuda/watch_state.h"
#include "handles/cuda/relay.h"
#include "tests/cases/run.h"
#include "tests/gpu/device_step.h"
#include "tests/gpu/devices.h"
#include "tests/gpu/failing.h"
#include "tests/harness/ranked.h"

enum { STEPS = 6, EARLY_STEPS = 2 }; /* then all exchanges of a step have come twice */

static void reserve(void) {
    gpu_reserve((size_t)320 << 20);
}

TestSuite(gpu_exchanges, .init = reserve);

/* Rows cross the network in several chunks, the last of which is smaller. */
static Case exchanged_case(const EpBootstrap *bootstrap, int hidden) {
    int ranks = bootstrap->size;
    Case c = {.ranks = ranks,
              .experts = 3 * ranks,
              .top_k = 3,
              .hidden = hidden,
              .max_tokens = 101,
              .counted = 1,
              .weighted = 1,
              .capacity = 900,
              .alignment = 4};
    snprintf(c.nodes, sizeof(c.nodes), "%s", ranks == 2 ? "01" : "0011");
    return case_complete(c);
}

static EpGroup *open_on_nodes(const EpBootstrap *bootstrap, const Case *c, const char *graphs) {
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "2");
    set_on_ranks(bootstrap, "LIBEP_NODE_CHUNK", "5000");
    set_on_ranks(bootstrap, "LIBEP_NODE_GRAPHS", graphs);
    return open_group(bootstrap, c);
}

static const EpReplays *replays_of(const EpGroup *group) {
    return &ep_cuda(group)->watch->replays;
}

static int count_graphs(const EpReplays *replays) {
    int graphs = 0;
    for (int i = 0; i < replays->count; i++)
        graphs += replays->of[i].graph != NULL;
    return graphs;
}

/* Prepare has stamps and the routing, each of the other operations stamps and rows. */
static int count_exchanges(const EpGroup *group) {
    return 2 + 4 * (1 + ep_cuda(group)->relay->tables.chunks);
}

static void run_step(DeviceStep *gpu, int step) {
    World *world = device_step_world(&gpu->c, step);
    check_note("step %d: %s", step, case_describe(&world->c));
    device_step_load(gpu, world);
    device_step_issue(gpu, STEP_ALL);
    device_step_check(gpu);
    world_free(world);
}

static void open_step(DeviceStep *gpu, EpGroup *group, const Case *c, int rank) {
    device_step_open(gpu, group, device_step_handle(group, c), c, rank, new_stream(), NULL);
}

static void close_step(DeviceStep *gpu) {
    CHECK_CUDA(cudaStreamDestroy(gpu->stream));
    device_step_close(gpu);
}

/* ---- the same bytes ------------------------------------------------------------------------ */

/* From the third step on nothing is captured, and every exchange is a replay. */
static void replayed(const EpBootstrap *bootstrap) {
    Case c = exchanged_case(bootstrap, 72);
    EpGroup *group = open_on_nodes(bootstrap, &c, "auto");
    DeviceStep gpu;
    REQUIRE(group, "no group");
    const EpReplays *replays = replays_of(group);
    open_step(&gpu, group, &c, bootstrap->rank);
    CHECK(ep_cuda(group)->relay->tables.chunks > 2, "few chunks");
    for (int step = 0; step < STEPS; step++) {
        int64_t launches = replays->launches;
        int32_t count = replays->count;
        run_step(&gpu, step);
        if (step < EARLY_STEPS) continue;
        CHECK(replays->count == count, "%d exchanges, then %d", count, replays->count);
        CHECK(replays->launches - launches == count_exchanges(group), "%d replays in a step of %d",
              (int)(replays->launches - launches), count_exchanges(group));
        CHECK(count_graphs(replays) == count, "%d graphs of %d", count_graphs(replays), count);
    }
    CHECK_OK(ep_group_status(group, NULL));
    close_step(&gpu);
    ep_group_destroy(group);
}

ThreadTest(gpu_exchanges, replayed_2, 2) {
    replayed(bootstrap);
}
ThreadTest(gpu_exchanges, replayed_4, 4) {
    replayed(bootstrap);
}

/* Steps of one handle are under way while those of the other follow. */
ThreadTest(gpu_exchanges, of_two_sizes_2, 2) {
    Case c[2] = {exchanged_case(bootstrap, 136), exchanged_case(bootstrap, 72)};
    EpGroup *group = open_on_nodes(bootstrap, &c[0], "auto");
    DeviceStep gpu[2];
    World *world[2];
    REQUIRE(group, "no group");
    for (int i = 0; i < 2; i++)
        open_step(&gpu[i], group, &c[i], bootstrap->rank);
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < 2; i++)
            device_step_load(&gpu[i], world[i] = device_step_world(&c[i], step));
        for (int i = 0; i < 2; i++)
            device_step_issue(&gpu[i], STEP_ALL);
        for (int i = 0; i < 2; i++) {
            device_step_check(&gpu[i]);
            world_free(world[i]);
        }
    }
    CHECK(count_graphs(replays_of(group)) == replays_of(group)->count, "%d graphs of %d",
          count_graphs(replays_of(group)), replays_of(group)->count);
    close_step(&gpu[0]);
    close_step(&gpu[1]);
    ep_group_destroy(group);
}

/* ---- the limit ----------------------------------------------------------------------------- */

static void limited(const EpBootstrap *bootstrap, const char *graphs) {
    Case c = exchanged_case(bootstrap, 72);
    EpGroup *group = open_on_nodes(bootstrap, &c, graphs);
    DeviceStep gpu;
    REQUIRE(group, "no group");
    open_step(&gpu, group, &c, bootstrap->rank);
    for (int step = 0; step < STEPS; step++)
        run_step(&gpu, step);
    CHECK(count_graphs(replays_of(group)) == atoi(graphs), "%d graphs, limit %s",
          count_graphs(replays_of(group)), graphs);
    CHECK(atoi(graphs) || !replays_of(group)->launches, "replays without a graph");
    close_step(&gpu);
    ep_group_destroy(group);
}

ThreadTest(gpu_exchanges, none_replayed_2, 2) {
    limited(bootstrap, "0");
}
ThreadTest(gpu_exchanges, three_replayed_2, 2) {
    limited(bootstrap, "3");
}

/* ---- failures ------------------------------------------------------------------------------ */

#define WHY "the watchdog has had enough"

/* Returns whether the watcher has ended the communicator, and destroyed the graphs before the group
 * is: a process may exit without that. */
static int has_ended(const EpGroup *group) {
    const EpCudaWatch *w = ep_cuda(group)->watch;
    for (int i = 0; i < 5000; i++, usleep(1000))
        if (__atomic_load_n(&w->ending, __ATOMIC_ACQUIRE) && count_graphs(&w->replays) == 0)
            return 1;
    return 0;
}

/* A rank whose deadline comes later may hear of the absent one from another rank first. */
static void check_why(const FailingGroup *failing, EpStatus status, int aborts) {
    char heard[32];
    snprintf(heard, sizeof(heard), "because of rank %d", failing->absent);
    if (aborts)
        CHECK_REFUSED(status, EP_ERR_PEER, WHY);
    else if (status == EP_ERR_PEER)
        CHECK_REFUSED(status, EP_ERR_PEER, heard);
    else
        CHECK_REFUSED(status, EP_ERR_TIMEOUT, "did not arrive within");
}

/* The last rank stays away from an operation whose exchanges are replays, or aborts. */
static void failing(const EpBootstrap *bootstrap, StepOp op, int aborts) {
    FailingGroup failing;
    Case c = failing_case(bootstrap->size, EP_MODE_THROUGHPUT);
    snprintf(c.nodes, sizeof(c.nodes), "%s", bootstrap->size == 2 ? "01" : "0011");
    setenv("LIBEP_LOG_FILE", "/dev/null", 1);
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "2");
    set_on_ranks(bootstrap, "LIBEP_NODE_CHUNK", "10000");
    set_on_ranks(bootstrap, "LIBEP_NODE_GRAPHS", "auto");
    REQUIRE(failing_open(&failing, bootstrap, &c, aborts ? 2 * FAILING_LIMIT : FAILING_TIMEOUT),
            "no group");
    for (int step = 0; step < EARLY_STEPS + 1; step++)
        run_step(&failing.gpu, step);
    int64_t launches = replays_of(failing.group)->launches;
    bootstrap->barrier(bootstrap->context, 60);
    double begin = failing_now();
    if (bootstrap->rank != failing.absent) {
        CHECK_OK(device_step_try(&failing.gpu, op));
        CHECK(replays_of(failing.group)->launches > launches, "nothing was replayed");
        bootstrap->barrier(bootstrap->context, 60);
        CHECK_CUDA(cudaStreamSynchronize(failing.gpu.stream));
        check_why(&failing, ep_group_status(failing.group, NULL), aborts);
        check_why(&failing, device_step_try(&failing.gpu, op), aborts);
        CHECK(has_ended(failing.group), "the communicator or its graphs are still there");
    } else {
        bootstrap->barrier(bootstrap->context, 60);
        if (aborts) CHECK_OK(ep_group_abort(failing.group, WHY));
    }
    CHECK(failing_now() - begin < FAILING_LIMIT, "it took %.1f s", failing_now() - begin);
    bootstrap->barrier(bootstrap->context, 60);
    failing_close(&failing);
    REQUIRE(failing_open(&failing, bootstrap, &c, 60), "no further group");
    run_step(&failing.gpu, 0);
    failing_close(&failing);
}

/* A replay has the arguments of the operation that was captured, perhaps dispatch where the same
 * rows now travel in combine_backward: sentences have the one that is under way. */
ThreadTest(gpu_exchanges, of_another_operation_2, 2) {
    FailingGroup failing;
    Case c = failing_case(bootstrap->size, EP_MODE_THROUGHPUT);
    StepOp op = bootstrap->rank ? STEP_DISPATCH_BACKWARD : STEP_COMBINE_BACKWARD;
    const char *own = bootstrap->rank ? "dispatch backward" : "combine backward";
    EpFinding finding = EP_FINDING_INIT;
    snprintf(c.nodes, sizeof(c.nodes), "01");
    setenv("LIBEP_LOG_FILE", "/dev/null", 1);
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "2");
    set_on_ranks(bootstrap, "LIBEP_NODE_GRAPHS", "auto");
    REQUIRE(failing_open(&failing, bootstrap, &c, FAILING_LIMIT), "no group");
    for (int step = 0; step < EARLY_STEPS + 1; step++)
        run_step(&failing.gpu, step);
    failing_call(&failing.gpu, op, EP_ERR_ORDER);
    CHECK_REFUSED(ep_group_status(failing.group, &finding), EP_ERR_ORDER, "combine backward",
                  "dispatch backward");
    CHECK(strcmp(finding.phase, own) == 0, "%s in %s", finding.phase, own);
    bootstrap->barrier(bootstrap->context, 60);
    failing_close(&failing);
}

ThreadTest(gpu_exchanges, absent_from_dispatch_2, 2) {
    failing(bootstrap, STEP_DISPATCH, 0);
}
ThreadTest(gpu_exchanges, absent_from_combine_4, 4) {
    failing(bootstrap, STEP_COMBINE, 0);
}
ThreadTest(gpu_exchanges, aborted_in_dispatch_2, 2) {
    failing(bootstrap, STEP_DISPATCH, 1);
}
ThreadTest(gpu_exchanges, aborted_in_prepare_4, 4) {
    failing(bootstrap, STEP_PREPARE, 1);
}
