/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that wait for one that stopped, that have lost their plan or that need too much memory.
 * Calls on GPUs return before they are done; ep_group_status reports their errors. */
#include "handles/handle.h"
#include "runtime/cuda/cuda.h"
#include "tests/gpu/failing.h"

TestSuite(gpu_faults, .init = be_quiet);
TestSuite(gpu_latency_faults, .init = be_quiet);

static int is_absent(const FailingGroup *failing) {
    return failing->gpu.step.rank == failing->absent;
}

/* ---- nothing is stored ----------------------------------------------------------------------- */

/* Whoever waits for a rank stores no row there, since the rank may still be in the operation
 * before; nor once the wait has failed. */
static void nothing_stored(const EpBootstrap *bootstrap, StepOp op) {
    FailingGroup failing;
    size_t bytes;
    failing_open_plain(&failing, bootstrap, FAILING_TIMEOUT);
    failing_call(&failing.gpu, STEP_DISPATCH, EP_OK);
    bootstrap->barrier(bootstrap->context, 60);
    char *before = failing_copy_records(failing.group, &bytes);
    bootstrap->barrier(bootstrap->context, 60);
    if (!is_absent(&failing)) {
        failing_call(&failing.gpu, op, EP_OK);
        CHECK_STATUS(ep_group_status(failing.group, NULL), EP_ERR_TIMEOUT);
    }
    bootstrap->barrier(bootstrap->context, 60);
    char *after = failing_copy_records(failing.group, &bytes);
    if (is_absent(&failing)) CHECK(!memcmp(before, after, bytes), "rows or heads were stored");
    free(before), free(after);
    failing_close(&failing);
}

RankTest(gpu_faults, nothing_stored_by_dispatch_2, 2, nothing_stored(bootstrap, STEP_DISPATCH));
RankTest(gpu_faults, nothing_stored_by_combine_2, 2, nothing_stored(bootstrap, STEP_COMBINE));
RankTest(gpu_faults, nothing_stored_by_combine_backward_4, 4,
         nothing_stored(bootstrap, STEP_COMBINE_BACKWARD));
RankTest(gpu_faults, nothing_stored_by_dispatch_backward_2, 2,
         nothing_stored(bootstrap, STEP_DISPATCH_BACKWARD));

/* ---- a plan that is overwritten -------------------------------------------------------------- */

/* Make a new handle with a plan, and overwrite the plan on the absent rank. */
static void overwrite_plan(FailingGroup *failing) {
    EpHandleConfig config = case_handle_config(&failing->gpu.c);
    size_t bytes = 0;
    config.max_recv_rows = failing->gpu.c.capacity;
    CHECK_OK(ep_handle_memory(failing->group, &config, &bytes));
    CHECK_OK(ep_handle_create(failing->group, &config, &failing->gpu.step.handle));
    char *memory = failing->gpu.step.handle->own.memory;
    failing_make_plan(&failing->gpu);
    device_step_poison(&failing->gpu);
    CHECK_CUDA(cudaStreamSynchronize(failing->gpu.stream));
    /* cudaMemset returns before the memory is set, and the step's stream does not wait for it. */
    if (is_absent(failing)) CHECK_CUDA(cudaMemset(memory, 0, bytes));
    CHECK_CUDA(cudaDeviceSynchronize());
}

/* The rank whose memory was overwritten gets the reason and writes nothing; the others do not wait
 * for it. */
static void check_overwritten(FailingGroup *failing, unsigned ops) {
    char blamed[48];
    EpStatus expected = is_absent(failing) ? EP_ERR_NOT_PREPARED : EP_ERR_PEER;
    double begin = seconds_now();
    snprintf(blamed, sizeof(blamed), "rank %d", failing->absent);
    failing_call(&failing->gpu, ops, expected);
    failing_check_soon(begin);
    CHECK_REFUSED(ep_group_status(failing->group, NULL), expected, blamed,
                  is_absent(failing) ? "other bytes" : "given up");
    if (is_absent(failing)) device_step_check(&failing->gpu);
}

static void overwritten_memory(const EpBootstrap *bootstrap, EpMode mode) {
    static const unsigned throughput[] = {STEP_DISPATCH, STEP_COMBINE, STEP_COMBINE_BACKWARD};
    static const unsigned latency[] = {STEP_COMBINE, STEP_COMBINE_PHASES};
    int is_latency = mode == EP_MODE_LATENCY;
    Case c = failing_case(bootstrap->size, mode);
    for (int i = 0; i < (is_latency ? LENGTH(latency) : LENGTH(throughput)); i++) {
        FailingGroup failing;
        unsigned ops = is_latency ? latency[i] : throughput[i];
        failing_open(&failing, bootstrap, &c, 2 * FAILING_LIMIT);
        check_note("operations %u", ops);
        overwrite_plan(&failing);
        bootstrap->barrier(bootstrap->context, 60);
        check_overwritten(&failing, ops);
        bootstrap->barrier(bootstrap->context, 60);
        failing_close(&failing);
    }
    failing_check_next(bootstrap, mode);
}

