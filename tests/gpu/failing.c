/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/failing.h"

#include "runtime/cuda/cuda.h"

Case failing_case(int ranks, EpMode mode) {
    Case c = {.ranks = ranks, .experts = 3 * ranks, .top_k = 3, .hidden = 72, .max_tokens = 130};
    c.spread = SPREAD_FULL, c.weighted = 1, c.capacity = 1600, c.mode = mode;
    return case_complete(c);
}

void failing_make_plan(DeviceStep *gpu) {
    device_step_issue(gpu,
                      gpu->c.mode == EP_MODE_LATENCY ? STEP_PREPARE | STEP_DISPATCH : STEP_PREPARE);
    device_step_check(gpu);
}

void failing_open(FailingGroup *failing, const EpBootstrap *bootstrap, const Case *c,
                  double seconds) {
    EpGroupConfig config = case_group_config(c);
    config.timeout_seconds = seconds;
    *failing = (FailingGroup){.absent = bootstrap->size - 1};
    failing->group = open_group_with(bootstrap, &config);
    device_step_new(&failing->gpu, failing->group, c, bootstrap->rank);
    device_step_draw(&failing->gpu, c);
    bootstrap->barrier(bootstrap->context, 60); /* no rank is late because of setup */
    failing_make_plan(&failing->gpu);
    if (check_failure()[0]) check_leave();
}

void failing_open_plain(FailingGroup *failing, const EpBootstrap *bootstrap, double seconds) {
    Case c = failing_case(bootstrap->size, EP_MODE_THROUGHPUT);
    failing_open(failing, bootstrap, &c, seconds);
}

void failing_close(FailingGroup *failing) {
    double begin = seconds_now();
    ep_group_destroy(failing->group);
    failing_check_soon(begin);
    device_step_close(&failing->gpu);
}

void failing_call(const DeviceStep *gpu, unsigned ops, EpStatus expected) {
    for (unsigned op = STEP_PREPARE; op <= STEP_COMBINE_WAIT; op <<= 1) {
        EpStatus status = ops & op ? device_step_try(gpu, (StepOp)op) : EP_OK;
        CHECK(status == EP_OK || status == expected, "operation %u: %d: %s", op, (int)status,
              ep_last_error());
    }
    CHECK_CUDA(cudaStreamSynchronize(gpu->stream));
}

void failing_check_soon(double begin) {
    CHECK(seconds_now() - begin < FAILING_LIMIT, "it took %.1f s", seconds_now() - begin);
}

void failing_check_refuses(const FailingGroup *failing, EpStatus status, const char *part) {
    unsigned ops = failing->gpu.c.mode == EP_MODE_LATENCY ? STEP_FORWARD | STEP_PHASES : STEP_ALL;
    CHECK_REFUSED(ep_group_status(failing->group, NULL), status, part);
    for (unsigned op = STEP_PREPARE; op <= STEP_COMBINE_WAIT; op <<= 1)
        if (ops & op) CHECK_REFUSED(device_step_try(&failing->gpu, (StepOp)op), status, part);
}

char *failing_copy_records(const EpGroup *group, size_t *bytes) {
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

int failing_none(const EpBootstrap *bootstrap) {
    int failed = check_failure()[0] != 0, all[EP_MAX_RANKS], sum = 0;
    if (bootstrap->allgather(bootstrap->context, &failed, all, sizeof(failed), 60) != EP_OK)
        return 0;
    for (int32_t r = 0; r < bootstrap->size; r++)
        sum += all[r];
    return sum == 0;
}

void failing_check_next(const EpBootstrap *bootstrap, EpMode mode) {
    FailingGroup failing;
    Case c = failing_case(bootstrap->size, mode);
    failing_open(&failing, bootstrap, &c, 60);
    device_step_issue(&failing.gpu, device_step_all(&c));
    device_step_check(&failing.gpu);
    CHECK_OK(ep_group_status(failing.group, NULL));
    failing_close(&failing);
}
