/* SPDX-License-Identifier: Apache-2.0 */
/* Latency mode: which handles get it, what memory it takes, and that a dispatch reads the routing
 * when it runs. run_case_on_threads tests what its operations write. */
#include "tests/cases/fixture.h"
#include "tests/harness/ranked.h"

/* ---- which mode ---- */

typedef struct Choice {
    int group, handle; /* modes */
    int max_tokens;
    int64_t capacity;
    EpLayout layout;
    int expected;
} Choice;

enum {
    MANY = EP_LATENCY_TOKENS,
    AUTO = EP_MODE_AUTO,
    NAMED = EP_MODE_LATENCY,
    THROUGHPUT = EP_MODE_THROUGHPUT
};

static const Choice choices[] = {
    {AUTO, EP_DEFAULT, MANY, 100, EP_LAYOUT_EXPERT_MAJOR, NAMED},
    {AUTO, EP_DEFAULT, MANY + 1, 100, EP_LAYOUT_EXPERT_MAJOR, THROUGHPUT},
    {AUTO, EP_DEFAULT, MANY, 0, EP_LAYOUT_EXPERT_MAJOR, THROUGHPUT},
    {AUTO, EP_DEFAULT, MANY, 0, EP_LAYOUT_FLAT, THROUGHPUT},
    {AUTO, EP_DEFAULT, MANY, 0, EP_LAYOUT_BATCHED, NAMED},
    {AUTO, THROUGHPUT, 1, 100, EP_LAYOUT_FLAT, THROUGHPUT},
    {THROUGHPUT, EP_DEFAULT, 1, 100, EP_LAYOUT_FLAT, THROUGHPUT},
    {THROUGHPUT, AUTO, 1, 100, EP_LAYOUT_FLAT, NAMED},
    {THROUGHPUT, NAMED, 600, 100, EP_LAYOUT_FLAT, NAMED},
    {NAMED, EP_DEFAULT, 600, 0, EP_LAYOUT_BATCHED, NAMED},
    {AUTO, EP_DEFAULT, MANY, 0, EP_LAYOUT_RANK_MAJOR, NAMED},
    {THROUGHPUT, AUTO, 1, 100, EP_LAYOUT_RANK_MAJOR, NAMED},
    {NAMED, EP_DEFAULT, 600, 0, EP_LAYOUT_RANK_MAJOR, NAMED},
    {AUTO, EP_DEFAULT, MANY + 1, 0, EP_LAYOUT_RANK_MAJOR, THROUGHPUT},
    {THROUGHPUT, EP_DEFAULT, 1, 0, EP_LAYOUT_RANK_MAJOR, THROUGHPUT},
};

static void check_choice(const EpBootstrap *bootstrap, const Choice *choice, int available) {
    Case c = case_complete((Case){.max_tokens = choice->max_tokens});
    EpGroupConfig config = case_group_config(&c);
    config.mode = (EpMode)choice->group, config.max_recv_rows = choice->capacity;
    if (choice->handle == EP_MODE_AUTO || choice->handle == EP_MODE_LATENCY)
        config.latency_sets = 1;
    EpGroup *group = open_group_with(bootstrap, &config);
    EpHandleConfig handle = EP_HANDLE_CONFIG_INIT;
    handle.layout = choice->layout, handle.mode = choice->handle;
    if (choice->layout == EP_LAYOUT_BATCHED) handle.rows_per_expert = 20;
    EpHandleCost cost = EP_HANDLE_COST_INIT;
    size_t bytes = 0;
    CHECK_OK(ep_handle_cost(group, &handle, &cost));
    CHECK_OK(ep_handle_memory(group, &handle, &bytes));
    EpMode expected = available ? (EpMode)choice->expected : EP_MODE_THROUGHPUT;
    CHECK(cost.mode == expected, "mode %d", (int)cost.mode);
    CHECK(cost.plan_bytes == (int64_t)bytes, "%lld bytes", (long long)cost.plan_bytes);
    CHECK(cost.buffer_bytes == 0, "%lld bytes of buffers", (long long)cost.buffer_bytes);
    EpGroupInfo info = group_info(group);
    if (choice->handle == EP_DEFAULT && choice->layout < EP_LAYOUT_BATCHED)
        CHECK(info.mode == expected, "the group says %d", (int)info.mode);
    ep_group_destroy(group);
}

