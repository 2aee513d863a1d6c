/* SPDX-License-Identifier: Apache-2.0 */
/* Callbacks that return wrong bytes, or what is no status, or no sentence: an error with a
 * sentence, and no memory is touched by mistake. */
#include <stdio.h>
#include <string.h>

#include "bootstrap/bootstrap.h"
#include "runtime/callback.h"
#include "tests/cases/run.h"

enum { RANKS = 2, MOST_COLLECTIVES = 40 };
#define DEADLINE 0.2
#define SLOW "ranks that have lost each other wait for NCCL, a minute each time"

/* A bootstrap that lies to its rank, once, about what rank `about` has contributed. */
typedef struct Liar {
    EpBootstrap whole;
    int about, byte, countdown; /* it lies when this reaches 0 */
    size_t offset;              /* the bytes before it are true */
    size_t bytes;               /* of the gathers that count; 0: all */
} Liar;

static EpStatus lying_allgather(void *context, const void *in, void *out, size_t bytes,
                                double timeout) {
    Liar *liar = context;
    EpStatus status = liar->whole.allgather(liar->whole.context, in, out, bytes, timeout);
    if (liar->bytes && liar->bytes != bytes) return status;
    if (--liar->countdown == 0 && bytes > liar->offset)
        memset((char *)out + (size_t)liar->about * bytes + liar->offset, liar->byte,
               bytes - liar->offset);
    return status;
}

static EpStatus lying_barrier(void *context, double timeout) {
    Liar *liar = context;
    return liar->whole.barrier(liar->whole.context, timeout);
}

/* The bootstraps of one round: ranks of the last round may be out of step. */
static EpBootstrap all[RANKS];

static EpBootstrap next_bootstrap(const EpBootstrap *bootstrap) {
    if (bootstrap->rank == 0) {
        all[0] = (EpBootstrap)EP_BOOTSTRAP_INIT;
        CHECK_OK(ep_bootstrap_local(RANKS, all));
    }
    CHECK_OK(bootstrap->barrier(bootstrap->context, 60));
    return all[bootstrap->rank];
}

static void end_round(const EpBootstrap *bootstrap) {
    CHECK_OK(bootstrap->barrier(bootstrap->context, 60));
    for (int r = 0; r < RANKS && bootstrap->rank == 0; r++)
        ep_bootstrap_destroy(&all[r]);
    CHECK_OK(bootstrap->barrier(bootstrap->context, 60));
}

/* Let rank 0 use a lying bootstrap without `share`, which lives in *liar. */
static EpBootstrap lie(EpBootstrap b, Liar *liar) {
    liar->whole = b;
    b.share = NULL, b.share_free = NULL;
    b.isend = NULL, b.irecv = NULL, b.test = NULL, b.cancel = NULL;
    if (b.rank == 0) b.context = liar, b.allgather = lying_allgather, b.barrier = lying_barrier;
    return b;
}

/* Create a group. Returns 0 if it took fewer collectives than the lie needs. */
static int create(const EpBootstrap *bootstrap, Liar liar, int out_is_null) {
    EpBootstrap own = lie(next_bootstrap(bootstrap), &liar);
    Case c = case_complete((Case){.ranks = RANKS});
    EpGroupConfig config = case_group_config(&c);
    config.timeout_seconds = DEADLINE;
    config.backend = EP_BACKEND_AUTO; /* reports of GPUs are gathered too */
    EpGroup *group = NULL;
    EpStatus status = ep_group_create(&own, &config, out_is_null ? NULL : &group);
    int lied = liar.countdown <= 0, as = 0;
    for (const char *at = ep_last_error(); status != EP_OK && *at; at++)
        as += *at == 'A';
    if (own.rank == 0 && lied && liar.about == 0)
        CHECK(out_is_null ? status == EP_ERR_NULL || status == EP_ERR_BOOTSTRAP
                          : status == EP_ERR_BOOTSTRAP && strstr(ep_last_error(), "own"),
              "status %d: %s", status, status == EP_OK ? "" : ep_last_error());
    CHECK(as < 200, "%d characters of a sentence of 199", as);
    CHECK((status == EP_OK) == (group != NULL), "status %d, group %p", status, (void *)group);
    ep_group_destroy(group);
    int each[RANKS];
    CHECK_OK(bootstrap->allgather(bootstrap->context, &lied, each, sizeof(lied), 60));
    end_round(bootstrap);
    return each[0];
}

static void create_with_lies(const EpBootstrap *bootstrap, Liar liar, int out_is_null) {
    int n = 1;
    for (; n < MOST_COLLECTIVES; n++) {
        liar.countdown = n;
        check_note("a lie in allgather %d", n);
        if (!create(bootstrap, liar, out_is_null)) break;
    }
    CHECK(n > (out_is_null ? 1 : 5) && n < MOST_COLLECTIVES, "%d allgathers", n);
}

