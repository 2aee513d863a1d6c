/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that do not arrive, or call something else: within the timeout the other ranks get an error
 * that names the rank and the operation, and the group returns it from then on. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/cases/calls.h"
#include "tests/cases/run.h"
#include "tests/harness/ranked.h"

enum { RANKS = 3, ABSENT = 2 };

/* A short timeout, and an upper bound for a test that waits for it. Other tests may share the
 * GPUs. */
#define SOON (TESTS_ON_GPU ? 3.0 : 0.3)
#define LATE (TESTS_ON_GPU ? 30.0 : 5.0)

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Failed groups log a warning. */
static void be_quiet(void) {
    setenv("LIBEP_LOG_FILE", "/dev/null", 1);
}

TestSuite(runtime_deadline, .init = be_quiet);

/* A rank of a group with a timeout of its own. */
typedef struct TimedRank {
    EpGroup *group;
    EpHandle *handle;
    World *world;
    Step step;
} TimedRank;

static TimedRank timed_open_in(const EpBootstrap *bootstrap, double seconds, EpMode mode) {
    Case c = {
        .ranks = RANKS, .spread = SPREAD_FULL, .experts = 6, .top_k = 3, .mode = mode, .id = 1};
    TimedRank h = {.world = world_new(&c)};
    EpGroupConfig config = case_group_config(&h.world->c);
    config.timeout_seconds = seconds;
    CHECK_OK(ep_group_create(bootstrap, &config, &h.group));
    h.handle = h.group ? open_handle(h.group, &h.world->c) : NULL;
    h.step = (Step){h.group, h.handle, h.world, bootstrap->rank, NULL};
    return h;
}

static TimedRank timed_open(const EpBootstrap *bootstrap, double seconds) {
    return timed_open_in(bootstrap, seconds, EP_MODE_THROUGHPUT);
}

static void timed_close(TimedRank *h) {
    double begin = now();
    ep_group_destroy(h->group);
    CHECK(now() - begin < LATE, "destroying a failed group took %.1f s", now() - begin);
    world_free(h->world);
}

static void check_group_failed(const Step *step, EpStatus status) {
    for (int i = 0; i < NUM_CALLS; i++)
        CHECK_STATUS(calls[i](step), status);
    CHECK_STATUS(ep_group_status(step->group, NULL), status);
}

static void check_timeout(const Step *step, int call) {
    double begin = now();
    CHECK_REFUSED(call_outcome(calls[call], step), EP_ERR_TIMEOUT, "rank 2", call_phases[call]);
    CHECK(now() - begin > 0.8 * SOON, "gave up after %.2f s", now() - begin);
    CHECK(now() - begin < LATE, "gave up after %.2f s", now() - begin);
    EpFinding found = EP_FINDING_INIT;
    CHECK_REFUSED(ep_group_status(step->group, &found), EP_ERR_TIMEOUT, "rank 2",
                  call_phases[call]);
    CHECK(found.status == EP_ERR_TIMEOUT && found.peer == ABSENT, "peer %d", (int)found.peer);
    CHECK(found.rank == step->rank, "rank %d", (int)found.rank);
    CHECK(strcmp(found.phase, call_phases[call]) == 0, "phase %s", found.phase);
    check_group_failed(step, EP_ERR_TIMEOUT);
}

/* Ranks 0 and 1 make the call. Rank 2 waits, outside libep, until both have given up. */
static void absent_from_in(const EpBootstrap *bootstrap, int call, EpMode mode) {
    TimedRank h = timed_open_in(bootstrap, SOON, mode);
    REQUIRE(h.handle, "no handle");
    if (call > 0) CHECK_OK(call_prepare(&h.step));
    if (call > 1 && mode == EP_MODE_LATENCY) CHECK_OK(call_dispatch(&h.step));
    if (bootstrap->rank != ABSENT) check_timeout(&h.step, call);
    bootstrap->barrier(bootstrap->context, 60);
    timed_close(&h);
}

