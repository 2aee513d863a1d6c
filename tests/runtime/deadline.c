/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that do not arrive: within the timeout the other ranks get an error that names the rank and
 * the operation, and the group returns it from then on. */
#include "tests/cases/calls.h"
#include "tests/cases/run.h"
#include "tests/harness/ranked.h"

enum { RANKS = 3, ABSENT = 2 };

/* A short timeout, which ranks must keep until one is absent on purpose, and an upper bound for a
 * test that waits for it. Other tests may share the processors and the GPUs. */
#define SOON (TESTS_ON_GPU ? 3.0 : TESTS_SANITIZED ? 2.5 : 1.0)
#define LATE 30.0

TestSuite(runtime_deadline, .init = be_quiet);

static Step timed_open(const EpBootstrap *bootstrap, double seconds, const char *changes) {
    Case c = case_of("ranks=%d spread=full experts=6 top_k=3 %s", RANKS, changes);
    c.timeout = seconds;
    return open_step(bootstrap, &c);
}

static void timed_close(Step *rank) {
    double begin = seconds_now();
    close_step(rank);
    CHECK(seconds_now() - begin < LATE, "destroying a failed group took %.1f s",
          seconds_now() - begin);
}

/* ---- ranks that are absent ---- */

/** Operations of a test from which rank 2 is absent, until the others have given up. */
typedef struct Absence {
    unsigned before; /* that all ranks call */
    unsigned ops;    /* that time out */
    unsigned others; /* that the others complete before those */
    unsigned late;   /* that rank 2 calls before them, when the others have failed */
    const char *changes;
    double first, second; /* seconds that rank 0 or 1 starts late: less than the timeout */
    double least;         /* seconds that the wait takes; 0: about SOON */
} Absence;

static unsigned ops_of(const Step *step) {
    return step->world->c.mode == EP_MODE_LATENCY ? STEP_FORWARD : STEP_ALL;
}

static void check_group_failed(const Step *step, EpStatus status) {
    for (int i = 0; i < NUM_CALLS; i++)
        CHECK_STATUS(call_op(step, call_number(i)), status);
    CHECK_STATUS(ep_group_status(step->group, NULL), status);
}

/* Operations enqueued behind those that fail do nothing. Whoever times out first, all blame rank 2:
 * a rank that a busy machine makes late hears of it before its own deadline. No wait begins before
 * the barrier. */
static void check_timeout(const EpBootstrap *bootstrap, const Step *step, const Absence *a) {
    unsigned first = a->ops & -a->ops, behind = ops_of(step) & -first;
    double late = step->rank ? a->second : a->first, begin = seconds_now();
    EpFinding found = EP_FINDING_INIT;
    CHECK_OK(bootstrap->barrier(bootstrap->context, 60));
    usleep((useconds_t)(1e6 * late));
    double own = seconds_now();
    EpStatus status = call_ops(step, a->ops | behind);
    double took = seconds_now() - begin, least = a->least ? a->least : 0.9 * SOON;
    own = seconds_now() - own;
    CHECK(own < LATE && took > least, "it took %.2f s", took);
    int may_hear = a->first + a->second > 0 || own < 1.3 * least;
    CHECK(status == EP_ERR_TIMEOUT || (status == EP_ERR_PEER && may_hear), "after %.2f s: %d: %s",
          own, (int)status, ep_last_error());
    CHECK_REFUSED(ep_group_status(step->group, &found), status, "rank 2", op_phase((StepOp)first));
    CHECK(found.status == status && found.peer == ABSENT, "peer %d", (int)found.peer);
    CHECK(found.rank == step->rank, "rank %d", (int)found.rank);
    CHECK(strcmp(found.phase, op_phase((StepOp)first)) == 0, "phase %s", found.phase);
    check_group_failed(step, status);
}

/* A rank that comes after the others gave up does not wait for its own timeout. The others may have
 * sent enough for its first calls, but not for all. */
static void check_latecomer(const Step *step, const Absence *a) {
    double begin = seconds_now();
    EpStatus status = call_ops(step, a->late);
    if (status == EP_OK) status = call_ops(step, a->ops);
    if (status == EP_OK) status = call_ops(step, (a->ops & STEP_SENDS) << 1 & ~a->ops);
    for (int i = 0; i < 2 && status == EP_OK; i++)
        status = call_ops(step, ops_of(step));
    CHECK_REFUSED(status, EP_ERR_PEER, "given up");
    CHECK(seconds_now() - begin < LATE, "it took %.2f s", seconds_now() - begin);
    check_group_failed(step, status);
}

