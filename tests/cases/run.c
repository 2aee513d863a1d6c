/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cases/run.h"

EpGroup *open_group(const EpBootstrap *bootstrap, const Case *c) {
    EpGroupConfig config = case_group_config(c);
    EpGroup *group = NULL;
    CHECK_OK(ep_group_create(bootstrap, &config, &group));
    return group;
}

EpHandle *open_handle(EpGroup *group, const Case *c) {
    EpHandleConfig config = case_handle_config(c);
    EpHandle *handle = NULL;
    CHECK_OK(ep_handle_create(group, &config, NULL, 0, &handle));
    return handle;
}

static void run_in_group(EpGroup *group, int rank, const World *world) {
    EpHandle *handle = open_handle(group, &world->c);
    if (!handle) return;
    Step step = {group, handle, world, rank};
    step_all(&step);
    ep_handle_destroy(handle);
}

void run_world(const EpBootstrap *bootstrap, const World *world) {
    EpGroup *group = open_group(bootstrap, &world->c);
    if (group) run_in_group(group, bootstrap->rank, world);
    ep_group_destroy(group);
}

void run_case(const EpBootstrap *bootstrap, const Case *c) {
    World *world = world_new(c);
    check_note("case: %s", case_describe(&world->c));
    run_world(bootstrap, world);
    world_free(world);
}

static void world_body(const EpBootstrap *bootstrap, void *arg) {
    const World *world = arg;
    check_note("case: %s", case_describe(&world->c));
    run_world(bootstrap, world);
}

static void run_in_mode(Case c, EpMode mode, int phases) {
    c.mode = mode, c.phases = phases;
    World *world = world_new(&c);
    run_ranks(world->c.ranks, world_body, world);
    world_free(world);
}

void run_case_on_threads(const Case *c) {
    if (c->mode != EP_MODE_LATENCY) run_in_mode(*c, EP_MODE_THROUGHPUT, 0);
    if (c->mode == EP_MODE_THROUGHPUT || !TESTS_HAVE_LATENCY) return;
    if (TESTS_ON_GPU) {
        /* GPU time is scarce: run whole calls and separate phases alternately. */
        static int turn;
        run_in_mode(*c, EP_MODE_LATENCY, c->phases || turn++ % 2);
        return;
    }
    if (!c->phases) run_in_mode(*c, EP_MODE_LATENCY, 0);
    run_in_mode(*c, EP_MODE_LATENCY, 1);
}
