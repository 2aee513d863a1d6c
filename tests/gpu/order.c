/* SPDX-License-Identifier: Apache-2.0 */
/* The order of calls on several streams, with captures in between; and what the host knows of
 * prepares that were captured, or were brought back. */
#include <string.h>

#include "tests/gpu/arena.h"
#include "tests/gpu/crew.h"

static cudaStream_t begin_capture(void) {
    cudaStream_t stream = new_stream();
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    return stream;
}

static void end_capture(cudaStream_t stream) {
    cudaGraph_t graph = NULL;
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    if (graph) CHECK_CUDA(cudaGraphDestroy(graph));
    CHECK_CUDA(cudaStreamDestroy(stream));
}

/* Calls on one stream after the other; between them one that is captured, and never run. */
static void capture_between(const EpBootstrap *bootstrap) {
    Crew crew;
    Case c = crew_case(bootstrap->size, EP_MODE_THROUGHPUT);
    REQUIRE(crew_open(&crew, bootstrap, &c, CREW_LATE), "no group");
    cudaStream_t stream[] = {new_stream(), new_stream()};
    for (int round = 0; round < 20 && !check_failure()[0]; round++) {
        Rig rig = crew.rig;
        rig.stream = stream[0];
        CHECK_OK(rig_try(&rig, RIG_DISPATCH));
        rig.stream = begin_capture();
        CHECK_OK(rig_try(&rig, RIG_COMBINE));
        end_capture(rig.stream);
        rig.stream = stream[1];
        CHECK_OK(rig_try(&rig, RIG_COMBINE));
        for (int i = 0; i < 2; i++)
            CHECK_CUDA(cudaStreamSynchronize(stream[i]));
        CHECK_OK(ep_group_status(crew.group, NULL));
    }
    for (int i = 0; i < 2; i++)
        CHECK_CUDA(cudaStreamDestroy(stream[i]));
    crew_close(&crew);
}

ThreadTest(gpu_order, capture_between_1, 1) {
    capture_between(bootstrap);
}
ThreadTest(gpu_order, capture_between_2, 2) {
    capture_between(bootstrap);
}

/* A prepare that is captured but not replayed makes no step, nor is one waited for. */
ThreadTest(gpu_order, captured_prepare, 1) {
    Crew crew;
    Case c = crew_case(bootstrap->size, EP_MODE_THROUGHPUT);
    REQUIRE(crew_open(&crew, bootstrap, &c, CREW_LATE), "no group");
    const EpHandle *handle = crew.rig.step.handle;
    for (int i = 0; i < 3; i++) {
        EpHandleInfo before = EP_HANDLE_INFO_INIT, after = before;
        Rig rig = crew.rig;
        CHECK_OK(ep_handle_info(handle, &before));
        rig.stream = begin_capture();
        CHECK_OK(rig_try(&rig, RIG_PREPARE));
        end_capture(rig.stream);
        CHECK_OK(ep_handle_info(handle, &after));
        CHECK(after.step == before.step, "step %lld", (long long)after.step);
        CHECK_OK(rig_try(&crew.rig, RIG_PREPARE));
        CHECK_CUDA(cudaStreamSynchronize(crew.rig.stream));
        CHECK_OK(ep_handle_info(handle, &after));
        CHECK(after.step == before.step + 1, "step %lld", (long long)after.step);
    }
    crew_close(&crew);
}

/* What another call of CUDA's has found to fail is no launch's failure. */
ThreadTest(gpu_order, failure_of_another_call, 2) {
    Crew crew;
    Case c = crew_case(bootstrap->size, EP_MODE_THROUGHPUT);
    void *none = NULL;
    REQUIRE(crew_open(&crew, bootstrap, &c, CREW_LATE), "no group");
    if (bootstrap->rank == 0)
        CHECK(cudaMalloc(&none, (size_t)1 << 50) != cudaSuccess, "a petabyte was there");
    crew_call(&crew.rig, RIG_PREPARE | RIG_DISPATCH | RIG_COMBINE, EP_OK);
    CHECK_OK(ep_group_status(crew.group, NULL));
    (void)cudaGetLastError();
    crew_close(&crew);
}

