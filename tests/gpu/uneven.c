/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks with different numbers of multiprocessors (LIBEP_NUM_SMS): each divides the work among its
 * own blocks. Settings belong to a process, so each rank is a process. */
#include <stdlib.h>

#include "tests/cases/run.h"
#include "tests/gpu/device_step.h"
#include "tests/harness/ranked.h"

enum { STEPS = 12 };

static const char *const sms[] = {"3", "40", "2", "17"};

static Case uneven_case(int ranks, int step) {
    int latency = step % 2 && gpu_has_latency();
    return case_complete((Case){.ranks = ranks,
                                .experts = 3 * ranks + 1,
                                .top_k = 4,
                                .hidden = 264,
                                .max_tokens = 300,
                                .counted = 1,
                                .weighted = 1,
                                .scale_bytes = 8,
                                .masked_percent = 5,
                                .alignment = 8,
                                .capacity = 1500,
                                .rows_per_expert = 200,
                                .overflow = EP_OVERFLOW_DROP,
                                .layout = (EpLayout)(1 + step / 2 % 3),
                                .mode = latency ? EP_MODE_LATENCY : EP_MODE_THROUGHPUT,
                                .phases = step / 6,
                                .seed = (uint64_t)step});
}

/* Run the step twice without waiting in between, so that ranks are not in step. */
static void one_step(EpGroup *group, int rank, cudaStream_t stream, const Case *c) {
    World *world = world_new(c);
    EpHandle *handle = device_step_handle(group, c);
    DeviceStep gpu[2];
    for (int i = 0; handle && i < 2; i++) {
        device_step_open(&gpu[i], group, handle, c, rank, stream, NULL);
        device_step_load(&gpu[i], world);
    }
    for (int i = 0; handle && i < 2; i++)
        device_step_issue(&gpu[i], device_step_all(c));
    for (int i = 0; handle && i < 2; i++) {
        device_step_check(&gpu[i]);
        device_step_close(&gpu[i]);
    }
    ep_handle_destroy(handle);
    world_free(world);
}

static void uneven(const EpBootstrap *bootstrap) {
    Case widest = uneven_case(bootstrap->size, 0);
    widest.sets = 4;
    setenv("LIBEP_NUM_SMS", sms[bootstrap->rank], 1);
    EpGroup *group = open_group(bootstrap, &widest);
    cudaStream_t stream = new_stream();
    REQUIRE(group, "no group");
    for (int step = 0; step < STEPS && !check_failure()[0]; step++) {
        Case c = uneven_case(bootstrap->size, step);
        check_note("%s multiprocessors, step %d: %s", sms[bootstrap->rank], step,
                   case_describe(&c));
        one_step(group, bootstrap->rank, stream, &c);
    }
    CHECK_OK(ep_group_status(group, NULL));
    ep_group_destroy(group);
    CHECK_CUDA(cudaStreamDestroy(stream));
}

RankedTest(mpi_gpu_uneven, of_two, 2, 60) {
    uneven(bootstrap);
}
RankedTest(mpi_gpu_uneven, of_four, 4, 60) {
    uneven(bootstrap);
}
