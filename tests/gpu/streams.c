/* SPDX-License-Identifier: Apache-2.0 */
/* Several handles, streams and groups at once, without a word from the host between the calls. */
#include <stdlib.h>

#include "tests/cases/run.h"
#include "tests/gpu/arena.h"
#include "tests/gpu/rig.h"

enum { ROUNDS = 20, MOST = 3 };

/* Groups that work at the same time share a GPU's multiprocessors, so that their kernels fit on it
 * together: see EP_NUM_SMS. */
static void reserve(void) {
    gpu_reserve((size_t)320 << 20);
    setenv("EP_NUM_SMS", "64", 1);
}

TestSuite(gpu_streams, .init = reserve);

static Case stream_case(int ranks, int number) {
    return case_complete((Case){.ranks = ranks,
                                .experts = 3 * ranks + number,
                                .top_k = 3 + number,
                                .hidden = 200 + 24 * number,
                                .max_tokens = 301 - 40 * number,
                                .masked_percent = 5,
                                .weighted = 1,
                                .scale_bytes = 4,
                                .alignment = 4,
                                .capacity = 1700,
                                .overflow = EP_OVERFLOW_DROP,
                                .counted = 1});
}

/* Rigs with a world each, new in every round. */
typedef struct Fleet {
    Rig rig[MOST];
    World *world[MOST];
    int count;
} Fleet;

static void fleet_load(Fleet *fleet, int round) {
    for (int i = 0; i < fleet->count; i++) {
        Case c = fleet->rig[i].c;
        c.seed = (uint64_t)(MOST * round + i);
        if (fleet->world[i]) world_free(fleet->world[i]);
        fleet->world[i] = world_new(&c);
        rig_load(&fleet->rig[i], fleet->world[i]);
    }
}

/* By now everything has been enqueued; nothing was waited for. */
static void fleet_check(Fleet *fleet, int round) {
    for (int i = 0; i < fleet->count; i++) {
        check_note("round %d, rig %d: %s", round, i, case_describe(&fleet->world[i]->c));
        rig_check(&fleet->rig[i]);
    }
}

static void fleet_close(Fleet *fleet) {
    for (int i = 0; i < fleet->count; i++) {
        rig_close(&fleet->rig[i]);
        if (fleet->world[i]) world_free(fleet->world[i]);
    }
}

/* ---- two streams ---- */

/* Operation by operation, the two by turns. */
static void take_turns(Fleet *fleet) {
    for (int op = 0; op < 5; op++)
        for (int i = 0; i < fleet->count; i++)
            rig_issue(&fleet->rig[i], 1u << op);
}

/* Two rigs, each on a stream of its own, in one group or in two. */
static void two_streams(const EpBootstrap *bootstrap, int groups) {
    Fleet fleet = {.count = 2};
    EpGroup *group[2] = {NULL};
    cudaStream_t stream[2] = {new_stream(), new_stream()};
    for (int i = 0; i < 2; i++) {
        Case c = stream_case(bootstrap->size, groups == 2 ? i : 0);
        group[i] = i < groups ? open_group(bootstrap, &c) : group[0];
        REQUIRE(group[i], "no group");
        rig_open(&fleet.rig[i], group[i], rig_handle(group[i], &c), &c, bootstrap->rank, stream[i],
                 NULL);
    }
    for (int round = 0; round < ROUNDS; round++) {
        fleet_load(&fleet, round);
        take_turns(&fleet);
        fleet_check(&fleet, round);
    }
    for (int i = 0; i < groups; i++) {
        CHECK_OK(ep_group_status(group[i], NULL));
        ep_group_destroy(group[i]);
    }
    fleet_close(&fleet);
    for (int i = 0; i < 2; i++)
        CHECK_CUDA(cudaStreamDestroy(stream[i]));
}

ThreadTest(gpu_streams, two_handles_1, 1) {
    two_streams(bootstrap, 1);
}
ThreadTest(gpu_streams, two_handles_2, 2) {
    two_streams(bootstrap, 1);
}
ThreadTest(gpu_streams, two_handles_4, 4) {
    two_streams(bootstrap, 1);
}
ThreadTest(gpu_streams, two_groups_1, 1) {
    two_streams(bootstrap, 2);
}
ThreadTest(gpu_streams, two_groups_2, 2) {
    two_streams(bootstrap, 2);
}
ThreadTest(gpu_streams, two_groups_4, 4) {
    two_streams(bootstrap, 2);
}

/* ---- layers ---- */

/* F0 F1 B0 F2 B1 B2 with two handles: the third micro-batch takes over the first's. */
static void pipeline(const EpBootstrap *bootstrap) {
    Case c = stream_case(bootstrap->size, 1);
    EpGroup *group = open_group(bootstrap, &c);
    REQUIRE(group, "no group");
    EpHandle *handle[2] = {rig_handle(group, &c), rig_handle(group, &c)};
    cudaStream_t stream = new_stream();
    Fleet fleet = {.count = 3};
    for (int i = 0; i < 3; i++)
        rig_open(&fleet.rig[i], group, handle[i % 2], &c, bootstrap->rank, stream, NULL);
    Rig *micro = fleet.rig;
    for (int round = 0; round < ROUNDS; round++) {
        fleet_load(&fleet, round);
        rig_issue(&micro[0], RIG_FORWARD);
        rig_issue(&micro[1], RIG_FORWARD);
        rig_issue(&micro[0], RIG_BACKWARD);
        rig_issue(&micro[2], RIG_FORWARD);
        rig_issue(&micro[1], RIG_BACKWARD);
        rig_issue(&micro[2], RIG_BACKWARD);
        fleet_check(&fleet, round);
    }
    CHECK_OK(ep_group_status(group, NULL));
    ep_group_destroy(group);
    fleet_close(&fleet);
    CHECK_CUDA(cudaStreamDestroy(stream));
}

ThreadTest(gpu_streams, pipeline_1, 1) {
    pipeline(bootstrap);
}
ThreadTest(gpu_streams, pipeline_2, 2) {
    pipeline(bootstrap);
}
ThreadTest(gpu_streams, pipeline_4, 4) {
    pipeline(bootstrap);
}
