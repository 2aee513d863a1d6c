/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that stop, make another call or need too much memory. Calls on GPUs return before they are
 * done; ep_group_status reports their errors. In each case every rank ends soon, and its GPU serves
 * the next group. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/cuda/cuda.h"
#include "tests/gpu/failing.h"

/* Failed groups log a warning. */
static void silence_log(void) {
    setenv("LIBEP_LOG_FILE", "/dev/null", 1);
}

TestSuite(gpu_faults, .init = silence_log);

static const StepOp all_ops[] = {STEP_PREPARE, STEP_DISPATCH, STEP_COMBINE, STEP_COMBINE_BACKWARD,
                                 STEP_DISPATCH_BACKWARD};

static bool open_failing(FailingGroup *failing, const EpBootstrap *bootstrap, double seconds) {
    Case c = failing_case(bootstrap->size, EP_MODE_THROUGHPUT);
    return failing_open(failing, bootstrap, &c, seconds);
}

/* ---- a peer that stops --------------------------------------------------------------------- */

/* Enqueue the calls of two steps before the first wait expires. All end when the first one ends. */
static void enqueue_two_steps(const DeviceStep *gpu) {
    for (int i = 0; i < 8; i++) {
        EpStatus status = device_step_try(gpu, all_ops[1 + i % 4]);
        CHECK(status == EP_OK || status == EP_ERR_TIMEOUT, "%d: %s", (int)status, ep_last_error());
    }
    CHECK_CUDA(cudaStreamSynchronize(gpu->stream));
}

static void check_blames(const FailingGroup *failing) {
    char peer[32], self[32];
    EpFinding found = EP_FINDING_INIT;
    snprintf(peer, sizeof(peer), "rank %d", failing->absent);
    snprintf(self, sizeof(self), "rank %d", failing->gpu.step.rank);
    CHECK_REFUSED(ep_group_status(failing->group, &found), EP_ERR_TIMEOUT, self, peer, "dispatch");
    CHECK(found.status == EP_ERR_TIMEOUT && found.peer == failing->absent, "peer %d", found.peer);
    CHECK(found.rank == failing->gpu.step.rank, "rank %d", found.rank);
    CHECK(strcmp(found.phase, "dispatch") == 0, "%s", found.phase);
    CHECK(!strstr(ep_last_error(), "row"), "an arrival concerns no row: %s", ep_last_error());
    failing_check_refuses(failing, EP_ERR_TIMEOUT, peer);
}

/* The absent rank calls after the others timed out: it fails at once, and its error names the rank
 * that they gave up on. */
static void check_latecomer(const FailingGroup *failing) {
    char blamed[48];
    EpFinding found = EP_FINDING_INIT;
    snprintf(blamed, sizeof(blamed), "because of rank %d", failing->absent);
    CHECK_OK(device_step_try(&failing->gpu, STEP_DISPATCH));
    CHECK_CUDA(cudaStreamSynchronize(failing->gpu.stream));
    CHECK_REFUSED(ep_group_status(failing->group, &found), EP_ERR_PEER, "given up", blamed);
    CHECK(found.peer == failing->absent, "peer %d", found.peer);
}

/* All ranks but rank 0 start `later` seconds late, which is less than the timeout. */
static void stopped_peer(const EpBootstrap *bootstrap, double later) {
    FailingGroup failing;
    REQUIRE(open_failing(&failing, bootstrap, FAILING_TIMEOUT), "no group");
    if (bootstrap->rank != failing.absent) {
        if (bootstrap->rank > 0) usleep((useconds_t)(1e6 * later));
        double begin = failing_now();
        enqueue_two_steps(&failing.gpu);
        CHECK(failing_now() - begin > 0.8 * FAILING_TIMEOUT, "gave up after %.2f s",
              failing_now() - begin);
        CHECK(failing_now() - begin < FAILING_LIMIT, "gave up after %.2f s", failing_now() - begin);
        check_blames(&failing);
    }
    bootstrap->barrier(bootstrap->context, 60);
    if (bootstrap->rank == failing.absent) check_latecomer(&failing);
    failing_close(&failing);
    failing_check_next(bootstrap, EP_MODE_THROUGHPUT);
}

ThreadTest(gpu_faults, stopped_peer_2, 2) {
    stopped_peer(bootstrap, 0);
}
ThreadTest(gpu_faults, stopped_peer_4, 4) {
    stopped_peer(bootstrap, 0);
}

