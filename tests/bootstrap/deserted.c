/* SPDX-License-Identifier: Apache-2.0 */
/* A rank goes while a group is created, behind each meeting there is: the others are told, soon. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/cases/run.h"

enum { RANKS = 3, LEAVER = 1 };
#define DEADLINE 0.4
#define NOT_SOON 20.0 /* a few deadlines and NCCL's, on a busy machine */

/* A bootstrap whose rank leaves behind a meeting. */
typedef struct Leaver {
    EpBootstrap whole;
    int meetings; /* that it still comes to */
    int gone;
} Leaver;

static EpStatus leave(Leaver *l, EpStatus status) {
    if (status != EP_OK || --l->meetings > 0) return status;
    l->gone = 1;
    return ep_set_last_error(EP_ERR_BOOTSTRAP, "the store at 10.0.0.7 is gone");
}

static EpStatus leaving_allgather(void *context, const void *in, void *out, size_t bytes,
                                  double timeout) {
    Leaver *l = context;
    if (l->gone) return leave(l, EP_OK);
    return leave(l, l->whole.allgather(l->whole.context, in, out, bytes, timeout));
}

static EpStatus leaving_barrier(void *context, double timeout) {
    Leaver *l = context;
    if (l->gone) return leave(l, EP_OK);
    return leave(l, l->whole.barrier(l->whole.context, timeout));
}

/* Each round has a bootstrap of its own: ranks of the last one's may be out of step. */
static EpBootstrap all[RANKS];

static EpBootstrap next_bootstrap(const EpBootstrap *bootstrap) {
    if (bootstrap->rank == 0) CHECK_OK(ep_bootstrap_local(RANKS, all));
    CHECK_OK(bootstrap->barrier(bootstrap->context, 60));
    return all[bootstrap->rank];
}

static double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Whoever stays has no group, and hears who is missing, or whose memory has gone with it; but after
 * the last meeting a rank may have one. */
static void check_told(EpStatus status, const EpGroup *group, int gone, double seconds) {
    const char *said = ep_last_error();
    CHECK((status == EP_OK) == (group != NULL), "status %d, group %p", status, (const void *)group);
    if (gone)
        CHECK(status == EP_ERR_BOOTSTRAP && strstr(said, "10.0.0.7"), "%d: %s", status, said);
    else if (status != EP_OK)
        CHECK((status == EP_ERR_TIMEOUT && strstr(said, "rank 1 did not arrive")) ||
                  strstr(said, "cannot map the shared memory of rank 1"),
              "%d: %s", status, said);
    CHECK(seconds < NOT_SOON, "it took %.1f s", seconds);
}

/* Returns how many ranks have a group. */
static int create(const EpBootstrap *bootstrap, int meetings) {
    EpBootstrap own = next_bootstrap(bootstrap);
    Leaver leaver = {own, meetings, meetings == 0};
    own.share = NULL, own.share_free = NULL;
    if (bootstrap->rank == LEAVER)
        own.context = &leaver, own.allgather = leaving_allgather, own.barrier = leaving_barrier;
    Case c = case_complete((Case){.ranks = RANKS});
    EpGroupConfig config = case_group_config(&c);
    config.timeout_seconds = DEADLINE;
    EpGroup *group = NULL;
    double start = seconds_now();
    EpStatus status = ep_group_create(&own, &config, &group);
    check_note("the last of %d meetings", meetings);
    check_told(status, group, bootstrap->rank == LEAVER && leaver.gone, seconds_now() - start);
    leaver.meetings = 1 << 20; /* it stays until the group is destroyed */
    int made = group != NULL, each[RANKS], count = 0;
    ep_group_destroy(group);
    CHECK_OK(bootstrap->allgather(bootstrap->context, &made, each, sizeof(made), 60));
    for (int r = 0; r < RANKS; r++)
        count += each[r];
    if (bootstrap->rank == 0)
        for (int r = 0; r < RANKS; r++)
            ep_bootstrap_destroy(&all[r]);
    return count;
}

ThreadTest(bootstrap_deserted, behind_each_meeting, RANKS) {
#if TESTS_ON_GPU && !defined(NCCL_SECONDS)
    HOST_ONLY("NCCL is given a minute to set up, each time");
#endif
    int made = 0, meetings = 0;
    while (made < RANKS && meetings < 60) {
        CHECK(made == 0 || made == RANKS - 1, "%d ranks of %d have a group", made, RANKS);
        made = create(bootstrap, meetings++);
    }
    CHECK(made == RANKS && meetings > 3, "%d ranks have a group after %d meetings", made, meetings);
}
