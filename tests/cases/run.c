/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cases/run.h"

#include <stdlib.h>
#include <string.h>

EpGroup *open_group(const EpBootstrap *bootstrap, const Case *c) {
    EpGroupConfig config = case_group_config(c);
    EpGroup *group = NULL;
    CHECK_OK(ep_group_create(bootstrap, &config, &group));
    return group;
}

EpHandle *open_handle(EpGroup *group, const Case *c) {
    EpHandleConfig config = case_handle_config(c);
    EpHandle *handle = NULL;
    CHECK_OK(ep_handle_create(group, &config, &handle));
    return handle;
}

void open_plan(EpGroup *group, const Case *c, EpTensor *plan) {
    EpHandleConfig config = case_handle_config(c);
    size_t bytes = 0;
    CHECK_OK(ep_handle_memory(group, &config, &bytes));
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    REQUIRE(memory, "no memory for %zu bytes", bytes);
    *plan = ep_tensor_1d(memset(memory, 0xee, bytes), EP_TYPE_UINT8, (int64_t)bytes);
}

/* Pretend the nodes of the case, unless the test has a topology of its own. Returns whether it did.
 */
static int pretend_nodes(const Case *c) {
    char list[2 * sizeof(c->nodes)];
    int has_own = getenv("LIBEP_TOPOLOGY") && !getenv("LIBEP_TEST_NODES");
    if (!c->nodes[0] || has_own) return 0;
    for (int r = 0; r < c->ranks; r++)
        list[2 * r] = c->nodes[r], list[2 * r + 1] = r + 1 < c->ranks ? ',' : 0;
    setenv("LIBEP_TOPOLOGY", list, 1);
    return 1;
}

static void restore_nodes(void) {
    const char *all = getenv("LIBEP_TEST_NODES");
    if (all)
        setenv("LIBEP_TOPOLOGY", all, 1);
    else
        unsetenv("LIBEP_TOPOLOGY");
}

/* Check that the group has the nodes that the oracle assumes. */
static void check_nodes(const EpGroup *group, const Case *c, int rank) {
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    int nodes = 0, node = 0;
    for (int r = 0; r < c->ranks; r++) {
        if (case_node(c, r) != r) continue;
        if (r == case_node(c, rank)) node = nodes;
        nodes++;
    }
    CHECK_OK(ep_group_query(group, &info));
    CHECK(info.num_nodes == nodes && info.node == node, "node %d of %d, not %d of %d", info.node,
          info.num_nodes, node, nodes);
}

static void run_in_group(EpGroup *group, int rank, const World *world) {
    EpHandle *handle = open_handle(group, &world->c);
    if (!handle) return;
    EpTensor plan = {.data = NULL};
    Step step = {group, handle, world, rank, NULL};
    if (world->c.named) open_plan(group, &world->c, &plan), step.plan = &plan;
    step_all(&step);
    free(plan.data);
    ep_handle_destroy(handle);
}

void run_world(const EpBootstrap *bootstrap, const World *world) {
    EpGroup *group = open_group(bootstrap, &world->c);
    if (group) check_nodes(group, &world->c, bootstrap->rank);
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
    int pretends = pretend_nodes(&world->c);
    run_ranks(world->c.ranks, world_body, world);
    if (pretends) restore_nodes();
    world_free(world);
}

/* Between nodes of GPUs there is no latency mode. */
static int has_latency(const Case *given) {
    Case c = case_complete(*given);
    for (int r = 0; r < c.ranks && TESTS_ON_GPU; r++)
        if (case_node(&c, r)) return 0;
    return TESTS_HAVE_LATENCY;
}

void run_case_on_threads(const Case *c) {
    if (c->mode != EP_MODE_LATENCY) run_in_mode(*c, EP_MODE_THROUGHPUT, 0);
    if (c->mode == EP_MODE_THROUGHPUT || !has_latency(c)) return;
    if (TESTS_ON_GPU) {
        /* GPU time is scarce: run whole calls and separate phases alternately. */
        static int turn;
        run_in_mode(*c, EP_MODE_LATENCY, c->phases || turn++ % 2);
        return;
    }
    if (!c->phases) run_in_mode(*c, EP_MODE_LATENCY, 0);
    run_in_mode(*c, EP_MODE_LATENCY, 1);
}