ThreadTest(handles_latency, who_gets_it, 1) {
    for (int i = 0; i < LENGTH(choices); i++) {
        const Choice *c = &choices[i];
        int named = c->group == EP_MODE_LATENCY || c->handle == EP_MODE_LATENCY ||
                    c->layout == EP_LAYOUT_RANK_MAJOR;
        check_note("choice %d", i);
        if (TESTS_HAVE_LATENCY || !named) check_choice(bootstrap, c, TESTS_HAVE_LATENCY);
    }
}

static void check_mode(EpGroup *group, int layout, int mode, EpMode expected) {
    EpHandleConfig config = EP_HANDLE_CONFIG_INIT;
    EpHandleCost cost = EP_HANDLE_COST_INIT;
    config.layout = layout, config.mode = mode, config.max_recv_rows = 100;
    CHECK_OK(ep_handle_cost(group, &config, &cost));
    CHECK(cost.mode == expected, "mode %d for %d", (int)cost.mode, mode);
}

/* On several nodes AUTO is latency mode up to LIBEP_NODE_LATENCY, on both backends alike: never
 * where nodes differ in their ranks. There GPUs have no latency mode by name, either; else both
 * backends have it, without other settings. `most` NULL: the default. */
static void check_modes_on_nodes(const EpBootstrap *bootstrap, const char *nodes, const char *most,
                                 int max_tokens, EpMode chosen) {
    Case c = case_complete((Case){.ranks = bootstrap->size, .max_tokens = max_tokens});
    EpGroupConfig config = case_group_config(&c);
    EpHandleConfig named = EP_HANDLE_CONFIG_INIT;
    EpHandle *handle = NULL;
    config.mode = EP_MODE_AUTO, config.max_recv_rows = 100, config.latency_sets = EP_DEFAULT;
    if (chosen == EP_MODE_THROUGHPUT) config.latency_sets = 1;
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", nodes);
    if (most) set_on_ranks(bootstrap, "LIBEP_NODE_LATENCY", most);
    EpGroup *group = open_group_with(bootstrap, &config);
    CHECK(group_info(group).mode == chosen, "mode %d", (int)group_info(group).mode);
    for (int layout = EP_LAYOUT_FLAT; layout <= EP_LAYOUT_RANK_MAJOR;
         layout += EP_LAYOUT_RANK_MAJOR - EP_LAYOUT_FLAT)
        check_mode(group, layout, EP_MODE_AUTO, chosen);
    check_mode(group, EP_LAYOUT_FLAT, EP_DEFAULT, chosen);
    named.layout = EP_LAYOUT_FLAT, named.mode = EP_MODE_LATENCY;
    if (TEST_BACKEND == EP_BACKEND_HOST || bootstrap->size % 2 == 0)
        check_mode(group, EP_LAYOUT_FLAT, EP_MODE_LATENCY, EP_MODE_LATENCY);
    else
        CHECK_REFUSED(ep_handle_create(group, &named, &handle), EP_ERR_UNSUPPORTED, "config.mode",
                      "nodes of GPUs have different numbers of ranks");
    CHECK(!handle, "a handle was made");
    ep_group_destroy(group);
}

ThreadTest(handles_latency, auto_on_two_nodes, 2) {
    check_modes_on_nodes(bootstrap, "2", NULL, 128, EP_MODE_LATENCY);
    check_modes_on_nodes(bootstrap, "2", NULL, 129, EP_MODE_THROUGHPUT);
    check_modes_on_nodes(bootstrap, "2", "0", 9, EP_MODE_THROUGHPUT);
    check_modes_on_nodes(bootstrap, "2", "8", 9, EP_MODE_THROUGHPUT);
    check_modes_on_nodes(bootstrap, "2", "9", 9, EP_MODE_LATENCY);
}

RankTest(handles_latency, auto_on_unequal_nodes, 3,
         check_modes_on_nodes(bootstrap, "0,1,1", "9", 9, EP_MODE_THROUGHPUT));

