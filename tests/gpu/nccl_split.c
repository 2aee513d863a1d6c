/* SPDX-License-Identifier: Apache-2.0 */
/* Groups on several nodes split their communicators from the one that the caller lends, which still
 * works after they have ended, in whatever way. */
#include <stdlib.h>
#include <string.h>

#include "tests/cases/run.h"
#include "tests/gpu/communicator.h"
#include "tests/gpu/failing.h"
#include "tests/harness/ranked.h"

#define WHY "the watchdog has had enough"

/* Failed groups log a warning. */
static void silence_log(void) {
    setenv("LIBEP_LOG_FILE", "/dev/null", 1);
}

TestSuite(gpu_nccl_split, .init = silence_log);

/* A case on these nodes, one digit for each rank. */
static Case divided_case(const EpBootstrap *bootstrap, const char *nodes) {
    Case c = {.ranks = bootstrap->size,
              .experts = 5 * bootstrap->size,
              .top_k = 3,
              .hidden = 200,
              .max_tokens = 131,
              .weighted = 1,
              .capacity = 1700};
    char topology[2 * sizeof(c.nodes)] = "";
    memcpy(c.nodes, nodes, (size_t)bootstrap->size);
    for (int r = 0; r < bootstrap->size; r++)
        topology[2 * r] = nodes[r], topology[2 * r + 1] = r + 1 < bootstrap->size ? ',' : 0;
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", topology);
    return case_complete(c);
}

static EpGroupConfig lending_config(const Case *c, ncclComm_t comm) {
    EpGroupConfig config = case_group_config(c);
    ep_group_config_set_nccl(&config, comm);
    return config;
}

/* Two groups at a time, and another one after them. */
static void split(const EpBootstrap *bootstrap, int blocking, const char *nodes) {
    Nccl nccl;
    if (!nccl_serves(&nccl, bootstrap->size)) return;
    ncclComm_t comm = nccl_communicator(&nccl, bootstrap, blocking);
    REQUIRE(comm, "no communicator");
    Case c = divided_case(bootstrap, nodes);
    EpGroupConfig config = lending_config(&c, comm);
    EpGroup *groups[3] = {NULL};
    cudaStream_t stream = new_stream();
    for (int i = 0; i < 2; i++)
        REQUIRE_OK(ep_group_create(bootstrap, &config, &groups[i]));
    for (int i = 0; i < 4; i++)
        nccl_check_step(groups[i % 2], &c, bootstrap->rank, stream);
    ep_group_destroy(groups[0]);
    nccl_check_works(&nccl, comm, bootstrap, stream);
    REQUIRE_OK(ep_group_create(bootstrap, &config, &groups[2]));
    nccl_check_step(groups[1], &c, bootstrap->rank, stream);
    nccl_check_step(groups[2], &c, bootstrap->rank, stream);
    for (int i = 1; i < 3; i++)
        ep_group_destroy(groups[i]);
    nccl_check_works(&nccl, comm, bootstrap, stream);
    CHECK_CUDA(cudaStreamDestroy(stream));
    CHECK(nccl.destroy(comm) == ncclSuccess, "ncclCommDestroy");
}

ThreadTest(gpu_nccl_split, two_nodes_4, 4) {
    split(bootstrap, 1, "0011");
}
ThreadTest(gpu_nccl_split, without_blocking_4, 4) {
    split(bootstrap, 0, "0101");
}
/* One rank is alone on its node. */
ThreadTest(gpu_nccl_split, uneven_nodes_3, 3) {
    split(bootstrap, 1, "001");
}
ThreadTest(gpu_nccl_split, a_node_each_2, 2) {
    split(bootstrap, 0, "01");
}

/* ---- failures ------------------------------------------------------------------------------ */

static void wait_until_failed(EpGroup *group) {
    double begin = failing_now();
    while (ep_group_status(group, NULL) == EP_OK && failing_now() - begin < FAILING_LIMIT)
        ;
}