/* Rank 0 times out first, before the others give up. It took part, so they must not blame it. */
ThreadTest(gpu_faults, stopped_peer_and_late_ones_4, 4) {
    stopped_peer(bootstrap, FAILING_TIMEOUT / 3);
}

/* Returns a copy of the heads and records that other ranks store in this one's window. */
static char *copy_records(const EpGroup *group, size_t *bytes) {
    const EpCuda *cuda = ep_cuda(group);
    const EpWindowLayout *l = &cuda->device.layout;
    size_t heads = (size_t)(l->credit - l->head), records = (size_t)(l->bytes - l->ring);
    char *copy = malloc(heads + records);
    if (!copy) abort();
    *bytes = heads + records;
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(cudaMemcpy(copy, cuda->own.memory + l->head, heads, cudaMemcpyDeviceToHost));
    CHECK_CUDA(
        cudaMemcpy(copy + heads, cuda->own.memory + l->ring, records, cudaMemcpyDeviceToHost));
    return copy;
}

/* Whoever waits for a rank stores no row there, since the rank may still be in the operation
 * before; nor once the wait has failed. */
static void nothing_stored(const EpBootstrap *bootstrap, StepOp op) {
    FailingGroup failing;
    size_t bytes;
    REQUIRE(open_failing(&failing, bootstrap, FAILING_TIMEOUT), "no group");
    failing_call(&failing.gpu, STEP_DISPATCH, EP_OK);
    bootstrap->barrier(bootstrap->context, 60);
    char *before = copy_records(failing.group, &bytes);
    bootstrap->barrier(bootstrap->context, 60);
    if (bootstrap->rank != failing.absent) {
        failing_call(&failing.gpu, op, EP_OK);
        CHECK_STATUS(ep_group_status(failing.group, NULL), EP_ERR_TIMEOUT);
    }
    bootstrap->barrier(bootstrap->context, 60);
    char *after = copy_records(failing.group, &bytes);
    if (bootstrap->rank == failing.absent)
        CHECK(!memcmp(before, after, bytes), "rows or heads were stored");
    free(before), free(after);
    failing_close(&failing);
}

ThreadTest(gpu_faults, nothing_stored_by_dispatch_2, 2) {
    nothing_stored(bootstrap, STEP_DISPATCH);
}
ThreadTest(gpu_faults, nothing_stored_by_combine_2, 2) {
    nothing_stored(bootstrap, STEP_COMBINE);
}
ThreadTest(gpu_faults, nothing_stored_by_combine_backward_4, 4) {
    nothing_stored(bootstrap, STEP_COMBINE_BACKWARD);
}
ThreadTest(gpu_faults, nothing_stored_by_dispatch_backward_2, 2) {
    nothing_stored(bootstrap, STEP_DISPATCH_BACKWARD);
}

/* ---- another order ------------------------------------------------------------------------- */

/* Every rank gets the error long before the timeout. */
static void check_order(const FailingGroup *failing, EpStatus status, double begin) {
    CHECK(status == EP_OK || status == EP_ERR_ORDER, "%d: %s", (int)status, ep_last_error());
    CHECK_CUDA(cudaStreamSynchronize(failing->gpu.stream));
    CHECK(failing_now() - begin < FAILING_LIMIT, "it took %.1f s", failing_now() - begin);
    failing_check_refuses(failing, EP_ERR_ORDER, "rank");
}

static void other_operations(const EpBootstrap *bootstrap) {
    static const StepOp calls[][2] = {{STEP_DISPATCH, STEP_COMBINE},
                                      {STEP_COMBINE, STEP_DISPATCH_BACKWARD},
                                      {STEP_COMBINE_BACKWARD, STEP_PREPARE}};
    for (int i = 0; i < 3; i++) {
        FailingGroup failing;
        check_note("pair %d", i);
        REQUIRE(open_failing(&failing, bootstrap, 2 * FAILING_LIMIT), "no group");
        double begin = failing_now();
        StepOp op = calls[i][bootstrap->rank == failing.absent];
        check_order(&failing, device_step_try(&failing.gpu, op), begin);
        failing_close(&failing);
    }
    failing_check_next(bootstrap, EP_MODE_THROUGHPUT);
}

