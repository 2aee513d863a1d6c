/* SPDX-License-Identifier: Apache-2.0 */
/* Hundreds of steps of one group's handles in latency and throughput mode, whole and in phases,
 * interleaved operation by operation on two streams. Each rank has random delays of its own, on the
 * host before a call or on the stream before its kernel. LIBEP_TEST_SEED=N sets the seed,
 * LIBEP_TEST_STEPS=M takes M rounds, each with one step of each handle. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/cases/run.h"
#include "tests/gpu/device_step.h"
#include "tests/gpu/devices.h"
#include "tests/harness/random.h"

enum { HANDLES = 9, ROUNDS = 60, DELAY_BYTES = 2 << 20 };

/* Handles 0 to 2 and 8: latency mode, each layout. 3 and 4: latency mode with quantised rows. 5 to
 * 7: throughput mode, each layout that it has. The combines of 2 and 3 get topk_weights. The
 * sums of 1 and 5 travel quantised. */
static Case handle_case(int ranks, int handle) {
    int throughput = handle >= 5 && handle < 8, quantised = handle == 3 || handle == 4;
    /* A round has at most 12 send phases. */
    Case c = {.ranks = ranks,
              .sets = EP_MAX_LATENCY_SETS,
              .experts = 2 * ranks + 1,
              .top_k = 3,
              .hidden = 64,
              .max_tokens = 14,
              .counted = 1,
              .weighted = handle % 2 || handle == 8,
              .global_ids = handle % 2,
              .weights_at_combine = handle == 2 || handle == 3,
              .masked_percent = 8,
              .alignment = 4,
              .capacity = handle == 5 ? 30 : 100,
              .rows_per_expert = 24,
              .overflow = EP_OVERFLOW_DROP,
              .layout = handle == 8 ? EP_LAYOUT_RANK_MAJOR : (EpLayout)(1 + handle % 3),
              .mode = throughput ? EP_MODE_THROUGHPUT : EP_MODE_LATENCY};
    if (handle % 4 == 1 && gpu_has_quant()) c.sum_quant = EP_QUANT_FP8;
    if (quantised && gpu_has_quant()) c.quant = handle == 3 ? EP_QUANT_FP8 : EP_QUANT_MXFP8;
    return case_complete(c);
}

typedef struct HandleStep {
    DeviceStep gpu;
    World *world;
    unsigned left; /* operations not yet issued in this round */
} HandleStep;

typedef struct StepSet {
    EpGroup *group;
    cudaStream_t stream[2];
    HandleStep step[HANDLES];
    Random shared, own; /* equal draws on all ranks; this rank's delays */
    char *from, *to;    /* copied to delay a stream */
} StepSet;

static void set_open(StepSet *set, const EpBootstrap *bootstrap, uint64_t seed) {
    Case widest = handle_case(bootstrap->size, 6);
    *set = (StepSet){.group = open_group(bootstrap, &widest), .to = gpu_allocate(128, DELAY_BYTES)};
    set->shared = random_stream(seed, 1, 0);
    set->own = random_stream(seed, 2, (uint64_t)bootstrap->rank);
    REQUIRE(set->group && set->to, "no group, or no memory");
    REQUIRE_CUDA(cudaMalloc((void **)&set->from, DELAY_BYTES));
    for (int i = 0; i < 2; i++)
        set->stream[i] = new_stream();
    for (int i = 0; i < HANDLES; i++) {
        Case c = handle_case(bootstrap->size, i);
        EpHandle *handle = device_step_handle(set->group, &c);
        REQUIRE(handle, "no handle");
        device_step_open(&set->step[i].gpu, set->group, handle, &c, bootstrap->rank,
                         set->stream[i % 2], NULL);
    }
}

static void set_close(StepSet *set) {
    ep_group_destroy(set->group);
    for (int i = 0; i < HANDLES; i++) {
        device_step_close(&set->step[i].gpu);
        if (set->step[i].world) world_free(set->step[i].world);
    }
    for (int i = 0; i < 2; i++)
        CHECK_CUDA(cudaStreamDestroy(set->stream[i]));
    CHECK_CUDA(cudaFree(set->from));
    gpu_release(set->to);
}