static void absent_from(const EpBootstrap *bootstrap, int call) {
    absent_from_in(bootstrap, call, EP_MODE_THROUGHPUT);
}

ThreadTest(runtime_deadline, absent_from_prepare, RANKS) {
    absent_from(bootstrap, 0);
}
ThreadTest(runtime_deadline, absent_from_dispatch, RANKS) {
    absent_from(bootstrap, 1);
}
ThreadTest(runtime_deadline, absent_from_combine, RANKS) {
    absent_from(bootstrap, 2);
}
ThreadTest(runtime_deadline, absent_from_combine_backward, RANKS) {
    absent_from(bootstrap, 3);
}
ThreadTest(runtime_deadline, absent_from_dispatch_backward, RANKS) {
    absent_from(bootstrap, 4);
}

static void absent_from_call(const EpBootstrap *bootstrap, void *call) {
    HOST_ONLY("LIBEP_TEST_NODES=2 runs this suite on nodes of GPUs");
    absent_from(bootstrap, *(const int *)call);
}

/* The same on pretended nodes: the missing rank is on another node, on that of rank 1, or alone. */
Test(runtime_deadline, absent_on_several_nodes, .timeout = 120) {
    static const char *const nodes[] = {"0,0,1", "0,1,1", "0,1,2"};
    for (int i = 0; i < 3; i++) {
        setenv("LIBEP_TOPOLOGY", nodes[i], 1);
        for (int call = 0; call < NUM_CALLS; call++)
            run_on_threads(RANKS, absent_from_call, &call);
    }
}

/* ---- refused calls ---- */

typedef enum Then { STAYS, DESTROYS, ABORTS, CORRECTS, THEN_COUNT } Then;

#define GONE "the store is gone"

