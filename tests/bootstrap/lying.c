/* SPDX-License-Identifier: Apache-2.0 */
/* Callbacks that return wrong bytes, or what is no status, or no sentence: an error with a
 * sentence, and no memory is touched by mistake. */
#include "bootstrap/bootstrap.h"
#include "runtime/callback.h"
#include "tests/cases/run.h"
#include "tests/harness/bootstraps.h"

enum { RANKS = 2, MOST_COLLECTIVES = 40, LIES = 10 /* at a time */ };
#define DEADLINE 0.4
#define PATIENCE 2.0
#define SLOW "ranks that have lost each other wait for NCCL, a minute each time"

/* Lies to its rank, once, about what rank `about` has contributed. Or it fails, without a sentence,
 * in place of gathering: the others then gather too few ranks, or bytes of different calls. */
typedef struct Liar {
    int about, byte, countdown; /* it lies when this reaches 0 */
    size_t offset;              /* the bytes before it are true */
    size_t bytes;               /* of the gathers that count; 0: all */
    int code;                   /* with which it fails, or 0 */
} Liar;

/* What one group is created with, and whether the lie was told. */
typedef struct Lie {
    Liar liar;
    int out_is_null, was_told;
} Lie;

/* A rank whose arguments are refused has no deadline but the library's own, of 100 s. Of a peer
 * that has gone it waits for less. */
static EpStatus impatient_gather(void *test, const Wrapped *wrapped, const void *in, void *out,
                                 size_t bytes, double timeout) {
    (void)test;
    return forward_gather(wrapped, in, out, bytes, timeout < PATIENCE ? timeout : PATIENCE);
}

static EpStatus lying_gather(void *test, const Wrapped *wrapped, const void *in, void *out,
                             size_t bytes, double timeout) {
    Liar *liar = test;
    int is_odd = in && (!liar->bytes || liar->bytes == bytes) && --liar->countdown == 0;
    if (is_odd && liar->code) return (EpStatus)liar->code;
    EpStatus status = impatient_gather(NULL, wrapped, in, out, bytes, timeout);
    if (is_odd && bytes > liar->offset)
        memset((char *)out + (size_t)liar->about * bytes + liar->offset, liar->byte,
               bytes - liar->offset);
    return status;
}

/* Returns a bootstrap without `share`, which rank 0's liar wraps. */
static EpBootstrap wrapped_on_0(const EpBootstrap *bootstrap, Wrapped *wrapped) {
    EpBootstrap own = gathers_alone(bootstrap);
    if (own.rank == 0) wrap_bootstrap(&own, wrapped);
    return own;
}