static void absent_from(const EpBootstrap *bootstrap, Absence a) {
    Step h = timed_open(bootstrap, SOON, a.changes ? a.changes : "");
    CHECK_OK(call_ops(&h, a.before));
    if (bootstrap->rank != ABSENT) {
        CHECK_OK(call_ops(&h, a.others));
        check_timeout(bootstrap, &h, &a);
    } else {
        CHECK_OK(bootstrap->barrier(bootstrap->context, 60));
    }
    bootstrap->barrier(bootstrap->context, 60);
    if (bootstrap->rank == ABSENT) check_latecomer(&h, &a);
    timed_close(&h);
}

#define MADE (STEP_PREPARE | STEP_DISPATCH)
#define ABSENT_FROM(name, before, ops, ...)               \
    RankTest(runtime_deadline, absent_from_##name, RANKS, \
             absent_from(bootstrap, (Absence){before, ops, __VA_ARGS__}))
ABSENT_FROM(prepare, 0, STEP_PREPARE, 0);
ABSENT_FROM(dispatch, STEP_PREPARE, STEP_DISPATCH, 0);
ABSENT_FROM(combine, STEP_PREPARE, STEP_COMBINE, 0);
ABSENT_FROM(combine_backward, STEP_PREPARE, STEP_COMBINE_BACKWARD, 0);
ABSENT_FROM(dispatch_backward, STEP_PREPARE, STEP_DISPATCH_BACKWARD, 0);
/* Rank 0 times out first, before the others give up. It took part, so they must not blame it. */
ABSENT_FROM(late_dispatch, STEP_PREPARE, STEP_DISPATCH, .second = SOON / 3);
#define DECODES .changes = "mode=latency"
#define WEIGHS .changes = "mode=latency weights_at_combine=1"
ABSENT_FROM(dispatch_in_latency_mode, STEP_PREPARE, STEP_DISPATCH, DECODES);
ABSENT_FROM(combine_in_latency_mode, MADE, STEP_COMBINE, DECODES);
ABSENT_FROM(combine_phases, MADE, STEP_COMBINE_PHASES, DECODES);
/* On GPUs send phases wait for no peer, and the receive phase times out. */
#define SENT (TESTS_ON_GPU ? STEP_DISPATCH_SEND : 0)
ABSENT_FROM(dispatch_phases, STEP_PREPARE, STEP_DISPATCH_PHASES & ~SENT, .others = SENT,
            .late = SENT, DECODES);
/* A rank that leaves out its receive phase has sent, so the others complete theirs. They miss
 * it in the next operation. */
ABSENT_FROM(receive_phase_alone, STEP_PREPARE | STEP_DISPATCH_SEND, STEP_COMBINE,
            .others = STEP_DISPATCH_WAIT, .late = STEP_DISPATCH_WAIT, DECODES);
/* The send phase waits for weights, and names the rank that does not send them. */
ABSENT_FROM(weights, MADE, STEP_COMBINE_SEND, WEIGHS);
/* If all tokens go to rank 1, rank 0 waits for its sums and times out first, while rank 1 waits for
 * the weights of rank 2. */
ABSENT_FROM(weights_for_one_rank, MADE, STEP_COMBINE, .second = SOON / 1.5,
            .changes = "mode=latency weights_at_combine=1 routing=3 target=1");

/* Latency mode with a node for each rank. */
#define ABSENT_ON_NODES(name, before, ops, ...)                         \
    RankTest(runtime_deadline, absent_on_nodes_from_##name, RANKS, {    \
        needs_latency();                                                \
        set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "0,1,2");             \
        absent_from(bootstrap, (Absence){before, ops, 0, __VA_ARGS__}); \
    })
ABSENT_ON_NODES(dispatch, STEP_PREPARE, STEP_DISPATCH, DECODES);
ABSENT_ON_NODES(combine, MADE, STEP_COMBINE, DECODES);
ABSENT_ON_NODES(combine_phases, MADE, STEP_COMBINE_PHASES, DECODES);
ABSENT_ON_NODES(weights, MADE, STEP_COMBINE, WEIGHS);

static void absent_from_call(const EpBootstrap *bootstrap, void *op) {
    HOST_ONLY("LIBEP_TEST_NODES=2 runs this suite on nodes of GPUs");
    unsigned before = *(unsigned *)op > STEP_PREPARE ? STEP_PREPARE : 0;
    absent_from(bootstrap, (Absence){.before = before, .ops = *(unsigned *)op});
}

/* The same on pretended nodes: the missing rank is on another node, on that of rank 1, or alone. */
Test(runtime_deadline, absent_on_several_nodes, .timeout = 120) {
    static const char *const nodes[] = {"0,0,1", "0,1,1", "0,1,2"};
    unsigned ops[NUM_CALLS];
    for (int call = 0; call < NUM_CALLS; call++)
        ops[call] = call_number(call);
    for (int i = 0; i < 3; i++) {
        setenv("LIBEP_TOPOLOGY", nodes[i], 1);
        RUN_SIDE_BY_SIDE(RANKS, absent_from_call, ops);
    }
}

