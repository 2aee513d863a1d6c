/* SPDX-License-Identifier: Apache-2.0 */
/* Many random steps of one group: T, routing, layout, handle and stream change from step to step,
 * several steps are under way at once, and every byte of each is compared with the oracle.
 * LIBEP_TEST_SEED=N begins elsewhere, LIBEP_TEST_STEPS=M takes M steps. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/cases/run.h"
#include "tests/gpu/arena.h"
#include "tests/gpu/rig.h"
#include "tests/harness/random.h"

enum {
    HANDLES = 6,          /* two of each layout */
    RIGS = 4 * HANDLES,   /* steps that can be under way */
    STEPS_OF_WORLDS = 125 /* steps after which all rigs get new worlds */
};

static void reserve(void) {
    gpu_reserve((size_t)512 << 20);
}

TestSuite(gpu_steps, .init = reserve);

static uint64_t number_from(const char *name, uint64_t standard) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : standard;
}

/* The second handle of a layout has so little room that rows are lost now and then. */
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
                                .counted = 1});
}

typedef struct Walk {
    EpGroup *group;
    EpHandle *handle[HANDLES];
    cudaStream_t stream[2];
    Rig rig[RIGS];
    World *world[RIGS];
    uint64_t seed;
    Random random; /* draws the same on every rank */
} Walk;

static void walk_open(Walk *walk, const EpBootstrap *bootstrap) {
    Case widest = handle_case(bootstrap->size, 1);
    memset(walk, 0, sizeof(*walk));
    walk->seed = number_from("LIBEP_TEST_SEED", 1);
    walk->random = random_stream(walk->seed, 7, 7);
    walk->group = open_group(bootstrap, &widest);
    REQUIRE(walk->group, "no group");
    for (int i = 0; i < 2; i++)
        walk->stream[i] = new_stream();
    for (int i = 0; i < HANDLES; i++) {
        Case c = handle_case(bootstrap->size, i);
        walk->handle[i] = rig_handle(walk->group, &c);
        REQUIRE(walk->handle[i], "no handle");
    }
    for (int i = 0; i < RIGS; i++) {
        Case c = handle_case(bootstrap->size, i % HANDLES);
        rig_open(&walk->rig[i], walk->group, walk->handle[i % HANDLES], &c, bootstrap->rank,
                 walk->stream[0], NULL);
    }
}

static void walk_close(Walk *walk) {
    ep_group_destroy(walk->group);
    for (int i = 0; i < RIGS; i++) {
        rig_close(&walk->rig[i]);
        if (walk->world[i]) world_free(walk->world[i]);
    }
    for (int i = 0; i < 2; i++)
        CHECK_CUDA(cudaStreamDestroy(walk->stream[i]));
}

static void new_worlds(Walk *walk) {
    static const Spread spreads[] = {SPREAD_RANDOM, SPREAD_RANDOM, SPREAD_RANDOM, SPREAD_FULL,
                                     SPREAD_ALONE,  SPREAD_HOLE,   SPREAD_NONE};
    for (int i = 0; i < RIGS; i++) {
        Case c = walk->rig[i].c;
        c.seed = random_next(&walk->random);
        c.spread = spreads[random_below(&walk->random, 7)];
        c.routing = (Routing)random_below(&walk->random, 2);
        if (walk->world[i]) world_free(walk->world[i]);
        walk->world[i] = world_new(&c);
        rig_load(&walk->rig[i], walk->world[i]);
    }
}

/* Which operations a step performs: always a plan, then whatever. */
static unsigned draw_ops(Random *random) {
    static const unsigned ops[] = {RIG_ALL,
                                   RIG_ALL,
                                   RIG_FORWARD,
                                   RIG_PREPARE | RIG_DISPATCH,
                                   RIG_PREPARE | RIG_BACKWARD,
                                   RIG_PREPARE | RIG_DISPATCH | RIG_COMBINE_BACKWARD,
                                   RIG_PREPARE};
    return ops[random_below(random, 7)];
}

/* A handful of steps one after the other, and only then a look at them. */
static int batch(Walk *walk, int step) {
    int chosen[6], count = 1 + (int)random_below(&walk->random, 6);
    for (int i = 0; i < count; i++) {
        /* Distinct rigs: a rig's outputs show one step. */
        int first = (int)random_below(&walk->random, RIGS / 6);
        chosen[i] = first * 6 + (int)((uint64_t)(step + i) % 6);
        Rig *rig = &walk->rig[chosen[i]];
        rig->stream = walk->stream[random_below(&walk->random, 2)];
        rig_poison(rig);
        rig_issue(rig, draw_ops(&walk->random));
    }
    for (int i = 0; i < count; i++) {
        check_note("seed %llu, step %d: %s", (unsigned long long)walk->seed, step + i,
                   case_describe(&walk->world[chosen[i]]->c));
        rig_check(&walk->rig[chosen[i]]);
    }
    return count;
}

static void walk_steps(const EpBootstrap *bootstrap, int standard) {
    static _Thread_local Walk walk;
    int steps = (int)number_from("LIBEP_TEST_STEPS", (uint64_t)standard), reload = 0;
    walk_open(&walk, bootstrap);
    REQUIRE(walk.rig[RIGS - 1].got, "not everything could be opened");
    for (int step = 0; step < steps && !check_failure()[0];) {
        if (step >= reload) new_worlds(&walk), reload = step + STEPS_OF_WORLDS;
        step += batch(&walk, step);
    }
    CHECK_OK(ep_group_status(walk.group, NULL));
    if (bootstrap->rank == 0)
        printf("gpu_steps: %d ranks, %d steps, seed %llu\n", bootstrap->size, steps,
               (unsigned long long)walk.seed);
    walk_close(&walk);
}

/* Processes that share GPUs take milliseconds for each operation. */
#define MANY_STEPS(bootstrap) (gpu_shares((bootstrap)->size) ? 1000 : 10000)

ThreadTest(gpu_steps, random_1, 1) {
    walk_steps(bootstrap, 2000);
}
ThreadTest(gpu_steps, random_2, 2) {
    walk_steps(bootstrap, MANY_STEPS(bootstrap));
}
ThreadTest(gpu_steps, random_4, 4) {
    walk_steps(bootstrap, MANY_STEPS(bootstrap));
}
