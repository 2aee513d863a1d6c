/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that give the library different numbers of multiprocessors (EP_NUM_SMS): each divides the
 * work among its own blocks. Settings are the process's, so each rank is a process. */
#include <stdlib.h>

#include "tests/cases/run.h"
#include "tests/gpu/rig.h"
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
                                .halves = step / 6,
                                .seed = (uint64_t)step});
}

/* Twice without a word in between: ranks are not in step then. */
static void one_step(EpGroup *group, int rank, cudaStream_t stream, const Case *c) {
    World *world = world_new(c);
    EpHandle *handle = rig_handle(group, c);
    Rig rig[2];
    for (int i = 0; handle && i < 2; i++) {
        rig_open(&rig[i], group, handle, c, rank, stream, NULL);
        rig_load(&rig[i], world);
    }
    for (int i = 0; handle && i < 2; i++)
        rig_issue(&rig[i], rig_all(c));
    for (int i = 0; handle && i < 2; i++) {
        rig_check(&rig[i]);
        rig_close(&rig[i]);
    }
    ep_handle_destroy(handle);
    world_free(world);
}

static void uneven(const EpBootstrap *bootstrap) {
    Case widest = uneven_case(bootstrap->size, 0);
    setenv("EP_NUM_SMS", sms[bootstrap->rank], 1);
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