static unsigned draw_ops(Random *random, EpMode mode) {
    static const unsigned latency[] = {STEP_FORWARD,
                                       STEP_PHASES,
                                       STEP_PHASES,
                                       STEP_PREPARE | STEP_DISPATCH,
                                       STEP_PREPARE | STEP_DISPATCH_SEND | STEP_DISPATCH_WAIT,
                                       STEP_PREPARE | STEP_DISPATCH | STEP_COMBINE_SEND |
                                           STEP_COMBINE_WAIT};
    int drawn = (int)random_below(random, 6);
    if (mode == EP_MODE_LATENCY) return latency[drawn];
    return drawn % 2 ? STEP_ALL : STEP_FORWARD;
}

static void new_round(StepSet *set) {
    static const Spread spreads[] = {SPREAD_RANDOM, SPREAD_RANDOM, SPREAD_FULL,
                                     SPREAD_ALONE,  SPREAD_HOLE,   SPREAD_NONE};
    for (int i = 0; i < HANDLES; i++) {
        HandleStep *step = &set->step[i];
        Case c = step->gpu.c;
        c.seed = random_next(&set->shared);
        c.spread = spreads[random_below(&set->shared, 6)];
        c.routing = (Routing)random_below(&set->shared, 2);
        if (step->world) world_free(step->world);
        step->world = world_new(&c);
        step->left = draw_ops(&set->shared, c.mode);
        device_step_load(&step->gpu, step->world);
    }
}

static void delay(StepSet *set, cudaStream_t stream) {
    if (random_percent(&set->own, 10)) usleep((useconds_t)random_below(&set->own, 700));
    if (!random_percent(&set->own, 10)) return;
    for (int i = (int)random_below(&set->own, 4); i >= 0; i--)
        CHECK_CUDA(cudaMemcpyAsync(set->to, set->from, DELAY_BYTES, cudaMemcpyDefault, stream));
}

/* Issue the next operation of a handle, searching from a random one. Returns 0 if none is left. */
static int issue_one(StepSet *set) {
    int first = (int)random_below(&set->shared, HANDLES);
    for (int i = 0; i < HANDLES; i++) {
        HandleStep *step = &set->step[(first + i) % HANDLES];
        if (!step->left) continue;
        unsigned op = step->left & -step->left;
        step->left -= op;
        delay(set, step->gpu.stream);
        device_step_issue(&step->gpu, op);
        return 1;
    }
    return 0;
}

static void run_rounds(const EpBootstrap *bootstrap) {
    const char *seed_text = getenv("LIBEP_TEST_SEED"), *rounds_text = getenv("LIBEP_TEST_STEPS");
    uint64_t seed = seed_text ? strtoull(seed_text, NULL, 10) : 1;
    int rounds = rounds_text ? atoi(rounds_text) : ROUNDS;
    StepSet set;
    set_open(&set, bootstrap, seed);
    REQUIRE(!check_failure()[0], "not everything could be opened");
    for (int round = 0; round < rounds && !check_failure()[0]; round++) {
        new_round(&set);
        while (issue_one(&set)) {
        }
        for (int i = 0; i < HANDLES; i++) {
            check_note("seed %llu, round %d, handle %d: %s", (unsigned long long)seed, round, i,
                       case_describe(&set.step[i].world->c));
            device_step_check(&set.step[i].gpu);
        }
    }
    CHECK_OK(ep_group_status(set.group, NULL));
    if (bootstrap->rank == 0)
        printf("gpu_steps: latency, %d ranks, %d rounds, seed %llu\n", bootstrap->size, rounds,
               (unsigned long long)seed);
    set_close(&set);
}

ThreadTest(gpu_steps, both_modes_1, 1) {
    GPU_NEEDS_LATENCY();
    run_rounds(bootstrap);
}
ThreadTest(gpu_steps, both_modes_2, 2) {
    GPU_NEEDS_LATENCY();
    run_rounds(bootstrap);
}
ThreadTest(gpu_steps, both_modes_4, 4) {
    GPU_NEEDS_LATENCY();
    run_rounds(bootstrap);
}