ThreadTest(bootstrap_lying, letters_of_a_peer, RANKS) {
    HOST_ONLY(SLOW);
    create_with_lies(bootstrap, (Liar){.about = 1, .byte = 'A'}, 0);
}
ThreadTest(bootstrap_lying, letters_after_the_status_of_a_peer, RANKS) {
    HOST_ONLY(SLOW);
    create_with_lies(bootstrap, (Liar){.about = 1, .byte = 'A', .offset = sizeof(EpStatus)}, 0);
}
ThreadTest(bootstrap_lying, minus_ones_of_a_peer, RANKS) {
    HOST_ONLY(SLOW);
    create_with_lies(bootstrap, (Liar){.about = 1, .byte = 0xff}, 0);
}
ThreadTest(bootstrap_lying, this_rank, RANKS) {
    HOST_ONLY(SLOW);
    create_with_lies(bootstrap, (Liar){.about = 0, .byte = 'A'}, 0);
}

/* A refused rank stays refused, even if its own status does not come back. */
ThreadTest(bootstrap_lying, refused_rank, RANKS) {
    HOST_ONLY(SLOW);
    create_with_lies(bootstrap, (Liar){.about = 0, .byte = 0}, 1);
}

/* The CUDA backend looks up each rank's GPU by its bus id. */
static void lie_about_bus(const EpBootstrap *bootstrap, __attribute__((unused)) void *arg) {
    Liar liar = {.about = 1, .byte = '1', .countdown = 1};
    Case c = case_complete((Case){.ranks = RANKS});
    EpGroupConfig config = case_group_config(&c);
    EpGroup *group = NULL;
    if (!TESTS_ON_GPU) {
        check_left_out("the host backend has no bus ids");
        return;
    }
    EpBootstrap own = lie(next_bootstrap(bootstrap), &liar);
    liar.bytes = sizeof(group->choice.bus);
    EpStatus status = ep_group_create(&own, &config, &group);
    if (own.rank == 0)
        CHECK_REFUSED(status, EP_ERR_BOOTSTRAP, "rank 0", "bootstrap.allgather", "bus id of rank 1",
                      "without an end");
    else
        CHECK(status != EP_OK, "no error");
    CHECK(group == NULL, "an output was written");
    end_round(bootstrap);
}

Test(bootstrap_lying, bus_id_of_a_peer, .timeout = 120) {
    run_on_threads(RANKS, lie_about_bus, NULL);
}

/* Calls and sizes of windows are checked before they are used. */
ThreadTest(bootstrap_lying, windows, RANKS) {
    HOST_ONLY(SLOW);
    Liar liar = {.about = 1, .byte = 'A', .offset = sizeof(EpRankStatus)};
    EpBootstrap own = lie(next_bootstrap(bootstrap), &liar);
    Case c = case_complete((Case){.ranks = RANKS});
    EpGroupConfig config = case_group_config(&c);
    config.timeout_seconds = DEADLINE;
    EpGroup *group = NULL;
    void *out = &group;
    REQUIRE_OK(ep_group_create(&own, &config, &group));
    liar.countdown = 1;
    EpStatus status = ep_mem_alloc(group, 64, &out);
    if (own.rank == 0)
        CHECK_REFUSED(status, EP_ERR_BOOTSTRAP, "ep_mem_alloc", "bootstrap.allgather", "rank 1",
                      "call number 1094795585");
    else
        CHECK(status != EP_OK, "no error"); /* it depends on when rank 0 leaves */
    CHECK(out == &group, "an output was written");
    ep_group_destroy(group);
    end_round(bootstrap);
}

/* ---- callbacks that fail ------------------------------------------------------------------- */

/* A bootstrap whose allgather fails for its rank, once, without a sentence, in place of gathering.
 * The others then gather too few ranks, or bytes of different calls: whatever has this size. */
typedef struct Failing {
    EpBootstrap whole;
    int countdown, code;
} Failing;

static EpStatus failing_allgather(void *context, const void *in, void *out, size_t bytes,
                                  double timeout) {
    Failing *f = context;
    if (--f->countdown == 0) return (EpStatus)f->code;
    return f->whole.allgather(f->whole.context, in, out, bytes, timeout);
}

static EpStatus failing_barrier(void *context, double timeout) {
    Failing *f = context;
    return f->whole.barrier(f->whole.context, timeout);
}

static void check_failed(EpStatus status, int code) {
    const char *said = ep_last_error();
    char got[64];
    snprintf(got, sizeof(got), "expected an EpStatus, got %d", code);
    if (code == EP_ERR_NO_MEMORY)
        CHECK(status == EP_ERR_NO_MEMORY && strstr(said, "rank 0: bootstrap.allgather: expected "
                                                         "EP_OK, got EP_ERR_NO_MEMORY: out of"),
              "%d: %s", status, said);
    else
        CHECK(status == EP_ERR_BOOTSTRAP && strstr(said, got), "%d: %s", status, said);
}

