/* SPDX-License-Identifier: Apache-2.0 */
/* More rows than the capacity: rows past it are dropped and counted, all others are right. */
#include "tests/cases/run.h"

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
