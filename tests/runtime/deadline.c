/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that do not arrive, or call something else: within the timeout the other ranks get an error
 * that names the rank and the operation, and the group returns it from then on. */
#include "tests/cases/calls.h"
#include "tests/cases/run.h"
#include "tests/harness/ranked.h"

enum { RANKS = 3, ABSENT = 2 };

/* A short timeout, and an upper bound for a test that waits for it. Other tests may share the
 * GPUs. */
#define SOON (TESTS_ON_GPU ? 3.0 : 0.3)
#define LATE (TESTS_ON_GPU ? 30.0 : 5.0)

TestSuite(runtime_deadline, .init = be_quiet);

static Step timed_open(const EpBootstrap *bootstrap, double seconds, EpMode mode) {
    Case c = case_of("ranks=%d spread=full experts=6 top_k=3 mode=%d id=1", RANKS, mode);
    c.timeout = seconds;
    return open_step(bootstrap, &c);
}

static void timed_close(Step *rank) {
    double begin = seconds_now();
    close_step(rank);
    CHECK(seconds_now() - begin < LATE, "destroying a failed group took %.1f s",
          seconds_now() - begin);
}

/* A test of a step `h` that is opened so, and closed in time. */
#define DeadlineTest(name, open)                                  \
    static void name##_on(const EpBootstrap *bootstrap, Step *h); \
    ThreadTest(runtime_deadline, name, RANKS) {                   \
        Step h = open;                                            \
        name##_on(bootstrap, &h);                                 \
        timed_close(&h);                                          \
    }                                                             \
    static void name##_on(const EpBootstrap *bootstrap, Step *h)

static void check_group_failed(const Step *step, EpStatus status) {
    for (int i = 0; i < NUM_CALLS; i++)
        CHECK_STATUS(calls[i](step), status);
    CHECK_STATUS(ep_group_status(step->group, NULL), status);
}

static void check_timeout(const Step *step, int call) {
    double begin = seconds_now();
    CHECK_REFUSED(call_outcome(calls[call], step), EP_ERR_TIMEOUT, "rank 2", call_phases[call]);
    CHECK(seconds_now() - begin > 0.8 * SOON, "gave up after %.2f s", seconds_now() - begin);
    CHECK(seconds_now() - begin < LATE, "gave up after %.2f s", seconds_now() - begin);
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
    Step h = timed_open(bootstrap, SOON, mode);
    if (call > 0) CHECK_OK(call_prepare(&h));
    if (call > 1 && mode == EP_MODE_LATENCY) CHECK_OK(call_dispatch(&h));
    if (bootstrap->rank != ABSENT) check_timeout(&h, call);
    bootstrap->barrier(bootstrap->context, 60);
    timed_close(&h);
}

