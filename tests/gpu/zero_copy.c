/* SPDX-License-Identifier: Apache-2.0 */
/* Buffers that peers can reach (ep_mem_alloc) give the same bytes as plain device memory, with
 * staging or zero-copy receive, also if only some ranks or some buffers are reachable. */
#include <string.h>

#include "tests/cases/run.h"
#include "tests/gpu/device_step.h"
#include "tests/gpu/devices.h"

static void reserve(void) {
    gpu_reserve((size_t)640 << 20);
}

TestSuite(gpu_zero_copy, .init = reserve);

enum { CASES = 15 };

/* All layouts, with and without weights and scales; some overflow, some are quantised. */
static Case draw_case(int ranks, int i) {
    int weighted = i / 3 % 2, tight = i / 6 == 1, quantised = i >= 12;
    return case_complete((Case){.ranks = ranks,
                                .experts = 4 * ranks + 3,
                                .top_k = 5,
                                .hidden = quantised ? 256 : 264,
                                .max_tokens = 293,
                                .masked_percent = 5,
                                .weighted = weighted,
                                .scale_bytes = weighted ? 12 : 0,
                                .alignment = 8,
                                .capacity = tight ? 700 : 2500,
                                .rows_per_expert = tight ? 72 : 320,
                                .overflow = EP_OVERFLOW_DROP,
                                .layout = (EpLayout)(1 + i % 3),
                                .quant = quantised ? (EpQuant)(i - 10) : EP_QUANT_NONE,
                                .scale_order = (EpScaleOrder)(1 + i % 2),
                                .counted = 1,
                                .seed = (uint64_t)i});
}

/* Plain memory on all ranks, reachable memory on all ranks, reachable memory on even ranks only. */
enum { PLAIN, REACHABLE, MIXED, MEMORIES };

static void check_equal(const DeviceStep *a, const DeviceStep *b) {
    for (int i = 0; i < STEP_OUTPUTS; i++) {
        Image left = device_step_output(a, (StepOutput)i),
              right = device_step_output(b, (StepOutput)i);
        image_check_equal(&left, &right, 0, "plain and reachable memory");
    }
}

static void run_case_in(DeviceStep *gpu, EpGroup *group, const World *world, int rank,
                        cudaStream_t stream, void *memory) {
    EpHandle *handle = device_step_handle(group, &world->c);
    device_step_open(gpu, group, handle, &world->c, rank, stream, memory);
    device_step_load(gpu, world);
    device_step_issue(gpu, STEP_ALL);
    device_step_check(gpu);
    CHECK_OK(ep_group_status(group, NULL));
    ep_handle_destroy(handle);
}

static void compare_memories(EpGroup *group, const Case *c, int rank, void *reachable) {
    DeviceStep gpu[MEMORIES];
    World *world = world_new(c);
    cudaStream_t stream = new_stream();
    void *memory[MEMORIES] = {NULL, reachable, rank % 2 ? NULL : reachable};
    for (int i = 0; i < MEMORIES; i++) {
        check_note("memory %d: %s", i, case_describe(c));
        run_case_in(&gpu[i], group, world, rank, stream, memory[i]);
    }
    check_equal(&gpu[PLAIN], &gpu[REACHABLE]);
    check_equal(&gpu[PLAIN], &gpu[MIXED]);
    for (int i = 0; i < MEMORIES; i++)
        device_step_close(&gpu[i]);
    CHECK_CUDA(cudaStreamDestroy(stream));
    world_free(world);
}

static size_t most_bytes(int ranks) {
    size_t most = 0;
    for (int i = 0; i < CASES; i++) {
        Case c = draw_case(ranks, i);
        if (device_step_bytes(&c) > most) most = device_step_bytes(&c);
    }
    return most;
}

static void zero_copy(const EpBootstrap *bootstrap) {
    Case widest = draw_case(bootstrap->size, 3);
    EpGroup *group = open_group(bootstrap, &widest);
    void *reachable = NULL;
    REQUIRE(group, "no group");
    REQUIRE_OK(ep_mem_alloc(group, most_bytes(bootstrap->size), &reachable));
    for (int i = 0; i < CASES; i++) {
        Case c = draw_case(bootstrap->size, i);
        compare_memories(group, &c, bootstrap->rank, reachable);
    }
    CHECK_OK(ep_mem_free(group, reachable));
    ep_group_destroy(group);
}

ThreadTest(gpu_zero_copy, as_staged_1, 1) {
    zero_copy(bootstrap);
}
ThreadTest(gpu_zero_copy, as_staged_2, 2) {
    zero_copy(bootstrap);
}
ThreadTest(gpu_zero_copy, as_staged_4, 4) {
    zero_copy(bootstrap);
}

/* ---- receive tensors without rows ---------------------------------------------------------- */

enum { TOKENS = 37, HIDDEN = 24, ROW_BYTES = 2 * HIDDEN };

/* Every token goes to one expert of rank `target`. Each rank sends rows of a byte of its own, so
 * the target's rows have these bytes in the order of the ranks. */
