/* SPDX-License-Identifier: Apache-2.0 */
/* Buffers that peers can reach (ep_mem_alloc) give the same bytes as plain device memory, with
 * staging or zero-copy receive, also if only some ranks or some buffers are reachable. */
#include "tests/gpu/device_step.h"

GpuSuite(gpu_zero_copy, 640);

enum { CASES = 15 };

/* All layouts, with and without weights and scales; some overflow, some are quantised. */
static Case draw_case(int ranks, int i) {
    int weighted = i / 3 % 2, tight = i / 6 == 1, quantised = i >= 12;
    Case c = {.ranks = ranks, .experts = 4 * ranks + 3, .top_k = 5};
    c.hidden = quantised ? 256 : 264, c.max_tokens = 293, c.masked_percent = 5;
    c.weighted = weighted, c.scale_bytes = weighted ? 12 : 0, c.alignment = 8;
    c.capacity = tight ? 700 : 2500, c.rows_per_expert = tight ? 72 : 320;
    c.overflow = EP_OVERFLOW_DROP, c.layout = (EpLayout)(1 + i % 3);
    c.quant = quantised ? (EpQuant)(i - 10) : EP_QUANT_NONE;
    c.scale_order = (EpScaleOrder)(1 + i % 2), c.counted = 1, c.seed = (uint64_t)i;
    return case_complete(c);
}

/* Plain memory on all ranks, reachable memory on all ranks, reachable memory on even ranks only. */
enum { MEMORIES = 3 };

static void compare_memories(EpGroup *group, const Case *c, int rank, void *reachable) {
    DeviceStep gpu[MEMORIES];
    void *memory[MEMORIES] = {NULL, reachable, rank % 2 ? NULL : reachable};
    EpHandle *handle = open_handle(group, c);
    for (int i = 0; i < MEMORIES; i++) {
        device_step_open(&gpu[i], group, handle, c, rank, NULL, memory[i]);
        device_step_draw(&gpu[i], c);
        check_note("memory %d: %s", i, case_describe(c));
        device_step_issue(&gpu[i], STEP_ALL);
        device_step_check(&gpu[i]);
        CHECK_OK(ep_group_status(group, NULL));
    }
    for (int i = 1; i < MEMORIES; i++)
        device_step_check_equal(&gpu[0], &gpu[i], 1, "plain and reachable memory");
    ep_handle_destroy(handle);
    for (int i = 0; i < MEMORIES; i++)
        device_step_close(&gpu[i]);
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
    REQUIRE_OK(ep_mem_alloc(group, most_bytes(bootstrap->size), &reachable));
    for (int i = 0; i < CASES; i++) {
        Case c = draw_case(bootstrap->size, i);
        compare_memories(group, &c, bootstrap->rank, reachable);
    }
    CHECK_OK(ep_mem_free(group, reachable));
    ep_group_destroy(group);
}

RankTests(gpu_zero_copy, as_staged, zero_copy(bootstrap));

/* ---- receive tensors without rows ------------------------------------------------------------ */

/* With exact sizing, a rank that gets nothing names a tensor of no rows, in a window all the same.
 * Every token goes to one rank, to each in turn. */
static void no_rows(const EpBootstrap *bootstrap) {
    Case c = case_complete((Case){.ranks = bootstrap->size, .top_k = 1, .max_tokens = 37});
    EpGroup *group = open_group(bootstrap, &c);
    EpHandle *handle = open_handle(group, &c);
    void *window = NULL;
    DeviceStep gpu;
    REQUIRE_OK(ep_mem_alloc(group, device_step_bytes(&c), &window));
    device_step_open(&gpu, group, handle, &c, bootstrap->rank, NULL, window);
    c.spread = SPREAD_FULL, c.routing = ROUTING_ONE_RANK;
    for (c.target = 0; c.target < c.ranks; c.target++) {
        device_step_draw(&gpu, &c);
        int64_t rows = gpu.drawn->rank[bootstrap->rank].recv_rows;
        CHECK(bootstrap->rank == c.target ? rows > 0 : rows == 0, "%lld rows", (long long)rows);
        device_step_issue(&gpu, STEP_PREPARE);
        device_step_check(&gpu); /* then the host knows how many rows arrive */
        device_step_issue(&gpu, STEP_ALL & ~(unsigned)STEP_PREPARE);
        device_step_check(&gpu);
        REQUIRE_OK(ep_group_status(group, NULL));
    }
    device_step_close(&gpu);
    ep_group_destroy(group);
}

RankTests24(gpu_zero_copy, no_rows, no_rows(bootstrap));

/* ---- allocation ------------------------------------------------------------------------------ */

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

RankTest(gpu_zero_copy, memory_comes_and_goes_1, 1, come_and_go(bootstrap));
RankTest(gpu_zero_copy, memory_comes_and_goes_2, 2, come_and_go(bootstrap));