/* ---- refused calls ---- */

typedef enum Then { STAYS, DESTROYS, ABORTS, CORRECTS, THEN_COUNT } Then;

#define GONE "the store is gone"

/* Make a call without its tensors. */
static EpStatus refused_call(const Step *step, StepOp op) {
    static const EpTensor *const none[STEP_ARRAYS];
    return step_call_with(step, none, 0, op, NULL);
}

/* Check what the peers of a rank are told whose call was refused. */
static void check_quotes(const Step *step, StepOp op, Then then, const char *refusal) {
    double begin = seconds_now();
    EpStatus status = call_ops(step, op == STEP_DISPATCH_SEND ? STEP_DISPATCH : op);
    EpFinding found = EP_FINDING_INIT;
    if (then == CORRECTS) {
        CHECK_OK(status);
        CHECK_REFUSED(call_ops(step, op), EP_ERR_TIMEOUT, "rank 2 did not");
        CHECK(!strstr(ep_last_error(), "refused"), "%s", ep_last_error());
        return;
    }
    if (then == STAYS)
        CHECK_REFUSED(status, EP_ERR_TIMEOUT, "rank 2 did not", "; its last call was ", refusal);
    else
        CHECK_REFUSED(status, EP_ERR_PEER, "rank 2",
                      then == ABORTS ? GONE : "has destroyed the group", "; its last call was ",
                      refusal);
    CHECK(seconds_now() - begin < LATE, "it took %.1f s", seconds_now() - begin);
    CHECK_STATUS(ep_group_status(step->group, &found), status);
    CHECK(found.peer == ABSENT, "peer %d", (int)found.peer);
}

static void refused(const EpBootstrap *bootstrap, StepOp op, Then then, const char *changes) {
    char refusal[256] = "refused: rank 2: ep_";
    Step h = timed_open(bootstrap, then == STAYS || then == CORRECTS ? SOON : 100, changes);
    if (op > STEP_PREPARE) CHECK_OK(call_ops(&h, STEP_PREPARE));
    check_note("operation %d, then %d", (int)op, (int)then);
    bootstrap->barrier(bootstrap->context, 60);
    if (bootstrap->rank == ABSENT) {
        CHECK_REFUSED(refused_call(&h, op), EP_ERR_NULL, "expected a tensor, got NULL");
        if (then == CORRECTS) CHECK_OK(call_ops(&h, op));
        if (then == ABORTS) CHECK_OK(ep_group_abort(h.group, GONE));
        /* A rank on another node is told by the thread of the rank that is aborted. */
        if (then == ABORTS) CHECK_STATUS(ep_group_status(h.group, NULL), EP_ERR_ABORTED);
    } else {
        check_quotes(&h, op, then, refusal);
    }
    if (then != DESTROYS) bootstrap->barrier(bootstrap->context, 60);
    timed_close(&h);
}

typedef struct Refused {
    StepOp op;
    Then then;
    const char *changes;
} Refused;

static void refused_body(const EpBootstrap *bootstrap, void *arg) {
    const Refused *r = arg;
    refused(bootstrap, r->op, r->then, r->changes);
}

/* On GPUs deadlines are long: two operations have to do where ranks wait for one. */
static void refused_calls(const char *nodes) {
    setenv("LIBEP_TOPOLOGY", nodes, 1);
    for (int then = 0; then < THEN_COUNT; then++) {
        int waits = then == STAYS || then == CORRECTS;
        Refused calls[NUM_CALLS];
        for (int call = 0; call < NUM_CALLS; call++)
            calls[call] = (Refused){call_number(call), (Then)then, ""};
        run_side_by_side(waits && TESTS_ON_GPU ? 2 : NUM_CALLS, RANKS, refused_body, calls,
                         sizeof(calls[0]));
    }
}

/* Peers quote the sentence of a refused call: at their deadline, or at once if the rank is aborted
 * or destroys the group. A rank that calls again is waited for as any other. */
CasesTest(runtime_deadline, refused_calls, refused_calls(""));
Test(runtime_deadline, refused_calls_on_two_nodes, .timeout = 120) {
    refused_calls("0,0,1");
    /* On GPUs NCCL's wait for rank 0 may end before that for rank 2, which no watcher watches. */
    if (!TESTS_ON_GPU) refused_calls("0,1,1");
}
Test(runtime_deadline, refused_send_phase, .timeout = 120) {
    needs_latency();
    for (int then = STAYS; then < CORRECTS; then++)
        run_on_threads(RANKS, refused_body,
                       &(Refused){STEP_DISPATCH_SEND, (Then)then, "mode=latency"});
}

