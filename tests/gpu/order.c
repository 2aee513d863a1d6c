/* SPDX-License-Identifier: Apache-2.0 */
/* The order of calls on several streams with captures in between, and what the host knows of plans
 * that were captured or restored. */
#include "tests/gpu/failing.h"

/* Capture a call, and never run it. */
static void capture_only(DeviceStep gpu, StepOp op) {
    gpu.stream = new_stream();
    graph_begin(gpu.stream);
    CHECK_OK(device_step_try(&gpu, op));
    graph_discard(gpu.stream);
    CHECK_CUDA(cudaStreamDestroy(gpu.stream));
}

/* Make calls on two streams by turns. Between them a call is captured and never run. */
static void capture_between(const EpBootstrap *bootstrap) {
    FailingGroup failing;
    failing_open_plain(&failing, bootstrap, FAILING_LIMIT);
    cudaStream_t stream[] = {new_stream(), new_stream()};
    for (int round = 0; round < 20 && !check_failure()[0]; round++) {
        DeviceStep gpu = failing.gpu;
        gpu.stream = stream[0];
        CHECK_OK(device_step_try(&gpu, STEP_DISPATCH));
        capture_only(gpu, STEP_COMBINE);
        gpu.stream = stream[1];
        CHECK_OK(device_step_try(&gpu, STEP_COMBINE));
        for (int i = 0; i < 2; i++)
            CHECK_CUDA(cudaStreamSynchronize(stream[i]));
        CHECK_OK(ep_group_status(failing.group, NULL));
    }
    for (int i = 0; i < 2; i++)
        CHECK_CUDA(cudaStreamDestroy(stream[i]));
    failing_close(&failing);
}

RankTest(gpu_order, capture_between_1, 1, capture_between(bootstrap));
RankTest(gpu_order, capture_between_2, 2, capture_between(bootstrap));

/* A prepare that is captured but not replayed does not count as a step, and ep_handle_info does
 * not wait for it. */
ThreadTest(gpu_order, captured_prepare, 1) {
    FailingGroup failing;
    failing_open_plain(&failing, bootstrap, FAILING_LIMIT);
    const EpHandle *handle = failing.gpu.step.handle;
    for (int i = 0; i < 3; i++) {
        EpHandleInfo before = EP_HANDLE_INFO_INIT, after = before;
        CHECK_OK(ep_handle_info(handle, &before));
        capture_only(failing.gpu, STEP_PREPARE);
        CHECK_OK(ep_handle_info(handle, &after));
        CHECK(after.step == before.step, "step %lld", (long long)after.step);
        CHECK_OK(device_step_try(&failing.gpu, STEP_PREPARE));
        CHECK_CUDA(cudaStreamSynchronize(failing.gpu.stream));
        CHECK_OK(ep_handle_info(handle, &after));
        CHECK(after.step == before.step + 1, "step %lld", (long long)after.step);
    }
    failing_close(&failing);
}

/* The error of an earlier CUDA call by the caller is not taken for a launch failure. */
ThreadTest(gpu_order, failure_of_another_call, 2) {
    FailingGroup failing;
    void *none = NULL;
    failing_open_plain(&failing, bootstrap, FAILING_LIMIT);
    if (bootstrap->rank == 0)
        CHECK(cudaMalloc(&none, (size_t)1 << 50) != cudaSuccess, "a petabyte was there");
    failing_call(&failing.gpu, STEP_PREPARE | STEP_DISPATCH | STEP_COMBINE, EP_OK);
    CHECK_OK(ep_group_status(failing.group, NULL));
    (void)cudaGetLastError();
    failing_close(&failing);
}

/* A rank can destroy a failed group at once without querying its status first. */
ThreadTest(gpu_order, destroyed_unasked, 2) {
    FailingGroup failing;
    failing_open_plain(&failing, bootstrap, FAILING_LIMIT);
    CHECK_OK(device_step_try(&failing.gpu, bootstrap->rank ? STEP_COMBINE : STEP_DISPATCH));
    CHECK_CUDA(cudaStreamSynchronize(failing.gpu.stream));
    if (bootstrap->rank == 0) CHECK_STATUS(ep_group_status(failing.group, NULL), EP_ERR_ORDER);
    bootstrap->barrier(bootstrap->context, 60);
    double begin = seconds_now();
    failing_close(&failing);
    CHECK(seconds_now() - begin < FAILING_LIMIT / 2, "it took %.1f s", seconds_now() - begin);
}