/* The group's communicators are aborted on all ranks while the lent one goes on. */
static void outlives_abort(const EpBootstrap *bootstrap, int blocking) {
    Nccl nccl;
    EpGroup *group = NULL;
    if (!nccl_serves(&nccl, bootstrap->size)) return;
    ncclComm_t comm = nccl_communicator(&nccl, bootstrap, blocking);
    REQUIRE(comm, "no communicator");
    Case c = divided_case(bootstrap, "0011");
    EpGroupConfig config = lending_config(&c, comm);
    cudaStream_t stream = new_stream();
    REQUIRE_OK(ep_group_create(bootstrap, &config, &group));
    if (bootstrap->rank == 0) CHECK_OK(ep_group_abort(group, WHY));
    wait_until_failed(group);
    CHECK_REFUSED(ep_group_status(group, NULL), bootstrap->rank ? EP_ERR_PEER : EP_ERR_ABORTED,
                  "rank 0", WHY);
    nccl_check_works(&nccl, comm, bootstrap, stream);
    ep_group_destroy(group);
    nccl_check_works(&nccl, comm, bootstrap, stream);
    REQUIRE_OK(ep_group_create(bootstrap, &config, &group));
    nccl_check_step(group, &c, bootstrap->rank, stream);
    ep_group_destroy(group);
    CHECK_CUDA(cudaStreamDestroy(stream));
    CHECK(nccl.destroy(comm) == ncclSuccess, "ncclCommDestroy");
}

ThreadTest(gpu_nccl_split, outlives_abort_4, 4) {
    outlives_abort(bootstrap, 1);
}
ThreadTest(gpu_nccl_split, outlives_abort_without_blocking_4, 4) {
    outlives_abort(bootstrap, 0);
}

/* NCCL fails on one rank, whatever it does on the others. */
typedef struct Failure {
    int blocking;
    int bootstraps; /* whether the bootstrap is of the lent communicator */
} Failure;

#ifdef TESTS_EMULATED
static void check_refusal(const EpBootstrap *bootstrap, const Failure *f, EpStatus status) {
    EpStatus expected = bootstrap->rank == 1 ? EP_ERR_SYSTEM : EP_ERR_TIMEOUT;
    CHECK_REFUSED(status, expected, "ncclCommSplit");
    if (!f->bootstraps) return;
    CHECK_REFUSED(bootstrap->barrier(bootstrap->context, 60), expected, "ncclCommSplit");
}

static void fail_on_rank_1(const EpBootstrap *harness, const Failure *f) {
    Nccl nccl;
    EpGroup *group = NULL;
    EpBootstrap lent = EP_BOOTSTRAP_INIT;
    if (!nccl_serves(&nccl, harness->size)) return;
    ncclComm_t comm = nccl_communicator(&nccl, harness, f->blocking);
    REQUIRE(comm, "no communicator");
    if (f->bootstraps) REQUIRE_OK(ep_bootstrap_nccl(comm, &lent));
    Case c = divided_case(harness, "0011");
    EpGroupConfig config = lending_config(&c, comm);
    config.timeout_seconds = FAILING_TIMEOUT;
    set_on_ranks(harness, "EMULATED_SPLIT_FAILS", "1");
    double begin = failing_now();
    const EpBootstrap *bootstrap = f->bootstraps ? &lent : harness;
    check_refusal(bootstrap, f, ep_group_create(bootstrap, &config, &group));
    CHECK(!group, "a group was made");
    CHECK(failing_now() - begin < FAILING_LIMIT, "it took %.1f s", failing_now() - begin);
    CHECK_OK(harness->barrier(harness->context, 60));
    CHECK(nccl.abort(comm) == ncclSuccess, "ncclCommAbort");
    if (f->bootstraps) ep_bootstrap_destroy(&lent);
}
#else
static void fail_on_rank_1(const EpBootstrap *harness, const Failure *f) {
    (void)harness, (void)f;
    check_left_out("only the emulated NCCL fails at will");
}
#endif

ThreadTest(gpu_nccl_split, fails_4, 4) {
    fail_on_rank_1(bootstrap, &(Failure){.blocking = 1});
}
ThreadTest(gpu_nccl_split, fails_without_blocking_4, 4) {
    fail_on_rank_1(bootstrap, &(Failure){.blocking = 0});
}
ThreadTest(gpu_nccl_split, fails_with_bootstrap_4, 4) {
    fail_on_rank_1(bootstrap, &(Failure){.blocking = 1, .bootstraps = 1});
}
ThreadTest(gpu_nccl_split, fails_with_bootstrap_without_blocking_4, 4) {
    fail_on_rank_1(bootstrap, &(Failure){.blocking = 0, .bootstraps = 1});
}