/* A rank that has not asked what became of its operations leaves a failed group at once. */
ThreadTest(gpu_order, destroyed_unasked, 2) {
    Crew crew;
    Case c = crew_case(bootstrap->size, EP_MODE_THROUGHPUT);
    REQUIRE(crew_open(&crew, bootstrap, &c, CREW_LATE), "no group");
    CHECK_OK(rig_try(&crew.rig, bootstrap->rank ? RIG_COMBINE : RIG_DISPATCH));
    CHECK_CUDA(cudaStreamSynchronize(crew.rig.stream));
    if (bootstrap->rank == 0) CHECK_STATUS(ep_group_status(crew.group, NULL), EP_ERR_ORDER);
    bootstrap->barrier(bootstrap->context, 60);
    double begin = crew_now();
    crew_close(&crew);
    CHECK(crew_now() - begin < CREW_LATE / 2, "it took %.1f s", crew_now() - begin);
}

/* ---- a plan that is brought back ---- */

static EpHandleInfo prepare(EpHandle *handle, cudaStream_t stream, int32_t *index, int tokens) {
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    for (int i = 0; i < 3 * tokens; i++)
        index[i] = i % 3 + 3 * (i / 3 % 2);
    EpTensor topk_idx = ep_tensor_2d(index, EP_TYPE_INT32, tokens, 3);
    CHECK_OK(ep_prepare(handle, &topk_idx, NULL, stream, NULL));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    CHECK_OK(ep_handle_info(handle, &info));
    return info;
}

static void copy(void *to, const void *from, size_t bytes) {
    CHECK_CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
    CHECK_CUDA(cudaDeviceSynchronize());
}

/* All numbers are those of the step whose plan it is. */
ThreadTest(gpu_order, restored_numbers, 2) {
    Crew crew;
    Case c = crew_case(bootstrap->size, EP_MODE_THROUGHPUT);
    EpHandleConfig config = case_handle_config(&c);
    EpHandle *handle = NULL;
    size_t bytes = 0;
    void *memory = NULL, *saved = NULL;
    REQUIRE(crew_open(&crew, bootstrap, &c, CREW_LATE), "no group");
    config.max_recv_rows = c.capacity;
    REQUIRE_OK(ep_handle_memory(crew.group, &config, &bytes));
    REQUIRE_CUDA(cudaMalloc(&memory, bytes));
    REQUIRE_CUDA(cudaMalloc(&saved, bytes));
    REQUIRE_OK(ep_handle_create(crew.group, &config, memory, bytes, &handle));
    int32_t *index = gpu_allocate_zeroed(3 * 60, sizeof(*index));
    EpHandleInfo first = prepare(handle, crew.rig.stream, index, 40);
    copy(saved, memory, bytes);
    EpHandleInfo second = prepare(handle, crew.rig.stream, index, 10), back = EP_HANDLE_INFO_INIT;
    copy(memory, saved, bytes);
    CHECK_OK(ep_handle_bind(handle, memory, bytes));
    CHECK_OK(ep_handle_info(handle, &back));
    CHECK(second.local_rows != first.local_rows, "%lld rows", (long long)first.local_rows);
    CHECK(back.step == first.step && back.num_tokens == first.num_tokens &&
              back.recv_rows == first.recv_rows && back.local_rows == first.local_rows &&
              back.remote_rows_sent == first.remote_rows_sent &&
              back.remote_rows_received == first.remote_rows_received,
          "step %lld: %lld, %lld, %lld", (long long)back.step, (long long)back.local_rows,
          (long long)back.remote_rows_sent, (long long)back.remote_rows_received);
    gpu_release(index);
    ep_handle_destroy(handle);
    CHECK_CUDA(cudaFree(memory));
    CHECK_CUDA(cudaFree(saved));
    crew_close(&crew);
}
