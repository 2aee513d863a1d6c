/* SPDX-License-Identifier: Apache-2.0 */
/* More rows than the capacity: rows past it are dropped and counted, all others are right. */
#include "tests/cases/run.h"
#include "tests/harness/ranked.h"

#define POLICIES                                                                    \
    "ranks=3 experts=7 top_k=3 max_tokens=12 spread=full weighted=1 scale_bytes=4 " \
    "spare_rows=5 overflow=error|drop alignment=1|1|4|4|16|16 zero_tail=keep,zero " \
    "capacity=1,7,16,17,30,63 rows_per_expert=1|7|16|17|30|63 "
GridTest(dispatch_overflow, expert_major, POLICIES, "layout=expert-major");
GridTest(dispatch_overflow, flat, POLICIES, "layout=flat");
GridTest(dispatch_overflow, batched, POLICIES, "layout=batched");
/* The rank-major layout cannot overflow, whatever the capacity. */
GridTest(dispatch_overflow, rank_major, POLICIES, "layout=rank-major");

GridTest(dispatch_overflow, duplicates, EACH_LAYOUT,
         "ranks=2 experts=3 top_k=5 duplicates=1 spread=full capacity=14 rows_per_expert=9 "
         "overflow=drop weighted=1");

/* Tokens that find no place in a message to another node, and then those past the capacity. */
#define PLACES \
    "ranks=6 nodes=010212 experts=11 top_k=4 max_tokens=40 weighted=1 scale_bytes=8 seed=3 "
GridTest(dispatch_overflow, places_for_one_token, EACH_LAYOUT,
         PLACES "node_rows=1 capacity=900 spread=full");
GridTest(dispatch_overflow, places_for_some, EACH_LAYOUT,
         PLACES "node_rows=7 capacity=400 rows_per_expert=60 masked_percent=20 counted=1");
GridTest(dispatch_overflow, places_and_capacity, EACH_LAYOUT,
         PLACES "node_rows=13 capacity=90 rows_per_expert=24 overflow=drop duplicates=1 "
                "invalid_percent=5 alignment=4");
GridTest(dispatch_overflow, places_of_merged_entries, EACH_LAYOUT,
         PLACES "node_rows=5 capacity=500 overflow=drop duplicates=1 merged=1 hidden=1000");
GridTest(dispatch_overflow, places_for_all, EACH_LAYOUT,
         "ranks=5 nodes=01021 experts=11 top_k=4 max_tokens=40 node_rows=40 capacity=900");
GridTest(dispatch_overflow, places_on_unequal_nodes, EACH_LAYOUT,
         "ranks=5 nodes=01021 experts=11 top_k=4 max_tokens=40 node_rows=7 capacity=400");

/* A message of a chunk has places of tokens of any chunk. */
CasesTest(dispatch_overflow, places_in_many_messages, setenv("LIBEP_NODE_CHUNK", "4000", 1);
          run_grid(EACH_LAYOUT PLACES
                   "max_tokens=90 node_rows=31 capacity=900 quant=fp8 hidden=40");
          run_grid(EACH_LAYOUT PLACES "node_rows=17 capacity=900 masked_percent=60 counted=1");
          run_case_on_threads(&(Case){.ranks = 3,
                                      .nodes = "012",
                                      .experts = 7,
                                      .top_k = 3,
                                      .max_tokens = 30,
                                      .node_rows = 9,
                                      .capacity = 300,
                                      .by_entry = 1,
                                      .weighted = 1}));

/* More tokens than a block has threads. */
Test(dispatch_overflow, places_of_many_tokens, .timeout = 120) {
    run_dispatch(case_of("ranks=3 nodes=011 experts=8 top_k=3 hidden=16 max_tokens=2300 "
                         "node_rows=1500 capacity=9000 masked_percent=20 overflow=drop"));
}

/* The capacity cuts the second of three slabs of one rank. `padded`: what is below the
   capacity. */
static void check_cut(EpGroup *group, int64_t capacity, const int32_t expected[10],
                      const char *what) {
    static const int32_t experts[] = {0, 0, 0, 1, 1, 1, 1, 1, 2}; /* slabs of 4, 8 and 4 rows */
    enum { TOKENS = 9, EXPERTS = 3, NUMBERS = 10 };
    int32_t *index = malloc(sizeof(experts)), *out = calloc(NUMBERS, sizeof(*out));
    EpHandleConfig config = EP_HANDLE_CONFIG_INIT;
    EpHandle *handle = NULL;
    config.max_recv_rows = capacity, config.alignment = 4, config.overflow = EP_OVERFLOW_DROP;
    REQUIRE_OK(ep_handle_create(group, &config, &handle));
    memcpy(index, experts, sizeof(experts));
    EpTensor topk_idx = ep_tensor_2d(index, EP_TYPE_INT32, TOKENS, 1);
    EpTensor counts = ep_tensor_1d(out, EP_TYPE_INT32, EXPERTS);
    EpTensor padded = ep_tensor_1d(out + 3, EP_TYPE_INT32, EXPERTS);
    EpTensor offsets = ep_tensor_1d(out + 6, EP_TYPE_INT32, EXPERTS + 1);
    EpPlanTensors tensors = EP_PLAN_TENSORS_INIT;
    tensors.expert_counts = &counts, tensors.expert_padded = &padded;
    tensors.expert_offsets = &offsets;
    CHECK_OK(ep_prepare(handle, NULL, &topk_idx, NULL, NULL, &tensors));
    for (int i = 0; i < NUMBERS; i++)
        CHECK(out[i] == expected[i], "%s: number %d is %d instead of %d", what, i, out[i],
              expected[i]);
    ep_handle_destroy(handle);
    free(index), free(out);
}

