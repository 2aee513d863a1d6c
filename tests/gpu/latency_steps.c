/* SPDX-License-Identifier: Apache-2.0 */
/* Some hundred steps of handles in latency and throughput mode of one group, whole and in halves,
 * interleaved operation by operation on two streams, while each rank dawdles as it likes: on the
 * host before a call, or on the stream before its kernel. LIBEP_TEST_SEED=N begins elsewhere,
 * LIBEP_TEST_STEPS=M takes M rounds of a step of each handle. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/cases/run.h"
#include "tests/gpu/arena.h"
#include "tests/gpu/rig.h"
#include "tests/harness/random.h"

enum { HANDLES = 8, ROUNDS = 60, BALLAST = 2 << 20 };

/* Latency mode in all layouts, then twice with rows that are quantised, and throughput mode. */
static Case handle_case(int ranks, int handle) {
    int throughput = handle >= 5, quantised = !throughput && handle >= 3;
    Case c = {.ranks = ranks,
              .experts = 2 * ranks + 1,
              .top_k = 3,
              .hidden = 64,
              .max_tokens = 14,
              .counted = 1,
              .weighted = handle % 2,
              .masked_percent = 8,
              .alignment = 4,
              .capacity = handle == 5 ? 30 : 100,
              .rows_per_expert = 24,
              .overflow = EP_OVERFLOW_DROP,
              .layout = (EpLayout)(1 + handle % 3),
              .mode = throughput ? EP_MODE_THROUGHPUT : EP_MODE_LATENCY};
    if (quantised && gpu_has_quant()) c.quant = handle == 3 ? EP_QUANT_FP8 : EP_QUANT_MXFP8;
    return case_complete(c);
}

typedef struct Player {
    Rig rig;
    World *world;
    unsigned left; /* operations of this round still to be issued */
} Player;

typedef struct Band {
    EpGroup *group;
    cudaStream_t stream[2];
    Player player[HANDLES];
    Random shared, own; /* what all ranks draw, and a rank's delays */
    char *from, *to;    /* copied to hold up a stream */
} Band;

static void band_open(Band *band, const EpBootstrap *bootstrap, uint64_t seed) {
    Case widest = handle_case(bootstrap->size, 6);
    *band = (Band){.group = open_group(bootstrap, &widest), .to = gpu_allocate(128, BALLAST)};
    band->shared = random_stream(seed, 1, 0);
    band->own = random_stream(seed, 2, (uint64_t)bootstrap->rank);
    REQUIRE(band->group && band->to, "no group, or no memory");
    REQUIRE_CUDA(cudaMalloc((void **)&band->from, BALLAST));
    for (int i = 0; i < 2; i++)
        band->stream[i] = new_stream();
    for (int i = 0; i < HANDLES; i++) {
        Case c = handle_case(bootstrap->size, i);
        EpHandle *handle = rig_handle(band->group, &c);
        REQUIRE(handle, "no handle");
        rig_open(&band->player[i].rig, band->group, handle, &c, bootstrap->rank,
                 band->stream[i % 2], NULL);
    }
}

static void band_close(Band *band) {
    ep_group_destroy(band->group);
    for (int i = 0; i < HANDLES; i++) {
        rig_close(&band->player[i].rig);
        if (band->player[i].world) world_free(band->player[i].world);
    }
    for (int i = 0; i < 2; i++)
        CHECK_CUDA(cudaStreamDestroy(band->stream[i]));
    CHECK_CUDA(cudaFree(band->from));
    gpu_release(band->to);
}

static unsigned draw_ops(Random *random, EpMode mode) {
    static const unsigned latency[] = {RIG_FORWARD,
                                       RIG_HALVES,
                                       RIG_HALVES,
                                       RIG_PREPARE | RIG_DISPATCH,
                                       RIG_PREPARE | RIG_DISPATCH_SEND | RIG_DISPATCH_WAIT,
                                       RIG_PREPARE | RIG_DISPATCH | RIG_COMBINE_SEND |
                                           RIG_COMBINE_WAIT};
    int drawn = (int)random_below(random, 6);
    if (mode == EP_MODE_LATENCY) return latency[drawn];
    return drawn % 2 ? RIG_ALL : RIG_FORWARD;
}

static void new_round(Band *band) {
    static const Spread spreads[] = {SPREAD_RANDOM, SPREAD_RANDOM, SPREAD_FULL,
                                     SPREAD_ALONE,  SPREAD_HOLE,   SPREAD_NONE};
    for (int i = 0; i < HANDLES; i++) {
        Player *player = &band->player[i];
        Case c = player->rig.c;
        c.seed = random_next(&band->shared);
        c.spread = spreads[random_below(&band->shared, 6)];
        c.routing = (Routing)random_below(&band->shared, 2);
        if (player->world) world_free(player->world);
        player->world = world_new(&c);
        player->left = draw_ops(&band->shared, c.mode);
        rig_load(&player->rig, player->world);
    }
}

static void dawdle(Band *band, cudaStream_t stream) {
    if (random_percent(&band->own, 10)) usleep((useconds_t)random_below(&band->own, 700));
    if (!random_percent(&band->own, 10)) return;
    for (int i = (int)random_below(&band->own, 4); i >= 0; i--)
        CHECK_CUDA(cudaMemcpyAsync(band->to, band->from, BALLAST, cudaMemcpyDefault, stream));
}

/* The next operation of a handle that has one left, beginning the search anywhere; 0: none has. */
static int play_one(Band *band) {
    int first = (int)random_below(&band->shared, HANDLES);
    for (int i = 0; i < HANDLES; i++) {
        Player *player = &band->player[(first + i) % HANDLES];
        if (!player->left) continue;
        unsigned op = player->left & -player->left;
        player->left -= op;
        dawdle(band, player->rig.stream);
        rig_issue(&player->rig, op);
        return 1;
    }
    return 0;
}

static void play(const EpBootstrap *bootstrap) {
    const char *seed_text = getenv("LIBEP_TEST_SEED"), *rounds_text = getenv("LIBEP_TEST_STEPS");
    uint64_t seed = seed_text ? strtoull(seed_text, NULL, 10) : 1;
    int rounds = rounds_text ? atoi(rounds_text) : ROUNDS;
    Band band;
    band_open(&band, bootstrap, seed);
    REQUIRE(!check_failure()[0], "not everything could be opened");
    for (int round = 0; round < rounds && !check_failure()[0]; round++) {
        new_round(&band);
        while (play_one(&band)) {
        }
        for (int i = 0; i < HANDLES; i++) {
            check_note("seed %llu, round %d, handle %d: %s", (unsigned long long)seed, round, i,
                       case_describe(&band.player[i].world->c));
            rig_check(&band.player[i].rig);
        }
    }
    CHECK_OK(ep_group_status(band.group, NULL));
    if (bootstrap->rank == 0)
        printf("gpu_steps: latency, %d ranks, %d rounds, seed %llu\n", bootstrap->size, rounds,
               (unsigned long long)seed);
    band_close(&band);
}

ThreadTest(gpu_steps, both_modes_1, 1) {
    GPU_NEEDS_LATENCY();
    play(bootstrap);
}
ThreadTest(gpu_steps, both_modes_2, 2) {
    GPU_NEEDS_LATENCY();
    play(bootstrap);
}
ThreadTest(gpu_steps, both_modes_4, 4) {
    GPU_NEEDS_LATENCY();
    play(bootstrap);
}
