/* SPDX-License-Identifier: Apache-2.0 */
/* Many handles in latency mode: more than a group has windows for its callers, all in use; and such
 * that come and go. */
#include <stdlib.h>

#include "tests/cases/run.h"
#include "tests/gpu/arena.h"
#include "tests/gpu/rig.h"
#include "tests/harness/random.h"

enum { KINDS = 6, HANDLES = EP_MAX_WINDOWS + 10, ROUNDS = 25, LIVES = EP_MAX_WINDOWS + 8 };

/* Each layout, whole and in halves. */
static Case kind_case(int ranks, int kind) {
    return case_complete((Case){.ranks = ranks,
                                .experts = 2 * ranks + 1,
                                .top_k = 3,
                                .hidden = 56,
                                .max_tokens = 11,
                                .counted = 1,
                                .weighted = 1,
                                .scale_bytes = 8,
                                .masked_percent = 10,
                                .capacity = 60,
                                .rows_per_expert = 20,
                                .overflow = EP_OVERFLOW_DROP,
                                .layout = (EpLayout)(1 + kind % 3),
                                .mode = EP_MODE_LATENCY,
                                .halves = kind / 3});
}

static int64_t library_bytes(EpGroup *group) {
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    CHECK_OK(ep_group_query(group, &info));
    return info.library_bytes;
}

/* A rig for each kind, over whatever handle of that kind. */
typedef struct Bench {
    EpGroup *group;
    cudaStream_t stream;
    Rig rig[KINDS];
    World *world[KINDS];
    void *reached; /* where the first rig lies: memory that peers reach */
    Random random; /* the same on all ranks */
    uint64_t seed;
} Bench;

static void bench_open(Bench *bench, const EpBootstrap *bootstrap) {
    Case c = kind_case(bootstrap->size, 0);
    const char *seed = getenv("LIBEP_TEST_SEED");
    *bench = (Bench){.group = open_group(bootstrap, &c), .stream = new_stream()};
    bench->seed = seed ? strtoull(seed, NULL, 10) : 1;
    bench->random = random_stream(bench->seed, 0, 0);
    REQUIRE(bench->group, "no group");
    REQUIRE_OK(ep_mem_alloc(bench->group, rig_bytes(&c), &bench->reached));
    for (int i = 0; i < KINDS; i++) {
        c = kind_case(bootstrap->size, i);
        rig_open(&bench->rig[i], bench->group, NULL, &c, bootstrap->rank, bench->stream,
                 i ? NULL : bench->reached);
    }
}

static void bench_close(Bench *bench) {
    CHECK_OK(ep_group_status(bench->group, NULL));
    ep_group_destroy(bench->group);
    for (int i = 0; i < KINDS; i++) {
        rig_close(&bench->rig[i]);
        if (bench->world[i]) world_free(bench->world[i]);
    }
    CHECK_CUDA(cudaStreamDestroy(bench->stream));
}

/* Take a new world to a handle. */
static void load(Bench *bench, int kind, EpHandle *handle) {
    Case c = bench->rig[kind].c;
    c.seed = random_next(&bench->random);
    if (bench->world[kind]) world_free(bench->world[kind]);
    bench->world[kind] = world_new(&c);
    bench->rig[kind].step.handle = handle;
    rig_load(&bench->rig[kind], bench->world[kind]);
}

static void check(Bench *bench, int kind, int round) {
    check_note("seed %llu, round %d: %s", (unsigned long long)bench->seed, round,
               case_describe(&bench->world[kind]->c));
    rig_check(&bench->rig[kind]);
}

/* ---- many ---------------------------------------------------------------------------------- */

/* A step of one handle of each kind, operation by operation. */
static void use_some(Bench *bench, EpHandle *const *handles, int round) {
    for (int i = 0; i < KINDS; i++)
        load(bench, i, handles[i + KINDS * random_below(&bench->random, HANDLES / KINDS)]);
    for (unsigned op = RIG_PREPARE; op <= RIG_COMBINE_WAIT; op <<= 1)
        for (int i = 0; i < KINDS; i++)
            rig_issue(&bench->rig[i], op & rig_all(&bench->rig[i].c));
    for (int i = 0; i < KINDS; i++)
        check(bench, i, round);
}