/* A refused call alone changes nothing: the ranks destroy the group together, and soon. */
ThreadTest(runtime_deadline, refused_calls_and_no_others, RANKS) {
    for (int only = -1; only < RANKS; only++) { /* -1: on all ranks */
        Step h = timed_open(bootstrap, 100, "");
        step_all(&h);
        if (only < 0 || only == bootstrap->rank)
            CHECK_STATUS(refused_call(&h, STEP_DISPATCH), EP_ERR_NULL);
        CHECK_OK(bootstrap->barrier(bootstrap->context, 60));
        timed_close(&h);
    }
}

/* No wait ends before its deadline, which is much longer here than a rank waits after it to hear
 * whom to blame. LIBEP_TIMEOUT is that of a group whose configuration names none. */
#define DEADLINE (TESTS_ON_GPU ? 3.0 : TESTS_SANITIZED ? 2.5 : 1.2)
static void absent_with(const EpBootstrap *bootstrap, const char *setting, const char *value,
                        double seconds) {
    set_on_ranks(bootstrap, setting, value);
    Step h = timed_open(bootstrap, seconds, "");
    if (bootstrap->rank != ABSENT)
        check_timeout(bootstrap, &h, &(Absence){.ops = STEP_PREPARE, .least = 0.95 * DEADLINE});
    else
        CHECK_OK(bootstrap->barrier(bootstrap->context, 60));
    bootstrap->barrier(bootstrap->context, 60);
    timed_close(&h);
}

RankTest(runtime_deadline, deadline_from_the_setting, RANKS,
         absent_with(bootstrap, "LIBEP_TIMEOUT",
                     TESTS_ON_GPU      ? "3"
                     : TESTS_SANITIZED ? "2.5"
                                       : "1.2",
                     EP_DEFAULT));
RankTest(runtime_deadline, deadline_of_the_group, RANKS,
         absent_with(bootstrap, "LIBEP_TIMEOUT", "77", DEADLINE));
ThreadTest(runtime_deadline, deadline_of_a_wait_that_spins, RANKS) {
    HOST_ONLY("no LIBEP_SPIN on GPUs");
    absent_with(bootstrap, "LIBEP_SPIN", "1000000000", DEADLINE);
}

/* The others wait for a slow rank that arrives within the timeout. */
ThreadTest(runtime_deadline, slow_rank_is_waited_for, RANKS) {
    Step h = timed_open(bootstrap, 30, "");
    if (bootstrap->rank == ABSENT) usleep(300000);
    step_all(&h);
    timed_close(&h);
}

/* A rank with a wrong configuration gets that error within the timeout; the other ranks' errors
 * name the missing rank. */
static void create_without_one(const EpBootstrap *bootstrap, int wrong) {
    EpGroupConfig config = group_config(RANKS);
    EpGroup *group = NULL;
    config.timeout_seconds = TESTS_ON_GPU ? 5 : SOON; /* GPU discovery is slow */
    if (bootstrap->rank == wrong) config.max_tokens = 0;
    CHECK_OK(bootstrap->barrier(bootstrap->context, 60));
    if (bootstrap->rank == ABSENT) return;
    double begin = seconds_now();
    if (bootstrap->rank == wrong)
        CHECK_REFUSED(ep_group_create(bootstrap, &config, &group), EP_ERR_RANGE, "max_tokens");
    else
        CHECK_TIMEOUT(ep_group_create(bootstrap, &config, &group), config.timeout_seconds,
                      "rank 2");
    CHECK(seconds_now() - begin < LATE, "gave up after %.1f s", seconds_now() - begin);
    CHECK(group == NULL, "a group was made");
}

RankTest(runtime_deadline, absent_from_group_create, RANKS, create_without_one(bootstrap, -1));
RankTest(runtime_deadline, refused_while_one_is_absent, RANKS, create_without_one(bootstrap, 0));

/* One rank destroys its group while the others still call. */
ThreadTest(runtime_deadline, group_destroyed_by_one_rank, RANKS) {
    Step h = timed_open(bootstrap, SOON, "");
    if (bootstrap->rank != ABSENT) {
        EpStatus status = call_ops(&h, STEP_PREPARE);
        CHECK(status == EP_ERR_TIMEOUT || status == EP_ERR_PEER, "%d: %s", (int)status,
              ep_last_error());
        CHECK(strstr(ep_last_error(), "rank 2"), "%s", ep_last_error());
    }
    timed_close(&h);
}
