/* SPDX-License-Identifier: Apache-2.0 */
/* Routes of plans: how large they are, and what damage in them leads to. */
#include <cuda_runtime_api.h>

#include "handles/cuda/handle.h"
#include "tests/gpu/device_step.h"
#include "tests/harness/random.h"

/* ---- sizes --------------------------------------------------------------------------------- */

enum { RANKS = 2, TOKENS = 64, TOP_K = 8, ROWS = RANKS * TOKENS, LOCAL = 4 };

/* Returns the bytes of a plan with room for `capacity` slots; 0: exact sizing. */
static int64_t plan_bytes(const EpGroup *group, EpLayout layout, EpMode mode, int64_t capacity) {
    EpHandleConfig config = EP_HANDLE_CONFIG_INIT;
    size_t bytes = 0;
    config.layout = layout, config.mode = mode;
    if (layout == EP_LAYOUT_BATCHED)
        config.rows_per_expert = capacity / LOCAL;
    else
        config.max_recv_rows = capacity;
    CHECK_OK(ep_handle_memory(group, &config, &bytes));
    EpHandleCost cost = EP_HANDLE_COST_INIT;
    CHECK_OK(ep_handle_cost(group, &config, &cost));
    CHECK(cost.plan_bytes == (int64_t)bytes, "%lld bytes", (long long)cost.plan_bytes);
    return (int64_t)bytes;
}

/* Returns the bytes of the routes. Where each entry has a slot: 4 for each (row, k), or 8 for each
 * row and 4 for each slot if that is at most half as much. Flat: 4 for each k of each kept row. */
static int64_t route_bytes(EpLayout layout, int64_t capacity) {
    int64_t dense = 4 * ROWS * TOP_K, listed = 8 * ROWS + 4 * capacity;
    if (layout == EP_LAYOUT_FLAT) return capacity && capacity < ROWS ? 4 * capacity * TOP_K : dense;
    return capacity && 2 * listed <= dense ? listed : dense;
}

static void check_sizes(const EpGroup *group, EpLayout layout) {
    static const int64_t capacities[] = {32, 64, 128, 192, 256, 384, 416, 4000};
    int64_t most = 4000; /* its routes are dense */
    int64_t others =
        plan_bytes(group, layout, EP_MODE_THROUGHPUT, most) - route_bytes(layout, most);
    for (size_t i = 0; i < sizeof(capacities) / sizeof(capacities[0]); i++) {
        int64_t bytes = plan_bytes(group, layout, EP_MODE_THROUGHPUT, capacities[i]);
        CHECK(bytes == others + route_bytes(layout, capacities[i]),
              "layout %d, %lld rows: %lld bytes", (int)layout, (long long)capacities[i],
              (long long)bytes);
    }
    if (layout == EP_LAYOUT_BATCHED) return;
    int64_t exact = plan_bytes(group, layout, EP_MODE_THROUGHPUT, 0);
    CHECK(exact == others + route_bytes(layout, 0), "%lld bytes", (long long)exact);
}

/* All arrays are multiples of 128 bytes here, so no padding hides a wrong size. */
ThreadTest(gpu_routes, sizes, RANKS) {
    Case c = case_complete((Case){.ranks = RANKS,
                                  .experts = RANKS * LOCAL,
                                  .top_k = TOP_K,
                                  .max_tokens = TOKENS,
                                  .mode = EP_MODE_LATENCY});
    EpGroup *group = open_group(bootstrap, &c);
    for (int layout = EP_LAYOUT_EXPERT_MAJOR; layout <= EP_LAYOUT_BATCHED; layout++) {
        check_sizes(group, (EpLayout)layout);
        int64_t small = plan_bytes(group, (EpLayout)layout, EP_MODE_LATENCY, 32);
        int64_t large = plan_bytes(group, (EpLayout)layout, EP_MODE_LATENCY, 4000);
        CHECK(small == large, "latency mode: %lld bytes, not %lld", (long long)small,
              (long long)large);
    }
    ep_group_destroy(group);
}

/* ---- damage -------------------------------------------------------------------------------- */

typedef enum Damage {
    FAR,    /* slots and rows that nothing has */
    FULL,   /* every entry has a slot, and chains go in circles */
    RANDOM, /* any bits */
    DAMAGES
} Damage;

static int32_t spoilt_word(Damage damage, Random *random, int32_t i) {
    static const int32_t far[] = {-1, INT32_MAX, INT32_MIN, 1 << 20, -100};
    if (damage == FAR) return far[i % 5];
    return damage == FULL ? i : (int32_t)random_below(random, UINT32_MAX);
}

/* Overwrite the routes in a plan. What senders know of the rows stays on several ranks, which would
 * wait for rows that nobody sends. */