ThreadTest(gpu_faults, other_operations_2, 2) {
    other_operations(bootstrap);
}
ThreadTest(gpu_faults, other_operations_4, 4) {
    other_operations(bootstrap);
}

/* One rank makes the same call on a handle of equal configuration with another id. */
static void other_handles(const EpBootstrap *bootstrap) {
    FailingGroup failing;
    REQUIRE(open_failing(&failing, bootstrap, 2 * FAILING_LIMIT), "no group");
    Case c = failing.gpu.c;
    c.id = bootstrap->rank == failing.absent ? EP_MAX_HANDLE_ID : 1;
    DeviceStep gpu = failing.gpu;
    gpu.step.handle = device_step_handle(failing.group, &c);
    double begin = failing_now();
    check_order(&failing, device_step_try(&gpu, STEP_PREPARE), begin);
    CHECK(strstr(ep_last_error(), "id differs") && strstr(ep_last_error(), "has 4095") &&
              strstr(ep_last_error(), "has 1"),
          "%s", ep_last_error());
    failing_close(&failing);
}

ThreadTest(gpu_faults, other_handles_2, 2) {
    other_handles(bootstrap);
}
ThreadTest(gpu_faults, other_handles_4, 4) {
    other_handles(bootstrap);
}

/* ---- memory -------------------------------------------------------------------------------- */

/* The rank whose memory was overwritten gets the reason and writes nothing; the others do not wait
 * for it. */
static void check_overwritten(FailingGroup *failing, StepOp op) {
    char blamed[48];
    int is_mine = failing->gpu.step.rank == failing->absent;
    EpStatus expected = is_mine ? EP_ERR_NOT_PREPARED : EP_ERR_PEER;
    double begin = failing_now();
    snprintf(blamed, sizeof(blamed), "rank %d", failing->absent);
    EpStatus status = device_step_try(&failing->gpu, op);
    CHECK(status == EP_OK || status == expected, "%d: %s", (int)status, ep_last_error());
    CHECK_CUDA(cudaStreamSynchronize(failing->gpu.stream));
    CHECK(failing_now() - begin < FAILING_LIMIT, "it took %.1f s", failing_now() - begin);
    CHECK_REFUSED(ep_group_status(failing->group, NULL), expected, blamed,
                  is_mine ? "other bytes" : "given up");
    if (is_mine) device_step_check(&failing->gpu);
}

static void overwritten_memory(const EpBootstrap *bootstrap) {
    static const StepOp ops[] = {STEP_DISPATCH, STEP_COMBINE, STEP_COMBINE_BACKWARD};
    for (int i = 0; i < 3; i++) {
        FailingGroup failing;
        check_note("operation %d", (int)ops[i]);
        REQUIRE(open_failing(&failing, bootstrap, 2 * FAILING_LIMIT), "no group");
        (void)failing_overwrite(&failing);
        bootstrap->barrier(bootstrap->context, 60);
        check_overwritten(&failing, ops[i]);
        bootstrap->barrier(bootstrap->context, 60);
        failing_close(&failing);
    }
    failing_check_next(bootstrap, EP_MODE_THROUGHPUT);
}

ThreadTest(gpu_faults, overwritten_memory_2, 2) {
    overwritten_memory(bootstrap);
}
ThreadTest(gpu_faults, overwritten_memory_4, 4) {
    overwritten_memory(bootstrap);
}

/* ep_prepare has tables of experts in shared memory. A group with more experts than fit is refused
 * before it exists, and where the program leaves the choice, the host backend serves it. */
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
    setenv("LIBEP_LOG_FILE", "/dev/null", 1);
    unlink(path), close(fd);
    /* The most that fit on an H100. */
    config.num_experts = 5400, config.backend = EP_BACKEND_CUDA;
    REQUIRE_OK(ep_group_create(bootstrap, &config, &group));
    EpHandle *handle = NULL;
    REQUIRE_OK(ep_handle_create(group, NULL, &handle));
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
    if ((size_t)(memory.shared_bytes + memory.private_bytes) < total) {
        check_left_out("a GPU has room for the largest group");
        return;
    }
    CHECK_STATUS(ep_group_create(bootstrap, &config, &group), EP_ERR_NO_MEMORY);
    CHECK(group == NULL, "a group was made");
    failing_check_next(bootstrap, EP_MODE_THROUGHPUT);
}