RankTests24(gpu_faults, overwritten_memory, overwritten_memory(bootstrap, EP_MODE_THROUGHPUT));
LatencyTests24(gpu_latency_faults, overwritten_memory,
               overwritten_memory(bootstrap, EP_MODE_LATENCY));

/* ---- late ranks ---- */

/* Both modes by turns, while each rank in turn keeps the others waiting. No rank is blamed. */
static void both_in_turn(const EpBootstrap *bootstrap) {
    FailingGroup failing;
    DeviceStep other;
    Case c = failing_case(bootstrap->size, EP_MODE_LATENCY);
    failing_open(&failing, bootstrap, &c, 2 * FAILING_LIMIT);
    c = failing_case(bootstrap->size, EP_MODE_THROUGHPUT);
    device_step_open(&other, failing.group, open_handle(failing.group, &c), &c, bootstrap->rank,
                     failing.gpu.stream, NULL);
    device_step_draw(&other, &c);
    for (int turn = 0; turn < 2 * bootstrap->size && !check_failure()[0]; turn++) {
        check_note("turn %d", turn);
        CHECK_CUDA(cudaStreamSynchronize(failing.gpu.stream));
        bootstrap->barrier(bootstrap->context, 60);
        if (bootstrap->rank == turn / 2) usleep(700000);
        device_step_issue(turn % 2 ? &failing.gpu : &other, turn % 2 ? STEP_COMBINE : STEP_PREPARE);
        device_step_issue(turn % 2 ? &other : &failing.gpu, turn % 2 ? STEP_PREPARE : STEP_COMBINE);
        device_step_issue(&failing.gpu, STEP_DISPATCH);
        CHECK_CUDA(cudaStreamSynchronize(failing.gpu.stream));
        CHECK_OK(ep_group_status(failing.group, NULL));
    }
    bootstrap->barrier(bootstrap->context, 60);
    failing_close(&failing);
    device_step_close(&other);
}

LatencyTests24(gpu_latency_faults, both_in_turn, both_in_turn(bootstrap));

/* ---- too much memory ------------------------------------------------------------------------- */

/* ep_prepare has tables of experts in shared memory. A group with more experts than fit is
 * refused before it exists, and where the program leaves the choice, the host backend serves
 * it. */
ThreadTest(gpu_faults, more_experts_than_there_is_room, 1) {
    Case c = case_complete((Case){.experts = 6000});
    EpGroupConfig config = case_group_config(&c);
    EpGroup *group = NULL;
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    config.backend = EP_BACKEND_CUDA;
    CHECK_REFUSED(ep_group_create(bootstrap, &config, &group), EP_ERR_UNSUPPORTED, "shared memory",
                  "experts", "got 232448 bytes");
    CHECK(group == NULL, "a group was made");
    REQUIRE(setenv("LIBEP_BACKEND", "auto", 1) == 0, "setenv");
    char path[] = "/tmp/libep-log-XXXXXX", log[1024] = "";
    int fd = mkstemp(path);
    setenv("LIBEP_LOG_FILE", path, 1);
    config.backend = EP_BACKEND_AUTO;
    for (int i = 0; i < 2; i++) { /* one warning */
        REQUIRE_OK(ep_group_create(bootstrap, &config, &group));
        CHECK_OK(ep_group_query(group, &info));
        CHECK(info.backend == EP_BACKEND_HOST && strstr(info.reason, "experts"), "%s", info.reason);
        ep_group_destroy(group);
    }
    CHECK(fd >= 0 && read(fd, log, sizeof(log) - 1) > 0, "no log");
    const char *warning = strstr(log, "warn: rank 0: AUTO takes the host backend although a GPU is "
                                      "present: expected a GPU whose blocks have");
    CHECK(warning && !strstr(warning + 20, "libep: warn:"), "%s", log);
    be_quiet();
    unlink(path), close(fd);
    /* The most that fit on an H100. */
    config.num_experts = 5400, config.backend = EP_BACKEND_CUDA;
    REQUIRE_OK(ep_group_create(bootstrap, &config, &group));
    open_handle_with(group, NULL);
    ep_group_destroy(group);
}

/* A valid group that needs more memory than the GPU has is refused, and the GPU then serves a
 * smaller group. */
ThreadTest(gpu_faults, more_memory_than_there_is, 1) {
    Case c = case_complete((Case){.experts = 64, .top_k = EP_MAX_TOP_K, .max_tokens = 1 << 30});
    EpGroupConfig config = case_group_config(&c);
    EpGroupMemory memory = EP_GROUP_MEMORY_INIT;
    EpGroup *group = NULL;
    size_t left = 0, total = 0;
    REQUIRE_CUDA(cudaMemGetInfo(&left, &total));
    REQUIRE_OK(ep_group_memory(&config, 1, &memory));
    if ((size_t)(memory.shared_bytes + memory.private_bytes) < total)
        check_left_out("a GPU has room for the largest group");
    CHECK_STATUS(ep_group_create(bootstrap, &config, &group), EP_ERR_NO_MEMORY);
    CHECK(group == NULL, "a group was made");
    failing_check_next(bootstrap, EP_MODE_THROUGHPUT);
}
