/* SPDX-License-Identifier: Apache-2.0 */
/* Groups on several pretended nodes of GPUs: what they say of themselves, what they refuse, and
 * that they take the memory that was promised. What they compute is tested by the cases with nodes.
 */
#include <sched.h>

#include "tests/gpu/device_step.h"
#include "tests/harness/ranked.h"

static Case nodes_case(void) {
    Case c = {.ranks = 4, .nodes = "0011", .experts = 12, .top_k = 4, .hidden = 256};
    c.max_tokens = 100, c.capacity = 1200;
    return case_complete(c);
}

/* Open a group on these nodes. */
static EpGroup *open_on_nodes(const EpBootstrap *bootstrap, const char *nodes,
                              const EpGroupConfig *config) {
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", nodes);
    return open_group_with(bootstrap, config);
}

/* Ranks of equal number on nodes 0, 3 and 1, 2 send to each other. */
static void check_relays(const EpGroup *group, const EpGroupInfo *info) {
    static const int32_t elsewhere[] = {1, 0, 3, 2};
    int32_t rank = -1;
    CHECK_OK(ep_group_relay(group, info->node, &rank));
    CHECK(rank == info->rank, "relay %d on its own node", rank);
    CHECK_OK(ep_group_relay(group, 1 - info->node, &rank));
    CHECK(rank == elsewhere[info->rank], "relay %d", rank);
    CHECK_REFUSED(ep_group_relay(group, 2, &rank), EP_ERR_RANGE, "node", "0 .. 1, got 2");
    CHECK_REFUSED(ep_group_relay(group, -1, &rank), EP_ERR_RANGE, "node", "0 .. 1, got -1");
    CHECK_REFUSED(ep_group_relay(group, 0, NULL), EP_ERR_NULL, "rank", "got NULL");
    CHECK(rank == elsewhere[info->rank], "a refused call has changed the output");
}

/* A rank on one core is told so, since NCCL's threads need some, too. Only rank 0 is on one. */
ThreadTest(gpu_nodes, on_one_core_2, 2) {
    static char path[] = "/tmp/libep-core-XXXXXX";
    cpu_set_t before, one;
    Case c = nodes_case();
    c.ranks = 2;
    EpGroupConfig config = case_group_config(&c);
    REQUIRE(sched_getaffinity(0, sizeof(before), &before) == 0, "no affinity");
    if (bootstrap->rank == 0) {
        int file = mkstemp(path);
        REQUIRE(file >= 0, "no log file");
        close(file);
        setenv("LIBEP_LOG_FILE", path, 1);
        CPU_ZERO(&one);
        for (int cpu = 0; CPU_COUNT(&one) == 0; cpu++)
            if (CPU_ISSET(cpu, &before)) CPU_SET(cpu, &one);
        CHECK(sched_setaffinity(0, sizeof(one), &one) == 0, "sched_setaffinity");
    }
    REQUIRE_OK(bootstrap->barrier(bootstrap->context, 60));
    EpGroup *group = open_on_nodes(bootstrap, "0,1", &config);
    ep_group_destroy(group);
    if (bootstrap->rank == 0) {
        int lines = count_lines(path, "may run on one CPU only");
        CHECK(lines == (CPU_COUNT(&before) > 1 ? 1 : 2), "%d warnings", lines);
        unlink(path);
        sched_setaffinity(0, sizeof(before), &before);
    }
}

ThreadTest(gpu_nodes, known_to_the_group_4, 4) {
    Case c = nodes_case();
    EpGroupConfig config = case_group_config(&c);
    config.num_nodes = 2;
    EpGroup *group = open_on_nodes(bootstrap, "0,1,1,0", &config);
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    CHECK_OK(ep_group_query(group, &info));
    CHECK(info.backend == EP_BACKEND_CUDA && info.num_nodes == 2, "backend %d, %d nodes",
          (int)info.backend, info.num_nodes);
    CHECK(info.node == (bootstrap->rank == 1 || bootstrap->rank == 2), "node %d", info.node);
    CHECK(info.within[0] && strncmp(info.between, "NCCL 2.", 7) == 0, "within %s, between %s",
          info.within, info.between);
    check_relays(group, &info);
    ep_group_destroy(group);
}