static void many_handles(const EpBootstrap *bootstrap) {
    Bench bench;
    EpHandle *handles[HANDLES];
    bench_open(&bench, bootstrap);
    REQUIRE(!check_failure()[0], "no bench");
    int64_t before = library_bytes(bench.group);
    for (int i = 0; i < HANDLES; i++) {
        handles[i] = rig_handle(bench.group, &bench.rig[i % KINDS].c);
        REQUIRE(handles[i], "no handle %d", i);
    }
    for (int round = 0; round < ROUNDS && !check_failure()[0]; round++)
        use_some(&bench, handles, round);
    for (int i = 0; i < HANDLES; i++)
        ep_handle_destroy(handles[i * 5 % HANDLES]);
    CHECK(library_bytes(bench.group) == before, "%lld bytes instead of %lld",
          (long long)library_bytes(bench.group), (long long)before);
    bench_close(&bench);
}

ThreadTest(gpu_latency, many_handles_1, 1) {
    GPU_NEEDS_LATENCY();
    many_handles(bootstrap);
}
ThreadTest(gpu_latency, many_handles_2, 2) {
    GPU_NEEDS_LATENCY();
    many_handles(bootstrap);
}
ThreadTest(gpu_latency, many_handles_4, 4) {
    GPU_NEEDS_LATENCY();
    many_handles(bootstrap);
}

/* ---- that come and go ---------------------------------------------------------------------- */

/* One lives through, others come and go beside it, used, unused and in flight. */
static void live_once(Bench *bench, EpHandle *lasting, int round) {
    int kind = 1 + round % (KINDS - 1);
    int64_t before = library_bytes(bench->group);
    EpHandle *used = rig_handle(bench->group, &bench->rig[kind].c);
    EpHandle *unused = rig_handle(bench->group, &bench->rig[(round + 2) % KINDS].c);
    REQUIRE(used && unused, "no handle");
    load(bench, kind, used);
    load(bench, 0, lasting);
    rig_issue(&bench->rig[0], RIG_PREPARE | RIG_DISPATCH);
    rig_issue(&bench->rig[kind], rig_all(&bench->rig[kind].c));
    rig_issue(&bench->rig[0], RIG_COMBINE);
    check(bench, kind, round);
    check(bench, 0, round);
    rig_poison(&bench->rig[kind]);
    if (round % 4 == 3) rig_issue(&bench->rig[kind], RIG_DISPATCH_SEND);
    ep_handle_destroy(round % 2 ? used : unused);
    ep_handle_destroy(round % 2 ? unused : used);
    CHECK(library_bytes(bench->group) == before, "round %d: %lld bytes instead of %lld", round,
          (long long)library_bytes(bench->group), (long long)before);
}

static void come_and_go(const EpBootstrap *bootstrap) {
    Bench bench;
    bench_open(&bench, bootstrap);
    REQUIRE(!check_failure()[0], "no bench");
    EpHandle *lasting = rig_handle(bench.group, &bench.rig[0].c);
    REQUIRE(lasting, "no handle");
    for (int round = 0; round < LIVES && !check_failure()[0]; round++)
        live_once(&bench, lasting, round);
    bench_close(&bench);
}

ThreadTest(gpu_latency, come_and_go_1, 1) {
    GPU_NEEDS_LATENCY();
    come_and_go(bootstrap);
}
ThreadTest(gpu_latency, come_and_go_2, 2) {
    GPU_NEEDS_LATENCY();
    come_and_go(bootstrap);
}
ThreadTest(gpu_latency, come_and_go_4, 4) {
    GPU_NEEDS_LATENCY();
    come_and_go(bootstrap);
}

/* ---- too many entries ---------------------------------------------------------------------- */

ThreadTest(gpu_latency, too_many_entries, 2) {
    GPU_NEEDS_LATENCY();
    Case c = kind_case(bootstrap->size, 0);
    EpHandle *handle = NULL;
    c.max_tokens = 40000;
    EpGroup *group = open_group(bootstrap, &c);
    REQUIRE(group, "no group");
    EpHandleConfig config = case_handle_config(&c);
    CHECK_REFUSED(ep_handle_create(group, &config, NULL, 0, &handle), EP_ERR_UNSUPPORTED,
                  "ep_handle_create", "config", "at most", "in latency mode", "got 40000 * 3");
    CHECK(handle == NULL, "a handle was made");
    CHECK_OK(ep_group_status(group, NULL));
    ep_group_destroy(group);
}