/* A group without a capacity is feasible: each handle must then choose its own. */
SoloTest(handles_latency, groups_without_a_capacity_are_feasible) {
    needs_latency();
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    EpGroupConfig config = case_group_config(&c);
    EpGroupMemory memory = EP_GROUP_MEMORY_INIT;
    config.mode = EP_MODE_LATENCY;
    CHECK_OK(ep_group_memory(&config, 2, &memory));
    CHECK(memory.feasible && memory.handle_bytes == 0, "%s", memory.reason);
    config.max_recv_rows = 10;
    CHECK_OK(ep_group_memory(&config, 2, &memory));
    CHECK(memory.feasible && memory.handle_bytes > 0, "%s", memory.reason);
}

/* ---- what it takes ---- */

FixtureTest(handles_latency, costs_what_it_says, "mode=latency layout=batched") {
    EpHandleConfig config = case_handle_config(&f->world->c);
    EpHandleCost cost = EP_HANDLE_COST_INIT;
    EpGroupInfo before = EP_GROUP_INFO_INIT, during = before, after = before;
    EpHandle *handle = NULL;
    CHECK_OK(ep_handle_cost(f->group, &config, &cost));
    CHECK_OK(ep_group_query(f->group, &before));
    REQUIRE_OK(ep_handle_create(f->group, &config, &handle));
    CHECK_OK(ep_group_query(f->group, &during));
    ep_handle_destroy(handle);
    REQUIRE_OK(ep_handle_create(f->group, &config, &handle));
    config.plans = EP_PLANS_NAMED;
    REQUIRE_OK(ep_handle_create(f->group, &config, &handle));
    CHECK_OK(ep_group_query(f->group, &after));
    CHECK(during.library_bytes - before.library_bytes == cost.plan_bytes, "%lld bytes more",
          (long long)(during.library_bytes - before.library_bytes));
    CHECK(after.library_bytes == during.library_bytes, "%lld bytes more",
          (long long)(after.library_bytes - during.library_bytes));
}

/* ---- order ---- */

static void refuse_until_dispatched(Fixture *fixture) {
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    CHECK_REFUSED(fixture_call(fixture, STEP_COMBINE), EP_ERR_NOT_PREPARED, "ep_combine",
                  "ep_dispatch");
    CHECK_REFUSED(ep_handle_info(fixture->handle, &info), EP_ERR_NOT_PREPARED, "ep_handle_info",
                  "ep_dispatch");
    CHECK(info.step == 0, "outputs were written");
    fixture_check_untouched(fixture);
}

/* A dispatch makes the plan; the next ep_prepare discards it. */
FixtureTest(handles_latency, dispatch_makes_the_plan, "mode=latency layout=batched") {
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    CHECK_REFUSED(fixture_call(f, STEP_DISPATCH), EP_ERR_NOT_PREPARED, "ep_dispatch", "routing");
    CHECK_REFUSED(fixture_call(f, STEP_COMBINE), EP_ERR_NOT_PREPARED, "ep_combine", "plan");
    fixture_check_untouched(f);
    for (int step = 1; step <= 3; step++) {
        fixture_reset(f);
        CHECK_OK(fixture_call(f, STEP_PREPARE));
        refuse_until_dispatched(f);
        CHECK_OK(fixture_call(f, STEP_DISPATCH));
        CHECK_OK(fixture_call(f, STEP_COMBINE));
        CHECK_OK(ep_handle_info(f->handle, &info));
        CHECK(info.step == step && info.mode == EP_MODE_LATENCY, "step %lld instead of %d, mode %d",
              (long long)info.step, step, (int)info.mode);
    }
}

FixtureTest(handles_latency, there_is_no_backward, "mode=latency") {
    step_dispatch(&f->step);
    CHECK_REFUSED(fixture_call(f, STEP_COMBINE_BACKWARD), EP_ERR_UNSUPPORTED, "ep_combine_backward",
                  "throughput mode", "no backward");
    CHECK_REFUSED(fixture_call(f, STEP_DISPATCH_BACKWARD), EP_ERR_UNSUPPORTED,
                  "ep_dispatch_backward", "throughput mode", "no backward");
    fixture_check_untouched(f);
    step_combine(&f->step);
}

static void check_dispatched(Fixture *fixture, int32_t given, int64_t tokens) {
    *(int32_t *)fixture->tensor[IN_COUNT].data = given;
    CHECK_OK(fixture_call(fixture, STEP_DISPATCH));
    EpHandleInfo info = handle_info(fixture->handle);
    CHECK(info.num_tokens == tokens, "%lld tokens instead of %lld", (long long)info.num_tokens,
          (long long)tokens);
}

