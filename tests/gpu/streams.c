/* SPDX-License-Identifier: Apache-2.0 */
/* Several handles, streams and groups at once; the host does not wait between the calls. */
#include "tests/gpu/device_step.h"

enum { ROUNDS = 20 };

/* Limit LIBEP_NUM_SMS, so that the kernels of two groups fit on a GPU together. */
static void reserve(void) {
    gpu_reserve((size_t)320 << 20);
    setenv("LIBEP_NUM_SMS", "64", 1);
}

TestSuite(gpu_streams, .init = reserve);

static Case stream_case(int ranks, int number) {
    Case c = {.ranks = ranks, .experts = 3 * ranks + number, .top_k = 3 + number};
    c.hidden = 200 + 24 * number, c.max_tokens = 301 - 40 * number, c.masked_percent = 5;
    c.weighted = 1, c.scale_bytes = 4, c.alignment = 4, c.capacity = 1700;
    c.overflow = EP_OVERFLOW_DROP, c.counted = 1;
    return case_complete(c);
}

/* Load new worlds of a round. */
static void load(DeviceStep *gpu, int count, int round) {
    for (int i = 0; i < count; i++) {
        Case c = gpu[i].c;
        c.seed = (uint64_t)(2 * round + i);
        device_step_draw(&gpu[i], &c);
    }
}

/* The first wait of a round: all steps have been enqueued. */
static void check(DeviceStep *gpu, int count, int round) {
    for (int i = 0; i < count; i++) {
        check_note("round %d, gpu %d: %s", round, i, case_describe(&gpu[i].drawn->c));
        device_step_check(&gpu[i]);
    }
}

/* Two steps, each on its own stream, in one group or in two. They are issued operation by
 * operation, each for both in turn. */
static void two_streams(const EpBootstrap *bootstrap, int groups) {
    DeviceStep gpu[2];
    EpGroup *group[2] = {NULL};
    for (int i = 0; i < 2; i++) {
        Case c = stream_case(bootstrap->size, groups == 2 ? i : 0);
        group[i] = i < groups ? open_group(bootstrap, &c) : group[0];
        device_step_new(&gpu[i], group[i], &c, bootstrap->rank);
    }
    for (int round = 0; round < ROUNDS; round++) {
        load(gpu, 2, round);
        for (int i = 0; i < 2 * 5; i++)
            device_step_issue(&gpu[i % 2], 1u << i / 2);
        check(gpu, 2, round);
    }
    for (int i = 0; i < groups; i++) {
        CHECK_OK(ep_group_status(group[i], NULL));
        ep_group_destroy(group[i]);
    }
    for (int i = 0; i < 2; i++)
        device_step_close(&gpu[i]);
}

RankTests(gpu_streams, two_handles, two_streams(bootstrap, 1));
RankTests(gpu_streams, two_groups, two_streams(bootstrap, 2));
