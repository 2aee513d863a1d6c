/* SPDX-License-Identifier: Apache-2.0 */
/* Groups whose creation fails: the emulated NCCL refuses to split or to connect on one rank, or a
 * rank departs. The others give up at the deadline. */
#include "ep/ep_weight.h"
#include "tests/gpu/communicator.h"
#include "tests/gpu/failing.h"
#include "tests/harness/bootstraps.h"
#include "tests/harness/ranked.h"

/* On two nodes, or on the nodes that the test runs on. */
static Case failures_case(const EpBootstrap *bootstrap, const char *topology) {
    if (topology[0]) set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", topology);
    Case c = {.ranks = bootstrap->size, .experts = 5 * bootstrap->size, .top_k = 3, .hidden = 200};
    c.max_tokens = 131, c.weighted = 1, c.capacity = 1700;
    return case_complete(c);
}

/* ---- NCCL fails on rank 1, whatever it does on the others ---------------------------------- */

/* `bootstraps`: whether the bootstrap is of the lent communicator. */
static void fail_to_split(const EpBootstrap *harness, int blocking, int bootstraps) {
    NcclRank rank;
    EpBootstrap lent = EP_BOOTSTRAP_INIT;
    const EpBootstrap *bootstrap = bootstraps ? &lent : harness;
    EpStatus expected = harness->rank == 1 ? EP_ERR_SYSTEM : EP_ERR_TIMEOUT;
    nccl_rank_open(&rank, harness, blocking);
    if (bootstraps) REQUIRE_OK(ep_bootstrap_nccl(rank.comm, &lent));
    Case c = failures_case(harness, "2");
    EpGroupConfig config = case_group_config(&c);
    ep_group_config_set_nccl(&config, rank.comm);
    config.timeout_seconds = FAILING_TIMEOUT;
    set_on_ranks(harness, "EMULATED_SPLIT_FAILS", "1");
    double begin = seconds_now();
    CHECK_NO_GROUP(bootstrap, &config, expected, "ncclCommSplit");
    if (bootstraps) CHECK_REFUSED(lent.barrier(lent.context, 60), expected, "ncclCommSplit");
    failing_check_soon(begin);
    nccl_rank_abort(&rank);
    if (bootstraps) ep_bootstrap_destroy(&lent);
}

RankTest(gpu_nccl_split, fails_4, 4, fail_to_split(bootstrap, 1, 0));
RankTest(gpu_nccl_split, fails_without_blocking_4, 4, fail_to_split(bootstrap, 0, 0));
RankTest(gpu_nccl_split, fails_with_bootstrap_4, 4, fail_to_split(bootstrap, 1, 1));
RankTest(gpu_nccl_split, fails_with_bootstrap_without_blocking_4, 4,
         fail_to_split(bootstrap, 0, 1));

/* NCCL holds the other ranks while it connects them, and one does not come: they give up at the
 * deadline, and another group can be made. */
static void fail_to_connect(const EpBootstrap *bootstrap) {
    Case c = failures_case(bootstrap, "2");
    EpGroupConfig config = case_group_config(&c);
    EpGroup *group = NULL;
    double begin = seconds_now();
    be_quiet();
    config.timeout_seconds = FAILING_TIMEOUT;
    set_on_ranks(bootstrap, "EMULATED_CONNECT_FAILS", "1");
    EpStatus status = ep_group_create(bootstrap, &config, &group);
    if (bootstrap->rank == 1)
        CHECK_REFUSED(status, EP_ERR_SYSTEM, "ncclGroupEnd", "Cuda failure 35");
    else
        CHECK(status == EP_ERR_TIMEOUT || status == EP_ERR_PEER, "%d: %s", (int)status,
              ep_last_error());
    CHECK(!group, "a group was made");
    failing_check_soon(begin);
    CHECK_OK(bootstrap->barrier(bootstrap->context, 60));
    set_on_ranks(bootstrap, "EMULATED_CONNECT_FAILS", "-1");
    snprintf(c.nodes, sizeof(c.nodes), "0011");
    group = open_group(bootstrap, &c);
    device_step_run(group, &c, bootstrap->rank, NULL);
    ep_group_destroy(group);
}

RankTest(gpu_nodes, fails_to_connect_4, 4, fail_to_connect(bootstrap));

/* Ranks of a node connect for the first weight that kernels cannot move: here one whose runs are no
 * multiples of 16 bytes. */
