/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that do not come, or come with something else: everyone else is told who and where, in
 * time, and the group says the same from then on. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/cases/run.h"
#include "tests/harness/ranked.h"

enum { RANKS = 3, ABSENT = 2 };

/* A deadline that is soon over, and what is surely later. Other tests may share the GPUs. */
#define SOON (TESTS_ON_GPU ? 3.0 : 0.3)
#define LATE (TESTS_ON_GPU ? 30.0 : 5.0)

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Failed groups log a warning. */
static void be_quiet(void) {
    setenv("EP_LOG_FILE", "/dev/null", 1);
}

TestSuite(runtime_deadline, .init = be_quiet);

/* A rank of a group whose waits end soon. */
typedef struct Hurried {
    EpGroup *group;
    EpHandle *handle;
    World *world;
    Step step;
} Hurried;

static Hurried hurried_open_in(const EpBootstrap *bootstrap, double seconds, EpMode mode) {
    Case c = {.ranks = RANKS, .spread = SPREAD_FULL, .experts = 6, .top_k = 3, .mode = mode};
    Hurried h = {.world = world_new(&c)};
    EpGroupConfig config = case_group_config(&h.world->c);
    config.timeout_seconds = seconds;
    CHECK_OK(ep_group_create(bootstrap, &config, &h.group));
    h.handle = h.group ? open_handle(h.group, &h.world->c) : NULL;
    h.step = (Step){h.group, h.handle, h.world, bootstrap->rank};
    return h;
}

static Hurried hurried_open(const EpBootstrap *bootstrap, double seconds) {
    return hurried_open_in(bootstrap, seconds, EP_MODE_THROUGHPUT);
}

static void hurried_close(Hurried *h) {
    double begin = now();
    ep_group_destroy(h->group);
    CHECK(now() - begin < LATE, "destroying a failed group took %.1f s", now() - begin);
    world_free(h->world);
}

static EpStatus call_prepare(const Step *step) {
    const RankWorld *me = &step->world->rank[step->rank];
    EpTensor topk_idx = ep_tensor_2d(me->index, EP_TYPE_INT64, me->rows, step->world->c.top_k);
    return ep_prepare(step->handle, &topk_idx, NULL, NULL, NULL);
}

/* Calls with outputs that live as long as the test: a failed operation may have begun to write. */
static EpStatus call_dispatch(const Step *step) {
    static _Thread_local _Alignas(16) char room[1 << 16];
    EpTensor tokens = step_tokens(step);
    EpTensor rows = step_rows(step, room, EP_TYPE_BF16, step->world->c.hidden);
    return ep_dispatch(step->handle, &tokens, NULL, NULL, NULL, &rows, NULL, NULL, NULL);
}

static EpStatus call_combine(const Step *step) {
    static _Thread_local _Alignas(16) char room[1 << 16];
    EpTensor rows = step_expert_out(step), out = step_grad_out(step);
    out.data = room;
    return ep_combine(step->handle, &rows, NULL, NULL, &out);
}

static EpStatus call_combine_backward(const Step *step) {
    static _Thread_local _Alignas(16) char room[1 << 16];
    EpTensor grad = step_grad_out(step);
    EpTensor rows = step_rows(step, room, EP_TYPE_BF16, step->world->c.hidden);
    return ep_combine_backward(step->handle, &grad, NULL, NULL, NULL, &rows, NULL);
}

static EpStatus call_dispatch_backward(const Step *step) {
    static _Thread_local _Alignas(16) char room[1 << 16];
    EpTensor rows = step_expert_out(step), out = step_grad_out(step);
    out.data = room;
    return ep_dispatch_backward(step->handle, &rows, NULL, NULL, &out, NULL);
}

typedef EpStatus (*Call)(const Step *step);

static const Call calls[] = {call_prepare, call_dispatch, call_combine, call_combine_backward,
                             call_dispatch_backward};
static const char *const phases[] = {"prepare", "dispatch", "combine", "combine backward",
                                     "dispatch backward"};

/* How a call ends. On GPUs it is under way when it returns; what becomes of it is for
 * ep_group_status to say. */
static EpStatus outcome(Call call, const Step *step) {
    EpStatus status = call(step);
    return status == EP_OK && TESTS_ON_GPU ? ep_group_status(step->group, NULL) : status;
}

