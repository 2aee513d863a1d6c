/* SPDX-License-Identifier: Apache-2.0 */
/* Rows travel through staging memory in rounds. A tiny stage leads to many rounds of few rows, and
 * to sizes that are not a multiple of it. */
#include <stdlib.h>
#include <string.h>

#include "tests/cases/run.h"

static void run_with_stage(const char *bytes, Case c) {
    HOST_ONLY("no LIBEP_STAGE_BYTES on GPUs: beyond_the_default_stage exceeds the rings");
    setenv("LIBEP_STAGE_BYTES", bytes, 1);
    for (int layout = EP_LAYOUT_EXPERT_MAJOR; layout <= EP_LAYOUT_RANK_MAJOR; layout++) {
        c.layout = (EpLayout)layout;
        run_case_on_threads(&c);
    }
}

static const Case base_case = {.ranks = 3,
                               .experts = 10,
                               .top_k = 4,
                               .max_tokens = 61,
                               .hidden = 40,
                               .spread = SPREAD_HOLE,
                               .masked_percent = 10,
                               .weighted = 1,
                               .scale_bytes = 12,
                               .alignment = 8};

Test(dispatch_chunks, smallest_stage, .timeout = 120) {
    run_with_stage("1", base_case);
}
Test(dispatch_chunks, odd_stage, .timeout = 120) {
    run_with_stage("1009", base_case);
}
Test(dispatch_chunks, stage_of_some_rows, .timeout = 120) {
    run_with_stage("4K", base_case);
}

/* Ranks with very different amounts to send leave the rounds at different times. */
Test(dispatch_chunks, uneven_senders, .timeout = 120) {
    Case c = base_case;
    c.spread = SPREAD_ALONE;
    run_with_stage("2K", c);
    c.spread = SPREAD_RANDOM;
    c.routing = ROUTING_ONE_RANK;
    c.target = 1;
    run_with_stage("2K", c);
}

Test(dispatch_chunks, between_nodes, .timeout = 120) {
    Case c = base_case;
    c.ranks = 4;
    memcpy(c.nodes, "0101", 4);
    run_with_stage("2K", c);
}

/* With exact sizing ranks repeat a step of some sizes, but not all of them in every chunk. */
static void repeated_body(const EpBootstrap *bootstrap, void *arg) {
    const World *world = arg;
    EpGroup *group = open_group(bootstrap, &world->c);
    EpHandle *handle = group ? open_handle(group, &world->c) : NULL;
    for (int i = 0; handle && i < 4; i++) {
        Step step = {group, handle, world, bootstrap->rank, NULL};
        step_all(&step);
    }
    ep_group_destroy(group);
}

Test(dispatch_chunks, repeated_between_nodes, .timeout = 120) {
    GPU_NEEDS(4);
    Case c = base_case;
    c.ranks = 4, c.spread = SPREAD_RANDOM, c.masked_percent = 60;
    memcpy(c.nodes, "0101", 4);
    setenv("LIBEP_TOPOLOGY", "0,1,0,1", 1);
    setenv("LIBEP_NODE_CHUNK", "1000", 1);
    World *world = world_new(&c);
    run_ranks(4, repeated_body, world);
    world_free(world);
}

/* Dispatch only: the oracle would take seconds for the sums, which other cases test. */
static void dispatch_body(const EpBootstrap *bootstrap, void *arg) {
    const World *world = arg;
    EpGroup *group = open_group(bootstrap, &world->c);
    EpHandle *handle = group ? open_handle(group, &world->c) : NULL;
    if (handle) {
        Step step = {group, handle, world, bootstrap->rank, NULL};
        step_prepare(&step);
        step_dispatch(&step);
    }
    ep_group_destroy(group);
}

Test(dispatch_chunks, beyond_the_default_stage, .timeout = 120) {
    GPU_NEEDS(2);
    GPU_ROOM((size_t)768 << 20);
    Case c = {.ranks = 2, .experts = 4, .hidden = 4096, .max_tokens = 2500, .spread = SPREAD_FULL};
    World *world = world_new(&c);
    run_ranks(2, dispatch_body, world);
    world_free(world);
}