static void send_to(const EpBootstrap *bootstrap, EpHandle *handle, int target, int32_t *index,
                    char *tokens, char *window) {
    int rank = bootstrap->rank, ranks = bootstrap->size;
    EpTensor choices = ep_tensor_2d(index, EP_TYPE_INT32, TOKENS, 1),
             rows = ep_tensor_2d(tokens, EP_TYPE_BF16, TOKENS, HIDDEN);
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    int32_t host[TOKENS];
    for (int i = 0; i < TOKENS; i++)
        host[i] = 2 * target + 1;
    CHECK_CUDA(cudaMemcpy(index, host, sizeof(host), cudaMemcpyDefault));
    CHECK_CUDA(cudaMemset(tokens, 1 + rank, (size_t)TOKENS * ROW_BYTES));
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_OK(ep_prepare(handle, NULL, &choices, NULL, NULL, NULL));
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_OK(ep_handle_info(handle, &info));
    CHECK(info.recv_rows == (rank == target ? ranks * TOKENS : 0), "%lld rows",
          (long long)info.recv_rows);
    EpTensor received = ep_tensor_2d(window, EP_TYPE_BF16, info.recv_rows, HIDDEN);
    CHECK_OK(ep_dispatch(handle, NULL, NULL, &rows, NULL, NULL, NULL, &received, NULL, NULL, NULL));
    CHECK_CUDA(cudaDeviceSynchronize());
}

static void check_rows(const char *window, int64_t rows) {
    size_t bytes = (size_t)rows * ROW_BYTES;
    char *got = gpu_allocate_zeroed(1, bytes + 1);
    CHECK_CUDA(cudaMemcpy(got, window, bytes, cudaMemcpyDefault));
    for (size_t i = 0; i < bytes; i++)
        if (got[i] != 1 + (char)(i / ((size_t)TOKENS * ROW_BYTES)))
            CHECK(0, "byte %zu is %d", i, got[i]);
    gpu_release(got);
}

/* With exact sizing, a rank that gets nothing names a tensor of no rows, in a window all the same.
 */
static void no_rows(const EpBootstrap *bootstrap) {
    Case c = case_complete((Case){.ranks = (int)bootstrap->size, .top_k = 1, .max_tokens = TOKENS});
    EpGroup *group = open_group(bootstrap, &c);
    EpHandle *handle = group ? open_handle(group, &c) : NULL;
    int32_t *index = NULL;
    void *tokens = NULL, *window = NULL;
    REQUIRE(handle, "no handle");
    REQUIRE_CUDA(cudaMalloc((void **)&index, sizeof(*index) * TOKENS));
    REQUIRE_CUDA(cudaMalloc(&tokens, (size_t)TOKENS * ROW_BYTES));
    REQUIRE_OK(ep_mem_alloc(group, (size_t)(c.ranks * TOKENS * ROW_BYTES), &window));
    for (int target = 0; target < c.ranks; target++) {
        send_to(bootstrap, handle, target, index, tokens, window);
        REQUIRE_OK(ep_group_status(group, NULL));
        if (target == bootstrap->rank) check_rows(window, (int64_t)c.ranks * TOKENS);
    }
    ep_handle_destroy(handle);
    ep_group_destroy(group);
    CHECK_CUDA(cudaFree(index));
    CHECK_CUDA(cudaFree(tokens));
}

ThreadTest(gpu_zero_copy, no_rows_2, 2) {
    no_rows(bootstrap);
}
ThreadTest(gpu_zero_copy, no_rows_4, 4) {
    no_rows(bootstrap);
}

/* ---- allocation ---------------------------------------------------------------------------- */

/* Allocate device memory and check that it is aligned and zeroed. */
static void *take_zeroed(EpGroup *group, size_t bytes) {
    void *memory = NULL;
    char *copy = gpu_allocate_zeroed(1, bytes);
    if (!CHECK_OK(ep_mem_alloc(group, bytes, &memory))) return NULL;
    CHECK((uintptr_t)memory % 128 == 0, "memory at %p", memory);
    memset(copy, 0x77, bytes);
    CHECK_CUDA(cudaMemcpy(copy, memory, bytes, cudaMemcpyDefault));
    for (size_t i = 0; i < bytes; i++)
        if (copy[i]) CHECK(copy[i] == 0, "byte %zu is %d", i, copy[i]);
    CHECK_CUDA(cudaMemset(memory, 0x5a, bytes));
    gpu_release(copy);
    return memory;
}

/* Sizes may differ between ranks, refused calls change nothing, and freed memory can be allocated
 * again, zeroed. */
static void come_and_go(const EpBootstrap *bootstrap) {
    Case c = draw_case(bootstrap->size, 0);
    EpGroup *group = open_group(bootstrap, &c);
    void *memory[3] = {NULL}, *none = &none, *other = NULL;
    REQUIRE(group, "no group");
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 3; i++)
            memory[i] = take_zeroed(group, 1000 + (size_t)(3 * 1000 * bootstrap->rank + i));
        CHECK_REFUSED(ep_mem_alloc(group, 0, &none), EP_ERR_RANGE, "ep_mem_alloc", "bytes");
        REQUIRE_CUDA(cudaMalloc(&other, 64));
        CHECK_REFUSED(ep_mem_free(group, other), EP_ERR_FOREIGN, "ep_mem_free", "memory");
        CHECK_CUDA(cudaFree(other));
        CHECK(none == &none, "an output was written");
        CHECK_OK(ep_mem_free(group, memory[1]));
        CHECK_REFUSED(ep_mem_free(group, memory[1]), EP_ERR_FOREIGN, "ep_mem_free", "memory");
        CHECK_OK(ep_mem_free(group, memory[0]));
        CHECK_OK(ep_mem_free(group, memory[2]));
    }
    take_zeroed(group, 1000); /* left to the group */
    ep_group_destroy(group);
}

ThreadTest(gpu_zero_copy, memory_comes_and_goes_1, 1) {
    come_and_go(bootstrap);
}
ThreadTest(gpu_zero_copy, memory_comes_and_goes_2, 2) {
    come_and_go(bootstrap);
}
