/* SPDX-License-Identifier: Apache-2.0 */
/* Launches of which two blocks run at a time, with more rows than rings hold. Emulated GPUs do so
 * on request; others run all blocks. */
#include <stdlib.h>

#include "tests/cases/run.h"
#include "tests/gpu/device_step.h"

/* Five blocks, or nine. Of these fewer than half receive in some operations. */
static void set_up(void) {
    setenv("EMULATED_SMS", "9", 1);
}

TestSuite(gpu_resident, .init = set_up);

static Case resident_case(int ranks, EpMode mode) {
    return case_complete((Case){.ranks = ranks,
                                .experts = 4 * ranks,
                                .top_k = 5,
                                .hidden = 136,
                                .max_tokens = mode == EP_MODE_LATENCY ? 67 : 301,
                                .spread = SPREAD_FULL,
                                .weighted = 1,
                                .capacity = 4000,
                                .mode = mode});
}

/* The limit is the process's, so ranks that are threads set it together. ep_prepare needs all its
 * blocks. */
static void limit(const EpBootstrap *bootstrap, const char *resident) {
    CHECK_OK(bootstrap->barrier(bootstrap->context, 60));
    if (bootstrap->rank == 0 && resident) setenv("EMULATED_RESIDENT", resident, 1);
    if (bootstrap->rank == 0 && !resident) unsetenv("EMULATED_RESIDENT");
    CHECK_OK(bootstrap->barrier(bootstrap->context, 60));
}

static void two_blocks(const EpBootstrap *bootstrap, EpMode mode, int blocks) {
    DeviceStep gpu;
    Case c = resident_case(bootstrap->size, mode);
    EpGroupConfig config = case_group_config(&c);
    EpGroup *group = NULL;
    World *world = world_new(&c);
    config.num_sms = blocks, config.timeout_seconds = 60;
    check_note("%d blocks: %s", blocks, case_describe(&c));
    REQUIRE_OK(ep_group_create(bootstrap, &config, &group));
    device_step_open(&gpu, group, device_step_handle(group, &c), &c, bootstrap->rank, new_stream(),
                     NULL);
    device_step_load(&gpu, world);
    device_step_issue(&gpu, STEP_PREPARE);
    CHECK_CUDA(cudaStreamSynchronize(gpu.stream));
    limit(bootstrap, "2");
    device_step_issue(&gpu, device_step_all(&c) & ~(unsigned)STEP_PREPARE);
    device_step_check(&gpu);
    CHECK_OK(ep_group_status(group, NULL));
    limit(bootstrap, NULL);
    CHECK_CUDA(cudaStreamDestroy(gpu.stream));
    device_step_close(&gpu);
    ep_group_destroy(group);
    world_free(world);
}

static void few_resident(const EpBootstrap *bootstrap) {
    two_blocks(bootstrap, EP_MODE_THROUGHPUT, 5);
    two_blocks(bootstrap, EP_MODE_THROUGHPUT, 9);
    two_blocks(bootstrap, EP_MODE_LATENCY, 9);
}

ThreadTest(gpu_resident, two_blocks_1, 1) {
    few_resident(bootstrap);
}
ThreadTest(gpu_resident, two_blocks_2, 2) {
    few_resident(bootstrap);
}
ThreadTest(gpu_resident, two_blocks_4, 4) {
    few_resident(bootstrap);
}