/* Create a group; returns the status of ep_group_create. */
static EpStatus create_group(const EpBootstrap *own, EpBackend backend, EpGroup **out) {
    EpGroupConfig config = group_config(RANKS);
    config.timeout_seconds = DEADLINE, config.backend = backend;
    return ep_group_create(own, &config, out);
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

/* Create a group. */
static void create(const EpBootstrap *bootstrap, void *arg) {
    Lie *lie = arg;
    Liar liar = lie->liar;
    Wrapped wrapped = {.gather = bootstrap->rank == 0 ? lying_gather : impatient_gather,
                       .test = &liar};
    EpBootstrap own = gathers_alone(bootstrap);
    EpGroup *group = NULL;
    wrap_bootstrap(&own, &wrapped);
    check_note("a lie in allgather %d", liar.countdown);
    ep_set_last_error(EP_ERR_SYSTEM, "of an earlier call");
    /* With AUTO reports of GPUs are gathered, too. */
    EpStatus status = create_group(&own, EP_BACKEND_AUTO, lie->out_is_null ? NULL : &group);
    int lied = liar.countdown <= 0, as = 0;
    for (const char *at = ep_last_error(); status != EP_OK && *at; at++)
        as += *at == 'A';
    if (own.rank == 0 && lied && liar.code)
        check_failed(status, liar.code);
    else if (liar.code && status != EP_OK) /* not what the bytes of another call happen to mean */
        CHECK(status == EP_ERR_TIMEOUT && strstr(ep_last_error(), "rank 0"), "%d: %s", status,
              ep_last_error());
    else if (own.rank == 0 && lied && liar.about == 0)
        CHECK(lie->out_is_null ? status == EP_ERR_NULL || status == EP_ERR_BOOTSTRAP
                               : status == EP_ERR_BOOTSTRAP && strstr(ep_last_error(), "own"),
              "status %d: %s", status, status == EP_OK ? "" : ep_last_error());
    CHECK(as < 200, "%d characters of a sentence of 199", as);
    CHECK((status == EP_OK) == (group != NULL), "status %d, group %p", status, (void *)group);
    ep_group_destroy(group);
    if (own.rank == 0) lie->was_told = lied;
}

/* A lie in each allgather, a few groups at a time, until it is in none that a group makes. */
static void create_with_lies(Liar liar, int out_is_null) {
    int n = 0, was_told = 1;
    HOST_ONLY(SLOW);
    for (int first = 1; was_told && first < MOST_COLLECTIVES; first += LIES) {
        Lie lies[LIES];
        for (int i = 0; i < LIES; i++) {
            lies[i] = (Lie){liar, out_is_null, 0};
            lies[i].liar.countdown = first + i;
        }
        RUN_SIDE_BY_SIDE(RANKS, create, lies);
        for (int i = 0; i < LIES && (was_told = lies[i].was_told); i++)
            n++;
    }
    CHECK(n >= (out_is_null ? 1 : 5) && !was_told, "%d allgathers", n);
}

#define LieTest(name, out_is_null, ...) \
    SoloCall(bootstrap_lying, name, create_with_lies((Liar){__VA_ARGS__}, (out_is_null)))
LieTest(letters_of_a_peer, 0, .about = 1, .byte = 'A');
LieTest(letters_after_the_status_of_a_peer, 0, .about = 1, .byte = 'A', .offset = sizeof(EpStatus));
LieTest(minus_ones_of_a_peer, 0, .about = 1, .byte = 0xff);
LieTest(this_rank, 0, .about = 0, .byte = 'A');
/* A refused rank stays refused, even if its own status does not come back. */
LieTest(refused_rank, 1, .about = 0, .byte = 0);

/* The CUDA backend looks up each rank's GPU by its bus id. */
static void lie_about_bus(const EpBootstrap *bootstrap, __attribute__((unused)) void *arg) {
    Liar liar = {.about = 1, .byte = '1', .countdown = 1};
    Wrapped wrapped = {.gather = lying_gather, .test = &liar};
    EpGroup *group = NULL;
    if (!TESTS_ON_GPU) check_left_out("the host backend has no bus ids");
    EpBootstrap own = wrapped_on_0(bootstrap, &wrapped);
    Case c = case_complete(case_of("ranks=%d", RANKS));
    EpGroupConfig config = case_group_config(&c);
    liar.bytes = sizeof(group->choice.bus);
    EpStatus status = ep_group_create(&own, &config, &group);
    if (own.rank == 0)
        CHECK_REFUSED(status, EP_ERR_BOOTSTRAP, "rank 0", "bootstrap.allgather", "bus id of rank 1",
                      "without an end");
    else
        CHECK(status != EP_OK, "no error");
    CHECK(group == NULL, "an output was written");
}

Test(bootstrap_lying, bus_id_of_a_peer, .timeout = 120) {
    run_on_threads(RANKS, lie_about_bus, NULL);
}

/* Calls and sizes of windows are checked before they are used. */
ThreadTest(bootstrap_lying, windows, RANKS) {
    HOST_ONLY(SLOW);
    Liar liar = {.about = 1, .byte = 'A', .offset = sizeof(EpRankStatus)};
    Wrapped wrapped = {.gather = lying_gather, .test = &liar};
    EpBootstrap own = wrapped_on_0(bootstrap, &wrapped);
    EpGroup *group = NULL;
    void *out = &group;
    REQUIRE_OK(create_group(&own, TEST_BACKEND, &group));
    liar.countdown = 1;
    EpStatus status = ep_mem_alloc(group, 64, &out);
    if (own.rank == 0)
        CHECK_REFUSED(status, EP_ERR_BOOTSTRAP, "ep_mem_alloc", "bootstrap.allgather", "rank 1",
                      "call number 1094795585");
    else
        CHECK(status != EP_OK, "no error"); /* it depends on when rank 0 leaves */
    CHECK(out == &group, "an output was written");
    ep_group_destroy(group);
}

/* ---- callbacks that fail ------------------------------------------------------------------- */

LieTest(no_memory_without_a_sentence, 0, .code = EP_ERR_NO_MEMORY);
LieTest(no_status, 0, .code = 99);
LieTest(negative_status, 0, .code = -5);

#define UNUSED __attribute__((unused))

static EpStatus silent_share(UNUSED void *context, UNUSED int32_t node, UNUSED size_t bytes,
                             UNUSED double timeout, UNUSED void **segments, UNUSED void **memory) {
    return (EpStatus)99;
}
static EpStatus silent_barrier(UNUSED void *context, UNUSED double timeout) {
    return (EpStatus)99;
}
static EpStatus silent_irecv(UNUSED void *context, UNUSED int32_t peer, UNUSED int32_t tag,
                             UNUSED void *data, UNUSED size_t bytes, UNUSED void **request) {
    return EP_ERR_SYSTEM;
}
static EpStatus speaking_isend(UNUSED void *context, UNUSED int32_t peer, UNUSED int32_t tag,
                               UNUSED const void *data, UNUSED size_t bytes,
                               UNUSED void **request) {
    return ep_set_last_error((EpStatus)1000, "the store is gone");
}
static EpStatus silent_test(UNUSED void *context, UNUSED void **request, UNUSED int *done) {
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
