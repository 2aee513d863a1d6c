/* SPDX-License-Identifier: Apache-2.0 */
/* More rows than the capacity: rows past it are dropped and counted, all others are right. */
#include "tests/cases/run.h"

static void run_capacities(EpLayout layout, EpOverflow overflow, int alignment) {
    static const int64_t capacities[] = {1, 7, 16, 17, 30, 63};
    for (size_t i = 0; i < sizeof(capacities) / sizeof(capacities[0]); i++) {
        Case c = {.ranks = 3,
                  .experts = 7,
                  .top_k = 3,
                  .max_tokens = 12,
                  .spread = SPREAD_FULL,
                  .layout = layout,
                  .alignment = alignment,
                  .capacity = capacities[i],
                  .rows_per_expert = capacities[i],
                  .overflow = overflow,
                  .weighted = 1,
                  .scale_bytes = 4,
                  .spare_rows = 5,
                  .zero_tail = (int)i % 2,
                  .seed = i};
        run_case_on_threads(&c);
    }
}

static void run_policies(EpLayout layout) {
    for (int alignment = 1; alignment <= 16; alignment *= 4) {
        run_capacities(layout, EP_OVERFLOW_ERROR, alignment);
        run_capacities(layout, EP_OVERFLOW_DROP, alignment);
    }
}

Test(dispatch_overflow, expert_major, .timeout = 120) {
    run_policies(EP_LAYOUT_EXPERT_MAJOR);
}
Test(dispatch_overflow, flat, .timeout = 120) {
    run_policies(EP_LAYOUT_FLAT);
}
Test(dispatch_overflow, batched, .timeout = 120) {
    run_policies(EP_LAYOUT_BATCHED);
}

Test(dispatch_overflow, duplicates, .timeout = 120) {
    for (int layout = EP_LAYOUT_EXPERT_MAJOR; layout <= EP_LAYOUT_BATCHED; layout++) {
        Case c = {.ranks = 2,
                  .experts = 3,
                  .top_k = 5,
                  .duplicates = 1,
                  .spread = SPREAD_FULL,
                  .layout = (EpLayout)layout,
                  .capacity = 14,
                  .rows_per_expert = 9,
                  .overflow = EP_OVERFLOW_DROP,
                  .weighted = 1};
        run_case_on_threads(&c);
    }
}

/* Both errors of one step are reported, one after the other. */
Test(dispatch_overflow, together_with_wrong_indices, .timeout = 120) {
    Case c = {.ranks = 2, .top_k = 3, .spread = SPREAD_FULL, .invalid_percent = 20, .capacity = 5};
    run_case_on_threads(&c);
}

/* The policy of a handle overrides the group's. */
ThreadTest(dispatch_overflow, policy_of_the_handle, 2) {
    Case c = case_complete((Case){.ranks = 2, .spread = SPREAD_FULL, .capacity = 3});
    EpGroup *group = open_group(bootstrap, &c);
    if (!group) return;
    c.overflow = EP_OVERFLOW_DROP;
    EpHandleConfig config = case_handle_config(&c);
    config.overflow = EP_OVERFLOW_DROP;
    EpHandle *handle = NULL;
    World *world = world_new(&c);
    if (CHECK_OK(ep_handle_create(group, &config, NULL, 0, &handle))) {
        Step step = {group, handle, world, bootstrap->rank};
        step_all(&step);
    }
    ep_group_destroy(group);
    world_free(world);
}

/* The capacity, alignment and K of a handle override the group's. */
ThreadTest(dispatch_overflow, capacity_of_the_handle, 2) {
    Case c = case_complete((Case){.ranks = 2, .spread = SPREAD_FULL, .top_k = 4});
    EpGroup *group = open_group(bootstrap, &c);
    if (!group) return;
    c.capacity = 9;
    c.alignment = 4;
    c.top_k = 3;
    EpHandleConfig config = case_handle_config(&c);
    config.max_recv_rows = c.capacity;
    config.alignment = c.alignment;
    config.top_k = c.top_k;
    EpHandle *handle = NULL;
    World *world = world_new(&c);
    if (CHECK_OK(ep_handle_create(group, &config, NULL, 0, &handle))) {
        Step step = {group, handle, world, bootstrap->rank};
        step_all(&step);
    }
    ep_group_destroy(group);
    world_free(world);
}
