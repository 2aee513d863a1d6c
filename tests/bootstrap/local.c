/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks as threads: the callbacks of ep_bootstrap_local, and groups over them. */
#include <malloc.h>

#include "tests/cases/run.h"
#include "tests/harness/bootstraps.h"
#include "tests/harness/names.h"

ThreadTest(bootstrap_local, allgather_in_rank_order, 5) {
    const EpBootstrap *b = bootstrap;
    for (int round = 0; round < 20; round++) {
        int mine[3] = {b->rank, round, b->rank * round}, all[15];
        CHECK_OK(b->allgather(b->context, mine, all, sizeof(mine), 60));
        for (int r = 0; r < 5; r++)
            CHECK(all[r * 3] == r && all[r * 3 + 1] == round && all[r * 3 + 2] == r * round,
                  "round %d, rank %d", round, r);
    }
}

ThreadTest(bootstrap_local, barrier_waits_for_everyone, 4) {
    static int arrived;
    for (int round = 1; round <= 50; round++) {
        __atomic_add_fetch(&arrived, 1, __ATOMIC_SEQ_CST);
        CHECK_OK(bootstrap->barrier(bootstrap->context, 60));
        int seen = __atomic_load_n(&arrived, __ATOMIC_SEQ_CST);
        CHECK(seen >= 4 * round, "%d arrivals in round %d", seen, round);
    }
}

/* All ranks of a node see its segments, which are zeroed and do not overlap. */
ThreadTest(bootstrap_local, shared_memory_of_a_node, 4) {
    enum { BYTES = 1000 };
    const EpBootstrap *b = bootstrap;
    if (!b->share) return;
    void *segments[4] = {0}, *memory = NULL;
    int32_t node = b->rank / 2;
    REQUIRE_OK(b->share(b->context, node, BYTES, 60, segments, &memory));
    for (int r = 0; r < 4; r++) {
        CHECK((segments[r] != NULL) == (r / 2 == node), "rank %d's segment is %p", r, segments[r]);
        CHECK((uintptr_t)segments[r] % 64 == 0, "rank %d's segment is at %p", r, segments[r]);
    }
    static const char zeros[BYTES];
    CHECK(memcmp(segments[b->rank], zeros, BYTES) == 0, "not zeroed");
    memset(segments[b->rank], b->rank + 1, BYTES);
    CHECK_OK(b->barrier(b->context, 60));
    const char *other = segments[b->rank ^ 1];
    CHECK(other[0] == (b->rank ^ 1) + 1 && other[BYTES - 1] == other[0], "%d", other[0]);
    CHECK_OK(b->barrier(b->context, 60));
    b->share_free(b->context, memory, 1);
}

/* A rank that is alone in `share` gives up and frees the block of all. The block is too large for
 * the heap, so libc counts it as mapped. */
SoloTest(bootstrap_local, block_of_a_share_that_fails) {
    enum { BYTES = 64 << 20 };
    EpBootstrap b[2] = {EP_BOOTSTRAP_INIT};
    void *segments[2] = {NULL, NULL}, *memory = NULL;
    REQUIRE_OK(ep_bootstrap_local(2, b));
    size_t before = mallinfo2().hblkhd;
    CHECK_TIMEOUT(b[0].share(b[0].context, 0, BYTES, 0.05, segments, &memory), 0.05,
                  "rank 1 did not");
    size_t after = mallinfo2().hblkhd;
    CHECK(after == before && !memory && !segments[0], "%zu bytes, %zu before", after, before);
    for (int r = 0; r < 2; r++)
        ep_bootstrap_destroy(&b[r]);
}

/* Each rank arrives after the previous one has given up. */
SoloTest(bootstrap_local, never_all_at_once) {
    EpBootstrap b[2] = {EP_BOOTSTRAP_INIT};
    REQUIRE_OK(ep_bootstrap_local(2, b));
    CHECK_TIMEOUT(b[0].barrier(b[0].context, 0.05), 0.05, "rank 0:", "rank 1 did not");
    CHECK_TIMEOUT(b[1].barrier(b[1].context, 0.05), 0.05, "rank 1:", "rank 0 did not");
    for (int r = 0; r < 2; r++)
        ep_bootstrap_destroy(&b[r]);
}

SoloTest(bootstrap_local, sizes_out_of_range) {
    static EpBootstrap out[1024];
    memset(out, 0x5a, sizeof(out));
    CHECK_REFUSED(ep_bootstrap_local(0, out), EP_ERR_RANGE, "size", "0");
    CHECK_REFUSED(ep_bootstrap_local(-4, out), EP_ERR_RANGE, "size", "-4");
    CHECK_REFUSED(ep_bootstrap_local(1025, out), EP_ERR_RANGE, "size", "1025");
    CHECK_REFUSED(ep_bootstrap_local(2, NULL), EP_ERR_NULL, "out");
    CHECK_REFUSED(ep_bootstrap_local(2, out), EP_ERR_STRUCT_SIZE, "out[0]", "expected struct_size",
                  "EP_..._INIT");
    CHECK(*(unsigned char *)out == 0x5a, "the output was written");
    out[0] = (EpBootstrap)EP_BOOTSTRAP_INIT; /* stands for all */
    REQUIRE_OK(ep_bootstrap_local(1024, out));
    CHECK(out[1023].rank == 1023 && out[0].size == 1024, "%d of %d", out[1023].rank, out[0].size);
    for (int r = 0; r < 1024; r++)
        ep_bootstrap_destroy(&out[r]);
}

