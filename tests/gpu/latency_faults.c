/* SPDX-License-Identifier: Apache-2.0 */
/* Latency mode with ranks that stop, call something else or have lost their memory: every rank
 * comes to an end soon, with a sentence that names the one to blame. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/gpu/crew.h"

#define LENGTH(array) (int)(sizeof(array) / sizeof((array)[0]))

/* Failed groups log a warning. */
static void be_quiet(void) {
    setenv("EP_LOG_FILE", "/dev/null", 1);
}

/* Waits that expire take seconds: two suites do so side by side. */
TestSuite(gpu_latency_faults, .init = be_quiet);
TestSuite(gpu_late_dispatch, .init = be_quiet);
TestSuite(gpu_late_combine, .init = be_quiet);

static bool open_crew(Crew *crew, const EpBootstrap *bootstrap, double seconds) {
    Case c = crew_case(bootstrap->size, EP_MODE_LATENCY);
    return crew_open(crew, bootstrap, &c, seconds);
}

static int is_absent(const Crew *crew) {
    return crew->rig.step.rank == crew->absent;
}

/* ---- a peer that stops --------------------------------------------------------------------- */

#define DISPATCH_HALVES (RIG_DISPATCH_SEND | RIG_DISPATCH_WAIT)
#define COMBINE_HALVES (RIG_COMBINE_SEND | RIG_COMBINE_WAIT)

static void check_blames(const Crew *crew, const char *phase) {
    char peer[32], self[32];
    EpFinding found = EP_FINDING_INIT;
    snprintf(peer, sizeof(peer), "rank %d", crew->absent);
    snprintf(self, sizeof(self), "rank %d", crew->rig.step.rank);
    CHECK_REFUSED(ep_group_status(crew->group, &found), EP_ERR_TIMEOUT, self, peer, phase);
    CHECK(found.status == EP_ERR_TIMEOUT && found.peer == crew->absent, "peer %d", found.peer);
    CHECK(found.rank == crew->rig.step.rank, "rank %d", found.rank);
    CHECK(strcmp(found.phase, phase) == 0, "%s", found.phase);
    crew_check_refuses(crew, EP_ERR_TIMEOUT, peer);
}

/* What is enqueued behind the operation that the peer does not come to does nothing. */
static void wait_in_vain(const Crew *crew, unsigned ops, const char *phase) {
    double begin = crew_now();
    crew_call(&crew->rig, ops, EP_ERR_TIMEOUT);
    crew_call(&crew->rig, RIG_DISPATCH | RIG_COMBINE, EP_ERR_TIMEOUT);
    CHECK(crew_now() - begin > 0.8 * CREW_SOON, "gave up after %.2f s", crew_now() - begin);
    CHECK(crew_now() - begin < CREW_LATE, "gave up after %.2f s", crew_now() - begin);
    check_blames(crew, phase);
}

/* Who comes after all may find there what was sent before the others gave up, but not for long. */
static void check_hears_of_it(const Crew *crew, unsigned ops) {
    EpFinding found = EP_FINDING_INIT;
    crew_call(&crew->rig, ops, EP_ERR_PEER);
    crew_call(&crew->rig, RIG_DISPATCH | RIG_COMBINE, EP_ERR_PEER);
    CHECK_REFUSED(ep_group_status(crew->group, &found), EP_ERR_PEER, "given up");
    CHECK(found.peer == crew->absent, "peer %d", found.peer);
}

static void stopped_peer(const EpBootstrap *bootstrap, unsigned ops, const char *phase) {
    Crew crew;
    REQUIRE(open_crew(&crew, bootstrap, CREW_SOON), "no group");
    if (!is_absent(&crew)) wait_in_vain(&crew, ops, phase);
    bootstrap->barrier(bootstrap->context, 60);
    if (is_absent(&crew)) check_hears_of_it(&crew, ops);
    crew_close(&crew);
    crew_check_next(bootstrap, EP_MODE_LATENCY);
}

#define STOPPED(suite, name, ranks, ops, phase) \
    ThreadTest(suite, name, ranks) {            \
        GPU_NEEDS_LATENCY();                    \
        stopped_peer(bootstrap, ops, phase);    \
    }
