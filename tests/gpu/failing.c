/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/failing.h"

#include "handles/handle.h"

#include <time.h>

double failing_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- life ---------------------------------------------------------------------------------- */

Case failing_case(int ranks, EpMode mode) {
    return case_complete((Case){.ranks = ranks,
                                .experts = 3 * ranks,
                                .top_k = 3,
                                .hidden = 72,
                                .max_tokens = 130,
                                .spread = SPREAD_FULL,
                                .weighted = 1,
                                .capacity = 1600,
                                .mode = mode});
}

static void make_plan(DeviceStep *gpu) {
    device_step_issue(gpu,
                      gpu->c.mode == EP_MODE_LATENCY ? STEP_PREPARE | STEP_DISPATCH : STEP_PREPARE);
    device_step_check(gpu);
}

bool failing_open(FailingGroup *failing, const EpBootstrap *bootstrap, const Case *c,
                  double seconds) {
    EpGroupConfig config = case_group_config(c);
    config.timeout_seconds = seconds;
    *failing = (FailingGroup){.world = world_new(c), .absent = bootstrap->size - 1};
    if (!CHECK_OK(ep_group_create(bootstrap, &config, &failing->group))) return false;
    device_step_open(&failing->gpu, failing->group, device_step_handle(failing->group, c), c,
                     bootstrap->rank, new_stream(), NULL);
    device_step_load(&failing->gpu, failing->world);
    bootstrap->barrier(bootstrap->context, 60); /* no rank is late because of setup */
    make_plan(&failing->gpu);
    return !check_failure()[0];
}

void failing_close(FailingGroup *failing) {
    double begin = failing_now();
    ep_group_destroy(failing->group);
    CHECK(failing_now() - begin < FAILING_LIMIT, "destroying a failed group took %.1f s",
          failing_now() - begin);
    CHECK_CUDA(cudaStreamDestroy(failing->gpu.stream));
    device_step_close(&failing->gpu);
    world_free(failing->world);
}

char *failing_overwrite(FailingGroup *failing) {
    EpHandleConfig config = case_handle_config(&failing->gpu.c);
    size_t bytes = 0;
    config.max_recv_rows = failing->gpu.c.capacity;
    CHECK_OK(ep_handle_memory(failing->group, &config, &bytes));
    CHECK_OK(ep_handle_create(failing->group, &config, &failing->gpu.step.handle));
    char *memory = failing->gpu.step.handle->own.memory;
    make_plan(&failing->gpu);
    device_step_poison(&failing->gpu);
    CHECK_CUDA(cudaStreamSynchronize(failing->gpu.stream));
    /* cudaMemset returns before the memory is set, and the step's stream does not wait for it. */
    if (failing->gpu.step.rank == failing->absent) CHECK_CUDA(cudaMemset(memory, 0, bytes));
    CHECK_CUDA(cudaDeviceSynchronize());
    return memory;
}

/* ---- calls --------------------------------------------------------------------------------- */

void failing_call(const DeviceStep *gpu, unsigned ops, EpStatus expected) {
    for (unsigned op = STEP_PREPARE; op <= STEP_COMBINE_WAIT; op <<= 1) {
        EpStatus status = ops & op ? device_step_try(gpu, (StepOp)op) : EP_OK;
        CHECK(status == EP_OK || status == expected, "operation %u: %d: %s", op, (int)status,
              ep_last_error());
    }
    CHECK_CUDA(cudaStreamSynchronize(gpu->stream));
}

void failing_check_refuses(const FailingGroup *failing, EpStatus status, const char *part) {
    unsigned ops = failing->gpu.c.mode == EP_MODE_LATENCY ? STEP_FORWARD | STEP_PHASES : STEP_ALL;
    CHECK_REFUSED(ep_group_status(failing->group, NULL), status, part);
    for (unsigned op = STEP_PREPARE; op <= STEP_COMBINE_WAIT; op <<= 1)
        if (ops & op) CHECK_REFUSED(device_step_try(&failing->gpu, (StepOp)op), status, part);
}

void failing_check_next(const EpBootstrap *bootstrap, EpMode mode) {
    FailingGroup failing;
    Case c = failing_case(bootstrap->size, mode);
    if (!failing_open(&failing, bootstrap, &c, 60)) return;
    device_step_issue(&failing.gpu, device_step_all(&c));
    device_step_check(&failing.gpu);
    CHECK_OK(ep_group_status(failing.group, NULL));
    failing_close(&failing);
}