static void check_group_failed(const Step *step, EpStatus status) {
    for (int i = 0; i < 5; i++)
        CHECK_STATUS(calls[i](step), status);
    CHECK_STATUS(ep_group_status(step->group, NULL), status);
}

static void check_timeout(const Step *step, int call) {
    double begin = now();
    CHECK_REFUSED(outcome(calls[call], step), EP_ERR_TIMEOUT, "rank 2", phases[call]);
    CHECK(now() - begin > 0.8 * SOON, "gave up after %.2f s", now() - begin);
    CHECK(now() - begin < LATE, "gave up after %.2f s", now() - begin);
    EpFinding found = EP_FINDING_INIT;
    CHECK_REFUSED(ep_group_status(step->group, &found), EP_ERR_TIMEOUT, "rank 2", phases[call]);
    CHECK(found.status == EP_ERR_TIMEOUT && found.peer == ABSENT, "peer %d", (int)found.peer);
    CHECK(found.rank == step->rank, "rank %d", (int)found.rank);
    CHECK(strcmp(found.phase, phases[call]) == 0, "phase %s", found.phase);
    check_group_failed(step, EP_ERR_TIMEOUT);
}

/* Ranks 0 and 1 make the call; rank 2 waits, outside libep, until they have given up. */
static void absent_from_in(const EpBootstrap *bootstrap, int call, EpMode mode) {
    Hurried h = hurried_open_in(bootstrap, SOON, mode);
    REQUIRE(h.handle, "no handle");
    if (call > 0) CHECK_OK(call_prepare(&h.step));
    if (call > 1 && mode == EP_MODE_LATENCY) CHECK_OK(call_dispatch(&h.step));
    if (bootstrap->rank != ABSENT) check_timeout(&h.step, call);
    bootstrap->barrier(bootstrap->context, 60);
    hurried_close(&h);
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

/* What the others left behind may be enough for the first call, but not for a second. */
static void check_hears_of_failure(const Step *step) {
    EpStatus status = outcome(call_prepare, step);
    if (status == EP_OK) status = outcome(call_dispatch, step);
    CHECK(status == EP_ERR_PEER || status == EP_ERR_TIMEOUT, "%d: %s", (int)status,
          status == EP_OK ? "" : ep_last_error());
    check_group_failed(step, status);
}

/* Who arrives after the others gave up is told so, and does not wait for them in vain. */
ThreadTest(runtime_deadline, late_rank_learns_of_the_failure, RANKS) {
    Hurried h = hurried_open(bootstrap, SOON);
    REQUIRE(h.handle, "no handle");
    if (bootstrap->rank != ABSENT) CHECK_STATUS(outcome(call_prepare, &h.step), EP_ERR_TIMEOUT);
    bootstrap->barrier(bootstrap->context, 60);
    if (bootstrap->rank == ABSENT) check_hears_of_failure(&h.step);
    hurried_close(&h);
}

/* EP_TIMEOUT is the deadline of a group that names none. */
ThreadTest(runtime_deadline, deadline_from_the_setting, RANKS) {
    if (bootstrap->rank == 0 || ranked_is()) setenv("EP_TIMEOUT", TESTS_ON_GPU ? "3" : "0.3", 1);
    bootstrap->barrier(bootstrap->context, 60);
    Hurried h = hurried_open(bootstrap, EP_DEFAULT);
    REQUIRE(h.handle, "no handle");
    if (bootstrap->rank != ABSENT) check_timeout(&h.step, 0);
    bootstrap->barrier(bootstrap->context, 60);
    hurried_close(&h);
}

/* Polls count for the deadline, however many there are to be. */
ThreadTest(runtime_deadline, deadline_of_a_wait_that_spins, RANKS) {
    HOST_ONLY("no EP_SPIN on GPUs");
    if (bootstrap->rank == 0) setenv("EP_SPIN", "1000000000", 1);
    bootstrap->barrier(bootstrap->context, 60);
    Hurried h = hurried_open(bootstrap, SOON);
    REQUIRE(h.handle, "no handle");
    if (bootstrap->rank != ABSENT) check_timeout(&h.step, 0);
    bootstrap->barrier(bootstrap->context, 60);
    hurried_close(&h);
}

/* A slow rank within the deadline is only waited for. */
ThreadTest(runtime_deadline, slow_rank_is_waited_for, RANKS) {
    Hurried h = hurried_open(bootstrap, 30);
    REQUIRE(h.handle, "no handle");
    if (bootstrap->rank == ABSENT) usleep(300000);
    step_all(&h.step);
    hurried_close(&h);
}

ThreadTest(runtime_deadline, absent_from_group_create, RANKS) {
    Case c = case_complete((Case){.ranks = RANKS});
    EpGroupConfig config = case_group_config(&c);
    EpGroup *group = NULL;
    config.timeout_seconds = TESTS_ON_GPU ? 5 : 0.3; /* looking at GPUs takes a while */
    if (bootstrap->rank == ABSENT) return;
    double begin = now();
    CHECK_REFUSED(ep_group_create(bootstrap, &config, &group), EP_ERR_TIMEOUT, "rank 2");
    CHECK(now() - begin < config.timeout_seconds + 5, "gave up after %.1f s", now() - begin);
    CHECK(group == NULL, "a group was made");
}

/* What is wrong with a rank's own configuration comes before who is missing, within its deadline.
 */
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

/* A rank that destroys its group while others still call. */
ThreadTest(runtime_deadline, group_destroyed_by_one_rank, RANKS) {
    Hurried h = hurried_open(bootstrap, SOON);
    REQUIRE(h.handle, "no handle");
    if (bootstrap->rank != ABSENT) {
        EpStatus status = outcome(call_prepare, &h.step);
        CHECK(status == EP_ERR_TIMEOUT || status == EP_ERR_PEER, "%d: %s", (int)status,
              ep_last_error());
        CHECK(strstr(ep_last_error(), "rank 2"), "%s", ep_last_error());
    }
    hurried_close(&h);
}

/* ---- ranks that call something else ---- */

static void check_order(const EpBootstrap *bootstrap, Call usual, Call odd, EpStatus status) {
    Hurried h = hurried_open(bootstrap, 30);
    REQUIRE(h.handle, "no handle");
    CHECK_OK(call_prepare(&h.step));
    Call call = bootstrap->rank == ABSENT ? odd : usual;
    CHECK_STATUS(outcome(call, &h.step), status);
    CHECK(strstr(ep_last_error(), "rank"), "%s", ep_last_error());
    check_group_failed(&h.step, status);
    hurried_close(&h);
}

/* Each is told what the other has called, also after steps that went well. */
static void check_meet(const EpBootstrap *bootstrap, Call usual, const char *usual_name, Call odd,
                       const char *odd_name) {
    int is_odd = bootstrap->rank == ABSENT;
    char own[32], other[48];
    for (int steps = 0; steps < 3; steps++) {
        Hurried h = hurried_open(bootstrap, 30);
        REQUIRE(h.handle, "no handle");
        check_note("after %d steps", steps);
        for (int i = 0; i < steps; i++)
            step_all(&h.step);
        CHECK_OK(call_prepare(&h.step));
        snprintf(own, sizeof(own), ": %s: expected", is_odd ? odd_name : usual_name);
        snprintf(other, sizeof(other), "called %s on handle", is_odd ? usual_name : odd_name);
        CHECK_STATUS(outcome(is_odd ? odd : usual, &h.step), EP_ERR_ORDER);
        CHECK(strstr(ep_last_error(), own) && strstr(ep_last_error(), other), "%s",
              ep_last_error());
        check_group_failed(&h.step, EP_ERR_ORDER);
        hurried_close(&h);
    }
}

ThreadTest(runtime_deadline, dispatch_meets_combine, RANKS) {
    check_meet(bootstrap, call_dispatch, "dispatch", call_combine, "combine");
}

ThreadTest(runtime_deadline, combine_meets_dispatch, RANKS) {
    check_meet(bootstrap, call_combine, "combine", call_dispatch, "dispatch");
}

ThreadTest(runtime_deadline, combine_meets_dispatch_backward, RANKS) {
    check_meet(bootstrap, call_combine, "combine", call_dispatch_backward, "dispatch backward");
}

ThreadTest(runtime_deadline, dispatch_meets_prepare, RANKS) {
    check_meet(bootstrap, call_dispatch, "dispatch", call_prepare, "prepare");
}

static EpStatus call_narrow_dispatch(const Step *step) {
    static _Thread_local _Alignas(16) char room[1 << 16];
    EpTensor tokens = step_tokens(step);
    EpTensor rows = step_rows(step, room, EP_TYPE_BF16, 16);
    tokens.shape[1] = 16;
    return ep_dispatch(step->handle, &tokens, NULL, NULL, NULL, &rows, NULL, NULL, NULL);
}

ThreadTest(runtime_deadline, rows_of_other_sizes, RANKS) {
    check_order(bootstrap, call_dispatch, call_narrow_dispatch, EP_ERR_ORDER);
}

/* As many bytes of another type. */
static EpStatus call_retyped_dispatch(const Step *step) {
    static _Thread_local _Alignas(16) char room[1 << 16];
    EpTensor tokens = step_tokens(step);
    tokens.type = EP_TYPE_FP16;
    EpTensor rows = step_rows(step, room, EP_TYPE_FP16, step->world->c.hidden);
    return ep_dispatch(step->handle, &tokens, NULL, NULL, NULL, &rows, NULL, NULL, NULL);
}

ThreadTest(runtime_deadline, rows_of_another_type, RANKS) {
    check_order(bootstrap, call_dispatch, call_retyped_dispatch, EP_ERR_ORDER);
}

static EpStatus call_narrow_prepare(const Step *step) {
    const RankWorld *me = &step->world->rank[step->rank];
    EpTensor topk_idx = ep_tensor_2d(me->index, EP_TYPE_INT64, me->rows, 2);
    return ep_prepare(step->handle, &topk_idx, NULL, NULL, NULL);
}

ThreadTest(runtime_deadline, prepare_with_another_k, RANKS) {
    check_order(bootstrap, call_prepare, call_narrow_prepare, EP_ERR_ORDER);
}

/* Equal handles of a group, called in another order. */
ThreadTest(runtime_deadline, handles_in_another_order, RANKS) {
    Hurried h = hurried_open(bootstrap, 30);
    REQUIRE(h.handle, "no handle");
    Step second = h.step;
    second.handle = open_handle(h.group, &h.world->c);
    CHECK_STATUS(outcome(call_prepare, bootstrap->rank == ABSENT ? &second : &h.step),
                 EP_ERR_ORDER);
    CHECK(strstr(ep_last_error(), "rank"), "%s", ep_last_error());
    hurried_close(&h);
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

/* First halves wait for the peers, or what flies does; either way somebody says who is missing. */
ThreadTest(runtime_deadline, absent_from_a_first_half, RANKS) {
    NEEDS_LATENCY();
    Hurried h = hurried_open_in(bootstrap, SOON, EP_MODE_LATENCY);
    REQUIRE(h.handle, "no handle");
    CHECK_OK(call_prepare(&h.step));
    if (bootstrap->rank != ABSENT) {
        static _Thread_local _Alignas(16) char room[1 << 16];
        EpTensor tokens = step_tokens(&h.step), rows = step_recv_tokens(&h.step, room);
        EpStatus status = ep_dispatch_send(h.handle, &tokens, NULL, NULL, NULL);
        if (status == EP_OK) status = ep_dispatch_wait(h.handle, NULL, &rows, NULL, NULL, NULL);
        if (status == EP_OK) status = ep_group_status(h.group, NULL);
        CHECK_REFUSED(status, EP_ERR_TIMEOUT, "rank 2", "dispatch");
        CHECK_STATUS(ep_dispatch_wait(h.handle, NULL, &rows, NULL, NULL, NULL), EP_ERR_TIMEOUT);
    }
    bootstrap->barrier(bootstrap->context, 60);
    hurried_close(&h);
}

/* A handle of another mode on one rank: its prepare meets a dispatch. */
ThreadTest(runtime_deadline, handles_of_different_modes, RANKS) {
    NEEDS_LATENCY();
    if (TESTS_ON_GPU) HOST_ONLY("there ranks already meet to create a handle in latency mode");
    Hurried h = hurried_open_in(bootstrap, 30, EP_MODE_LATENCY);
    Case c = h.world->c;
    if (bootstrap->rank == ABSENT) c.mode = EP_MODE_THROUGHPUT;
    h.step.handle = h.group ? open_handle(h.group, &c) : NULL;
    REQUIRE(h.step.handle, "no handle");
    EpStatus status = call_prepare(&h.step);
    if (status == EP_OK) status = outcome(call_dispatch, &h.step);
    CHECK(status == EP_ERR_ORDER, "%d", (int)status);
    CHECK(strstr(ep_last_error(), "dispatch in latency mode") &&
              strstr(ep_last_error(), "prepare") && strstr(ep_last_error(), "on handle 1"),
          "%s", ep_last_error());
    hurried_close(&h);
}