static void spoil(const EpCudaPlan *plan, const Case *c, Damage damage, Random *random) {
    int32_t slots = plan->sizes.slots, rows = c->ranks * c->max_tokens;
    for (int32_t i = 0; c->ranks == 1 && i <= c->max_tokens; i++)
        plan->begins[i] = spoilt_word(damage, random, i);
    if (c->ranks == 1) plan->tokens[0] = spoilt_word(damage, random, 1);
    if (plan->sizes.form == EP_ROUTES_FLAT) {
        for (int32_t i = 0; i < slots * c->top_k; i++)
            plan->routes[i] = spoilt_word(damage, random, i);
        for (int r = 0; r < c->ranks; r++)
            plan->flat_begin[r] = spoilt_word(damage, random, r + (int)random_below(random, 5));
        return;
    }
    for (int32_t i = 0; i < rows && plan->sizes.form == EP_ROUTES_CHAINED; i++) {
        plan->chains[i].slot = damage == FULL ? i % slots : spoilt_word(damage, random, i);
        plan->chains[i].mask = (uint32_t)(damage == RANDOM ? spoilt_word(RANDOM, random, i) : -1);
    }
    for (int32_t i = 0; i < slots && plan->sizes.form == EP_ROUTES_CHAINED; i++)
        plan->next[i] = spoilt_word(damage, random, i);
    for (int32_t i = 0; i < rows * c->top_k && plan->sizes.form == EP_ROUTES_DENSE; i++)
        plan->routes[i] = spoilt_word(damage, random, i);
}

/* Check the guards of all outputs; what lies between them may be anything. */
static void check_guards(const DeviceStep *gpu) {
    device_step_fetch(gpu);
    memcpy(gpu->expected, gpu->poison, device_step_outputs_size(&gpu->c));
    for (int i = OUT_COUNTS; i < STEP_OUTPUTS; i++) {
        Image got = device_step_image(gpu, gpu->got, (StepOutput)i);
        Image expected = device_step_image(gpu, gpu->expected, (StepOutput)i);
        memcpy(expected.data, got.data, got.bytes);
        image_check_equal(&got, &expected, 1, "guards");
    }
}

/* The plan lies in memory that the host reaches, too. */
static void run_damaged(const EpBootstrap *bootstrap, EpGroup *group, const Case *c,
                        EpRouteForm form, Damage damage) {
    EpTensor memory;
    EpCudaPlan plan;
    DeviceStep gpu;
    Random random = random_stream(c->seed, bootstrap->rank, damage);
    device_step_new(&gpu, group, c, bootstrap->rank);
    open_plan(group, c, &memory);
    gpu.step.plan = &memory;
    device_step_draw(&gpu, c);
    check_note("layout %d, damage %d", (int)c->layout, (int)damage);
    device_step_issue(&gpu, STEP_PREPARE);
    device_step_check(&gpu);
    ep_cuda_plan_map(&gpu.step.handle->shape, memory.data, &plan);
    CHECK(plan.sizes.form == form, "form %d", (int)plan.sizes.form);
    spoil(&plan, c, damage, &random);
    device_step_issue(&gpu, STEP_ALL & ~(unsigned)STEP_PREPARE);
    check_guards(&gpu);
    CHECK_OK(ep_group_status(group, NULL));
    device_step_close(&gpu);
    gpu_release(memory.data);
}

/* Damaged routes give wrong rows; nothing outside the tensors is written, and the group lives. */
static void run_damages(const EpBootstrap *bootstrap, Case c, EpRouteForm form) {
    c = case_complete(c);
    EpGroup *group = open_group(bootstrap, &c);
    for (int damage = 0; damage < DAMAGES; damage++)
        run_damaged(bootstrap, group, &c, form, (Damage)damage);
    ep_group_destroy(group);
}

static const Case damaged = {.ranks = 2,
                             .experts = 12,
                             .top_k = 8,
                             .max_tokens = 21,
                             .weighted = 1,
                             .spread = SPREAD_FULL,
                             .named = 1,
                             .overflow = EP_OVERFLOW_DROP};

ThreadTest(gpu_routes, damaged_chains, 2) {
    for (int batched = 0; batched < 2; batched++) {
        Case c = damaged;
        c.layout = batched ? EP_LAYOUT_BATCHED : EP_LAYOUT_EXPERT_MAJOR;
        c.capacity = 80, c.rows_per_expert = 13;
        run_damages(bootstrap, c, EP_ROUTES_CHAINED);
    }
}

ThreadTest(gpu_routes, damaged_flat_routes, 2) {
    Case c = damaged;
    c.layout = EP_LAYOUT_FLAT, c.capacity = 30;
    run_damages(bootstrap, c, EP_ROUTES_FLAT);
}

RankTest(gpu_routes, damaged_dense_routes, 2, run_damages(bootstrap, damaged, EP_ROUTES_DENSE));

/* Numbers of rows that no plan has end no loop late. */
ThreadTest(gpu_routes, damaged_numbers, 1) {
    Case c = damaged;
    c.ranks = 1;
    run_damages(bootstrap, c, EP_ROUTES_DENSE);
    c.layout = EP_LAYOUT_FLAT, c.capacity = 15;
    run_damages(bootstrap, c, EP_ROUTES_FLAT);
}
