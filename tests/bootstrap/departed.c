/* SPDX-License-Identifier: Apache-2.0 */
/* A rank departs, or stops, while a group is created, after each collective call in turn: the other
 * ranks get an error soon. */
#include "tests/cases/meshes.h"
#include "tests/cases/run.h"
#include "tests/harness/bootstraps.h"

enum { RANKS = 3, DEPARTING = 1, ROUNDS = 12 /* at a time */, MOST = 60 };
#define DEADLINE 0.8
#define NOT_SOON 20.0 /* a few timeouts and NCCL's, on a busy machine */

/* One creation: a rank departs after so many collective calls, or stops until the others have given
 * up. */
typedef struct Round {
    int comm, collectives, stops;
    _Atomic int made, others_left; /* ranks that have it; others whose call has returned */
} Round;

typedef struct Departing {
    Round *round;
    int collectives, gone; /* that it still takes part in */
} Departing;

/* Not for ever: they must not wait for this rank. */
static void stop(const Round *round) {
    double end = seconds_now() + 2 * NOT_SOON;
    while (round->others_left < RANKS - 1 && seconds_now() < end)
        usleep(1000);
}

static EpStatus gather_or_depart(void *test, const Wrapped *wrapped, const void *in, void *out,
                                 size_t bytes, double timeout) {
    Departing *d = test;
    EpStatus status = d->gone ? EP_OK : forward_gather(wrapped, in, out, bytes, timeout);
    if (status != EP_OK || --d->collectives > 0) return status;
    if (d->round->stops) {
        if (d->collectives == 0) stop(d->round);
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

/* Make it while one rank departs, or stops: then that rank gets the call's result, whatever it is,
 * once it goes on. */
static void create(const EpBootstrap *bootstrap, void *arg) {
    Round *round = arg;
    EpBootstrap own = *bootstrap;
    Departing departing = {round, round->collectives, !round->collectives};
    Wrapped wrapped = {.gather = gather_or_depart, .test = &departing};
    int is_odd = bootstrap->rank == DEPARTING;
    own.share = NULL, own.share_free = NULL;
    if (round->comm) own = without_messages(&own);
    if (is_odd) wrap_bootstrap(&own, &wrapped);
    Made made = {.group = NULL};
    double start = seconds_now();
    check_note("the last of %d collectives", round->collectives);
    EpStatus status = make(&own, round->comm, &made);
    if (round->stops && is_odd)
        CHECK((status == EP_OK) == has_made(&made), "status %d", status);
    else
        check_create_result(status, has_made(&made), is_odd && departing.gone,
                            seconds_now() - start);
    round->others_left += !is_odd;
    round->made += has_made(&made);
    departing.collectives = 1 << 20; /* keep it until the group is destroyed */
    ep_group_destroy(made.group);
    ep_mesh_comm_destroy(made.comm);
}

static void depart_after_each(int comm, int stops) {
    int made = 0, count = 0;
    for (int first = stops; made < RANKS && first < MOST; first += ROUNDS) {
        Round rounds[ROUNDS] = {{0}};
        for (int i = 0; i < ROUNDS; i++)
            rounds[i].comm = comm, rounds[i].stops = stops, rounds[i].collectives = first + i;
        RUN_SIDE_BY_SIDE(RANKS, create, rounds);
        for (int i = 0; i < ROUNDS && made < RANKS; i++, count++) {
            made = rounds[i].made;
            CHECK(stops || !made || made >= RANKS - 1, "%d ranks of %d have made it", made, RANKS);
        }
    }
    CHECK(made == RANKS && count > 3, "%d ranks have made it after %d collectives", made, count);
}

#if TESTS_ON_GPU && !defined(TESTS_EMULATED)
#define ON_GPUS 1
#else
#define ON_GPUS 0
#endif
/* The deadline of the call holds for each of its waits. */
#define AFTER_EACH(name, skips, comm, stops)                                 \
    SoloTest(bootstrap_departed, name) {                                     \
        if (skips) HOST_ONLY("NCCL is given a minute to set up, each time"); \
        depart_after_each(comm, stops);                                      \
    }                                                                        \
    struct name##_done
AFTER_EACH(after_each_collective, ON_GPUS, 0, 0);
AFTER_EACH(after_each_collective_of_a_mesh, 1, 1, 0);
AFTER_EACH(stopped_after_each_collective, ON_GPUS, 0, 1);
