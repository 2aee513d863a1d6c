/* SPDX-License-Identifier: Apache-2.0 */
/* A rank departs, or stops, while a group is created, after each collective call in turn: the other
 * ranks get an error soon. */
#include "tests/cases/meshes.h"
#include "tests/cases/run.h"
#include "tests/harness/bootstraps.h"

enum { RANKS = 3, DEPARTING = 1 };
#define DEADLINE 0.4
#define NOT_SOON 20.0 /* a few timeouts and NCCL's, on a busy machine */

/* A rank that departs after some collective calls, or stops until the others have given up. */
typedef struct Departing {
    int collectives; /* that it still takes part in */
    int gone, stops;
} Departing;

static _Atomic int others_left; /* of all rounds: other ranks whose ep_group_create has returned */

/* Not for ever: they must not wait for this rank. */
static void stop(int round) {
    double end = seconds_now() + 2 * NOT_SOON;
    while (others_left < (round + 1) * (RANKS - 1) && seconds_now() < end)
        usleep(1000);
}

static EpStatus gather_or_depart(void *test, const Wrapped *wrapped, const void *in, void *out,
                                 size_t bytes, double timeout) {
    Departing *d = test;
    EpStatus status = d->gone ? EP_OK : forward_gather(wrapped, in, out, bytes, timeout);
    if (status != EP_OK || --d->collectives > 0) return status;
    if (d->stops) {
        if (d->collectives == 0) stop(d->stops - 1);
        return status;
    }
    d->gone = 1;
    return ep_set_last_error(EP_ERR_BOOTSTRAP, "the store at 10.0.0.7 is gone");
}

/** A group, or the communicators of a mesh: one of them is made. */
typedef struct Made {
    EpGroup *group;
    EpMeshComm *comm;
} Made;

static int has_made(const Made *made) {
    return made->group || made->comm;
}

static EpStatus make(const EpBootstrap *own, int comm, Made *made) {
    EpGroupConfig config = group_config(RANKS);
    EpMesh mesh = mesh_of("fsdp=3");
    EpMeshCommConfig of_mesh = comm_config(DEADLINE);
    config.timeout_seconds = DEADLINE;
    return comm ? ep_mesh_comm_create(own, &mesh, &of_mesh, &made->comm)
                : ep_group_create(own, &config, &made->group);
}

/* Check a rank's result. A rank that stays has no group, and its error names the missing rank or
 * its unmapped memory; but after the last collective call it
 * may have a group. */
static void check_create_result(EpStatus status, int made, int gone, double seconds) {
    const char *said = ep_last_error();
    CHECK((status == EP_OK) == made, "status %d, made %d", status, made);
    if (gone)
        CHECK(status == EP_ERR_BOOTSTRAP && strstr(said, "10.0.0.7"), "%d: %s", status, said);
    else if (status != EP_OK)
        CHECK((status == EP_ERR_TIMEOUT && strstr(said, "rank 1 did not arrive")) ||
                  strstr(said, "cannot map the shared memory of rank 1") ||
                  (status == EP_ERR_PEER && strstr(said, "rank 1")),
              "%d: %s", status, said);
    CHECK(seconds < NOT_SOON, "it took %.1f s", seconds);
}

/* Returns how many ranks had a group. */
static int end_round(const EpBootstrap *bootstrap, Made made) {
    int has = has_made(&made), each[RANKS], count = 0;
    ep_group_destroy(made.group);
    ep_mesh_comm_destroy(made.comm);
    CHECK_OK(bootstrap->allgather(bootstrap->context, &has, each, sizeof(has), 60));
    for (int r = 0; r < RANKS; r++)
        count += each[r];
    end_bootstraps(bootstrap);
    return count;
}

/* Make it while one rank departs, or stops: then that rank gets the call's result, whatever it is,
 * once it goes on. Returns how many ranks have it. */
static int create(const EpBootstrap *bootstrap, int comm, int collectives, int stops) {
    EpBootstrap next = next_bootstrap(bootstrap), own = next;
    Departing departing = {collectives, collectives == 0, stops};
    Wrapped wrapped = {.gather = gather_or_depart, .test = &departing};
    int is_odd = bootstrap->rank == DEPARTING;
    own.share = NULL, own.share_free = NULL;
    if (comm) own = without_messages(&own);
    if (is_odd) wrap_bootstrap(&own, &wrapped);
    Made made = {.group = NULL};
    double start = seconds_now();
    EpStatus status = make(&own, comm, &made);
    check_note("the last of %d collectives", collectives);
    if (stops && is_odd)
        CHECK((status == EP_OK) == has_made(&made), "status %d", status);
    else
        check_create_result(status, has_made(&made), is_odd && departing.gone,
                            seconds_now() - start);
    if (stops && !is_odd) others_left++;
    departing.collectives = 1 << 20; /* keep it until the group is destroyed */
    return end_round(bootstrap, made);
}

static void depart_after_each(const EpBootstrap *bootstrap, int comm, int stops) {
    int made = 0, collectives = stops;
    for (; made < RANKS && collectives < 60; collectives++) {
        CHECK(stops || made == 0 || made == RANKS - 1, "%d ranks of %d have made it", made, RANKS);
        made = create(bootstrap, comm, collectives, stops * collectives);
    }
    CHECK(made == RANKS && collectives > 3, "%d ranks have made it after %d collectives", made,
          collectives);
}

#if TESTS_ON_GPU && !defined(TESTS_EMULATED)
#define ON_GPUS 1
#else
#define ON_GPUS 0
#endif
/* The deadline of the call holds for each of its waits. */
#define AFTER_EACH(name, skips, comm, stops)                                 \
    ThreadTest(bootstrap_departed, name, RANKS) {                            \
        if (skips) HOST_ONLY("NCCL is given a minute to set up, each time"); \
        depart_after_each(bootstrap, comm, stops);                           \
    }                                                                        \
    struct name##_done
AFTER_EACH(after_each_collective, ON_GPUS, 0, 0);
AFTER_EACH(after_each_collective_of_a_mesh, 1, 1, 0);
AFTER_EACH(stopped_after_each_collective, ON_GPUS, 0, 1);
