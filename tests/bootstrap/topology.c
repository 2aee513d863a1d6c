/* SPDX-License-Identifier: Apache-2.0 */
/* Pretended nodes: rows between nodes go by messages instead of shared memory. */
#include <sched.h>

#include "tests/cases/run.h"
#include "tests/harness/ranked.h"

/* `nodes` is what the topology means. Some nodes are empty. */
#define TopologyTest(name, topology, ranks, nodes)                                          \
    CasesTest(bootstrap_topology, name, setenv("LIBEP_TOPOLOGY", topology, 1);              \
              run_grid(EACH_LAYOUT "nodes=" nodes                                           \
                                   " ranks=%d experts=11 top_k=4 weighted=1 scale_bytes=8 " \
                                   "alignment=8 masked_percent=10 max_tokens=30 seed=%d",   \
                       ranks, ranks))
TopologyTest(two_nodes, "2", 4, "0011");
TopologyTest(two_uneven_nodes, "2", 5, "00011");
TopologyTest(every_rank_a_node, "6", 6, "012345");
TopologyTest(three_nodes_of_three, "3", 9, "000111222");
TopologyTest(listed_nodes, "5,0,5,3,0", 5, "50530");
TopologyTest(listed_nodes_with_machines, "0,1,0,1,1/numa:2 core:4 pu:1", 5, "01011");
TopologyTest(one_node, "1", 3, "000");
TopologyTest(synthetic_machine, "2/numa:2 core:4 pu:1", 8, "00001111");
TopologyTest(more_nodes_than_ranks, "7", 3, "024");

static void check_nodes(const EpBootstrap *bootstrap, int nodes, int numa_nodes, int cpus) {
    Case c = case_complete((Case){.ranks = bootstrap->size});
    EpGroup *group = open_group(bootstrap, &c);
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    CHECK_OK(ep_group_query(group, &info));
    CHECK(info.num_nodes == nodes, "%d nodes", info.num_nodes);
    int node = (int)((int64_t)bootstrap->rank * nodes / bootstrap->size);
    CHECK(info.node == node, "rank %d is on node %d, not %d", info.rank, info.node, node);
    if (numa_nodes) {
        CHECK(info.numa_node >= -1 && info.numa_node < numa_nodes, "NUMA node %d", info.numa_node);
        CHECK(info.num_cpus >= 1 && info.num_cpus <= cpus, "%d CPUs", info.num_cpus);
    }
    ep_group_destroy(group);
}

ThreadTest(bootstrap_topology, nodes_are_blocks_of_ranks, 4) {
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "2");
    check_nodes(bootstrap, 2, 0, 0);
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "4");
    check_nodes(bootstrap, 4, 0, 0);
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "1");
    check_nodes(bootstrap, 1, 0, 0);
}

/* A list must have the node of every rank. */
ThreadTest(bootstrap_topology, lists_of_another_size, 4) {
    static const char *const lists[] = {"0,1,0", "0,1,0,1,0"};
    for (int i = 0; i < 2; i++) {
        EpGroupConfig config = group_config(4);
        set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", lists[i]);
        CHECK_NO_GROUP(bootstrap, &config, EP_ERR_SETTING, "LIBEP_TOPOLOGY",
                       "each of the group's 4 ranks", i ? "got 5" : "got 3", lists[i]);
    }
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "7,7,7,7");
    check_nodes(bootstrap, 1, 0, 0);
}

ThreadTest(bootstrap_topology, synthetic_machine_is_seen, 4) {
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "2/numa:2 core:4 pu:1");
    check_nodes(bootstrap, 2, 2, 8);
}

/* The group of a thread bound to one CPU reports one CPU, on one NUMA node. */
SoloTest(bootstrap_topology, cpus_of_a_bound_thread) {
    cpu_set_t before, one;
    EpBootstrap bootstrap = EP_BOOTSTRAP_INIT;
    REQUIRE(sched_getaffinity(0, sizeof(before), &before) == 0, "no affinity");
    int cpu = 0;
    while (!CPU_ISSET(cpu, &before))
        cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    Case c = case_complete((Case){.ranks = 1});
    REQUIRE_OK(ep_bootstrap_local(1, &bootstrap));
    EpGroup *all = open_group(&bootstrap, &c);
    REQUIRE(sched_setaffinity(0, sizeof(one), &one) == 0, "cannot bind");
    EpGroup *bound = open_group(&bootstrap, &c);
    sched_setaffinity(0, sizeof(before), &before);
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    CHECK_OK(ep_group_query(all, &info));
    CHECK(info.num_cpus == CPU_COUNT(&before), "%d CPUs", info.num_cpus);
    CHECK_OK(ep_group_query(bound, &info));
    CHECK(info.num_cpus == 1 && info.numa_node >= 0, "%d CPUs on node %d", info.num_cpus,
          info.numa_node);
    ep_group_destroy(bound);
    ep_group_destroy(all);
    ep_bootstrap_destroy(&bootstrap);
}
