/* SPDX-License-Identifier: Apache-2.0 */
/* Copies of experts: placements and choices against the oracle, changed between steps, and what
 * ep_group_place refuses. */
#include "tests/cases/calls.h"
#include "tests/cases/refusals.h"
#include "tests/cases/run.h"

TestSuite(handles_placement, .init = be_quiet);

/* Each case places the experts anew in a group that the cases share. */
#define MAPS "map=first,random,identity,everywhere,half,nobody map_seed=3 masked_percent=10 "
#define CHOICES EACH_LAYOUT MAPS "choice=near,spread weighted=1 seed=3"
GridTest(handles_placement, choices, CHOICES,
         "ranks=3 experts=7 physical=11 top_k=3 alignment=4 invalid_percent=10",
         "ranks=1 experts=5 physical=9 top_k=2 capacity=40 overflow=drop",
         "ranks=4 experts=3 physical=8 top_k=3 merged=1 duplicates=1");
/* More entries than a block of any kernel takes at a time, and more experts than a warp has lanes.
 * There are fewer places than experts, or fewer than ranks. */
GridTest(handles_placement, sizes, EACH_LAYOUT "map=random map_seed=4 spread=full weighted=1",
         "ranks=3 experts=77 physical=101 top_k=5 max_tokens=391 choice=spread",
         "ranks=2 experts=40 physical=33 top_k=3 max_tokens=19", "ranks=3 experts=2 physical=2");
GridTest(handles_placement, every_step, EACH_LAYOUT "ranks=2 experts=5 physical=9 map=random",
         "map_seed=1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20 choice=spread");
GridTest(handles_placement, by_entry, "layout=expert-major,batched by_entry=1 ranks=3 experts=5 "
         "physical=13 top_k=3 map=random,everywhere choice=near,spread", "weighted=1",
         "weights_at_combine=1");
#define SCARCE "ranks=4 nodes=0101 capacity=60 rows_per_expert=20 node_rows=5 overflow=drop"
#define NODES "experts=7 physical=15 top_k=3 map=random,everywhere,half map_seed=5 weighted=1 "
GridTest(handles_placement, nodes, EACH_LAYOUT NODES, "choice=near ranks=4 nodes=0011",
         "choice=spread map=random,everywhere " SCARCE,
         "choice=near map=random|half|everywhere " SCARCE);
GridTest(handles_placement, uneven_nodes, EACH_LAYOUT NODES, "ranks=3 nodes=010 max_tokens=150");

/* ---- what keeps its placement -------------------------------------------------------------- */

/* Place the experts of the case's group as its map with another seed says. */
static void place_others(const Step *step, int seed) {
    Case c = step->world->c;
    c.map_seed += seed;
    CHECK_OK(place_experts(step->group, &c));
}

#define KEPT "experts=5 physical=9 top_k=3 map=random weighted=1 choice=spread "

StepTest(handles_placement, plans_keep_theirs, 3, KEPT "mode=throughput capacity=90") {
    place_others(step, 0);
    step_prepare(step);
    place_others(step, 1);
    step_move(step);
    step_check_status(step);
}

StepTest(handles_placement, pending_operations_keep_theirs, 3, KEPT "mode=latency") {
    place_others(step, 0);
    StepPending *pending = step_dispatch_send(step);
    place_others(step, 1);
    step_dispatch_wait(step, pending);
    step_combine_send(step);
    place_others(step, 2);
    step_combine_wait(step);
    step_check_status(step);
}

/* Another map and another routing in each of many steps, on handles that stay. */
static void change_often(const EpBootstrap *bootstrap, const char *text) {
    int steps = (int)environment_number("LIBEP_TEST_STEPS", TESTS_ON_GPU ? 40 : 400);
    Case c = case_of("ranks=%d experts=3 physical=5 map=random choice=spread %s", bootstrap->size,
                     text);
    Step step = open_step(bootstrap, &c);
    for (int i = 0; i < steps && !check_failure()[0]; i++) {
        world_free(step.world);
        c.seed = (uint64_t)i, c.map_seed = i;
        step.world = world_new(&c);
        CHECK_OK(place_experts(step.group, &step.world->c));
        step_all(&step);
    }
    close_step(&step);
}

ThreadTest(handles_placement, many_steps, 2) {
    change_often(bootstrap, "max_tokens=4 capacity=30");
}
ThreadTest(handles_placement, many_steps_in_latency_mode, 2) {
    change_often(bootstrap, "max_tokens=4 mode=latency layout=flat");
}

/* ---- wrong maps ---------------------------------------------------------------------------- */

static EpStatus place_and_wait(EpGroup *group, const Case *c) {
    EpStatus status = place_experts(group, c);
    return status == EP_OK ? ep_group_status(group, NULL) : status;
}

#define DIFFERS "experts=5 physical=9 map=random "

StepTest(handles_placement, maps_differ, 3, DIFFERS) {
    Case c = step->world->c;
    c.map_seed = step->rank == 2;
    CHECK_REFUSED(place_and_wait(step->group, &c), EP_ERR_ORDER, "place: hash of the map differs");
    CHECK_REFUSED(place_experts(step->group, &c), EP_ERR_ORDER, "hash of the map differs");
}

StepTest(handles_placement, another_operation, 3, DIFFERS) {
    EpStatus status = step->rank == 1 ? call_ops(step, STEP_PREPARE)
                                      : place_and_wait(step->group, &step->world->c);
    CHECK_REFUSED(status, EP_ERR_ORDER, "place", "prepare");
}

/* Entries out of range count as none. */
StepTest(handles_placement, bad_entries, 2, "experts=3 physical=5 top_k=2 map=nobody") {
    int32_t *map = calloc(5, sizeof(*map));
    const int32_t bad[] = {-1, 3, -2, INT32_MAX, INT32_MIN};
    EpTensor tensor = ep_tensor_1d(memcpy(map, bad, sizeof(bad)), EP_TYPE_INT32, 5);
    EpFinding finding = EP_FINDING_INIT;
    CHECK_OK(ep_group_place(step->group, &tensor, NULL));
    CHECK_REFUSED(ep_group_status(step->group, &finding), EP_ERR_ROUTING,
                  "ep_group_place: map: expected an expert below 3 or -1, got 3 at 1 (4 such");
    CHECK(finding.token == 1 && finding.k == -1 && finding.count == 4, "%lld",
          (long long)finding.count);
    step_all(step);
    free(map);
}

typedef struct Placing {
    EpGroup *group;
    EpTensor map;
    const EpTensor *given;
} Placing;

static EpStatus place(void *context, const char *call) {
    Placing *p = context;
    (void)call;
    return ep_group_place(p->group, p->given, NULL);
}

GroupTest(handles_placement, refuses, 1, "experts=7 physical=11") {
    static const Member members[] = {TENSOR("map", Placing, map, given)};
    const Subject subject = {members, LENGTH(members), sizeof(Placing), place};
    int32_t *map = calloc(16, sizeof(*map));
    Placing p = {group, ep_tensor_1d(map, EP_TYPE_INT32, 11), NULL};
    p.given = &p.map;
    CHECK(group_info(group).num_physical == 11 && group_info(group).num_local_experts == 11, "%d",
          group_info(group).num_physical);
    check_refusals("placement", &subject, &p);
    CHECK_OK(place(&p, NULL));
    EpGroup *other = open_group_of(bootstrap, "experts=11");
    CHECK_REFUSED(ep_group_place(other, &p.map, NULL), EP_ERR_UNSUPPORTED,
                  "group: expected one with config.num_physical");
    ep_group_destroy(other);
    free(map);
}
