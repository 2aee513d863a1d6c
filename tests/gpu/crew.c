/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/crew.h"

#include <time.h>

double crew_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- life ---------------------------------------------------------------------------------- */

Case crew_case(int ranks, EpMode mode) {
    return case_complete((Case){.ranks = ranks,
                                .experts = 3 * ranks,
                                .top_k = 3,
                                .hidden = 72,
                                .max_tokens = 130,
                                .spread = SPREAD_FULL,
                                .weighted = 1,
                                .capacity = 1600,
                                .mode = mode});
}

static void make_plan(Rig *rig) {
    rig_issue(rig, rig->c.mode == EP_MODE_LATENCY ? RIG_PREPARE | RIG_DISPATCH : RIG_PREPARE);
    rig_check(rig);
}

bool crew_open(Crew *crew, const EpBootstrap *bootstrap, const Case *c, double seconds) {
    EpGroupConfig config = case_group_config(c);
    config.timeout_seconds = seconds;
    *crew = (Crew){.world = world_new(c), .absent = bootstrap->size - 1};
    if (!CHECK_OK(ep_group_create(bootstrap, &config, &crew->group))) return false;
    rig_open(&crew->rig, crew->group, rig_handle(crew->group, c), c, bootstrap->rank, new_stream(),
             NULL);
    rig_load(&crew->rig, crew->world);
    bootstrap->barrier(bootstrap->context, 60); /* nobody is late because of what came before */
    make_plan(&crew->rig);
    return !check_failure()[0];
}

void crew_close(Crew *crew) {
    double begin = crew_now();
    ep_group_destroy(crew->group);
    CHECK(crew_now() - begin < CREW_LATE, "destroying a failed group took %.1f s",
          crew_now() - begin);
    CHECK_CUDA(cudaStreamDestroy(crew->rig.stream));
    rig_close(&crew->rig);
    world_free(crew->world);
}

char *crew_overwrite(Crew *crew) {
    EpHandleConfig config = case_handle_config(&crew->rig.c);
    size_t bytes = 0;
    char *memory = NULL;
    config.max_recv_rows = crew->rig.c.capacity;
    CHECK_OK(ep_handle_memory(crew->group, &config, &bytes));
    CHECK_CUDA(cudaMalloc((void **)&memory, bytes));
    CHECK_OK(ep_handle_create(crew->group, &config, memory, bytes, &crew->rig.step.handle));
    make_plan(&crew->rig);
    rig_poison(&crew->rig);
    CHECK_CUDA(cudaStreamSynchronize(crew->rig.stream));
    /* cudaMemset returns before the memory is set, and the crew's stream waits for no other. */
    if (crew->rig.step.rank == crew->absent) CHECK_CUDA(cudaMemset(memory, 0, bytes));
    CHECK_CUDA(cudaDeviceSynchronize());
    return memory;
}

/* ---- calls --------------------------------------------------------------------------------- */

void crew_call(const Rig *rig, unsigned ops, EpStatus expected) {
    for (unsigned op = RIG_PREPARE; op <= RIG_COMBINE_WAIT; op <<= 1) {
        EpStatus status = ops & op ? rig_try(rig, (RigOp)op) : EP_OK;
        CHECK(status == EP_OK || status == expected, "operation %u: %d: %s", op, (int)status,
              ep_last_error());
    }
    CHECK_CUDA(cudaStreamSynchronize(rig->stream));
}

void crew_check_refuses(const Crew *crew, EpStatus status, const char *part) {
    unsigned ops = crew->rig.c.mode == EP_MODE_LATENCY ? RIG_FORWARD | RIG_HALVES : RIG_ALL;
    CHECK_REFUSED(ep_group_status(crew->group, NULL), status, part);
    for (unsigned op = RIG_PREPARE; op <= RIG_COMBINE_WAIT; op <<= 1)
        if (ops & op) CHECK_REFUSED(rig_try(&crew->rig, (RigOp)op), status, part);
}

void crew_check_next(const EpBootstrap *bootstrap, EpMode mode) {
    Crew crew;
    Case c = crew_case(bootstrap->size, mode);
    if (!crew_open(&crew, bootstrap, &c, 60)) return;
    rig_issue(&crew.rig, rig_all(&c));
    rig_check(&crew.rig);
    CHECK_OK(ep_group_status(crew.group, NULL));
    crew_close(&crew);
}