/* The dispatch reads num_tokens. On the host it refuses a number out of range; kernels clamp it to
 * the rows of topk_idx, since their calls do not read it. */
FixtureTest(handles_latency, number_of_tokens_out_of_range, "mode=latency layout=batched") {
    CHECK_OK(fixture_call(f, STEP_PREPARE));
    if (TESTS_ON_GPU) {
        check_dispatched(f, 10, 9), check_dispatched(f, -1, 0);
    } else {
        *(int32_t *)f->tensor[IN_COUNT].data = 10;
        CHECK_REFUSED(fixture_call(f, STEP_DISPATCH), EP_ERR_RANGE, "ep_dispatch", "num_tokens",
                      "0 .. 9", "got 10");
        fixture_check_untouched(f);
    }
    check_dispatched(f, 4, 4);
    /* The tensor of tokens must still have T rows. */
    f->tensor[IN_TOKENS].shape[0] = 4;
    CHECK_REFUSED(fixture_call(f, STEP_DISPATCH), EP_ERR_SHAPE, "tokens", "9", "got 4");
}

/* ---- routing that changes in place, as in replays of graphs ---- */

enum { RANKS = 4, REPLAYS = 40 };

/* Buffers that every dispatch reads and writes again after one ep_prepare. */
typedef struct Fixed {
    int64_t *index;
    int64_t num_tokens;
    int32_t totals[3];
} Fixed;

static void fill(Fixed *fixed, const World *world, int rank) {
    const RankWorld *me = &world->rank[rank];
    memcpy(fixed->index, me->index, (size_t)me->rows * (size_t)world->c.top_k * sizeof(int64_t));
    fixed->num_tokens = me->tokens;
}

static void defer_routing(EpHandle *handle, Fixed *fixed, const Case *c) {
    EpTensor topk_idx = ep_tensor_2d(fixed->index, EP_TYPE_INT64, c->max_tokens, c->top_k);
    EpTensor num_tokens = ep_tensor_1d(&fixed->num_tokens, EP_TYPE_INT64, 1);
    EpTensor totals = ep_tensor_1d(fixed->totals, EP_TYPE_INT32, 3);
    EpPlanTensors out = EP_PLAN_TENSORS_INIT;
    out.totals = &totals;
    CHECK_OK(ep_prepare(handle, NULL, &topk_idx, &num_tokens, NULL, &out));
}

static void replay(const Step *step, Fixed *fixed) {
    const RankWorld *me = &step->world->rank[step->rank];
    fill(fixed, step->world, step->rank);
    step_dispatch_again(step);
    CHECK(fixed->totals[0] == me->recv_rows && fixed->totals[1] == me->needed_rows, "totals %d, %d",
          (int)fixed->totals[0], (int)fixed->totals[1]);
    step_combine(step);
    step_check_status(step);
}

static void replays(const EpBootstrap *bootstrap, EpLayout layout, int phases) {
    Case c = case_complete(case_of("ranks=%d experts=10 top_k=3 counted=1 weighted=1 layout=%d "
                                   "mode=latency index_type=int64 phases=%d",
                                   RANKS, layout, phases));
    EpGroup *group = open_group(bootstrap, &c);
    EpHandle *handle = open_handle(group, &c);
    Fixed fixed = {.index = calloc((size_t)(c.max_tokens * c.top_k), sizeof(int64_t))};
    defer_routing(handle, &fixed, &c);
    for (int i = 0; i < REPLAYS; i++) {
        c.seed = (uint64_t)i, c.spread = (Spread)(i % 5), c.masked_percent = i % 30;
        World *world = world_new(&c);
        check_note("case: %s", case_describe(&c));
        Step step = {group, handle, world, bootstrap->rank, NULL};
        replay(&step, &fixed);
        world_free(world);
    }
    ep_group_destroy(group);
    free(fixed.index);
}

ThreadTest(handles_latency, routes_again_without_prepare, RANKS) {
    needs_latency();
    for (EpLayout layout = EP_LAYOUT_EXPERT_MAJOR; layout <= EP_LAYOUT_RANK_MAJOR; layout++) {
        replays(bootstrap, layout, 0);
        replays(bootstrap, layout, 1);
    }
}