STOPPED(gpu_late_dispatch, whole_2, 2, RIG_DISPATCH, "dispatch")
STOPPED(gpu_late_dispatch, in_halves_4, 4, DISPATCH_HALVES, "dispatch")
STOPPED(gpu_late_combine, whole_4, 4, RIG_COMBINE, "combine")
STOPPED(gpu_late_combine, in_halves_2, 2, COMBINE_HALVES, "combine")

/* First halves wait for nobody; the second one finds out. */
static void wait_in_second_half(const EpBootstrap *bootstrap) {
    Crew crew;
    REQUIRE(open_crew(&crew, bootstrap, CREW_SOON), "no group");
    if (!is_absent(&crew)) {
        crew_call(&crew.rig, RIG_DISPATCH_SEND, EP_OK);
        CHECK_OK(ep_group_status(crew.group, NULL));
        wait_in_vain(&crew, RIG_DISPATCH_WAIT, "dispatch");
    }
    bootstrap->barrier(bootstrap->context, 60);
    if (is_absent(&crew)) check_hears_of_it(&crew, DISPATCH_HALVES);
    crew_close(&crew);
}

ThreadTest(gpu_late_dispatch, second_half_waits_4, 4) {
    GPU_NEEDS_LATENCY();
    wait_in_second_half(bootstrap);
}

/* A rank that leaves out its second half has sent: the others' are complete. They miss it in the
 * next operation. */
static void left_out_second_half(const EpBootstrap *bootstrap) {
    Crew crew;
    REQUIRE(open_crew(&crew, bootstrap, CREW_SOON), "no group");
    rig_poison(&crew.rig);
    rig_issue(&crew.rig, RIG_DISPATCH_SEND);
    if (!is_absent(&crew)) {
        rig_issue(&crew.rig, RIG_DISPATCH_WAIT);
        rig_check(&crew.rig);
        CHECK_OK(ep_group_status(crew.group, NULL));
        wait_in_vain(&crew, RIG_COMBINE, "combine");
    }
    bootstrap->barrier(bootstrap->context, 60);
    if (is_absent(&crew)) {
        crew_call(&crew.rig, RIG_DISPATCH_WAIT, EP_ERR_PEER);
        check_hears_of_it(&crew, RIG_COMBINE);
    }
    crew_close(&crew);
    crew_check_next(bootstrap, EP_MODE_LATENCY);
}

ThreadTest(gpu_late_combine, left_out_second_half_4, 4) {
    GPU_NEEDS_LATENCY();
    left_out_second_half(bootstrap);
}

/* ---- other calls --------------------------------------------------------------------------- */

/* Everyone learns of it, and long before the deadline. */
static void check_disagree(const Crew *crew, const Rig *rig, unsigned ops) {
    double begin = crew_now();
    EpStatus status = rig_try(rig, (RigOp)(ops & -ops));
    if (status == EP_OK && (ops & (ops - 1))) status = rig_try(rig, (RigOp)(ops & (ops - 1)));
    CHECK(status == EP_OK || status == EP_ERR_ORDER || status == EP_ERR_MISMATCH, "%d: %s",
          (int)status, ep_last_error());
    CHECK_CUDA(cudaStreamSynchronize(rig->stream));
    CHECK(crew_now() - begin < CREW_LATE, "it took %.1f s", crew_now() - begin);
    status = ep_group_status(crew->group, NULL);
    CHECK(status == EP_ERR_ORDER || status == EP_ERR_MISMATCH, "%d: %s", (int)status,
          ep_last_error());
    crew_check_refuses(crew, status, "rank");
}

static void other_operations(const EpBootstrap *bootstrap) {
    static const unsigned meet[][2] = {{RIG_DISPATCH, RIG_COMBINE},
                                       {RIG_COMBINE, RIG_DISPATCH},
                                       {DISPATCH_HALVES, COMBINE_HALVES}};
    for (int i = 0; i < LENGTH(meet); i++) {
        Crew crew;
        check_note("pair %d", i);
        REQUIRE(open_crew(&crew, bootstrap, 2 * CREW_LATE), "no group");
        check_disagree(&crew, &crew.rig, meet[i][is_absent(&crew)]);
        bootstrap->barrier(bootstrap->context, 60);
        crew_close(&crew);
    }
    crew_check_next(bootstrap, EP_MODE_LATENCY);
}

