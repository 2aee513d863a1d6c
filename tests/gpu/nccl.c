/* SPDX-License-Identifier: Apache-2.0 */
/* Groups over the caller's communicator. On several nodes they split communicators of their own
 * from it. It still works after they have ended, in whatever way. */
#include "tests/gpu/communicator.h"
#include "tests/gpu/failing.h"
#include "tests/harness/ranked.h"

#define WHY "the watchdog has had enough"

TestSuite(gpu_nccl_split, .init = be_quiet);

/* A case on these nodes, one digit for each rank; "": on one. */
static Case lending_case(const EpBootstrap *bootstrap, const char *nodes) {
    Case c = {.ranks = bootstrap->size, .experts = 5 * bootstrap->size, .top_k = 3, .hidden = 200};
    c.max_tokens = 131, c.weighted = 1, c.capacity = 1700;
    char topology[2 * sizeof(c.nodes)] = "";
    memcpy(c.nodes, nodes, strlen(nodes));
    for (int r = 0; nodes[0] && r < bootstrap->size; r++)
        topology[2 * r] = nodes[r], topology[2 * r + 1] = r + 1 < bootstrap->size ? ',' : 0;
    if (nodes[0]) set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", topology);
    return case_complete(c);
}

static EpGroup *create(const NcclRank *rank, const Case *c) {
    EpGroup *group = NULL;
    EpGroupConfig config = case_group_config(c);
    ep_group_config_set_nccl(&config, rank->comm);
    CHECK_OK(ep_group_create(rank->harness, &config, &group));
    return group;
}

/* Two groups at a time, and another one after them. */
static void lend(const EpBootstrap *bootstrap, int blocking, const char *nodes) {
    NcclRank rank;
    nccl_rank_open(&rank, bootstrap, blocking);
    Case c = lending_case(bootstrap, nodes);
    EpGroup *groups[3] = {create(&rank, &c), create(&rank, &c), NULL};
    REQUIRE(groups[0] && groups[1], "no groups");
    for (int i = 0; i < 4; i++)
        device_step_run(groups[i % 2], &c, bootstrap->rank, NULL);
    ep_group_destroy(groups[0]);
    nccl_rank_check(&rank);
    groups[2] = create(&rank, &c);
    REQUIRE(groups[2], "no third group");
    for (int i = 1; i < 3; i++)
        device_step_run(groups[i], &c, bootstrap->rank, NULL);
    for (int i = 1; i < 3; i++)
        ep_group_destroy(groups[i]);
    nccl_rank_close(&rank);
}

RankTests24(gpu_nccl, borrowed, lend(bootstrap, 1, ""));
RankTest(gpu_nccl, borrowed_without_blocking_2, 2, lend(bootstrap, 0, ""));
RankTest(gpu_nccl_split, two_nodes_4, 4, lend(bootstrap, 1, "0011"));
RankTest(gpu_nccl_split, without_blocking_4, 4, lend(bootstrap, 0, "0101"));
/* One rank is alone on its node. */
RankTest(gpu_nccl_split, uneven_nodes_3, 3, lend(bootstrap, 1, "001"));
RankTest(gpu_nccl_split, a_node_each_2, 2, lend(bootstrap, 0, "01"));

static void wait_until_failed(EpGroup *group) {
    double begin = seconds_now();
    while (ep_group_status(group, NULL) == EP_OK && seconds_now() - begin < FAILING_LIMIT)
        ;
}

/* The group's communicators are aborted on all ranks while the lent one goes on. */
static void outlives_abort(const EpBootstrap *bootstrap, int blocking) {
    NcclRank rank;
    nccl_rank_open(&rank, bootstrap, blocking);
    Case c = lending_case(bootstrap, "0011");
    EpGroup *group = create(&rank, &c);
    if (bootstrap->rank == 0) CHECK_OK(ep_group_abort(group, WHY));
    wait_until_failed(group);
    CHECK_REFUSED(ep_group_status(group, NULL), bootstrap->rank ? EP_ERR_PEER : EP_ERR_ABORTED,
                  "rank 0", WHY);
    nccl_rank_check(&rank);
    ep_group_destroy(group);
    nccl_rank_check(&rank);
    group = create(&rank, &c);
    REQUIRE(group, "no second group");
    device_step_run(group, &c, bootstrap->rank, NULL);
    ep_group_destroy(group);
    nccl_rank_close(&rank);
}

RankTest(gpu_nccl_split, outlives_abort_4, 4, outlives_abort(bootstrap, 1));
RankTest(gpu_nccl_split, outlives_abort_without_blocking_4, 4, outlives_abort(bootstrap, 0));
