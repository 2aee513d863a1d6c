/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that are processes: they share GPUs (LIBEP_SHARE_GPUS), four ranks on two GPUs or on one;
 * or they have different numbers of multiprocessors (LIBEP_NUM_SMS), so that each divides the work
 * among its own blocks. */
#include "tests/gpu/device_step.h"
#include "tests/harness/ranked.h"

enum { STEPS = 9, PAGE = 4096 };

/* Each layout in throughput mode, then in latency mode, then in latency mode in phases. */
static Case process_case(int ranks, int step) {
    int latency = step / 3 > 0 && gpu_has_latency();
    Case c = {.ranks = ranks, .sets = 4, .experts = 3 * ranks + 1, .top_k = 4, .hidden = 264};
    c.max_tokens = 150, c.weighted = 1, c.scale_bytes = 8, c.masked_percent = 5, c.alignment = 8;
    c.capacity = 900, c.rows_per_expert = 140, c.overflow = EP_OVERFLOW_DROP;
    c.layout = (EpLayout)(1 + step % 3), c.mode = latency ? EP_MODE_LATENCY : EP_MODE_THROUGHPUT;
    c.phases = step / 6, c.seed = (uint64_t)step;
    return case_complete(c);
}

/* ---- shared GPUs --------------------------------------------------------------------------- */

static void check_group(EpGroup *group) {
    EpGroupInfo info = group_info(group);
    CHECK(info.backend == EP_BACKEND_CUDA && strstr(info.reason, "ranks share GPUs"), "%s",
          info.reason);
    CHECK_OK(ep_group_status(group, NULL));
}

static void steps(const EpBootstrap *bootstrap, __attribute__((unused)) void *arg) {
    Case widest = process_case(bootstrap->size, 0);
    EpGroup *group = open_group(bootstrap, &widest);
    for (int i = 0; i < STEPS && !check_failure()[0]; i++) {
        Case c = process_case(bootstrap->size, i);
        device_step_run(group, &c, bootstrap->rank, NULL);
    }
    check_group(group);
    ep_group_destroy(group);
}

/* Peers can reach memory from ep_mem_alloc and a part of a cudaMalloc allocation, but not memory of
 * a CUDA memory pool. */
static void windows(const EpBootstrap *bootstrap, __attribute__((unused)) void *arg) {
    Case c = process_case(bootstrap->size, 0);
    size_t bytes = (device_step_bytes(&c) + PAGE - 1) / PAGE * PAGE;
    EpGroup *group = open_group(bootstrap, &c);
    void *given = NULL, *pooled = NULL;
    char *own = NULL;
    REQUIRE_OK(ep_mem_alloc(group, bytes, &given));
    device_step_run(group, &c, bootstrap->rank, given);
    CHECK_OK(ep_mem_free(group, given));
    REQUIRE_CUDA(cudaMalloc((void **)&own, bytes + 3 * PAGE));
    REQUIRE_OK(ep_window_register(group, own + 2 * PAGE, bytes));
    device_step_run(group, &c, bootstrap->rank, own + 2 * PAGE);
    CHECK_OK(ep_window_deregister(group, own + 2 * PAGE));
    CHECK_CUDA(cudaFree(own));
    REQUIRE_CUDA(cudaMallocAsync(&pooled, 2 * PAGE, NULL));
    void *page = (void *)(((uintptr_t)pooled + PAGE - 1) / PAGE * PAGE);
    CHECK_REFUSED(ep_window_register(group, page, PAGE), EP_ERR_UNSUPPORTED, "memory",
                  "cudaMalloc's");
    CHECK_CUDA(cudaFreeAsync(pooled, NULL));
    device_step_run(group, &c, bootstrap->rank, NULL);
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

static void run_on_two_gpus(const char *test, RankBody body) {
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
    Case c = process_case(bootstrap->size, 0);
    EpGroupConfig config = case_group_config(&c);
    config.device = 0;
    CHECK_NO_GROUP(bootstrap, &config, EP_ERR_UNSUPPORTED, "config.backend", (const char *)arg,
                   "ranks 0 and 1");
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

/* ---- different numbers of multiprocessors -------------------------------------------------- */

/* Each step runs twice without waiting in between, so that ranks are not in step. */
static void uneven(const EpBootstrap *bootstrap) {
    static const char *const sms[] = {"3", "40", "2", "17"};
    setenv("LIBEP_NUM_SMS", sms[bootstrap->rank], 1);
    Case widest = process_case(bootstrap->size, 0);
    EpGroup *group = open_group(bootstrap, &widest);
    cudaStream_t stream = new_stream();
    for (int step = 0; step < STEPS && !check_failure()[0]; step++) {
        Case c = process_case(bootstrap->size, step);
        EpHandle *handle = open_handle(group, &c);
        DeviceStep gpu[2];
        for (int i = 0; i < 2; i++) {
            device_step_open(&gpu[i], group, handle, &c, bootstrap->rank, stream, NULL);
            device_step_draw(&gpu[i], &c);
        }
        for (int i = 0; i < 2; i++)
            device_step_issue(&gpu[i], device_step_all(&c));
        for (int i = 0; i < 2; i++) {
            device_step_check(&gpu[i]);
            device_step_close(&gpu[i]);
        }
        ep_handle_destroy(handle);
    }
    CHECK_OK(ep_group_status(group, NULL));
    ep_group_destroy(group);
    CHECK_CUDA(cudaStreamDestroy(stream));
}

RankedCall(mpi_gpu_uneven, of_two, 2, 60, uneven(bootstrap));
RankedCall(mpi_gpu_uneven, of_four, 4, 60, uneven(bootstrap));
