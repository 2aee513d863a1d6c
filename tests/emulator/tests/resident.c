/* SPDX-License-Identifier: Apache-2.0 */
/* Launches of which two blocks run at a time, with more rows than rings hold. */
#include "tests/gpu/device_step.h"

/* Five blocks, or nine. Of these fewer than half receive in some operations. */
static void set_up(void) {
    setenv("EMULATED_SMS", "9", 1);
}

TestSuite(gpu_resident, .init = set_up);

static Case resident_case(int ranks, EpMode mode) {
    Case c = {.ranks = ranks, .experts = 4 * ranks, .top_k = 5, .hidden = 136};
    c.max_tokens = mode == EP_MODE_LATENCY ? 67 : 301, c.spread = SPREAD_FULL, c.weighted = 1;
    c.capacity = 4000, c.mode = mode;
    return case_complete(c);
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
    config.num_sms = blocks, config.timeout_seconds = 60;
    EpGroup *group = open_group_with(bootstrap, &config);
    device_step_new(&gpu, group, &c, bootstrap->rank);
    device_step_draw(&gpu, &c);
    check_note("%d blocks: %s", blocks, case_describe(&c));
    device_step_issue(&gpu, STEP_PREPARE);
    CHECK_CUDA(cudaStreamSynchronize(gpu.stream));
    limit(bootstrap, "2");
    device_step_issue(&gpu, device_step_all(&c) & ~(unsigned)STEP_PREPARE);
    device_step_check(&gpu);
    CHECK_OK(ep_group_status(group, NULL));
    limit(bootstrap, NULL);
    device_step_close(&gpu);
    ep_group_destroy(group);
}

static void few_resident(const EpBootstrap *bootstrap) {
    two_blocks(bootstrap, EP_MODE_THROUGHPUT, 5);
    two_blocks(bootstrap, EP_MODE_THROUGHPUT, 9);
    two_blocks(bootstrap, EP_MODE_LATENCY, 9);
}

RankTests(gpu_resident, two_blocks, few_resident(bootstrap));
