/* SPDX-License-Identifier: Apache-2.0 */
/* ep_group_abort: it ends the waits of its rank, whatever waits, and the peers learn of it soon,
 * with its sentence. */
#include <pthread.h>

#include "tests/cases/calls.h"
#include "tests/cases/run.h"
#include "tests/harness/bootstraps.h"
#include "tests/harness/random.h"
#include "tests/harness/ranked.h"

enum { RANKS = 3, ABORTED = 0, ABSENT = 2 };

#define DEADLINE 100.0 /* no wait of these tests ends by itself */
#define SOON 30.0 /* a loaded machine is slow */
#define WHY "the store at 10.0.0.7 is gone"

static int arrived;

/* Wait for other threads, while calls of the library may use the bootstrap. */
static void wait_for(int ranks) {
    __atomic_add_fetch(&arrived, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&arrived, __ATOMIC_SEQ_CST) < ranks)
        usleep(1000);
}

/* Failed groups log a warning. */
static void set_up(void) {
    be_quiet();
    arrived = 0;
}

TestSuite(runtime_abort, .init = set_up);

/* A test whose ranks are always threads. */
#define OnThreads(name)                                               \
    static void name##_body(const EpBootstrap *bootstrap, void *arg); \
    Test(runtime_abort, name, .timeout = 120) {                       \
        run_on_threads(RANKS, name##_body, NULL);                     \
    }                                                                 \
    static void name##_body(const EpBootstrap *bootstrap, __attribute__((unused)) void *arg)

#define OnThreadsCall(name, call) \
    OnThreads(name) {             \
        call;                     \
    }                             \
    struct name##_done

/* ---- a rank, and a thread that aborts it ---- */

static _Thread_local double opened;

static Step rank_open(const EpBootstrap *bootstrap, EpMode mode) {
    Case c = case_of("ranks=%d spread=full experts=6 top_k=3 mode=%d", RANKS, mode);
    c.timeout = DEADLINE;
    Step rank = open_step(bootstrap, &c);
    opened = seconds_now();
    return rank;
}

/* All that a test does, destroying the group included, ends soon. */
static void rank_close(Step *rank) {
    close_step(rank);
    CHECK(seconds_now() - opened < SOON, "it took %.1f s", seconds_now() - opened);
}

/* A test of an open rank; with `OnThreads` its ranks are always threads. */
#define AbortTest(how, name)                                         \
    static void name##_on(const EpBootstrap *bootstrap, Step *rank); \
    how(name) {                                                      \
        Step rank = rank_open(bootstrap, EP_MODE_THROUGHPUT);        \
        name##_on(bootstrap, &rank);                                 \
        rank_close(&rank);                                           \
    }                                                                \
    static void name##_on(__attribute__((unused)) const EpBootstrap *bootstrap, Step *rank)
#define OnRanks(name) ThreadTest(runtime_abort, name, RANKS)

typedef struct Aborter {
    EpGroup *group;
    const char *why;
    useconds_t later; /* microseconds */
    EpStatus status;
    pthread_t thread;
} Aborter;

static void *aborter_main(void *context) {
    Aborter *aborter = context;
    usleep(aborter->later);
    aborter->status = ep_group_abort(aborter->group, aborter->why);
    return NULL;
}

static void aborter_start(Aborter *aborter, EpGroup *group, useconds_t later) {
    *aborter = (Aborter){.group = group, .why = WHY, .later = later};
    CHECK(pthread_create(&aborter->thread, NULL, aborter_main, aborter) == 0, "no thread");
}

static void aborter_end(Aborter *aborter) {
    pthread_join(aborter->thread, NULL);
    CHECK_OK(aborter->status);
}

/* Check that all calls on the group are refused, with `part` in their sentence. */
static void check_refuses(const Step *rank, EpStatus status, const char *part) {
    EpFinding found = EP_FINDING_INIT;
    void *memory = &found;
    for (int i = 0; i < NUM_CALLS; i++)
        CHECK_REFUSED(call_op(rank, call_number(i)), status, part, WHY);
    CHECK_REFUSED(ep_mem_alloc(rank->group, 64, &memory), status, part, WHY);
    CHECK(memory == &found, "an output was written");
    CHECK_REFUSED(ep_group_status(rank->group, &found), status, part, WHY);
    CHECK(found.status == status && found.rank == rank->rank, "%d on rank %d", (int)found.status,
          (int)found.rank);
    CHECK(found.peer == (status == EP_ERR_PEER ? ABORTED : -1), "peer %d", (int)found.peer);
}

static int rank_nodes(const Step *rank) {
    EpGroupInfo info = group_info(rank->group);
    return info.num_nodes;
}

static void check_aborted(const Step *rank, EpStatus status) {
    CHECK_REFUSED(status, EP_ERR_ABORTED, "rank 0: ", "the group was aborted: " WHY);
    check_refuses(rank, EP_ERR_ABORTED, "the group was aborted: ");
}

/* Check what a peer is told. It may have learnt it from another rank that has; on several nodes of
 * GPUs, before it is in the operation. */
static void check_told(const Step *rank, EpStatus status, const char *phase) {
    char self[16];
    snprintf(self, sizeof(self), "rank %d: ", rank->rank);
    if (TESTS_ON_GPU && rank_nodes(rank) > 1) phase = "";
    CHECK_REFUSED(status, EP_ERR_PEER, self, phase, "rank 0", "given up on the group", WHY);
    check_refuses(rank, EP_ERR_PEER, "given up on the group");
}

/* ---- a wait in an operation ---- */

/* Ranks 0 and 1 wait for rank 2, which never comes, until rank 0 is aborted. Then rank 2 calls. */
static void while_waiting_in(const EpBootstrap *bootstrap, StepOp op, EpMode mode) {
    Step rank = rank_open(bootstrap, mode);
    Aborter aborter;
    if (op > STEP_PREPARE) CHECK_OK(call_ops(&rank, STEP_PREPARE));
    if (op > STEP_DISPATCH && mode == EP_MODE_LATENCY) CHECK_OK(call_ops(&rank, STEP_DISPATCH));
    bootstrap->barrier(bootstrap->context, 60);
    double begin = seconds_now();
    if (bootstrap->rank == ABORTED) {
        aborter_start(&aborter, rank.group, 100000);
        EpStatus status = call_ops(&rank, op);
        CHECK(seconds_now() - begin > 0.05, "it did not wait");
        aborter_end(&aborter);
        check_aborted(&rank, status);
        /* On several nodes of GPUs it waited in NCCL, which does not know. */
        CHECK((TESTS_ON_GPU && rank_nodes(&rank) > 1) || strstr(ep_last_error(), op_phase(op)),
              "%s", ep_last_error());
    } else if (bootstrap->rank != ABSENT) {
        check_told(&rank, call_ops(&rank, op), op_phase(op));
    }
    bootstrap->barrier(bootstrap->context, 60);
    /* Ranks 0 and 1 may have sent enough for a first operation, but not for a second. */
    if (bootstrap->rank == ABSENT) {
        EpStatus status = call_ops(&rank, op);
        if (status == EP_OK) status = call_ops(&rank, op);
        check_told(&rank, status, op_phase(op));
    }
    rank_close(&rank);
}

#define WHILE_WAITING_IN(name, op, mode)                    \
    RankTest(runtime_abort, while_waiting_in_##name, RANKS, \
             while_waiting_in(bootstrap, STEP_##op, EP_MODE_##mode))
WHILE_WAITING_IN(prepare, PREPARE, THROUGHPUT);
WHILE_WAITING_IN(dispatch, DISPATCH, THROUGHPUT);
WHILE_WAITING_IN(combine, COMBINE, THROUGHPUT);
WHILE_WAITING_IN(combine_backward, COMBINE_BACKWARD, THROUGHPUT);
WHILE_WAITING_IN(dispatch_backward, DISPATCH_BACKWARD, THROUGHPUT);
WHILE_WAITING_IN(dispatch_in_latency_mode, DISPATCH, LATENCY);
WHILE_WAITING_IN(combine_in_latency_mode, COMBINE, LATENCY);

/* All ranks run steps, and rank 0 is aborted at some moment. */
static void while_running(const EpBootstrap *bootstrap, void *arg) {
    uint64_t seed = *(const uint64_t *)arg;
    Step rank = rank_open(bootstrap, EP_MODE_THROUGHPUT);
    Random random = random_stream(seed, 0, 0);
    Aborter aborter;
    EpStatus status = EP_OK;
    check_note("seed %d", (int)seed);
    if (bootstrap->rank == ABORTED)
        aborter_start(&aborter, rank.group, (useconds_t)random_below(&random, 20000));
    for (int i = 0; status == EP_OK; i++)
        status = call_ops(&rank, call_number(i % NUM_CALLS));
    if (bootstrap->rank == ABORTED) aborter_end(&aborter);
    if (bootstrap->rank == ABORTED)
        check_aborted(&rank, status);
    else
        check_told(&rank, status, "");
    rank_close(&rank);
}

Test(runtime_abort, while_running, .timeout = 120) {
    for (uint64_t seed = 0; seed < (TESTS_ON_GPU ? 3 : 20); seed++)
        run_on_threads(RANKS, while_running, &seed);
}

/* ---- no wait ---- */

/* Rank 0 is aborted by its own thread while nobody waits; the others call later. */
AbortTest(OnRanks, while_nobody_waits) {
    step_all(rank);
    bootstrap->barrier(bootstrap->context, 60);
    if (bootstrap->rank == ABORTED) CHECK_OK(ep_group_abort(rank->group, WHY));
    bootstrap->barrier(bootstrap->context, 60);
    EpStatus status = call_ops(rank, STEP_DISPATCH);
    if (bootstrap->rank == ABORTED)
        check_aborted(rank, status);
    else
        check_told(rank, status, "dispatch");
}

/* The first abort counts, and one by each rank is none of the others'. */
AbortTest(OnRanks, twice) {
    CHECK_OK(ep_group_abort(rank->group, WHY));
    CHECK_OK(ep_group_abort(rank->group, "too late"));
    check_refuses(rank, EP_ERR_ABORTED, "the group was aborted: ");
    CHECK_OK(ep_group_abort(rank->group, "too late"));
    check_refuses(rank, EP_ERR_ABORTED, "the group was aborted: ");
}

/* A group that has failed keeps its failure. */
AbortTest(OnRanks, of_a_failed_group) {
    CHECK_OK(call_ops(rank, STEP_PREPARE));
    StepOp op = bootstrap->rank == ABSENT ? STEP_COMBINE : STEP_DISPATCH;
    CHECK_STATUS(call_ops(rank, op), EP_ERR_ORDER);
    CHECK_OK(ep_group_abort(rank->group, WHY));
    CHECK_STATUS(call_op(rank, STEP_DISPATCH), EP_ERR_ORDER);
    CHECK(!strstr(ep_last_error(), WHY), "%s", ep_last_error());
    CHECK_STATUS(ep_group_status(rank->group, NULL), EP_ERR_ORDER);
}

/* Threads abort a rank at the same time. One of them comes first. */
GroupTest(runtime_abort, by_many_threads, 1, "") {
    enum { THREADS = 8 };
    Aborter aborters[THREADS];
    char why[THREADS][64], first[512];
    for (int i = 0; i < THREADS; i++) {
        snprintf(why[i], sizeof(why[i]), "thread %d of %d", i, THREADS);
        aborters[i] = (Aborter){.group = group, .why = why[i]};
        REQUIRE(!pthread_create(&aborters[i].thread, NULL, aborter_main, &aborters[i]), "thread");
    }
    for (int i = 0; i < THREADS; i++)
        aborter_end(&aborters[i]);
    CHECK_REFUSED(ep_group_status(group, NULL), EP_ERR_ABORTED, "thread ", " of 8");
    snprintf(first, sizeof(first), "%s", ep_last_error());
    CHECK_STATUS(ep_group_status(group, NULL), EP_ERR_ABORTED);
    CHECK(!strcmp(first, ep_last_error()), "'%s' after '%s'", ep_last_error(), first);
}

/* ---- a rendezvous ---- */

/* Ranks 0 and 1 make a call about windows, rank 2 does not. */
static void while_meeting(const EpBootstrap *bootstrap, int frees) {
    Step rank = rank_open(bootstrap, EP_MODE_THROUGHPUT);
    Aborter aborter;
    void *memory = NULL, *out = &memory;
    REQUIRE_OK(ep_mem_alloc(rank.group, 64, &memory));
    bootstrap->barrier(bootstrap->context, 60);
    if (bootstrap->rank == ABORTED) aborter_start(&aborter, rank.group, 100000);
    if (bootstrap->rank != ABSENT) {
        EpStatus status =
            frees ? ep_mem_free(rank.group, memory) : ep_mem_alloc(rank.group, 64, &out);
        if (bootstrap->rank == ABORTED) aborter_end(&aborter);
        if (bootstrap->rank == ABORTED)
            check_aborted(&rank, status);
        else
            check_told(&rank, status, "bootstrap");
        CHECK(out == &memory, "an output was written");
    }
    wait_for(RANKS);
    if (bootstrap->rank == ABSENT) check_told(&rank, call_ops(&rank, STEP_PREPARE), "prepare");
    rank_close(&rank);
}

OnThreadsCall(while_meeting_in_mem_alloc, while_meeting(bootstrap, 0));
OnThreadsCall(while_meeting_in_mem_free, while_meeting(bootstrap, 1));

/* Rank 0 is aborted first; the others then meet without it, or destroy their groups. */
AbortTest(OnThreads, before_the_others_meet) {
    void *out = rank;
    if (bootstrap->rank == ABORTED) CHECK_OK(ep_group_abort(rank->group, WHY));
    bootstrap->barrier(bootstrap->context, 60);
    if (bootstrap->rank == 1) check_told(rank, ep_mem_alloc(rank->group, 64, &out), "bootstrap");
}

/* Ranks 0 and 1 destroy their groups, rank 2 does not, until they have ended. */
OnThreads(while_destroying) {
    Step rank = rank_open(bootstrap, EP_MODE_THROUGHPUT);
    Aborter aborter;
    step_all(&rank);
    bootstrap->barrier(bootstrap->context, 60);
    double begin = seconds_now();
    /* Ranks that meet to destroy the group must not reach others' windows any more. So on GPUs each
     * has to be aborted, unless it hears of the other's abort over the network. */
    int aborts = bootstrap->rank == ABORTED || (bootstrap->rank != ABSENT && TESTS_ON_GPU);
    if (aborts) aborter_start(&aborter, rank.group, 100000);
    if (bootstrap->rank != ABSENT) {
        rank_close(&rank);
        CHECK(seconds_now() - begin > 0.05, "it did not wait");
    }
    if (aborts) pthread_join(aborter.thread, NULL);
    int heard_first = TESTS_ON_GPU && aborts && aborter.status == EP_ERR_DESTROYED;
    if (aborts && !heard_first) CHECK_OK(aborter.status);
    wait_for(RANKS);
    if (bootstrap->rank != ABSENT) return;
    if (TESTS_ON_GPU) CHECK_OK(ep_group_abort(rank.group, WHY));
    EpStatus status = call_ops(&rank, STEP_PREPARE);
    CHECK_REFUSED(status, TESTS_ON_GPU ? EP_ERR_ABORTED : EP_ERR_PEER, WHY);
    rank_close(&rank);
}

/* ---- many ranks ---- */

enum { CROWD = 15 };

typedef struct Crowd {
    pthread_barrier_t ready;
    int sample;
} Crowd;

/* All ranks meet again and again, and rank 0 is aborted at some moment: in a call, or between two.
 */
static void crowd_body(const EpBootstrap *bootstrap, void *arg) {
    Crowd *crowd = arg;
    EpGroupConfig config = group_config(CROWD);
    Aborter aborter;
    EpStatus status = EP_OK;
    config.timeout_seconds = DEADLINE;
    EpGroup *group = open_group_with(bootstrap, &config);
    pthread_barrier_wait(&crowd->ready);
    double begin = seconds_now();
    if (bootstrap->rank == ABORTED) aborter_start(&aborter, group, 100 + 400 * crowd->sample);
    while (status == EP_OK) {
        void *memory = NULL;
        status = ep_mem_alloc(group, 64, &memory);
        if (status == EP_OK) status = ep_mem_free(group, memory);
    }
    if (bootstrap->rank == ABORTED) aborter_end(&aborter);
    CHECK_REFUSED(status, bootstrap->rank == ABORTED ? EP_ERR_ABORTED : EP_ERR_PEER, WHY);
    CHECK(seconds_now() - begin < SOON, "it took %.1f s", seconds_now() - begin);
    ep_group_destroy(group);
}

static void crowd_on(const char *nodes) {
    setenv("LIBEP_TOPOLOGY", nodes, 1);
    for (int i = 0; i < 10; i++) {
        Crowd crowd = {.sample = i};
        pthread_barrier_init(&crowd.ready, NULL, CROWD);
        run_on_threads(CROWD, crowd_body, &crowd);
        pthread_barrier_destroy(&crowd.ready);
    }
}

Test(runtime_abort, in_a_crowd, .timeout = 120) {
    HOST_ONLY("there are not so many GPUs");
    crowd_on("");
}
Test(runtime_abort, in_a_crowd_on_two_nodes, .timeout = 120) {
    HOST_ONLY("there are not so many GPUs");
    crowd_on("2");
}

/* ---- several nodes ---- */

/* Each rank is a node of its own: peers learn of the abort by a message. Rank 0 is aborted while it
 * waits for rank 2 (`waits`), or while it does not. */
static void on_several_nodes(const EpBootstrap *bootstrap, int waits) {
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "3");
    Step rank = rank_open(bootstrap, EP_MODE_THROUGHPUT);
    EpStatus status = EP_OK;
    Aborter aborter;
    step_all(&rank);
    if (bootstrap->rank == ABORTED) {
        aborter_start(&aborter, rank.group, 100000);
        if (waits) status = call_ops(&rank, STEP_PREPARE);
        aborter_end(&aborter);
        check_aborted(&rank, waits ? status : ep_group_status(rank.group, NULL));
    }
    if (bootstrap->rank != 1 && waits) wait_for(2);
    /* Rank 0 may have taken part in a first prepare, but not in a second. */
    for (int i = 0; i < 2 && status == EP_OK; i++)
        status = call_ops(&rank, STEP_PREPARE);
    if (bootstrap->rank != ABORTED) check_told(&rank, status, "prepare");
    rank_close(&rank);
}

OnThreadsCall(on_several_nodes_while_waiting, on_several_nodes(bootstrap, 1));
OnThreadsCall(on_several_nodes_while_nobody_waits, on_several_nodes(bootstrap, 0));

/* ---- a bootstrap of the caller ---- */

typedef struct Polled {
    EpGroup *group;
    Aborter aborter;
} Polled;

/* A gather that waits for nobody, once there is a group to abort: it polls until it is told to give
 * up. The abort begins in it. */
static EpStatus gather_or_poll(void *test, const Wrapped *wrapped, const void *in, void *out,
                               size_t bytes, double timeout) {
    Polled *polled = test;
    EpStatus status;
    if (!in || !polled->group) return forward_gather(wrapped, in, out, bytes, timeout);
    aborter_start(&polled->aborter, polled->group, 1000);
    while ((status = ep_poll_abort()) == EP_OK)
        usleep(1000);
    return status;
}

ThreadTest(runtime_abort, in_a_callback_that_polls, 1) {
    Polled polled = {.group = NULL};
    Wrapped wrapped = {.gather = gather_or_poll, .test = &polled};
    EpBootstrap mine = gathers_alone(bootstrap);
    wrap_bootstrap(&mine, &wrapped);
    CHECK_OK(ep_poll_abort());
    EpGroup *group = open_group_of(&mine, "");
    void *out = &polled;
    polled.group = group;
    CHECK_REFUSED(ep_mem_alloc(group, 64, &out), EP_ERR_ABORTED, "rank 0: mem_alloc: ", WHY);
    aborter_end(&polled.aborter);
    CHECK(out == &polled, "an output was written");
    polled.group = NULL;
    CHECK_OK(ep_poll_abort());
    ep_group_destroy(group);
}

/* ---- ranks that go ---- */

/* Ranks that go right after a refused call end no operation of the others. */
static void go_refused(const EpBootstrap *bootstrap, const char *nodes) {
    Case c = case_of("ranks=%d spread=full experts=6 top_k=3", RANKS);
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", nodes);
    for (int i = 0; i < 10; i++) {
        Step rank = open_step(bootstrap, &c);
        step_prepare(&rank);
        step_dispatch(&rank);
        CHECK_OK(ep_group_status(rank.group, NULL));
        CHECK_REFUSED(ep_plan_sources(rank.handle, NULL, NULL, -1, NULL, NULL), EP_ERR_RANGE, "");
        close_step(&rank);
    }
}
RankTest(runtime_abort, gone_after_a_refused_call, RANKS, go_refused(bootstrap, ""));
RankTest(runtime_abort, gone_after_a_refused_call_on_nodes, RANKS, go_refused(bootstrap, "0,1,0"));

/* ---- arguments ---- */

ThreadTest(runtime_abort, wrong_arguments, 1) {
    EpGroup *group = open_group_of(bootstrap, "");
    int stray[64] = {1, 2, 3};
    CHECK_REFUSED(ep_group_abort(NULL, WHY), EP_ERR_NULL, "ep_group_abort: group: ");
    CHECK_REFUSED(ep_group_abort((EpGroup *)stray, WHY), EP_ERR_FOREIGN, "ep_group_abort: group: ");
    CHECK_REFUSED(ep_group_abort(group, NULL), EP_ERR_NULL, "rank 0: ep_group_abort: sentence: ");
    CHECK_OK(ep_group_status(group, NULL));
    ep_group_destroy(group);
    CHECK_REFUSED(ep_group_abort(group, WHY), EP_ERR_DESTROYED, "ep_group_abort: group: ");
}

/* Sentences: none, the longest, and one that is cut between two of its characters. */
ThreadTest(runtime_abort, sentences, 1) {
    char longest[256], longer[400];
    memset(longest, 'x', 255), longest[255] = 0;
    memset(longer, 'x', sizeof(longer)), longer[sizeof(longer) - 1] = 0;
    memcpy(longer + 254, "\xe2\x82\xac", 3); /* a character of three bytes, the second is beyond */
    const char *const given[] = {"", longest, longer};
    const size_t kept[] = {strlen("no reason given"), 255, 254};
    for (int i = 0; i < 3; i++) {
        EpGroup *group = open_group_of(bootstrap, "");
        CHECK_OK(ep_group_abort(group, given[i]));
        CHECK_REFUSED(ep_group_status(group, NULL), EP_ERR_ABORTED, "was aborted: ");
        const char *said = strstr(ep_last_error(), "aborted: ");
        size_t length = said ? strlen(said + strlen("aborted: ")) : 0;
        CHECK(length == kept[i], "%zu bytes instead of %zu", length, kept[i]);
        ep_group_destroy(group);
    }
}