#define ABSENT_FROM(name, call, mode)                     \
    RankTest(runtime_deadline, absent_from_##name, RANKS, \
             absent_from_in(bootstrap, call, EP_MODE_##mode))
ABSENT_FROM(prepare, 0, THROUGHPUT);
ABSENT_FROM(dispatch, 1, THROUGHPUT);
ABSENT_FROM(combine, 2, THROUGHPUT);
ABSENT_FROM(combine_backward, 3, THROUGHPUT);
ABSENT_FROM(dispatch_backward, 4, THROUGHPUT);
ABSENT_FROM(dispatch_in_latency_mode, 1, LATENCY);
ABSENT_FROM(combine_in_latency_mode, 2, LATENCY);

static void absent_from_call(const EpBootstrap *bootstrap, void *call) {
    HOST_ONLY("LIBEP_TEST_NODES=2 runs this suite on nodes of GPUs");
    absent_from_in(bootstrap, *(const int *)call, EP_MODE_THROUGHPUT);
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
    double begin = seconds_now();
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
    CHECK(seconds_now() - begin < LATE, "it took %.1f s", seconds_now() - begin);
    CHECK_STATUS(ep_group_status(step->group, &found), status);
    CHECK(found.peer == ABSENT, "peer %d", (int)found.peer);
}

static void refused(const EpBootstrap *bootstrap, int call, Then then, EpMode mode) {
    char refusal[256] = "refused: rank 2: ep_";
    Step h = timed_open(bootstrap, then == STAYS || then == CORRECTS ? SOON : 100, mode);
    if (call > 0) CHECK_OK(call_prepare(&h));
    check_note("call %d, then %d", call, (int)then);
    bootstrap->barrier(bootstrap->context, 60);
    if (bootstrap->rank == ABSENT) {
        CHECK_REFUSED(refused_call(&h, call), EP_ERR_NULL, "expected a tensor, got NULL");
        if (then == CORRECTS) CHECK_OK(call_outcome(calls[call], &h));
        if (then == ABORTS) CHECK_OK(ep_group_abort(h.group, GONE));
        /* A rank on another node is told by the thread of the rank that is aborted. */
        if (then == ABORTS) CHECK_STATUS(ep_group_status(h.group, NULL), EP_ERR_ABORTED);
    } else {
        check_quotes(&h, call, then, refusal);
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
CasesTest(runtime_deadline, refused_calls, refused_calls(""));
Test(runtime_deadline, refused_calls_on_two_nodes, .timeout = 120) {
    refused_calls("0,0,1");
    /* On GPUs NCCL's wait for rank 0 may end before that for rank 2, which no watcher watches. */
    if (!TESTS_ON_GPU) refused_calls("0,1,1");
}
Test(runtime_deadline, refused_send_phase, .timeout = 120) {
    needs_latency();
    for (int then = STAYS; then < CORRECTS; then++)
        run_on_threads(RANKS, refused_body, &(Refused){NUM_CALLS, (Then)then, EP_MODE_LATENCY});
}

/* A refused call alone changes nothing: the ranks destroy the group together, and soon. */
ThreadTest(runtime_deadline, refused_calls_and_no_others, RANKS) {
    for (int only = -1; only < RANKS; only++) { /* -1: on all ranks */
        Step h = timed_open(bootstrap, 100, EP_MODE_THROUGHPUT);
        step_all(&h);
        if (only < 0 || only == bootstrap->rank) CHECK_STATUS(refused_call(&h, 1), EP_ERR_NULL);
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
DeadlineTest(late_rank_learns_of_the_failure, timed_open(bootstrap, SOON, EP_MODE_THROUGHPUT)) {
    if (bootstrap->rank != ABSENT) CHECK_STATUS(call_outcome(call_prepare, h), EP_ERR_TIMEOUT);
    bootstrap->barrier(bootstrap->context, 60);
    if (bootstrap->rank == ABSENT) check_learns_of_failure(h);
}

/* LIBEP_TIMEOUT is the timeout of a group whose configuration names none. A spinning wait also ends
 * at the timeout. */
static void absent_with(const EpBootstrap *bootstrap, const char *setting, const char *value,
                        double seconds) {
    set_on_ranks(bootstrap, setting, value);
    Step h = timed_open(bootstrap, seconds, EP_MODE_THROUGHPUT);
    if (bootstrap->rank != ABSENT) check_timeout(&h, 0);
    bootstrap->barrier(bootstrap->context, 60);
    timed_close(&h);
}

RankTest(runtime_deadline, deadline_from_the_setting, RANKS,
         absent_with(bootstrap, "LIBEP_TIMEOUT", TESTS_ON_GPU ? "3" : "0.3", EP_DEFAULT));
ThreadTest(runtime_deadline, deadline_of_a_wait_that_spins, RANKS) {
    HOST_ONLY("no LIBEP_SPIN on GPUs");
    absent_with(bootstrap, "LIBEP_SPIN", "1000000000", SOON);
}

/* The others wait for a slow rank that arrives within the timeout. */
DeadlineTest(slow_rank_is_waited_for, timed_open(bootstrap, 30, EP_MODE_THROUGHPUT)) {
    if (bootstrap->rank == ABSENT) usleep(300000);
    step_all(h);
}

/* A rank with a wrong configuration gets that error within the timeout; the other ranks' errors
 * name the missing rank. */
static void create_without_one(const EpBootstrap *bootstrap, int wrong) {
    EpGroupConfig config = group_config(RANKS);
    EpGroup *group = NULL;
    config.timeout_seconds = TESTS_ON_GPU ? 5 : 0.3; /* GPU discovery is slow */
    if (bootstrap->rank == wrong) config.max_tokens = 0;
    if (bootstrap->rank == ABSENT) return;
    double begin = seconds_now();
    EpStatus status = ep_group_create(bootstrap, &config, &group);
    if (bootstrap->rank == wrong)
        CHECK_REFUSED(status, EP_ERR_RANGE, "max_tokens");
    else
        CHECK_REFUSED(status, EP_ERR_TIMEOUT, "rank 2");
    CHECK(seconds_now() - begin < config.timeout_seconds + 5, "gave up after %.1f s",
          seconds_now() - begin);
    CHECK(group == NULL, "a group was made");
}

RankTest(runtime_deadline, absent_from_group_create, RANKS, create_without_one(bootstrap, -1));
RankTest(runtime_deadline, refused_while_one_is_absent, RANKS, create_without_one(bootstrap, 0));

/* One rank destroys its group while the others still call. */
DeadlineTest(group_destroyed_by_one_rank, timed_open(bootstrap, SOON, EP_MODE_THROUGHPUT)) {
    if (bootstrap->rank != ABSENT) {
        EpStatus status = call_outcome(call_prepare, h);
        CHECK(status == EP_ERR_TIMEOUT || status == EP_ERR_PEER, "%d: %s", (int)status,
              ep_last_error());
        CHECK(strstr(ep_last_error(), "rank 2"), "%s", ep_last_error());
    }
}

/* ---- ranks that call something else ---- */

static void check_order(const EpBootstrap *bootstrap, Call usual, Call odd, EpStatus status) {
    Step h = timed_open(bootstrap, 30, EP_MODE_THROUGHPUT);
    CHECK_OK(call_prepare(&h));
    Call call = bootstrap->rank == ABSENT ? odd : usual;
    CHECK_STATUS(call_outcome(call, &h), status);
    CHECK(strstr(ep_last_error(), "rank"), "%s", ep_last_error());
    check_group_failed(&h, status);
    timed_close(&h);
}

/* Each rank's error names the call of the other, also after successful steps. */
static void check_different_calls(const EpBootstrap *bootstrap, Call usual, const char *usual_name,
                                  Call odd, const char *odd_name) {
    int is_odd = bootstrap->rank == ABSENT;
    char own[32], other[48];
    for (int steps = 0; steps < 3; steps++) {
        Step h = timed_open(bootstrap, 30, EP_MODE_THROUGHPUT);
        check_note("after %d steps", steps);
        for (int i = 0; i < steps; i++)
            step_all(&h);
        CHECK_OK(call_prepare(&h));
        snprintf(own, sizeof(own), ": %s: expected", is_odd ? odd_name : usual_name);
        snprintf(other, sizeof(other), "called %s on handle", is_odd ? usual_name : odd_name);
        CHECK_STATUS(call_outcome(is_odd ? odd : usual, &h), EP_ERR_ORDER);
        CHECK(strstr(ep_last_error(), own) && strstr(ep_last_error(), other), "%s",
              ep_last_error());
        check_group_failed(&h, EP_ERR_ORDER);
        timed_close(&h);
    }
}

RankTest(runtime_deadline, dispatch_against_combine, RANKS,
         check_different_calls(bootstrap, call_dispatch, "dispatch", call_combine, "combine"));
RankTest(runtime_deadline, combine_against_dispatch_backward, RANKS,
         check_different_calls(bootstrap, call_combine, "combine", call_dispatch_backward,
                               "dispatch backward"));
RankTest(runtime_deadline, dispatch_against_prepare, RANKS,
         check_different_calls(bootstrap, call_dispatch, "dispatch", call_prepare, "prepare"));

/* Dispatch rows of a type and a number of elements. */
static EpStatus call_odd_dispatch(const Step *step, EpType type, int64_t columns) {
    static _Thread_local _Alignas(16) char room[1 << 16];
    EpTensor tokens = step_tokens(step), rows = step_rows(step, room, type, columns);
    tokens.type = type, tokens.shape[1] = columns;
    return ep_dispatch(step->handle, NULL, NULL, &tokens, NULL, NULL, NULL, &rows, NULL, NULL,
                       NULL);
}

static EpStatus call_narrow_dispatch(const Step *step) {
    return call_odd_dispatch(step, EP_TYPE_BF16, 16);
}

/* As many bytes. */
static EpStatus call_retyped_dispatch(const Step *step) {
    return call_odd_dispatch(step, EP_TYPE_FP16, step->world->c.hidden);
}

RankTest(runtime_deadline, rows_of_other_sizes, RANKS,
         check_order(bootstrap, call_dispatch, call_narrow_dispatch, EP_ERR_ORDER));
RankTest(runtime_deadline, rows_of_another_type, RANKS,
         check_order(bootstrap, call_dispatch, call_retyped_dispatch, EP_ERR_ORDER));

static EpStatus call_narrow_prepare(const Step *step) {
    const RankWorld *me = &step->world->rank[step->rank];
    EpTensor topk_idx = ep_tensor_2d(me->index, EP_TYPE_INT64, me->rows, 2);
    return ep_prepare(step->handle, NULL, &topk_idx, NULL, NULL, NULL);
}

RankTest(runtime_deadline, prepare_with_another_k, RANKS,
         check_order(bootstrap, call_prepare, call_narrow_prepare, EP_ERR_ORDER));

/* Equal handles of a group with different ids. A handle without an id matches any. */
DeadlineTest(handles_in_another_order, timed_open(bootstrap, 30, EP_MODE_THROUGHPUT)) {
    Step second = *h;
    Case c = h->world->c;
    for (c.id = 0; c.id < 4; c.id += 3) {
        second.handle = open_handle(h->group, &c);
        if (!c.id) CHECK_OK(call_outcome(call_prepare, bootstrap->rank == ABSENT ? &second : h));
    }
    CHECK_STATUS(call_outcome(call_prepare, bootstrap->rank == ABSENT ? &second : h), EP_ERR_ORDER);
    CHECK(strstr(ep_last_error(), "id differs") && strstr(ep_last_error(), "has 3"), "%s",
          ep_last_error());
}

/* ---- latency mode ---- */

/* A rank is absent from a send phase. The send or the receive phase of the others names it. */
DeadlineTest(absent_from_a_send_phase, timed_open(bootstrap, SOON, EP_MODE_LATENCY)) {
    CHECK_OK(call_prepare(h));
    if (bootstrap->rank != ABSENT) {
        static _Thread_local _Alignas(16) char room[1 << 16];
        EpTensor tokens = step_tokens(h), rows = step_recv_tokens(h, room);
        EpStatus status = ep_dispatch_send(h->handle, NULL, NULL, &tokens, NULL, NULL, NULL);
        if (status == EP_OK) status = ep_dispatch_wait(h->handle, NULL, &rows, NULL, NULL, NULL);
        if (status == EP_OK) status = ep_group_status(h->group, NULL);
        CHECK_REFUSED(status, EP_ERR_TIMEOUT, "rank 2", "dispatch");
        CHECK_STATUS(ep_dispatch_wait(h->handle, NULL, &rows, NULL, NULL, NULL), EP_ERR_TIMEOUT);
    }
    bootstrap->barrier(bootstrap->context, 60);
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

static Step open_dispatched(const EpBootstrap *bootstrap, double seconds) {
    Step h = timed_open(bootstrap, seconds, EP_MODE_LATENCY);
    if (!h.handle) return h;
    CHECK_OK(call_prepare(&h));
    CHECK_OK(call_dispatch(&h));
    return h;
}

/* The send phase itself waits for the weights of a rank that is absent. */
DeadlineTest(absent_from_a_send_phase_with_weights, open_dispatched(bootstrap, SOON)) {
    if (bootstrap->rank != ABSENT) {
        double begin = seconds_now();
        CHECK_REFUSED(call_outcome(call_weighing_combine_send, h), EP_ERR_TIMEOUT, "rank 2",
                      "combine");
        CHECK(seconds_now() - begin > 0.8 * SOON && seconds_now() - begin < LATE,
              "gave up after %.2f s", seconds_now() - begin);
        check_group_failed(h, EP_ERR_TIMEOUT);
    }
    bootstrap->barrier(bootstrap->context, 60);
}

/* Ranks disagree whether topk_weights are given. */
static void weights_of_some_ranks(const EpBootstrap *bootstrap, int odd_weighs) {
    Step h = open_dispatched(bootstrap, 30);
    int weighs = (bootstrap->rank == ABSENT) == odd_weighs;
    CHECK_STATUS(call_outcome(weighs ? call_weighing_combine : call_combine, &h), EP_ERR_ORDER);
    CHECK(strstr(ep_last_error(), TESTS_ON_GPU ? "sizes" : "number of topk_weights"), "%s",
          ep_last_error());
    check_group_failed(&h, EP_ERR_ORDER);
    timed_close(&h);
}

ThreadTest(runtime_deadline, weights_of_some_ranks, RANKS) {
    needs_latency();
    weights_of_some_ranks(bootstrap, 1);
    weights_of_some_ranks(bootstrap, 0);
}

/* One rank has a handle of another mode: its prepare arrives where the others dispatch. */
DeadlineTest(handles_of_different_modes, timed_open(bootstrap, 30, EP_MODE_LATENCY)) {
    Case c = h->world->c;
    if (bootstrap->rank == ABSENT) c.mode = EP_MODE_THROUGHPUT;
    h->handle = open_handle(h->group, &c);
    EpStatus status = call_prepare(h);
    if (status == EP_OK) status = call_outcome(call_dispatch, h);
    CHECK(status == EP_ERR_ORDER, "%d", (int)status);
    CHECK(strstr(ep_last_error(), "dispatch in latency mode") &&
              strstr(ep_last_error(), "prepare") && strstr(ep_last_error(), "on handle 1"),
          "%s", ep_last_error());
}