/* ---- many ranks ---- */

typedef struct Crowd {
    Case c;
    double seconds; /* of rank 0's step */
} Crowd;

static void crowd_body(const EpBootstrap *bootstrap, void *arg) {
    Crowd *crowd = arg;
    Step step = open_step(bootstrap, &crowd->c);
    EpGroupInfo info = group_info(step.group);
    CHECK(info.num_nodes == 2, "%d nodes", info.num_nodes);
    CHECK_OK(bootstrap->barrier(bootstrap->context, 60));
    double begin = seconds_now();
    if (step.handle) step_all(&step);
    if (bootstrap->rank == 0) crowd->seconds = seconds_now() - begin;
    close_step(&step);
}

/* Every rank polls 128 peers of another node. The sums of one entry do not depend on the nodes. */
SoloTest(bootstrap_local, many_ranks_on_pretended_nodes) {
    HOST_ONLY("there are not so many GPUs");
    enum { RANKS = 256 };
    char list[8 * RANKS] = "";
    for (int r = 0; r < RANKS; r++)
        snprintf(list + strlen(list), 8, "%s%d", r ? "," : "", 100 + r % 2);
    setenv("LIBEP_TOPOLOGY", list, 1);
    Crowd crowd = {case_of("ranks=%d experts=%d max_tokens=2 top_k=1 hidden=16", RANKS, RANKS), 0};
    run_on_threads(RANKS, crowd_body, &crowd);
    CHECK(TESTS_SANITIZED || crowd.seconds < 10, "a step took %.1f s", crowd.seconds);
    unsetenv("LIBEP_TOPOLOGY");
}

/* ---- bootstraps of the caller ---- */

ThreadTest(bootstrap_local, callers_bootstrap_over_posix_shared_memory, 4) {
    EpBootstrap own = gathers_alone(bootstrap);
    Case c = case_of("ranks=4 experts=9 top_k=3 weighted=1 alignment=8");
    Case flat = case_of("ranks=4 layout=flat scale_bytes=8");
    run_case(&own, &c);
    run_case(&own, &flat);
}

/* The shared memory of a live group has no name, so nothing is left when the process dies. */
ThreadTest(bootstrap_local, posix_shared_memory_leaves_no_names, 3) {
    EpBootstrap own = gathers_alone(bootstrap);
    Case c = case_complete((Case){.ranks = 3});
    time_t begin = time(NULL);
    EpGroup *group = open_group(&own, &c);
    bootstrap->barrier(bootstrap->context, 60);
    int left = names_that_stay(begin);
    CHECK(left == 0, "%d names in /dev/shm", left);
    ep_group_destroy(group);
}

typedef struct WrongBootstrap {
    size_t struct_size;
    int rank, size, has_allgather, has_barrier;
    EpStatus status;
    const char *field, *got;
} WrongBootstrap;

static const WrongBootstrap wrong_bootstraps[] = {
    {0, 0, 1, 1, 1, EP_ERR_STRUCT_SIZE, "bootstrap", "0"},
    {9999, 0, 1, 1, 1, EP_ERR_STRUCT_SIZE, "bootstrap", "9999"},
    {sizeof(EpBootstrap), 0, 0, 1, 1, EP_ERR_RANGE, "size", "got 0"},
    {sizeof(EpBootstrap), 0, 1025, 1, 1, EP_ERR_RANGE, "size", "got 1025"},
    {sizeof(EpBootstrap), 1, 1, 1, 1, EP_ERR_RANGE, "rank", "got 1"},
    {sizeof(EpBootstrap), -1, 1, 1, 1, EP_ERR_RANGE, "rank", "got -1"},
    {sizeof(EpBootstrap), 0, 1, 0, 1, EP_ERR_NULL, "allgather", "NULL"},
    {sizeof(EpBootstrap), 0, 1, 1, 0, EP_ERR_NULL, "barrier", "NULL"},
};

ThreadTest(bootstrap_local, wrong_bootstraps, 1) {
    for (size_t i = 0; i < sizeof(wrong_bootstraps) / sizeof(wrong_bootstraps[0]); i++) {
        const WrongBootstrap *wrong = &wrong_bootstraps[i];
        EpBootstrap own = gathers_alone(bootstrap);
        own.struct_size = wrong->struct_size;
        own.rank = wrong->rank;
        own.size = wrong->size;
        if (!wrong->has_allgather) own.allgather = NULL;
        if (!wrong->has_barrier) own.barrier = NULL;
        EpGroupConfig config = group_config(1);
        check_note("bootstrap %zu", i);
        CHECK_NO_GROUP(&own, &config, wrong->status, wrong->field, wrong->got);
    }
}
