/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that stop, call something else or ask for too much. Calls on GPUs are under way when they
 * return; ep_group_status says what became of them. Whatever happens, every rank comes to an end
 * soon, and its GPU serves the next group. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/gpu/crew.h"

/* Failed groups log a warning. */
static void be_quiet(void) {
    setenv("EP_LOG_FILE", "/dev/null", 1);
}

TestSuite(gpu_faults, .init = be_quiet);

static const RigOp all_ops[] = {RIG_PREPARE, RIG_DISPATCH, RIG_COMBINE, RIG_COMBINE_BACKWARD,
                                RIG_DISPATCH_BACKWARD};

static bool open_crew(Crew *crew, const EpBootstrap *bootstrap, double seconds) {
    Case c = crew_case(bootstrap->size, EP_MODE_THROUGHPUT);
    return crew_open(crew, bootstrap, &c, seconds);
}

/* ---- a peer that stops --------------------------------------------------------------------- */

/* Two steps' worth of calls are enqueued before anyone can know; they all end with the first. */
static void call_on(const Rig *rig) {
    for (int i = 0; i < 8; i++) {
        EpStatus status = rig_try(rig, all_ops[1 + i % 4]);
        CHECK(status == EP_OK || status == EP_ERR_TIMEOUT, "%d: %s", (int)status, ep_last_error());
    }
    CHECK_CUDA(cudaStreamSynchronize(rig->stream));
}

static void check_blames(const Crew *crew) {
    char peer[32], self[32];
    EpFinding found = EP_FINDING_INIT;
    snprintf(peer, sizeof(peer), "rank %d", crew->absent);
    snprintf(self, sizeof(self), "rank %d", crew->rig.step.rank);
    CHECK_REFUSED(ep_group_status(crew->group, &found), EP_ERR_TIMEOUT, self, peer, "dispatch");
    CHECK(found.status == EP_ERR_TIMEOUT && found.peer == crew->absent, "peer %d", found.peer);
    CHECK(found.rank == crew->rig.step.rank, "rank %d", found.rank);
    CHECK(strcmp(found.phase, "dispatch") == 0, "%s", found.phase);
    CHECK(!strstr(ep_last_error(), "row"), "an arrival is no row's: %s", ep_last_error());
    crew_check_refuses(crew, EP_ERR_TIMEOUT, peer);
}

/* Who comes after all is told at once whom the others have given up on. */
static void check_hears_of_it(const Crew *crew) {
    char blamed[48];
    EpFinding found = EP_FINDING_INIT;
    snprintf(blamed, sizeof(blamed), "because of rank %d", crew->absent);
    CHECK_OK(rig_try(&crew->rig, RIG_DISPATCH));
    CHECK_CUDA(cudaStreamSynchronize(crew->rig.stream));
    CHECK_REFUSED(ep_group_status(crew->group, &found), EP_ERR_PEER, "given up", blamed);
    CHECK(found.peer == crew->absent, "peer %d", found.peer);
}

/* All ranks but rank 0 come `later`: seconds, less than the deadline. */
static void stopped_peer(const EpBootstrap *bootstrap, double later) {
    Crew crew;
    REQUIRE(open_crew(&crew, bootstrap, CREW_SOON), "no group");
    if (bootstrap->rank != crew.absent) {
        if (bootstrap->rank > 0) usleep((useconds_t)(1e6 * later));
        double begin = crew_now();
        call_on(&crew.rig);
        CHECK(crew_now() - begin > 0.8 * CREW_SOON, "gave up after %.2f s", crew_now() - begin);
        CHECK(crew_now() - begin < CREW_LATE, "gave up after %.2f s", crew_now() - begin);
        check_blames(&crew);
    }
    bootstrap->barrier(bootstrap->context, 60);
    if (bootstrap->rank == crew.absent) check_hears_of_it(&crew);
    crew_close(&crew);
    crew_check_next(bootstrap, EP_MODE_THROUGHPUT);
}

ThreadTest(gpu_faults, stopped_peer_2, 2) {
    stopped_peer(bootstrap, 0);
}
ThreadTest(gpu_faults, stopped_peer_4, 4) {
    stopped_peer(bootstrap, 0);
}

/* Who fails first is through with what it has enqueued before the others give up: it was there, and
 * is not the one to blame. */
ThreadTest(gpu_faults, stopped_peer_and_late_ones_4, 4) {
    stopped_peer(bootstrap, CREW_SOON / 3);
}

/* ---- another order ------------------------------------------------------------------------- */

/* Everyone learns of it, and long before the deadline. */
static void check_order(const Crew *crew, EpStatus status, double begin) {
    CHECK(status == EP_OK || status == EP_ERR_ORDER, "%d: %s", (int)status, ep_last_error());
    CHECK_CUDA(cudaStreamSynchronize(crew->rig.stream));
    CHECK(crew_now() - begin < CREW_LATE, "it took %.1f s", crew_now() - begin);
    crew_check_refuses(crew, EP_ERR_ORDER, "rank");
}

