/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks as MPI processes: the cases run over shared memory and over messages. */
#include <pthread.h>
#include <sched.h>
#include <sys/mount.h>

#include "ep/ep_mpi.h"
#include "tests/cases/run.h"
#include "tests/harness/ranked.h"

/* Run each layout with different types and options. */
static void run_each_layout(const EpBootstrap *bootstrap, const char *nodes) {
    for (int i = 0; i < 6; i++) {
        Case c =
            case_of("ranks=%d nodes=%s experts=11 top_k=%d layout=%d alignment=%d max_tokens=30 "
                    "row_type=%d sum_type=%d index_type=%s weighted=%d scale_bytes=%d "
                    "masked_percent=10 spread=%s capacity=%d overflow=drop seed=%d",
                    bootstrap->size, nodes, 1 + i, 1 + i % 3, 1 << (2 * i % 8), 1 + i % 3,
                    1 + i / 2, i % 2 ? "int64" : "int32", i % 2, i * 4, i == 4 ? "hole" : "random",
                    i == 3 ? 20 : 0, i);
        run_case(bootstrap, &c);
        if (!TESTS_HAVE_LATENCY) continue;
        c.mode = EP_MODE_LATENCY, c.phases = i % 2;
        run_case(bootstrap, &c);
        c.quant = (EpQuant)(2 + i % 3), c.scale_order = (EpScaleOrder)(1 + i / 3);
        run_case(bootstrap, &c);
    }
}

RankedCall(mpi_layouts, two_ranks, 2, 90, run_each_layout(bootstrap, ""));
RankedCall(mpi_layouts, four_ranks, 4, 90, run_each_layout(bootstrap, ""));

/* Processes on simulated nodes communicate through MPI_Isend and MPI_Irecv. */
#define ONE_NODE "GPUs of a group share a node"
HostRankedTest(mpi_nodes, every_rank_a_node, 3, 60, ONE_NODE) {
    setenv("LIBEP_TOPOLOGY", "3", 1);
    setenv("LIBEP_STAGE_BYTES", "5000", 1);
    run_each_layout(bootstrap, "012");
}

/* Containers on one machine that share no /dev/shm: those of one host name are refused with a
 * sentence, and with a name each they are nodes. */
