/* SPDX-License-Identifier: Apache-2.0 */
/* A group that needs more memory than the machine has: an error on every rank, no leak, and the
 * process can go on. */
#include <stdint.h>
#include <sys/resource.h>

#include "tests/cases/run.h"

/* A valid case whose plan takes many GiB. */
static Case huge_case(int ranks) {
    return case_complete((Case){.ranks = ranks,
                                .experts = 4,
                                .top_k = EP_MAX_TOP_K,
                                .max_tokens = 1 << 24,
                                .hidden = EP_MAX_ROW_BYTES / 2});
}

static void limit_address_space(rlim_t bytes) {
    struct rlimit limit = {bytes, bytes};
    cr_assert(setrlimit(RLIMIT_AS, &limit) == 0, "setrlimit failed");
}

static void huge_body(const EpBootstrap *bootstrap, __attribute__((unused)) void *arg) {
    Case c = huge_case(bootstrap->size);
    EpGroupConfig config = case_group_config(&c);
    EpGroup *group = NULL;
    EpHandle *handle = NULL;
    EpStatus status = ep_group_create(bootstrap, &config, &group);
    /* A group may be small and leave the large allocations to its handles. */
    if (status == EP_OK) status = ep_handle_create(group, NULL, &handle);
    CHECK(status == EP_ERR_NO_MEMORY, "status %d: %s", (int)status,
          status == EP_OK ? "" : ep_last_error());
    CHECK(handle == NULL, "a handle was made");
    ep_group_destroy(group);
}

Test(runtime_memory, no_machine_has_this_much, .timeout = 60) {
    HOST_ONLY("CUDA needs the address space: see gpu_faults");
    if (TESTS_SANITIZED) cr_skip_test("sanitizers need the address space");
    limit_address_space((rlim_t)2 << 30);
    run_on_threads(2, huge_body, NULL);
}

/* The system refuses the memory of the stage: an error on every rank. */
static void stage_body(const EpBootstrap *bootstrap, __attribute__((unused)) void *arg) {
    /* Enough rows for any stage: a stage is no larger than the rows it could ever hold. */
    Case c = case_complete((Case){.ranks = bootstrap->size, .max_tokens = 1 << 20});
    c.hidden = EP_MAX_ROW_BYTES / 2;
    EpGroupConfig config = case_group_config(&c);
    EpGroup *group = NULL;
    CHECK_STATUS(ep_group_create(bootstrap, &config, &group), EP_ERR_NO_MEMORY);
    CHECK(group == NULL, "a group was made");
}

Test(runtime_memory, no_room_for_the_stage, .timeout = 60) {
    HOST_ONLY("CUDA needs the address space: see gpu_faults");
    if (TESTS_SANITIZED) cr_skip_test("sanitizers need the address space");
    setenv("LIBEP_STAGE_BYTES", "1G", 1);
    limit_address_space((rlim_t)1 << 30);
    run_on_threads(2, stage_body, NULL);
    /* The same process can create a group with a smaller stage. */
    setenv("LIBEP_STAGE_BYTES", "1M", 1);
    Case c = {.ranks = 2};
    run_case_on_threads(&c);
}

/* ep_group_memory reports the memory without allocating it. */
SoloTest(runtime_memory, infeasible_configurations_are_named) {
    HOST_ONLY("1024 ranks are more than GPUs serve");
    Case c = huge_case(1024);
    c.max_tokens = INT32_MAX;
    EpGroupConfig config = case_group_config(&c);
    EpGroupMemory memory = EP_GROUP_MEMORY_INIT;
    CHECK_OK(ep_group_memory(&config, 1024, &memory));
    CHECK(memory.feasible == 0 && memory.reason[0], "feasible: %s", memory.reason);
    c.max_tokens = 64;
    config = case_group_config(&c);
    CHECK_OK(ep_group_memory(&config, 1024, &memory));
    CHECK(memory.feasible == 1 && memory.handle_bytes > 0 && memory.shared_bytes > 0,
          "not feasible: %s", memory.reason);
}

SoloTest(runtime_memory, more_nodes_than_ranks) {
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    EpGroupMemory memory = EP_GROUP_MEMORY_INIT;
    config.num_experts = 8, config.max_tokens = 4, config.max_top_k = 2, config.max_row_bytes = 64;
    config.backend = EP_BACKEND_HOST, config.num_nodes = 3;
    CHECK_OK(ep_group_memory(&config, 2, &memory));
    CHECK(!memory.feasible && strstr(memory.reason, "each of 3 nodes, got 2 ranks"), "%s",
          memory.reason);
    CHECK_OK(ep_group_memory(&config, 3, &memory));
    CHECK(memory.feasible, "%s", memory.reason);
}

/* Sizes of the largest numbers do not overflow: each is at least its largest part. */
SoloTest(runtime_memory, sizes_of_the_largest_configurations) {
    static const int ranks[] = {1, 72, EP_MAX_RANKS};
    for (int i = 0; i < 3 * 2; i++) {
        EpGroupConfig config = EP_GROUP_CONFIG_INIT;
        EpGroupMemory memory = EP_GROUP_MEMORY_INIT;
        config.num_experts = EP_MAX_EXPERTS, config.max_tokens = i % 2 ? INT32_MAX : 1;
        config.max_top_k = EP_MAX_TOP_K, config.alignment = i % 2 ? 1 << 30 : 1;
        config.max_row_bytes = config.max_scale_bytes = EP_MAX_ROW_BYTES;
        config.backend = EP_BACKEND_HOST;
        check_note("%d ranks, %d tokens", ranks[i / 2], config.max_tokens);
        CHECK_OK(ep_group_memory(&config, ranks[i / 2], &memory));
        int64_t local = EP_MAX_EXPERTS / ranks[i / 2];
        CHECK(memory.shared_bytes > 4 * local && memory.private_bytes > 0, "%lld, %lld bytes",
              (long long)memory.shared_bytes, (long long)memory.private_bytes);
        CHECK(memory.feasible == !(i % 2), "feasible %d: %s", memory.feasible, memory.reason);
        if (memory.feasible)
            CHECK(memory.handle_bytes > INT64_C(4) * EP_MAX_EXPERTS, "%lld bytes",
                  (long long)memory.handle_bytes);
    }
}

SoloTest(runtime_memory, ranks_out_of_range) {
    EpGroupConfig config = group_config(1);
    EpGroupMemory memory = EP_GROUP_MEMORY_INIT;
    CHECK_REFUSED(ep_group_memory(&config, 0, &memory), EP_ERR_RANGE, "num_ranks", "0");
    CHECK_REFUSED(ep_group_memory(&config, EP_MAX_RANKS + 1, &memory), EP_ERR_RANGE, "num_ranks",
                  "1025");
    CHECK_REFUSED(ep_group_memory(NULL, 1, &memory), EP_ERR_NULL, "config");
    CHECK_REFUSED(ep_group_memory(&config, 1, NULL), EP_ERR_NULL, "out");
    CHECK(memory.shared_bytes == 0, "outputs were written");
}
