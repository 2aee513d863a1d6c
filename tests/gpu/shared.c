/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that share GPUs (LIBEP_SHARE_GPUS): four ranks on two GPUs, or on one if there is one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/cases/run.h"
#include "tests/gpu/device_step.h"
#include "tests/gpu/devices.h"
#include "tests/harness/ranked.h"

enum { STEPS = 9, PAGE = 4096 };

/* Each layout in throughput mode, then in latency mode, then in latency mode in phases. */
static Case shared_case(int ranks, int step) {
    int latency = step / 3 > 0 && gpu_has_latency();
    return case_complete((Case){.ranks = ranks,
                                .experts = 3 * ranks + 1,
                                .top_k = 4,
                                .hidden = 264,
                                .max_tokens = 150,
                                .weighted = 1,
                                .scale_bytes = 8,
                                .masked_percent = 5,
                                .alignment = 8,
                                .capacity = 900,
                                .rows_per_expert = 140,
                                .overflow = EP_OVERFLOW_DROP,
                                .layout = (EpLayout)(1 + step % 3),
                                .mode = latency ? EP_MODE_LATENCY : EP_MODE_THROUGHPUT,
                                .phases = step / 6,
                                .seed = (uint64_t)step});
}

static void run_step(EpGroup *group, int rank, const Case *c, void *memory) {
    DeviceStep gpu;
    World *world = world_new(c);
    cudaStream_t stream = new_stream();
    EpHandle *handle = device_step_handle(group, c);
    check_note("case: %s", case_describe(c));
    device_step_open(&gpu, group, handle, c, rank, stream, memory);
    device_step_load(&gpu, world);
    device_step_issue(&gpu, device_step_all(c));
    device_step_check(&gpu);
    device_step_close(&gpu);
    ep_handle_destroy(handle);
    CHECK_CUDA(cudaStreamDestroy(stream));
    world_free(world);
}

static void check_group(EpGroup *group) {
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    CHECK_OK(ep_group_query(group, &info));
    CHECK(info.backend == EP_BACKEND_CUDA && strstr(info.reason, "ranks share GPUs"), "%s",
          info.reason);
    CHECK_OK(ep_group_status(group, NULL));
}

static void steps(const EpBootstrap *bootstrap) {
    Case widest = shared_case(bootstrap->size, 0);
    widest.sets = 4;
    EpGroup *group = open_group(bootstrap, &widest);
    REQUIRE(group, "no group");
    for (int i = 0; i < STEPS && !check_failure()[0]; i++) {
        Case c = shared_case(bootstrap->size, i);
        run_step(group, bootstrap->rank, &c, NULL);
    }
    check_group(group);
    ep_group_destroy(group);
}

/* Peers can reach memory from ep_mem_alloc and a part of a cudaMalloc allocation, but not memory of
 * a CUDA memory pool. */
static void windows(const EpBootstrap *bootstrap) {
    Case c = shared_case(bootstrap->size, 0);
    size_t bytes = (device_step_bytes(&c) + PAGE - 1) / PAGE * PAGE;
    EpGroup *group = open_group(bootstrap, &c);
    void *given = NULL, *pooled = NULL;
    char *own = NULL;
    REQUIRE(group, "no group");
    REQUIRE_OK(ep_mem_alloc(group, bytes, &given));
    run_step(group, bootstrap->rank, &c, given);
    CHECK_OK(ep_mem_free(group, given));
    REQUIRE_CUDA(cudaMalloc((void **)&own, bytes + 3 * PAGE));
    REQUIRE_OK(ep_window_register(group, own + 2 * PAGE, bytes));
    run_step(group, bootstrap->rank, &c, own + 2 * PAGE);
    CHECK_OK(ep_window_deregister(group, own + 2 * PAGE));
    CHECK_CUDA(cudaFree(own));
    REQUIRE_CUDA(cudaMallocAsync(&pooled, 2 * PAGE, NULL));
    void *page = (void *)(((uintptr_t)pooled + PAGE - 1) / PAGE * PAGE);
    CHECK_REFUSED(ep_window_register(group, page, PAGE), EP_ERR_UNSUPPORTED, "memory",
                  "cudaMalloc's");
    CHECK_CUDA(cudaFreeAsync(pooled, NULL));
    run_step(group, bootstrap->rank, &c, NULL);
    check_group(group);
    ep_group_destroy(group);
}

/* Make at most two of the visible GPUs visible to the ranks. */
static void hide_gpus(void) {
    char shown[256] = "0,1";
    const char *before = getenv("CUDA_VISIBLE_DEVICES");
    if (gpu_count() <= 2) return;
    if (before) snprintf(shown, sizeof(shown), "%s", before);
    char *comma = strchr(shown, ','), *second = comma ? strchr(comma + 1, ',') : NULL;
    if (second) *second = 0;
    setenv("CUDA_VISIBLE_DEVICES", shown, 1);
}

static void run_on_two_gpus(const char *test, RankedBody body) {
    if (!gpu_count()) cr_skip_test("needs a GPU");
    setenv("LIBEP_SHARE_GPUS", "yes", 1);
    hide_gpus();
    ranked_run(test, 4, 100, body);
}

Test(mpi_gpu_shared, steps, .timeout = 110) {
    run_on_two_gpus("mpi_gpu_shared/steps", steps);
}
Test(mpi_gpu_shared, windows, .timeout = 110) {
    run_on_two_gpus("mpi_gpu_shared/windows", windows);
}

/* ---- refused ---- */

static void refused(const EpBootstrap *bootstrap, void *arg) {
    Case c = shared_case(bootstrap->size, 0);
    EpGroupConfig config = case_group_config(&c);
    EpGroup *group = NULL;
    config.device = 0;
    CHECK_REFUSED(ep_group_create(bootstrap, &config, &group), EP_ERR_UNSUPPORTED, "config.backend",
                  (const char *)arg, "ranks 0 and 1");
    CHECK(group == NULL, "a group was made");
}

Test(gpu_shared, unless_asked_for, .timeout = 60) {
    static char message[] = "LIBEP_SHARE_GPUS=yes";
    setenv("LIBEP_SHARE_GPUS", "no", 1);
    run_on_threads(2, refused, message);
}
Test(gpu_shared, threads, .timeout = 60) {
    static char message[] = "a process for each rank";
    setenv("LIBEP_SHARE_GPUS", "yes", 1);
    run_on_threads(2, refused, message);
}