ThreadTest(gpu_latency_faults, other_operations_2, 2) {
    GPU_NEEDS_LATENCY();
    other_operations(bootstrap);
}
ThreadTest(gpu_latency_faults, other_operations_4, 4) {
    GPU_NEEDS_LATENCY();
    other_operations(bootstrap);
}

/* Equal calls on two equal handles, whose order one rank mixes up. */
static void other_handles(const EpBootstrap *bootstrap) {
    Crew crew;
    REQUIRE(open_crew(&crew, bootstrap, 2 * CREW_LATE), "no group");
    Rig second = crew.rig;
    second.step.handle = rig_handle(crew.group, &crew.rig.c);
    check_disagree(&crew, is_absent(&crew) ? &second : &crew.rig, RIG_PREPARE | RIG_DISPATCH);
    bootstrap->barrier(bootstrap->context, 60);
    crew_close(&crew);
}

ThreadTest(gpu_latency_faults, other_handles_2, 2) {
    GPU_NEEDS_LATENCY();
    other_handles(bootstrap);
}
ThreadTest(gpu_latency_faults, other_handles_4, 4) {
    GPU_NEEDS_LATENCY();
    other_handles(bootstrap);
}

/* The rig of a handle in throughput mode, with a plan, in the crew's group. */
static void open_other_mode(const Crew *crew, Rig *rig) {
    Case c = crew->rig.c;
    c.mode = EP_MODE_THROUGHPUT;
    World *world = world_new(&c);
    rig_open(rig, crew->group, rig_handle(crew->group, &c), &c, crew->rig.step.rank,
             crew->rig.stream, NULL);
    rig_load(rig, world);
    rig_issue(rig, RIG_PREPARE | RIG_DISPATCH);
    rig_check(rig);
    world_free(world);
}

/* One rank calls an operation of a handle in the other mode: the absent one, or all but that. */
static void other_modes(const EpBootstrap *bootstrap) {
    static const unsigned meet[][2] = {{RIG_DISPATCH, RIG_PREPARE},
                                       {RIG_DISPATCH, RIG_DISPATCH},
                                       {RIG_COMBINE, RIG_COMBINE},
                                       {RIG_COMBINE, RIG_DISPATCH_BACKWARD}};
    for (int i = 0; i < 2 * LENGTH(meet); i++) {
        Crew crew;
        Rig other;
        check_note("pair %d", i);
        REQUIRE(open_crew(&crew, bootstrap, 2 * CREW_LATE), "no group");
        open_other_mode(&crew, &other);
        bootstrap->barrier(bootstrap->context, 60);
        int leaves = is_absent(&crew) == i % 2;
        check_disagree(&crew, leaves ? &other : &crew.rig, meet[i / 2][leaves]);
        bootstrap->barrier(bootstrap->context, 60);
        crew_close(&crew);
        rig_close(&other);
    }
    crew_check_next(bootstrap, EP_MODE_LATENCY);
}

ThreadTest(gpu_latency_faults, other_modes_2, 2) {
    GPU_NEEDS_LATENCY();
    other_modes(bootstrap);
}
ThreadTest(gpu_latency_faults, other_modes_4, 4) {
    GPU_NEEDS_LATENCY();
    other_modes(bootstrap);
}

/* Both modes in turn, where one rank after the other keeps the rest waiting: nobody is blamed. */
static void both_in_turn(const EpBootstrap *bootstrap) {
    Crew crew;
    Rig other;
    const struct timespec late = {.tv_nsec = 700000000};
    REQUIRE(open_crew(&crew, bootstrap, 2 * CREW_LATE), "no group");
    open_other_mode(&crew, &other);
    for (int turn = 0; turn < 2 * bootstrap->size && !check_failure()[0]; turn++) {
        check_note("turn %d", turn);
        CHECK_CUDA(cudaStreamSynchronize(crew.rig.stream));
        bootstrap->barrier(bootstrap->context, 60);
        if (bootstrap->rank == turn / 2) nanosleep(&late, NULL);
        rig_issue(turn % 2 ? &crew.rig : &other, turn % 2 ? RIG_COMBINE : RIG_PREPARE);
        rig_issue(turn % 2 ? &other : &crew.rig, turn % 2 ? RIG_PREPARE : RIG_COMBINE);
        rig_issue(&crew.rig, RIG_DISPATCH);
        CHECK_CUDA(cudaStreamSynchronize(crew.rig.stream));
        CHECK_OK(ep_group_status(crew.group, NULL));
    }
    bootstrap->barrier(bootstrap->context, 60);
    crew_close(&crew);
    rig_close(&other);
}

