/* SPDX-License-Identifier: Apache-2.0 */
/* ep_group_abort while kernels wait on streams, with other work behind them, and while a stream is
 * being captured. */
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/gpu/devices.h"
#include "tests/gpu/failing.h"

#define WHY "the watchdog has had enough"

/* Failed groups log a warning. */
static void silence_log(void) {
    setenv("LIBEP_LOG_FILE", "/dev/null", 1);
}

TestSuite(gpu_abort, .init = silence_log);

static void *abort_main(void *group) {
    return ep_group_abort(group, WHY) == EP_OK ? group : NULL;
}

/* Abort the group from another thread, whose current device is not the group's, while this one
 * captures a stream. The capture must survive. */
static void abort_while_capturing(const FailingGroup *failing) {
    pthread_t thread;
    void *done = NULL;
    cudaGraph_t graph = NULL;
    cudaStream_t captured = new_stream();
    CHECK_CUDA(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
    REQUIRE(!pthread_create(&thread, NULL, abort_main, failing->group), "no thread");
    pthread_join(thread, &done);
    CHECK(done != NULL, "the abort failed");
    CHECK_CUDA(cudaStreamEndCapture(captured, &graph));
    if (graph) CHECK_CUDA(cudaGraphDestroy(graph));
    CHECK_CUDA(cudaStreamDestroy(captured));
}

/* Enqueue an operation that waits for the absent rank, another one behind it, and copies that wait
 * for both. */
static void enqueue(const FailingGroup *failing, StepOp op) {
    const DeviceStep *gpu = &failing->gpu;
    CHECK_OK(device_step_try(gpu, op));
    CHECK_OK(device_step_try(gpu, op));
    CHECK_CUDA(cudaMemcpyAsync(gpu->got, gpu->device, 64, cudaMemcpyDeviceToHost, gpu->stream));
    CHECK_CUDA(cudaMemcpyAsync(gpu->device, gpu->inputs, 64, cudaMemcpyHostToDevice, gpu->stream));
}

static void aborted(const EpBootstrap *bootstrap, EpMode mode, StepOp op) {
    FailingGroup failing;
    Case c = failing_case(bootstrap->size, mode);
    REQUIRE(failing_open(&failing, bootstrap, &c, 2 * FAILING_LIMIT), "no group");
    double begin = failing_now();
    if (bootstrap->rank != failing.absent) {
        EpStatus expected = bootstrap->rank ? EP_ERR_PEER : EP_ERR_ABORTED;
        enqueue(&failing, op);
        usleep(100000);
        CHECK(cudaStreamQuery(failing.gpu.stream) == cudaErrorNotReady, "nothing waits");
        (void)cudaGetLastError();
        bootstrap->barrier(bootstrap->context, 60);
        if (bootstrap->rank == 0) abort_while_capturing(&failing);
        CHECK_CUDA(cudaStreamSynchronize(failing.gpu.stream));
        CHECK_REFUSED(ep_group_status(failing.group, NULL), expected, "rank 0", WHY);
        failing_check_refuses(&failing, expected, WHY);
    } else {
        bootstrap->barrier(bootstrap->context, 60);
    }
    CHECK(failing_now() - begin < FAILING_LIMIT, "it took %.1f s", failing_now() - begin);
    bootstrap->barrier(bootstrap->context, 60);
    failing_close(&failing);
    failing_check_next(bootstrap, mode);
}

ThreadTest(gpu_abort, dispatch_2, 2) {
    aborted(bootstrap, EP_MODE_THROUGHPUT, STEP_DISPATCH);
}
ThreadTest(gpu_abort, combine_4, 4) {
    aborted(bootstrap, EP_MODE_THROUGHPUT, STEP_COMBINE);
}
ThreadTest(gpu_abort, prepare_4, 4) {
    aborted(bootstrap, EP_MODE_THROUGHPUT, STEP_PREPARE);
}
ThreadTest(gpu_abort, dispatch_in_latency_mode_4, 4) {
    GPU_NEEDS_LATENCY();
    aborted(bootstrap, EP_MODE_LATENCY, STEP_DISPATCH);
}
ThreadTest(gpu_abort, combine_in_latency_mode_2, 2) {
    GPU_NEEDS_LATENCY();
    aborted(bootstrap, EP_MODE_LATENCY, STEP_COMBINE);
}