HostRankedTest(mpi_nodes, containers, 2, 30, "GPUs of a group share a node") {
    char name[16];
    EpGroupConfig config = group_config(2);
    if (unshare(CLONE_NEWNS | CLONE_NEWUTS) || mount("", "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
        mount("", "/dev/shm", "tmpfs", 0, NULL))
        check_left_out("needs the right to mount");
    CHECK_NO_GROUP(bootstrap, &config, EP_ERR_SYSTEM, "cannot map the shared memory of rank",
                   "containers of one host name must share /dev/shm");
    snprintf(name, sizeof(name), "container%d", bootstrap->rank);
    CHECK(sethostname(name, strlen(name)) == 0, "no host name");
    run_each_layout(bootstrap, "01");
}

/* ---- communicators ---- */

/* Two groups split the ranks, and each rank is also in a third group of all ranks. */
RankedTest(mpi_communicators, groups_of_split_communicators, 4, 60) {
    MPI_Comm split;
    MPI_Comm_split(MPI_COMM_WORLD, bootstrap->rank % 2, bootstrap->rank, &split);
    EpBootstrap inner = EP_BOOTSTRAP_INIT;
    REQUIRE_OK(ep_bootstrap_mpi(split, &inner));
    MPI_Comm_free(&split);
    CHECK(inner.size == 2 && inner.rank == bootstrap->rank / 2, "%d of %d", inner.rank, inner.size);
    Case small = {.ranks = 2, .experts = 5, .weighted = 1, .seed = (uint64_t)bootstrap->rank % 2};
    Case large = {.ranks = 4, .experts = 10, .top_k = 3, .weighted = 1};
    Step steps[] = {open_step(&inner, &small), open_step(bootstrap, &large)};
    for (int i = 0; i < 2; i++)
        step_all(&steps[i]);
    for (int i = 0; i < 2; i++)
        close_step(&steps[i]);
    ep_bootstrap_destroy(&inner);
}

/* libep never receives the caller's messages, nor the caller libep's. */
HostRankedTest(mpi_communicators, messages_of_the_caller_are_left_alone, 2, 30,
               "no messages on GPUs") {
    setenv("LIBEP_TOPOLOGY", "2", 1);
    int peer = 1 - bootstrap->rank, sent = 1000 + bootstrap->rank, received = 0;
    MPI_Request requests[2];
    MPI_Irecv(&received, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &requests[0]);
    run_case(bootstrap, &(Case){.ranks = 2, .nodes = "01", .weighted = 1});
    MPI_Isend(&sent, 1, MPI_INT, peer, 7, MPI_COMM_WORLD, &requests[1]);
    MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
    CHECK(received == 1000 + peer, "received %d", received);
}

RankedTest(mpi_communicators, wrong_arguments, 1, 30) {
    EpBootstrap out = EP_BOOTSTRAP_INIT;
    CHECK_REFUSED(ep_bootstrap_mpi(MPI_COMM_NULL, &out), EP_ERR_NULL, "comm");
    CHECK_REFUSED(ep_bootstrap_mpi(MPI_COMM_WORLD, NULL), EP_ERR_NULL, "out");
    out.struct_size = 8;
    CHECK_REFUSED(ep_bootstrap_mpi(MPI_COMM_WORLD, &out), EP_ERR_STRUCT_SIZE, "ep_bootstrap_mpi",
                  "out: expected struct_size", "got 8", "EP_BOOTSTRAP_INIT");
    CHECK(out.allgather == NULL && bootstrap->size == 1, "the output was written");
}

/* ---- failures between processes ---- */

/* Each process has its own environment, so settings that must agree may differ. */
HostRankedTest(mpi_failures, stages_that_disagree, 2, 30, "no LIBEP_STAGE_BYTES on GPUs") {
    /* Large enough to fill either stage. */
    Case c = case_complete((Case){.ranks = 2, .max_tokens = 4096, .hidden = 4096});
    EpGroupConfig config = case_group_config(&c);
    setenv("LIBEP_STAGE_BYTES", bootstrap->rank ? "1048576" : "2097152", 1);
    CHECK_NO_GROUP(bootstrap, &config, EP_ERR_MISMATCH, "LIBEP_STAGE_BYTES", "1048576", "2097152");
}

HostRankedTest(mpi_failures, topologies_that_disagree, 3, 30, ONE_NODE) {
    static const char *const given[] = {"0,1,0", "2", "0,1,0/numa:2 pu:4", ""};
    EpGroupConfig config = group_config(3);
    EpGroup *group = NULL;
    char same[80]; /* as far as the sentence quotes it */
    snprintf(same, sizeof(same), "0,1,0/numa:1%60spu:%d", "", 1 + (bootstrap->rank == 2));
    setenv("LIBEP_TOPOLOGY", same, 1);
    CHECK_REFUSED(ep_group_create(bootstrap, &config, &group), EP_ERR_MISMATCH, "LIBEP_TOPOLOGY",
                  "on rank 2, another one");
    for (int i = 1; i < 4; i++) {
        char first[40], second[40];
        snprintf(first, sizeof(first), "'%s' on rank 0", given[0]);
        snprintf(second, sizeof(second), "'%s' on rank 2", given[i]);
        setenv("LIBEP_TOPOLOGY", given[bootstrap->rank == 2 ? i : 0], 1);
        CHECK_NO_GROUP(bootstrap, &config, EP_ERR_MISMATCH, "LIBEP_TOPOLOGY", first, second);
    }
}

#define WHY "the scheduler wants its nodes back"

static void *abort_later(void *group) {
    usleep(100000);
    CHECK_OK(ep_group_abort(group, WHY));
    return NULL;
}

/* Rank 0 is aborted while it waits for the last rank to allocate memory. */
HostRankedTest(mpi_failures, aborted_while_it_allocates, 3, 60, "see runtime_abort") {
    be_quiet();
    Case c = case_of("ranks=3");
    Step step = open_step(bootstrap, &c);
    void *out = &step;
    pthread_t thread;
    double begin = seconds_now();
    int aborts = bootstrap->rank == 0;
    if (aborts) REQUIRE(!pthread_create(&thread, NULL, abort_later, step.group), "thread");
    if (bootstrap->rank < 2)
        CHECK_REFUSED(ep_mem_alloc(step.group, 64, &out), aborts ? EP_ERR_ABORTED : EP_ERR_PEER,
                      "rank 0", WHY);
    if (aborts) pthread_join(thread, NULL);
    CHECK(out == &step, "an output was written");
    MPI_Barrier(MPI_COMM_WORLD);
    close_step(&step);
    CHECK(seconds_now() - begin < 20, "it took %.1f s", seconds_now() - begin);
}

/* The error names the missing rank and no other. */
HostRankedTest(mpi_failures, absent_from_allgather, 4, 30, "it needs no GPU") {
    for (int absent = 0; absent < bootstrap->size; absent++) {
        EpBootstrap own = EP_BOOTSTRAP_INIT;
        char named[24];
        int32_t all[4];
        REQUIRE_OK(ep_bootstrap_mpi(MPI_COMM_WORLD, &own));
        snprintf(named, sizeof(named), "rank %d did", absent);
        if (own.rank != absent)
            CHECK_TIMEOUT(own.allgather(own.context, &own.rank, all, sizeof(own.rank), 0.3), 0.3,
                          named, "0.3 s");
        MPI_Barrier(MPI_COMM_WORLD);
        ep_bootstrap_destroy(&own);
    }
}

/* After a timeout a new bootstrap works, though messages of the old one are still outstanding. */
HostRankedTest(mpi_failures, new_bootstrap_after_a_timeout, 2, 30, "it needs no GPU") {
    int32_t all[2];
    for (int round = 0; round < 4; round++) {
        EpBootstrap own = EP_BOOTSTRAP_INIT;
        REQUIRE_OK(ep_bootstrap_mpi(MPI_COMM_WORLD, &own));
        int32_t mine = 10 * round + own.rank;
        if (round % 2 == 0 && own.rank == 0)
            CHECK_TIMEOUT(own.allgather(own.context, &mine, all, sizeof(mine), 0.2), 0.2, "rank 1");
        if (round % 2) {
            CHECK_OK(own.allgather(own.context, &mine, all, sizeof(mine), 20));
            CHECK(all[0] == 10 * round && all[1] == 10 * round + 1, "round %d: %d and %d", round,
                  (int)all[0], (int)all[1]);
        }
        ep_bootstrap_destroy(&own);
    }
}

HostRankedTest(mpi_failures, allgathers_of_different_lengths, 2, 30, "it needs no GPU") {
    int64_t all[2] = {7, 7}, mine = 3;
    EpBootstrap own = EP_BOOTSTRAP_INIT;
    REQUIRE_OK(ep_bootstrap_mpi(MPI_COMM_WORLD, &own));
    if (own.rank == 1) {
        CHECK_REFUSED(own.allgather(own.context, &mine, all, sizeof(mine), 20), EP_ERR_ORDER,
                      "rank 0 brought 1 bytes");
        CHECK(all[0] == 7 && all[1] == 7, "the output was written");
    } else {
        CHECK(own.barrier(own.context, 20) != EP_OK, "a barrier matched an allgather");
    }
    MPI_Barrier(MPI_COMM_WORLD);
    ep_bootstrap_destroy(&own);
}

/* ---- long messages ---- */

enum { MANY = 2100 }; /* tokens of 8 KiB: several messages of the largest size that a rank stages */

/* Run over TCP: a message too long to be buffered moves on only while both ranks call MPI. */
static void over_tcp(const char *test, int ranks, RankBody body) {
    HOST_ONLY(ONE_NODE);
    setenv("OMPI_MCA_btl", "self,tcp", 1);
    ranked_run(test, ranks, 60, body);
}

static Case long_messages(int ranks) {
    return case_complete(case_of(
        "ranks=%d experts=%d top_k=1 max_tokens=%d hidden=4096 spread=full", ranks, ranks, MANY));
}

static _Alignas(64) char tokens[MANY * 8192], rows[2 * MANY * 8192];

/* Prepare tokens for rank `to`, or none if `to` is negative. */
static EpStatus plan_rows(EpHandle *handle, int rank, int to) {
    static int32_t index[MANY];
    for (int i = 0; i < MANY; i++)
        index[i] = to;
    memset(tokens, 1 + rank, sizeof(tokens));
    EpTensor topk_idx = ep_tensor_2d(index, EP_TYPE_INT32, to < 0 ? 0 : MANY, 1);
    return ep_prepare(handle, NULL, &topk_idx, NULL, NULL, NULL);
}

static EpStatus send_rows(EpHandle *handle, const Case *c, int to) {
    EpTensor in = ep_tensor_2d(tokens, EP_TYPE_BF16, to < 0 ? 0 : MANY, c->hidden);
    EpTensor out = ep_tensor_2d(rows, EP_TYPE_BF16, 2 * MANY, c->hidden);
    return ep_dispatch(handle, NULL, NULL, &in, NULL, NULL, NULL, &out, NULL, NULL, NULL);
}

/* Nodes are {0, 1} and {2, 3}. Ranks 0 and 2 send to ranks 3 and 1, which then wait for the other
 * rank of their node. */
static void wait_on_the_node(const EpBootstrap *bootstrap, __attribute__((unused)) void *arg) {
    setenv("LIBEP_TOPOLOGY", "2", 1);
    Case c = long_messages(4);
    EpGroup *group = open_group(bootstrap, &c);
    static const int to[] = {3, -1, 1, -1}, from[] = {-1, 2, -1, 0};
    int rank = bootstrap->rank, sender = from[rank];
    EpHandle *handle = open_handle_with(group, NULL);
    for (int i = 0; i < 40; i++) {
        CHECK_OK(plan_rows(handle, rank, to[rank]));
        CHECK_OK(send_rows(handle, &c, to[rank]));
        if (sender >= 0)
            CHECK(rows[0] == 1 + sender && rows[MANY * 8192 - 1] == 1 + sender, "%d", rows[0]);
    }
    ep_group_destroy(group);
}

Test(mpi_messages, move_on_while_a_neighbour_is_waited_for, .timeout = 70) {
    over_tcp("mpi_messages/move_on_while_a_neighbour_is_waited_for", 4, wait_on_the_node);
}

/* Rank 1 is missing. Rank 0 starts to send to rank 2 and gives up; rank 2 starts to receive and
 * gives up. The message completes after both have left the group. */
static void give_up(const EpBootstrap *bootstrap, __attribute__((unused)) void *arg) {
    setenv("LIBEP_TOPOLOGY", "2", 1);
    setenv("LIBEP_LOG_FILE", "/dev/null", 1);
    Case c = long_messages(3);
    EpGroupConfig config = case_group_config(&c);
    int rank = bootstrap->rank, to = rank ? -1 : 2;
    config.timeout_seconds = 0.5;
    EpGroup *group = open_group_with(bootstrap, &config);
    EpHandle *handle = open_handle_with(group, NULL);
    CHECK_OK(plan_rows(handle, rank, to));
    if (rank == 2) usleep(1000000);
    if (rank != 1) CHECK_STATUS(send_rows(handle, &c, to), EP_ERR_TIMEOUT);
    if (rank == 0) CHECK(strstr(ep_last_error(), "rank 1 did"), "%s", ep_last_error());
    ep_group_destroy(group);
    if (rank == 0) usleep(1500000); /* no MPI calls meanwhile */
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Barrier(MPI_COMM_WORLD);
}

Test(mpi_messages, come_after_a_rank_has_given_up, .timeout = 70) {
    over_tcp("mpi_messages/come_after_a_rank_has_given_up", 3, give_up);
}