static void connect_for_weights(const EpBootstrap *bootstrap) {
    EpMesh mesh = EP_MESH_INIT;
    EpMeshCommConfig config = EP_MESH_COMM_CONFIG_INIT;
    EpWeightConfig w = EP_WEIGHT_CONFIG_INIT;
    EpMeshComm *comm;
    EpWeight *weight = NULL;
    be_quiet();
    config.backend = EP_BACKEND_CUDA, config.timeout_seconds = FAILING_TIMEOUT;
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "1"); /* nodes connect at once */
    set_on_ranks(bootstrap, "EMULATED_CONNECT_FAILS", "1");
    REQUIRE_OK(ep_mesh_parse("fsdp=2", &mesh));
    REQUIRE_OK(ep_mesh_comm_create(bootstrap, &mesh, &config, &comm));
    REQUIRE_OK(ep_spec_parse(&mesh, "_,fsdp,_", &w.spec));
    w.name = "w", w.type = w.grad_type = EP_TYPE_FP32;
    w.shape[0] = 3, w.shape[1] = 10, w.shape[2] = 24;
    CHECK_OK(ep_weight_create(comm, &w, &weight));
    w.shape[2] = 7, weight = NULL;
    double begin = seconds_now();
    CHECK(ep_weight_create(comm, &w, &weight) != EP_OK && !weight, "a weight was made");
    CHECK(bootstrap->rank == 0 || strstr(ep_last_error(), "ncclGroupEnd"), "%s", ep_last_error());
    failing_check_soon(begin);
    ep_mesh_comm_destroy(comm);
}

RankTest(gpu_weights, connect_when_needed_2, 2, connect_for_weights(bootstrap));

/* ---- a driver that is older than CUDA ------------------------------------------------------- */

static void find_old_driver(const EpBootstrap *bootstrap) {
    Case c = failures_case(bootstrap, "");
    EpGroupConfig config = case_group_config(&c);
    set_on_ranks(bootstrap, "EMULATED_DRIVER", "11080");
    CHECK_NO_GROUP(bootstrap, &config, EP_ERR_UNSUPPORTED, "expected a driver for CUDA",
                   "or newer, which this build was made with, got one for CUDA 11.8");
    set_on_ranks(bootstrap, "EMULATED_DRIVER", "");
}

RankTest(gpu_driver, is_too_old_2, 2, find_old_driver(bootstrap));

/* ---- a rank departs -------------------------------------------------------------------------- */

/* A rank that departs after some collective calls. */
static EpStatus gather_or_depart(void *left, const Wrapped *wrapped, const void *in, void *out,
                                 size_t bytes, double timeout) {
    if (--*(int *)left >= 0) return forward_gather(wrapped, in, out, bytes, timeout);
    return ep_set_last_error(EP_ERR_BOOTSTRAP, "this rank has departed");
}

/* Create a group while rank 1 departs after `calls` collective calls. Returns 1 if all ranks have a
 * group. */
static int create_departing(const EpBootstrap *harness, int calls, int borrows) {
    NcclRank rank;
    EpBootstrap lent = EP_BOOTSTRAP_INIT;
    int made = 0, each[8] = {0}, count = 0;
    nccl_rank_open(&rank, harness, 0);
    CHECK_OK(ep_bootstrap_nccl(rank.comm, &lent));
    int left = calls;
    Wrapped wrapped = {.gather = gather_or_depart, .test = &left};
    EpBootstrap own = lent;
    if (own.rank == 1) wrap_bootstrap(&own, &wrapped);
    Case c = failures_case(harness, "");
    EpGroup *group = NULL;
    EpGroupConfig config = case_group_config(&c);
    config.timeout_seconds = 0.5;
    if (borrows) ep_group_config_set_nccl(&config, rank.comm);
    double begin = seconds_now();
    EpStatus status = ep_group_create(&own, &config, &group);
    check_note("the last of %d calls", calls);
    CHECK(status == EP_OK || status == (own.rank == 1 ? EP_ERR_BOOTSTRAP : EP_ERR_TIMEOUT),
          "%d: %s", (int)status, ep_last_error());
    made = status == EP_OK, left = 1 << 20;
    CHECK_OK(harness->allgather(harness->context, &made, each, sizeof(made), 60));
    for (int r = 0; r < harness->size; r++)
        count += each[r];
    ep_group_destroy(group);
    failing_check_soon(begin);
    nccl_rank_abort(&rank);
    ep_bootstrap_destroy(&lent);
    CHECK_CUDA(cudaDeviceSynchronize());
    nccl_rank_meet(&rank);
    return count == harness->size;
}

static void create_departing_each(const EpBootstrap *harness, int borrows) {
    int calls = 0;
    while (calls < 60 && !create_departing(harness, calls, borrows))
        calls++;
    CHECK(calls > 3 && calls < 60, "all ranks have a group after %d calls", calls);
}

RankTest(gpu_nccl_bootstrap, departs_during_create, 3, create_departing_each(bootstrap, 1));
RankTest(gpu_nccl_bootstrap, departs_during_create_own, 2, create_departing_each(bootstrap, 0));
