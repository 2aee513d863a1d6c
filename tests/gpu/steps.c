/* SPDX-License-Identifier: Apache-2.0 */
/* Many random steps of one group. T, routing, layout, handle and stream change from step to step,
 * several steps are under way at once, and every byte of each is compared with the oracle.
 * LIBEP_TEST_SEED=N sets the seed, LIBEP_TEST_STEPS=M takes M steps. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/cases/run.h"
#include "tests/gpu/device_step.h"
#include "tests/gpu/devices.h"
#include "tests/harness/random.h"

enum {
    HANDLES = 6,                /* two of each layout */
    DEVICE_STEPS = 4 * HANDLES, /* steps that can be under way */
    RELOAD_INTERVAL = 125       /* steps after which all steps get new worlds */
};

static void reserve(void) {
    gpu_reserve((size_t)512 << 20);
}

TestSuite(gpu_steps, .init = reserve);

static uint64_t number_from(const char *name, uint64_t standard) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : standard;
}

/* The second handle of each layout has so little capacity that some steps drop rows. The sums of
 * two handles travel quantised. */
static Case handle_case(int ranks, int handle) {
    int tight = handle >= 3;
    return case_complete((Case){.ranks = ranks,
                                .experts = 3 * ranks + 1,
                                .top_k = 3,
                                .hidden = 64,
                                .max_tokens = 64,
                                .weighted = handle % 2,
                                .scale_bytes = 8 * (handle % 2),
                                .alignment = tight ? 1 : 4,
                                .capacity = tight ? 90 : 400,
                                .rows_per_expert = tight ? 30 : 96,
                                .overflow = EP_OVERFLOW_DROP,
                                .layout = (EpLayout)(1 + handle % 3),
                                .masked_percent = 10,
                                .sum_quant = handle % 5 ? EP_QUANT_NONE : EP_QUANT_FP8,
                                .counted = 1});
}

typedef struct RandomRun {
    EpGroup *group;
    EpHandle *handle[HANDLES];
    cudaStream_t stream[2];
    DeviceStep gpu[DEVICE_STEPS];
    World *world[DEVICE_STEPS];
    uint64_t seed;
    Random random; /* draws the same on every rank */
} RandomRun;

static void run_open(RandomRun *run, const EpBootstrap *bootstrap) {
    Case widest = handle_case(bootstrap->size, 1);
    widest.sets = 4;
    memset(run, 0, sizeof(*run));
    run->seed = number_from("LIBEP_TEST_SEED", 1);
    run->random = random_stream(run->seed, 7, 7);
    run->group = open_group(bootstrap, &widest);
    REQUIRE(run->group, "no group");
    for (int i = 0; i < 2; i++)
        run->stream[i] = new_stream();
    for (int i = 0; i < HANDLES; i++) {
        Case c = handle_case(bootstrap->size, i);
        run->handle[i] = device_step_handle(run->group, &c);
        REQUIRE(run->handle[i], "no handle");
    }
    for (int i = 0; i < DEVICE_STEPS; i++) {
        Case c = handle_case(bootstrap->size, i % HANDLES);
        device_step_open(&run->gpu[i], run->group, run->handle[i % HANDLES], &c, bootstrap->rank,
                         run->stream[0], NULL);
    }
}

static void run_close(RandomRun *run) {
    ep_group_destroy(run->group);
    for (int i = 0; i < DEVICE_STEPS; i++) {
        device_step_close(&run->gpu[i]);
        if (run->world[i]) world_free(run->world[i]);
    }
    for (int i = 0; i < 2; i++)
        CHECK_CUDA(cudaStreamDestroy(run->stream[i]));
}

static void load_worlds(RandomRun *run) {
    static const Spread spreads[] = {SPREAD_RANDOM, SPREAD_RANDOM, SPREAD_RANDOM, SPREAD_FULL,
                                     SPREAD_ALONE,  SPREAD_HOLE,   SPREAD_NONE};
    for (int i = 0; i < DEVICE_STEPS; i++) {
        Case c = run->gpu[i].c;
        c.seed = random_next(&run->random);
        c.spread = spreads[random_below(&run->random, 7)];
        c.routing = (Routing)random_below(&run->random, 2);
        if (run->world[i]) world_free(run->world[i]);
        run->world[i] = world_new(&c);
        device_step_load(&run->gpu[i], run->world[i]);
    }
}

/* Draw the operations of a step: ep_prepare and some others. */
static unsigned draw_ops(Random *random) {
    static const unsigned ops[] = {STEP_ALL,
                                   STEP_ALL,
                                   STEP_FORWARD,
                                   STEP_PREPARE | STEP_DISPATCH,
                                   STEP_PREPARE | STEP_BACKWARD,
                                   STEP_PREPARE | STEP_DISPATCH | STEP_COMBINE_BACKWARD,
                                   STEP_PREPARE};
    return ops[random_below(random, 7)];
}

/* Enqueue up to six steps, then check them. Returns their number. */
static int run_batch(RandomRun *run, int step) {
    int chosen[6], count = 1 + (int)random_below(&run->random, 6);
    for (int i = 0; i < count; i++) {
        /* All are distinct, since a device step holds the outputs of one step. */
        int first = (int)random_below(&run->random, DEVICE_STEPS / 6);
        chosen[i] = first * 6 + (int)((uint64_t)(step + i) % 6);
        DeviceStep *gpu = &run->gpu[chosen[i]];
        gpu->stream = run->stream[random_below(&run->random, 2)];
        device_step_poison(gpu);
        device_step_issue(gpu, draw_ops(&run->random));
    }
    for (int i = 0; i < count; i++) {
        check_note("seed %llu, step %d: %s", (unsigned long long)run->seed, step + i,
                   case_describe(&run->world[chosen[i]]->c));
        device_step_check(&run->gpu[chosen[i]]);
    }
    return count;
}

static void run_random_steps(const EpBootstrap *bootstrap, int standard) {
    static _Thread_local RandomRun run;
    int steps = (int)number_from("LIBEP_TEST_STEPS", (uint64_t)standard), reload = 0;
    run_open(&run, bootstrap);
    REQUIRE(run.gpu[DEVICE_STEPS - 1].got, "not everything could be opened");
    for (int step = 0; step < steps && !check_failure()[0];) {
        if (step >= reload) load_worlds(&run), reload = step + RELOAD_INTERVAL;
        step += run_batch(&run, step);
    }
    CHECK_OK(ep_group_status(run.group, NULL));
    if (bootstrap->rank == 0)
        printf("gpu_steps: %d ranks, %d steps, seed %llu\n", bootstrap->size, steps,
               (unsigned long long)run.seed);
    run_close(&run);
}

/* Processes that share GPUs take milliseconds for each operation. */
#define MANY_STEPS(bootstrap) (gpu_shares((bootstrap)->size) ? 1000 : 10000)

ThreadTest(gpu_steps, random_1, 1) {
    run_random_steps(bootstrap, 2000);
}
ThreadTest(gpu_steps, random_2, 2) {
    run_random_steps(bootstrap, MANY_STEPS(bootstrap));
}
ThreadTest(gpu_steps, random_4, 4) {
    run_random_steps(bootstrap, MANY_STEPS(bootstrap));
}