/* Returns 0 if the group takes fewer allgathers. */
static int create_with_failure(const EpBootstrap *bootstrap, int countdown, int code) {
    EpBootstrap own = next_bootstrap(bootstrap);
    Failing failing = {.whole = own, .countdown = countdown, .code = code};
    own.share = NULL, own.share_free = NULL;
    own.isend = NULL, own.irecv = NULL, own.test = NULL, own.cancel = NULL;
    if (own.rank == 0)
        own.context = &failing, own.allgather = failing_allgather, own.barrier = failing_barrier;
    Case c = case_complete((Case){.ranks = RANKS});
    EpGroupConfig config = case_group_config(&c);
    config.timeout_seconds = DEADLINE;
    EpGroup *group = NULL;
    ep_set_last_error(EP_ERR_SYSTEM, "of an earlier call");
    EpStatus status = ep_group_create(&own, &config, &group);
    int failed = failing.countdown <= 0, each[RANKS];
    check_note("allgather %d returns %d", countdown, code);
    if (own.rank == 0 && failed)
        check_failed(status, code);
    else if (status != EP_OK) /* not what the bytes of another call happen to mean */
        CHECK(status == EP_ERR_TIMEOUT && strstr(ep_last_error(), "rank 0"), "%d: %s", status,
              ep_last_error());
    ep_group_destroy(group);
    CHECK_OK(bootstrap->allgather(bootstrap->context, &failed, each, sizeof(failed), 60));
    end_round(bootstrap);
    return each[0];
}

ThreadTest(bootstrap_lying, failures_without_a_sentence, RANKS) {
    static const int codes[] = {EP_ERR_NO_MEMORY, 99, -5};
    HOST_ONLY(SLOW);
    for (int i = 0; i < 3; i++) {
        int n = 1;
        while (n < MOST_COLLECTIVES && create_with_failure(bootstrap, n, codes[i]))
            n++;
        CHECK(n > 5 && n < MOST_COLLECTIVES, "%d allgathers", n);
    }
}

static EpStatus
silent_share(__attribute__((unused)) void *context, __attribute__((unused)) int32_t node,
             __attribute__((unused)) size_t bytes, __attribute__((unused)) double timeout,
             __attribute__((unused)) void **segments, __attribute__((unused)) void **memory) {
    return (EpStatus)99;
}
static EpStatus silent_barrier(__attribute__((unused)) void *context,
                               __attribute__((unused)) double timeout) {
    return (EpStatus)99;
}
static EpStatus
silent_irecv(__attribute__((unused)) void *context, __attribute__((unused)) int32_t peer,
             __attribute__((unused)) int32_t tag, __attribute__((unused)) void *data,
             __attribute__((unused)) size_t bytes, __attribute__((unused)) void **request) {
    return EP_ERR_SYSTEM;
}
static EpStatus
speaking_isend(__attribute__((unused)) void *context, __attribute__((unused)) int32_t peer,
               __attribute__((unused)) int32_t tag, __attribute__((unused)) const void *data,
               __attribute__((unused)) size_t bytes, __attribute__((unused)) void **request) {
    return ep_set_last_error((EpStatus)1000, "the store is gone");
}
static EpStatus silent_test(__attribute__((unused)) void *context,
                            __attribute__((unused)) void **request,
                            __attribute__((unused)) int *done) {
    return (EpStatus)-1;
}

SoloTest(bootstrap_lying, each_callback_without_a_sentence) {
    EpBootstrap b = EP_BOOTSTRAP_INIT;
    b.rank = 3, b.size = 4;
    b.barrier = silent_barrier, b.share = silent_share, b.irecv = silent_irecv;
    b.isend = speaking_isend, b.test = silent_test;
    CHECK_REFUSED(ep_call_barrier(&b, 1), EP_ERR_BOOTSTRAP,
                  "rank 3: bootstrap.barrier: expected an EpStatus, got 99");
    CHECK_REFUSED(ep_call_share(&b, 0, 64, 1, NULL, NULL), EP_ERR_BOOTSTRAP,
                  "rank 3: bootstrap.share: expected an EpStatus, got 99");
    CHECK_REFUSED(ep_call_irecv(&b, 0, 0, NULL, 0, NULL), EP_ERR_SYSTEM,
                  "rank 3: bootstrap.irecv: expected EP_OK, got EP_ERR_SYSTEM: ");
    CHECK_REFUSED(ep_call_isend(&b, 0, 0, NULL, 0, NULL), EP_ERR_BOOTSTRAP,
                  "bootstrap.isend: expected an EpStatus, got 1000: the store is gone");
    CHECK_REFUSED(ep_call_test(&b, NULL, NULL), EP_ERR_BOOTSTRAP,
                  "rank 3: bootstrap.test: expected an EpStatus, got -1");
}