/* Make a call, or the send phase of a dispatch, with a tensor missing. */
static EpStatus refused_call(const Step *s, int call) {
    EpHandle *h = s->handle;
    if (call == 0) return ep_prepare(h, NULL, NULL, NULL, NULL, NULL);
    if (call == 1)
        return ep_dispatch(h, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
    if (call == 2) return ep_combine(h, NULL, NULL, NULL, NULL, NULL, NULL);
    if (call == 3) return ep_combine_backward(h, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
    if (call == 4) return ep_dispatch_backward(h, NULL, NULL, NULL, NULL, NULL, NULL);
    return ep_dispatch_send(h, NULL, NULL, NULL, NULL, NULL, NULL);
}

/* Check what the peers of a rank are told whose call was refused. */
static void check_quotes(const Step *step, int call, Then then, const char *refusal) {
    double begin = now();
    EpStatus status = call_outcome(calls[call < NUM_CALLS ? call : 1], step);
    EpFinding found = EP_FINDING_INIT;
    if (then == CORRECTS) {
        CHECK_OK(status);
        CHECK_REFUSED(call_outcome(calls[call], step), EP_ERR_TIMEOUT, "rank 2 did not");
        CHECK(!strstr(ep_last_error(), "refused"), "%s", ep_last_error());
        return;
    }
    if (then == STAYS)
        CHECK_REFUSED(status, EP_ERR_TIMEOUT, "rank 2 did not", "; its last call was ", refusal);
    else
        CHECK_REFUSED(status, EP_ERR_PEER, "rank 2",
                      then == ABORTS ? GONE : "has destroyed the group", "; its last call was ",
                      refusal);
    CHECK(now() - begin < LATE, "it took %.1f s", now() - begin);
    CHECK_STATUS(ep_group_status(step->group, &found), status);
    CHECK(found.peer == ABSENT, "peer %d", (int)found.peer);
}

static void refused(const EpBootstrap *bootstrap, int call, Then then, EpMode mode) {
    char refusal[256] = "refused: rank 2: ep_";
    TimedRank h = timed_open_in(bootstrap, then == STAYS || then == CORRECTS ? SOON : 100, mode);
    REQUIRE(h.handle, "no handle");
    if (call > 0) CHECK_OK(call_prepare(&h.step));
    check_note("call %d, then %d", call, (int)then);
    bootstrap->barrier(bootstrap->context, 60);
    if (bootstrap->rank == ABSENT) {
        CHECK_REFUSED(refused_call(&h.step, call), EP_ERR_NULL, "expected a tensor, got NULL");
        if (then == CORRECTS) CHECK_OK(call_outcome(calls[call], &h.step));
        if (then == ABORTS) CHECK_OK(ep_group_abort(h.group, GONE));
        /* A rank on another node is told by the thread of the rank that is aborted. */
        if (then == ABORTS) CHECK_STATUS(ep_group_status(h.group, NULL), EP_ERR_ABORTED);
    } else {
        check_quotes(&h.step, call, then, refusal);
    }
    if (then != DESTROYS) bootstrap->barrier(bootstrap->context, 60);
    timed_close(&h);
}

typedef struct Refused {
    int call;
    Then then;
    EpMode mode;
} Refused;

static void refused_body(const EpBootstrap *bootstrap, void *arg) {
    const Refused *r = arg;
    refused(bootstrap, r->call, r->then, r->mode);
}

/* On GPUs deadlines are long: two operations have to do where ranks wait for one. */
static void refused_calls(const char *nodes) {
    setenv("LIBEP_TOPOLOGY", nodes, 1);
    for (int then = 0; then < THEN_COUNT; then++) {
        int waits = then == STAYS || then == CORRECTS;
        for (int call = 0; call < (waits && TESTS_ON_GPU ? 2 : NUM_CALLS); call++)
            run_on_threads(RANKS, refused_body, &(Refused){call, (Then)then, EP_MODE_THROUGHPUT});
    }
}

/* Peers quote the sentence of a refused call: at their deadline, or at once if the rank is aborted
 * or destroys the group. A rank that calls again is waited for as any other. */
Test(runtime_deadline, refused_calls, .timeout = 120) {
    refused_calls("");
}
Test(runtime_deadline, refused_calls_on_two_nodes, .timeout = 120) {
    refused_calls("0,0,1");
    /* On GPUs NCCL's wait for rank 0 may end before that for rank 2, which no watcher watches. */
    if (!TESTS_ON_GPU) refused_calls("0,1,1");
}
Test(runtime_deadline, refused_send_phase, .timeout = 120) {
    NEEDS_LATENCY();
    for (int then = STAYS; then < CORRECTS; then++)
        run_on_threads(RANKS, refused_body, &(Refused){NUM_CALLS, (Then)then, EP_MODE_LATENCY});
}

/* A refused call alone changes nothing: the ranks destroy the group together, and soon. */
ThreadTest(runtime_deadline, refused_calls_and_no_others, RANKS) {
    for (int only = -1; only < RANKS; only++) { /* -1: on all ranks */
        TimedRank h = timed_open(bootstrap, 100);
        REQUIRE(h.handle, "no handle");
        step_all(&h.step);
        if (only < 0 || only == bootstrap->rank)
            CHECK_STATUS(refused_call(&h.step, 1), EP_ERR_NULL);
        timed_close(&h);
    }
}

/* Check that a late rank gets an error. The other ranks may have sent enough for its first call,
 * but not for a second. */
static void check_learns_of_failure(const Step *step) {
    EpStatus status = call_outcome(call_prepare, step);
    if (status == EP_OK) status = call_outcome(call_dispatch, step);
    CHECK(status == EP_ERR_PEER || status == EP_ERR_TIMEOUT, "%d: %s", (int)status,
          status == EP_OK ? "" : ep_last_error());
    check_group_failed(step, status);
}

/* A rank that arrives after the others gave up gets an error and does not wait for its own
 * timeout. */
ThreadTest(runtime_deadline, late_rank_learns_of_the_failure, RANKS) {
    TimedRank h = timed_open(bootstrap, SOON);
    REQUIRE(h.handle, "no handle");
    if (bootstrap->rank != ABSENT)
        CHECK_STATUS(call_outcome(call_prepare, &h.step), EP_ERR_TIMEOUT);
    bootstrap->barrier(bootstrap->context, 60);
    if (bootstrap->rank == ABSENT) check_learns_of_failure(&h.step);
    timed_close(&h);
}

/* LIBEP_TIMEOUT is the timeout of a group whose configuration names none. */
ThreadTest(runtime_deadline, deadline_from_the_setting, RANKS) {
    set_on_ranks(bootstrap, "LIBEP_TIMEOUT", TESTS_ON_GPU ? "3" : "0.3");
    TimedRank h = timed_open(bootstrap, EP_DEFAULT);
    REQUIRE(h.handle, "no handle");
    if (bootstrap->rank != ABSENT) check_timeout(&h.step, 0);
    bootstrap->barrier(bootstrap->context, 60);
    timed_close(&h);
}

/* A spinning wait also ends at the timeout, with any LIBEP_SPIN. */
ThreadTest(runtime_deadline, deadline_of_a_wait_that_spins, RANKS) {
    HOST_ONLY("no LIBEP_SPIN on GPUs");
    set_on_ranks(bootstrap, "LIBEP_SPIN", "1000000000");
    TimedRank h = timed_open(bootstrap, SOON);
    REQUIRE(h.handle, "no handle");
    if (bootstrap->rank != ABSENT) check_timeout(&h.step, 0);
    bootstrap->barrier(bootstrap->context, 60);
    timed_close(&h);
}

/* The others wait for a slow rank that arrives within the timeout. */
ThreadTest(runtime_deadline, slow_rank_is_waited_for, RANKS) {
    TimedRank h = timed_open(bootstrap, 30);
    REQUIRE(h.handle, "no handle");
    if (bootstrap->rank == ABSENT) usleep(300000);
    step_all(&h.step);
    timed_close(&h);
}

ThreadTest(runtime_deadline, absent_from_group_create, RANKS) {
    Case c = case_complete((Case){.ranks = RANKS});
    EpGroupConfig config = case_group_config(&c);
    EpGroup *group = NULL;
    config.timeout_seconds = TESTS_ON_GPU ? 5 : 0.3; /* GPU discovery is slow */
    if (bootstrap->rank == ABSENT) return;
    double begin = now();
    CHECK_REFUSED(ep_group_create(bootstrap, &config, &group), EP_ERR_TIMEOUT, "rank 2");
    CHECK(now() - begin < config.timeout_seconds + 5, "gave up after %.1f s", now() - begin);
    CHECK(group == NULL, "a group was made");
}

/* A rank with a wrong configuration gets that error within the timeout; the other rank's error
 * names the missing rank. */
ThreadTest(runtime_deadline, refused_while_one_is_absent, RANKS) {
    Case c = case_complete((Case){.ranks = RANKS});
    EpGroupConfig config = case_group_config(&c);
    EpGroup *group = NULL;
    config.max_tokens = bootstrap->rank == 0 ? 0 : config.max_tokens;
    config.timeout_seconds = TESTS_ON_GPU ? 5 : 0.3;
    if (bootstrap->rank == ABSENT) return;
    double begin = now();
    if (bootstrap->rank == 0)
        CHECK_REFUSED(ep_group_create(bootstrap, &config, &group), EP_ERR_RANGE, "max_tokens");
    else
        CHECK_REFUSED(ep_group_create(bootstrap, &config, &group), EP_ERR_TIMEOUT, "rank 2");
    CHECK(now() - begin < config.timeout_seconds + 5, "gave up after %.1f s", now() - begin);
    CHECK(group == NULL, "a group was made");
}

/* One rank destroys its group while the others still call. */
ThreadTest(runtime_deadline, group_destroyed_by_one_rank, RANKS) {
    TimedRank h = timed_open(bootstrap, SOON);
    REQUIRE(h.handle, "no handle");
    if (bootstrap->rank != ABSENT) {
        EpStatus status = call_outcome(call_prepare, &h.step);
        CHECK(status == EP_ERR_TIMEOUT || status == EP_ERR_PEER, "%d: %s", (int)status,
              ep_last_error());
        CHECK(strstr(ep_last_error(), "rank 2"), "%s", ep_last_error());
    }
    timed_close(&h);
}

/* ---- ranks that call something else ---- */

static void check_order(const EpBootstrap *bootstrap, Call usual, Call odd, EpStatus status) {
    TimedRank h = timed_open(bootstrap, 30);
    REQUIRE(h.handle, "no handle");
    CHECK_OK(call_prepare(&h.step));
    Call call = bootstrap->rank == ABSENT ? odd : usual;
    CHECK_STATUS(call_outcome(call, &h.step), status);
    CHECK(strstr(ep_last_error(), "rank"), "%s", ep_last_error());
    check_group_failed(&h.step, status);
    timed_close(&h);
}

/* Each rank's error names the call of the other, also after successful steps. */
static void check_different_calls(const EpBootstrap *bootstrap, Call usual, const char *usual_name,
                                  Call odd, const char *odd_name) {
    int is_odd = bootstrap->rank == ABSENT;
    char own[32], other[48];
    for (int steps = 0; steps < 3; steps++) {
        TimedRank h = timed_open(bootstrap, 30);
        REQUIRE(h.handle, "no handle");
        check_note("after %d steps", steps);
        for (int i = 0; i < steps; i++)
            step_all(&h.step);
        CHECK_OK(call_prepare(&h.step));
        snprintf(own, sizeof(own), ": %s: expected", is_odd ? odd_name : usual_name);
        snprintf(other, sizeof(other), "called %s on handle", is_odd ? usual_name : odd_name);
        CHECK_STATUS(call_outcome(is_odd ? odd : usual, &h.step), EP_ERR_ORDER);
        CHECK(strstr(ep_last_error(), own) && strstr(ep_last_error(), other), "%s",
              ep_last_error());
        check_group_failed(&h.step, EP_ERR_ORDER);
        timed_close(&h);
    }
}

ThreadTest(runtime_deadline, dispatch_against_combine, RANKS) {
    check_different_calls(bootstrap, call_dispatch, "dispatch", call_combine, "combine");
}

ThreadTest(runtime_deadline, combine_against_dispatch, RANKS) {
    check_different_calls(bootstrap, call_combine, "combine", call_dispatch, "dispatch");
}

ThreadTest(runtime_deadline, combine_against_dispatch_backward, RANKS) {
    check_different_calls(bootstrap, call_combine, "combine", call_dispatch_backward,
                          "dispatch backward");
}

ThreadTest(runtime_deadline, dispatch_against_prepare, RANKS) {
    check_different_calls(bootstrap, call_dispatch, "dispatch", call_prepare, "prepare");
}

static EpStatus call_narrow_dispatch(const Step *step) {
    static _Thread_local _Alignas(16) char room[1 << 16];
    EpTensor tokens = step_tokens(step);
    EpTensor rows = step_rows(step, room, EP_TYPE_BF16, 16);
    tokens.shape[1] = 16;
    return ep_dispatch(step->handle, NULL, NULL, &tokens, NULL, NULL, NULL, &rows, NULL, NULL,
                       NULL);
}

ThreadTest(runtime_deadline, rows_of_other_sizes, RANKS) {
    check_order(bootstrap, call_dispatch, call_narrow_dispatch, EP_ERR_ORDER);
}

/* Dispatch rows of another type with as many bytes. */
static EpStatus call_retyped_dispatch(const Step *step) {
    static _Thread_local _Alignas(16) char room[1 << 16];
    EpTensor tokens = step_tokens(step);
    tokens.type = EP_TYPE_FP16;
    EpTensor rows = step_rows(step, room, EP_TYPE_FP16, step->world->c.hidden);
    return ep_dispatch(step->handle, NULL, NULL, &tokens, NULL, NULL, NULL, &rows, NULL, NULL,
                       NULL);
}

ThreadTest(runtime_deadline, rows_of_another_type, RANKS) {
    check_order(bootstrap, call_dispatch, call_retyped_dispatch, EP_ERR_ORDER);
}

static EpStatus call_narrow_prepare(const Step *step) {
    const RankWorld *me = &step->world->rank[step->rank];
    EpTensor topk_idx = ep_tensor_2d(me->index, EP_TYPE_INT64, me->rows, 2);
    return ep_prepare(step->handle, NULL, &topk_idx, NULL, NULL, NULL);
}

ThreadTest(runtime_deadline, prepare_with_another_k, RANKS) {
    check_order(bootstrap, call_prepare, call_narrow_prepare, EP_ERR_ORDER);
}

/* Equal handles of a group with different ids. A handle without an id matches any. */
ThreadTest(runtime_deadline, handles_in_another_order, RANKS) {
    TimedRank h = timed_open(bootstrap, 30);
    REQUIRE(h.handle, "no handle");
    Step second = h.step;
    Case c = h.world->c;
    for (c.id = 0; c.id < 4; c.id += 3) {
        second.handle = open_handle(h.group, &c);
        if (!c.id)
            CHECK_OK(call_outcome(call_prepare, bootstrap->rank == ABSENT ? &second : &h.step));
    }
    CHECK_STATUS(call_outcome(call_prepare, bootstrap->rank == ABSENT ? &second : &h.step),
                 EP_ERR_ORDER);
    CHECK(strstr(ep_last_error(), "id differs") && strstr(ep_last_error(), "has 3"), "%s",
          ep_last_error());
    timed_close(&h);
}

/* ---- latency mode ---- */

ThreadTest(runtime_deadline, absent_from_dispatch_in_latency_mode, RANKS) {
    NEEDS_LATENCY();
    absent_from_in(bootstrap, 1, EP_MODE_LATENCY);
}

ThreadTest(runtime_deadline, absent_from_combine_in_latency_mode, RANKS) {
    NEEDS_LATENCY();
    absent_from_in(bootstrap, 2, EP_MODE_LATENCY);
}

/* A rank is absent from a send phase. The send or the receive phase of the others names it. */
ThreadTest(runtime_deadline, absent_from_a_send_phase, RANKS) {
    NEEDS_LATENCY();
    TimedRank h = timed_open_in(bootstrap, SOON, EP_MODE_LATENCY);
    REQUIRE(h.handle, "no handle");
    CHECK_OK(call_prepare(&h.step));
    if (bootstrap->rank != ABSENT) {
        static _Thread_local _Alignas(16) char room[1 << 16];
        EpTensor tokens = step_tokens(&h.step), rows = step_recv_tokens(&h.step, room);
        EpStatus status = ep_dispatch_send(h.handle, NULL, NULL, &tokens, NULL, NULL, NULL);
        if (status == EP_OK) status = ep_dispatch_wait(h.handle, NULL, &rows, NULL, NULL, NULL);
        if (status == EP_OK) status = ep_group_status(h.group, NULL);
        CHECK_REFUSED(status, EP_ERR_TIMEOUT, "rank 2", "dispatch");
        CHECK_STATUS(ep_dispatch_wait(h.handle, NULL, &rows, NULL, NULL, NULL), EP_ERR_TIMEOUT);
    }
    bootstrap->barrier(bootstrap->context, 60);
    timed_close(&h);
}

/* Combine in latency mode with topk_weights, whole or its send phase alone. */
static EpStatus call_weighing_combine(const Step *step) {
    static _Thread_local _Alignas(16) char room[1 << 16];
    EpTensor rows = step_expert_out(step), out = step_grad_out(step), weights = step_weights(step);
    out.data = room;
    return ep_combine(step->handle, NULL, &rows, NULL, &weights, NULL, &out);
}

static EpStatus call_weighing_combine_send(const Step *step) {
    EpTensor rows = step_expert_out(step), weights = step_weights(step);
    return ep_combine_send(step->handle, NULL, &rows, NULL, &weights, NULL);
}

static TimedRank open_dispatched(const EpBootstrap *bootstrap, double seconds) {
    TimedRank h = timed_open_in(bootstrap, seconds, EP_MODE_LATENCY);
    if (!h.handle) return h;
    CHECK_OK(call_prepare(&h.step));
    CHECK_OK(call_dispatch(&h.step));
    return h;
}

/* The send phase itself waits for the weights of a rank that is absent. */
ThreadTest(runtime_deadline, absent_from_a_send_phase_with_weights, RANKS) {
    NEEDS_LATENCY();
    TimedRank h = open_dispatched(bootstrap, SOON);
    REQUIRE(h.handle, "no handle");
    if (bootstrap->rank != ABSENT) {
        double begin = now();
        CHECK_REFUSED(call_outcome(call_weighing_combine_send, &h.step), EP_ERR_TIMEOUT, "rank 2",
                      "combine");
        CHECK(now() - begin > 0.8 * SOON && now() - begin < LATE, "gave up after %.2f s",
              now() - begin);
        check_group_failed(&h.step, EP_ERR_TIMEOUT);
    }
    bootstrap->barrier(bootstrap->context, 60);
    timed_close(&h);
}

/* Ranks disagree whether topk_weights are given. */
static void weights_of_some_ranks(const EpBootstrap *bootstrap, int odd_weighs) {
    TimedRank h = open_dispatched(bootstrap, 30);
    REQUIRE(h.handle, "no handle");
    int weighs = (bootstrap->rank == ABSENT) == odd_weighs;
    CHECK_STATUS(call_outcome(weighs ? call_weighing_combine : call_combine, &h.step),
                 EP_ERR_ORDER);
    CHECK(strstr(ep_last_error(), TESTS_ON_GPU ? "sizes" : "number of topk_weights"), "%s",
          ep_last_error());
    check_group_failed(&h.step, EP_ERR_ORDER);
    timed_close(&h);
}

ThreadTest(runtime_deadline, weights_of_one_rank, RANKS) {
    NEEDS_LATENCY();
    weights_of_some_ranks(bootstrap, 1);
}

ThreadTest(runtime_deadline, weights_of_all_ranks_but_one, RANKS) {
    NEEDS_LATENCY();
    weights_of_some_ranks(bootstrap, 0);
}

/* One rank has a handle of another mode: its prepare arrives where the others dispatch. */
ThreadTest(runtime_deadline, handles_of_different_modes, RANKS) {
    NEEDS_LATENCY();
    TimedRank h = timed_open_in(bootstrap, 30, EP_MODE_LATENCY);
    Case c = h.world->c;
    if (bootstrap->rank == ABSENT) c.mode = EP_MODE_THROUGHPUT;
    h.step.handle = h.group ? open_handle(h.group, &c) : NULL;
    REQUIRE(h.step.handle, "no handle");
    EpStatus status = call_prepare(&h.step);
    if (status == EP_OK) status = call_outcome(call_dispatch, &h.step);
    CHECK(status == EP_ERR_ORDER, "%d", (int)status);
    CHECK(strstr(ep_last_error(), "dispatch in latency mode") &&
              strstr(ep_last_error(), "prepare") && strstr(ep_last_error(), "on handle 1"),
          "%s", ep_last_error());
    timed_close(&h);
}