ThreadTest(gpu_nodes, other_nodes_than_expected_2, 2) {
    Case c = nodes_case();
    EpGroupConfig config = case_group_config(&c);
    config.num_nodes = 3;
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "2");
    CHECK_NO_GROUP(bootstrap, &config, EP_ERR_MISMATCH, "config.num_nodes", "2, got 3");
}

/* A window of the lent communicator would span nodes. */
ThreadTest(gpu_nodes, no_adopted_windows_2, 2) {
    Case c = nodes_case();
    EpGroupConfig config = case_group_config(&c);
    EpGroup *group = open_on_nodes(bootstrap, "2", &config);
    _Alignas(16) char window[64] = {0};
    CHECK_REFUSED(ep_window_adopt(group, window, 0, window, sizeof(window)), EP_ERR_UNSUPPORTED,
                  "group", "one node", "2 nodes");
    ep_group_destroy(group);
}

/* Check that a rank of the larger node takes what is promised. */
static void check_promise(const EpBootstrap *bootstrap) {
    Case c = nodes_case();
    c.ranks = bootstrap->size;
    EpGroupConfig config = case_group_config(&c);
    EpGroupMemory memory = EP_GROUP_MEMORY_INIT;
    EpGroup *group = open_on_nodes(bootstrap, "2", &config);
    EpGroupInfo info = group_info(group);
    config.num_nodes = 2;
    CHECK_OK(ep_group_memory(&config, bootstrap->size, &memory));
    CHECK(memory.feasible && memory.backend == EP_BACKEND_CUDA, "%s", memory.reason);
    int is_alone = bootstrap->size == 3 && bootstrap->rank == 2;
    CHECK(is_alone || info.library_bytes == memory.shared_bytes + memory.private_bytes,
          "%lld bytes taken, %lld promised", (long long)info.library_bytes,
          (long long)(memory.shared_bytes + memory.private_bytes));
    ep_group_destroy(group);
}

RankTest(gpu_nodes, memory_as_promised_4, 4, check_promise(bootstrap));
RankTest(gpu_nodes, memory_as_promised_3, 3, check_promise(bootstrap));

/* ---- several operations under way ------------------------------------------------------------ */

enum { STEPS = 4 };

/* Steps of two handles, whose rows differ in size and cross the network in several chunks, are
 * enqueued in turns, and nothing waits between them. */
static void two_handles(const EpBootstrap *bootstrap) {
    Case c[2] = {nodes_case(), nodes_case()};
    DeviceStep gpu[2];
    set_on_ranks(bootstrap, "LIBEP_NODE_CHUNK", "9000");
    for (int i = 0; i < 2; i++) {
        c[i].ranks = bootstrap->size, c[i].hidden = i ? 72 : 136, c[i].counted = 1;
        snprintf(c[i].nodes, sizeof(c[i].nodes), "%s", bootstrap->size == 2 ? "01" : "0011");
    }
    EpGroupConfig config = case_group_config(&c[0]);
    EpGroup *group = open_on_nodes(bootstrap, "2", &config);
    for (int i = 0; i < 2; i++)
        device_step_new(&gpu[i], group, &c[i], bootstrap->rank);
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < 2; i++)
            device_step_draw_step(&gpu[i], step);
        for (int i = 0; i < 2; i++)
            device_step_issue(&gpu[i], STEP_ALL);
        for (int i = 0; i < 2; i++)
            device_step_check(&gpu[i]);
    }
    for (int i = 0; i < 2; i++)
        device_step_close(&gpu[i]);
    ep_group_destroy(group);
}

RankTests24(gpu_nodes, two_handles, two_handles(bootstrap));