ThreadTest(gpu_latency_faults, both_in_turn_2, 2) {
    GPU_NEEDS_LATENCY();
    both_in_turn(bootstrap);
}
ThreadTest(gpu_latency_faults, both_in_turn_4, 4) {
    GPU_NEEDS_LATENCY();
    both_in_turn(bootstrap);
}

/* ---- other sizes --------------------------------------------------------------------------- */

/* What one rank may not have otherwise than the others; each is right by itself. */
static Case odd_case(Case c, int which) {
    switch (which) {
    case 0:
        c.top_k = 2;
        break;
    case 1:
        c.hidden = 64;
        break;
    case 2:
        c.row_type = EP_TYPE_FP16;
        break;
    default:
        c.sum_type = EP_TYPE_FP16;
    }
    return c;
}

static void call_odd(const Crew *crew, const Case *c, unsigned ops) {
    Rig odd;
    World *world = world_new(c);
    rig_open(&odd, crew->group, crew->rig.step.handle, c, crew->rig.step.rank, crew->rig.stream,
             NULL);
    rig_load(&odd, world);
    check_disagree(crew, &odd, ops);
    rig_close(&odd);
    world_free(world);
}

static void other_sizes(const EpBootstrap *bootstrap) {
    for (int i = 0; i < 4; i++) {
        unsigned ops = i < 3 ? RIG_PREPARE | RIG_DISPATCH : RIG_COMBINE;
        Crew crew;
        check_note("sizes %d", i);
        REQUIRE(open_crew(&crew, bootstrap, 2 * CREW_LATE), "no group");
        Case c = odd_case(crew.rig.c, i);
        if (is_absent(&crew))
            call_odd(&crew, &c, ops);
        else
            check_disagree(&crew, &crew.rig, ops);
        bootstrap->barrier(bootstrap->context, 60);
        crew_close(&crew);
    }
}

ThreadTest(gpu_latency_faults, other_sizes_2, 2) {
    GPU_NEEDS_LATENCY();
    other_sizes(bootstrap);
}
ThreadTest(gpu_latency_faults, other_sizes_4, 4) {
    GPU_NEEDS_LATENCY();
    other_sizes(bootstrap);
}

/* ---- memory -------------------------------------------------------------------------------- */

/* Its rank is told what is wrong and writes nothing, and the others do not wait for it. */
static void check_overwritten(Crew *crew, unsigned ops) {
    char blamed[48];
    EpStatus expected = is_absent(crew) ? EP_ERR_HANDLE_MEMORY : EP_ERR_PEER;
    double begin = crew_now();
    snprintf(blamed, sizeof(blamed), "rank %d", crew->absent);
    crew_call(&crew->rig, ops, expected);
    CHECK(crew_now() - begin < CREW_LATE, "it took %.1f s", crew_now() - begin);
    CHECK_REFUSED(ep_group_status(crew->group, NULL), expected, blamed,
                  is_absent(crew) ? "other bytes" : "given up");
    if (is_absent(crew)) rig_check(&crew->rig);
}

static void overwritten_memory(const EpBootstrap *bootstrap) {
    static const unsigned ops[] = {RIG_DISPATCH, RIG_COMBINE, DISPATCH_HALVES, COMBINE_HALVES};
    for (int i = 0; i < LENGTH(ops); i++) {
        Crew crew;
        check_note("operations %u", ops[i]);
        REQUIRE(open_crew(&crew, bootstrap, 2 * CREW_LATE), "no group");
        char *memory = crew_overwrite(&crew);
        bootstrap->barrier(bootstrap->context, 60);
        check_overwritten(&crew, ops[i]);
        bootstrap->barrier(bootstrap->context, 60);
        crew_close(&crew);
        CHECK_CUDA(cudaFree(memory));
    }
    crew_check_next(bootstrap, EP_MODE_LATENCY);
}

ThreadTest(gpu_latency_faults, overwritten_memory_2, 2) {
    GPU_NEEDS_LATENCY();
    overwritten_memory(bootstrap);
}
ThreadTest(gpu_latency_faults, overwritten_memory_4, 4) {
    GPU_NEEDS_LATENCY();
    overwritten_memory(bootstrap);
}