ThreadTest(dispatch_overflow, capacity_that_cuts_a_slab, 1) {
    Case c = case_complete((Case){.ranks = 1, .experts = 3, .top_k = 1, .max_tokens = 9});
    EpGroup *group = open_group(bootstrap, &c);
    /* counts, padded, offsets */
    check_cut(group, 16, (const int32_t[]){3, 5, 1, 4, 8, 4, 0, 4, 12, 16}, "enough");
    check_cut(group, 10, (const int32_t[]){3, 5, 0, 4, 6, 0, 0, 4, 10, 10}, "in the padding");
    check_cut(group, 7, (const int32_t[]){3, 3, 0, 4, 3, 0, 0, 4, 7, 7}, "in the slots");
    check_cut(group, 4, (const int32_t[]){3, 0, 0, 4, 0, 0, 0, 4, 4, 4}, "between slabs");
    check_cut(group, 3, (const int32_t[]){3, 0, 0, 3, 0, 0, 0, 3, 3, 3}, "no padding");
    ep_group_destroy(group);
}

/* Both errors of one step are reported, one after the other. */
GridTest(dispatch_overflow, together_with_wrong_indices, "ranks=2 top_k=3 spread=full",
         "invalid_percent=20 capacity=5");

/* A handle overrides the group's policy, capacity, alignment and K, or takes them. */
static void override(const EpBootstrap *bootstrap, const char *of_group, const char *of_handle) {
    Case c = case_complete(case_of("ranks=2 spread=full %s %s", of_group, of_handle));
    Case other = case_complete(case_of("ranks=2 spread=full %s", of_group));
    EpHandleConfig config = EP_HANDLE_CONFIG_INIT;
    EpGroup *group = open_group(bootstrap, &other);
    if (of_handle[0]) config = case_handle_config(&c), config.top_k = c.top_k;
    Step step = {group, open_handle_with(group, &config), world_new(&c), bootstrap->rank, NULL};
    step_all(&step);
    close_step(&step);
}

ThreadTest(dispatch_overflow, settings_of_the_handle, 2) {
    override(bootstrap, "capacity=3", "overflow=drop");
    override(bootstrap, "top_k=4", "capacity=9 alignment=4 top_k=3");
    override(bootstrap, "capacity=13 overflow=drop alignment=4", "");
}

/* With exact sizing messages hold what there is. So a handle in a group with node_rows has a size,
 * on several nodes, and ep_group_memory measures none without. */
ThreadTest(dispatch_overflow, places_need_a_size, 2) {
    EpGroupConfig config = group_config(2);
    EpGroupMemory memory = EP_GROUP_MEMORY_INIT;
    EpHandleConfig exact = EP_HANDLE_CONFIG_INIT;
    EpHandle *handle = NULL;
    config.node_rows = 3;
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "2");
    EpGroup *group = open_group_with(bootstrap, &config);
    CHECK_REFUSED(ep_handle_create(group, &exact, &handle), EP_ERR_UNSUPPORTED,
                  "config.max_recv_rows",
                  "expected a capacity, or the batched or rank-major layout",
                  "messages have 3 places (EpGroupConfig.node_rows), got 0 (exact sizing)");
    CHECK(!handle, "a handle was made");
    CHECK_OK(ep_group_memory(&config, 2, &memory));
    CHECK(memory.feasible && memory.handle_bytes == 0, "%s", memory.reason);
    ep_group_destroy(group);
    config.max_tokens = 64, config.node_rows = 16, config.num_nodes = 2;
    config.max_row_bytes = 8192;
    CHECK_OK(ep_group_memory(&config, 2, &memory));
    int64_t bytes = memory.private_bytes;
    config.node_rows = 0;
    CHECK_OK(ep_group_memory(&config, 2, &memory));
    CHECK(!TESTS_ON_GPU || memory.private_bytes > 2 * bytes, "%lld of %lld bytes", (long long)bytes,
          (long long)memory.private_bytes);
}
