/* SPDX-License-Identifier: Apache-2.0 */
/* Several handles, streams and groups at once; the host does not wait between the calls. */
#include <stdlib.h>

#include "tests/cases/run.h"
#include "tests/gpu/device_step.h"
#include "tests/gpu/devices.h"

enum { ROUNDS = 20, MAX_STEPS = 3 };

/* Limit LIBEP_NUM_SMS, so that the kernels of two groups fit on a GPU together. */
static void reserve(void) {
    gpu_reserve((size_t)320 << 20);
    setenv("LIBEP_NUM_SMS", "64", 1);
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

/* Device steps with a world each, new in every round. */
typedef struct StepSet {
    DeviceStep gpu[MAX_STEPS];
    World *world[MAX_STEPS];
    int count;
} StepSet;

static void set_load(StepSet *set, int round) {
    for (int i = 0; i < set->count; i++) {
        Case c = set->gpu[i].c;
        c.seed = (uint64_t)(MAX_STEPS * round + i);
        if (set->world[i]) world_free(set->world[i]);
        set->world[i] = world_new(&c);
        device_step_load(&set->gpu[i], set->world[i]);
    }
}

/* The first wait of a round: all steps have been enqueued. */
static void set_check(StepSet *set, int round) {
    for (int i = 0; i < set->count; i++) {
        check_note("round %d, gpu %d: %s", round, i, case_describe(&set->world[i]->c));
        device_step_check(&set->gpu[i]);
    }
}

static void set_close(StepSet *set) {
    for (int i = 0; i < set->count; i++) {
        device_step_close(&set->gpu[i]);
        if (set->world[i]) world_free(set->world[i]);
    }
}

/* ---- two streams ---- */

/* Issue operation by operation, each for all steps in turn. */
static void issue_by_turns(StepSet *set) {
    for (int op = 0; op < 5; op++)
        for (int i = 0; i < set->count; i++)
            device_step_issue(&set->gpu[i], 1u << op);
}

/* Two steps, each on its own stream, in one group or in two. */
static void two_streams(const EpBootstrap *bootstrap, int groups) {
    StepSet set = {.count = 2};
    EpGroup *group[2] = {NULL};
    cudaStream_t stream[2] = {new_stream(), new_stream()};
    for (int i = 0; i < 2; i++) {
        Case c = stream_case(bootstrap->size, groups == 2 ? i : 0);
        group[i] = i < groups ? open_group(bootstrap, &c) : group[0];
        REQUIRE(group[i], "no group");
        device_step_open(&set.gpu[i], group[i], device_step_handle(group[i], &c), &c,
                         bootstrap->rank, stream[i], NULL);
    }
    for (int round = 0; round < ROUNDS; round++) {
        set_load(&set, round);
        issue_by_turns(&set);
        set_check(&set, round);
    }
    for (int i = 0; i < groups; i++) {
        CHECK_OK(ep_group_status(group[i], NULL));
        ep_group_destroy(group[i]);
    }
    set_close(&set);
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

/* F0 F1 B0 F2 B1 B2 with two handles: the third micro-batch reuses the first one's handle. */
static void pipeline(const EpBootstrap *bootstrap) {
    Case c = stream_case(bootstrap->size, 1);
    EpGroup *group = open_group(bootstrap, &c);
    REQUIRE(group, "no group");
    EpHandle *handle[2] = {device_step_handle(group, &c), device_step_handle(group, &c)};
    cudaStream_t stream = new_stream();
    StepSet set = {.count = 3};
    for (int i = 0; i < 3; i++)
        device_step_open(&set.gpu[i], group, handle[i % 2], &c, bootstrap->rank, stream, NULL);
    DeviceStep *micro = set.gpu;
    for (int round = 0; round < ROUNDS; round++) {
        set_load(&set, round);
        device_step_issue(&micro[0], STEP_FORWARD);
        device_step_issue(&micro[1], STEP_FORWARD);
        device_step_issue(&micro[0], STEP_BACKWARD);
        device_step_issue(&micro[2], STEP_FORWARD);
        device_step_issue(&micro[1], STEP_BACKWARD);
        device_step_issue(&micro[2], STEP_BACKWARD);
        set_check(&set, round);
    }
    CHECK_OK(ep_group_status(group, NULL));
    ep_group_destroy(group);
    set_close(&set);
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