static void other_operations(const EpBootstrap *bootstrap) {
    static const RigOp meet[][2] = {{RIG_DISPATCH, RIG_COMBINE},
                                    {RIG_COMBINE, RIG_DISPATCH_BACKWARD},
                                    {RIG_COMBINE_BACKWARD, RIG_PREPARE}};
    for (int i = 0; i < 3; i++) {
        Crew crew;
        check_note("pair %d", i);
        REQUIRE(open_crew(&crew, bootstrap, 2 * CREW_LATE), "no group");
        double begin = crew_now();
        RigOp op = meet[i][bootstrap->rank == crew.absent];
        check_order(&crew, rig_try(&crew.rig, op), begin);
        crew_close(&crew);
    }
    crew_check_next(bootstrap, EP_MODE_THROUGHPUT);
}

ThreadTest(gpu_faults, other_operations_2, 2) {
    other_operations(bootstrap);
}
ThreadTest(gpu_faults, other_operations_4, 4) {
    other_operations(bootstrap);
}

/* Equal calls on two equal handles, whose order one rank mixes up. */
static void other_handles(const EpBootstrap *bootstrap) {
    Crew crew;
    REQUIRE(open_crew(&crew, bootstrap, 2 * CREW_LATE), "no group");
    Rig second = crew.rig;
    second.step.handle = rig_handle(crew.group, &crew.rig.c);
    double begin = crew_now();
    const Rig *rig = bootstrap->rank == crew.absent ? &second : &crew.rig;
    check_order(&crew, rig_try(rig, RIG_PREPARE), begin);
    crew_close(&crew);
}

ThreadTest(gpu_faults, other_handles_2, 2) {
    other_handles(bootstrap);
}
ThreadTest(gpu_faults, other_handles_4, 4) {
    other_handles(bootstrap);
}

/* ---- memory -------------------------------------------------------------------------------- */

/* Its rank is told what is wrong and writes nothing, and the others do not wait for it. */
static void check_overwritten(Crew *crew, RigOp op) {
    char blamed[48];
    int is_mine = crew->rig.step.rank == crew->absent;
    double begin = crew_now();
    snprintf(blamed, sizeof(blamed), "rank %d", crew->absent);
    CHECK_OK(rig_try(&crew->rig, op));
    CHECK_CUDA(cudaStreamSynchronize(crew->rig.stream));
    CHECK(crew_now() - begin < CREW_LATE, "it took %.1f s", crew_now() - begin);
    CHECK_REFUSED(ep_group_status(crew->group, NULL), is_mine ? EP_ERR_HANDLE_MEMORY : EP_ERR_PEER,
                  blamed, is_mine ? "other bytes" : "given up");
    if (is_mine) rig_check(&crew->rig);
}

static void overwritten_memory(const EpBootstrap *bootstrap) {
    static const RigOp ops[] = {RIG_PREPARE, RIG_DISPATCH, RIG_COMBINE};
    for (int i = 0; i < 3; i++) {
        Crew crew;
        check_note("operation %d", (int)ops[i]);
        REQUIRE(open_crew(&crew, bootstrap, 2 * CREW_LATE), "no group");
        char *memory = crew_overwrite(&crew);
        bootstrap->barrier(bootstrap->context, 60);
        check_overwritten(&crew, ops[i]);
        bootstrap->barrier(bootstrap->context, 60);
        crew_close(&crew);
        CHECK_CUDA(cudaFree(memory));
    }
    crew_check_next(bootstrap, EP_MODE_THROUGHPUT);
}

ThreadTest(gpu_faults, overwritten_memory_2, 2) {
    overwritten_memory(bootstrap);
}
ThreadTest(gpu_faults, overwritten_memory_4, 4) {
    overwritten_memory(bootstrap);
}

/* Valid, and more than the GPU has: an error, and the GPU serves a smaller group. */
ThreadTest(gpu_faults, more_memory_than_there_is, 1) {
    Case c = case_complete((Case){.experts = 1 << 30, .top_k = EP_MAX_TOP_K});
    EpGroupConfig config = case_group_config(&c);
    EpGroupMemory memory = EP_GROUP_MEMORY_INIT;
    EpGroup *group = NULL;
    size_t left = 0, total = 0;
    REQUIRE_CUDA(cudaMemGetInfo(&left, &total));
    REQUIRE_OK(ep_group_memory(&config, 1, &memory));
    if ((size_t)(memory.shared_bytes + memory.private_bytes) < total) {
        check_left_out("a GPU has room for the largest group");
        return;
    }
    CHECK_STATUS(ep_group_create(bootstrap, &config, &group), EP_ERR_NO_MEMORY);
    CHECK(group == NULL, "a group was made");
    crew_check_next(bootstrap, EP_MODE_THROUGHPUT);
}
