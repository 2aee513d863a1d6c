/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_HARNESS_THREADS_H
#define TESTS_HARNESS_THREADS_H

/**
 * Ranks as threads of the test's process, over ep_bootstrap_local. Where ranks share GPUs, which
 * requires processes, run_ranks starts processes instead: see gpu_shares.
 */

#include "tests/harness/check.h"

/** The body of one rank. All ranks share `arg`. */
typedef void (*RankBody)(const EpBootstrap *bootstrap, void *arg);

/** Run a body of one rank, which a failed REQUIRE leaves. */
void run_body(RankBody body, const EpBootstrap *bootstrap, void *arg);

/** Run `body` on `ranks` threads and assert that no rank's check failed. */
void run_on_threads(int ranks, RankBody body, void *arg);

/** Likewise for several groups of ranks at a time, whose args lie in an array of elements of so
 * many bytes: for ranks that mostly wait. On GPUs one group runs after the other. */
void run_side_by_side(int groups, int ranks, RankBody body, void *args, size_t bytes);
#define RUN_SIDE_BY_SIDE(ranks, body, args) \
    run_side_by_side(LENGTH(args), ranks, body, args, sizeof(*(args)))

/** Run `body` on `ranks` threads, or on processes, each with an `arg` of its own, where ranks share
 * GPUs. */
void run_ranks(int ranks, RankBody body, void *arg);

/** A test whose body runs once on each of `ranks` threads or processes. */
#define ThreadTest(suite, name, ranks)                                          \
    static void suite##_##name##_body(const EpBootstrap *bootstrap, void *arg); \
    Test(suite, name, .timeout = 120) {                                         \
        run_ranks(ranks, suite##_##name##_body, NULL);                          \
    }                                                                           \
    static void suite##_##name##_body(const EpBootstrap *bootstrap,             \
                                      __attribute__((unused)) void *arg)

/** Likewise of one call: RankTest(suite, name, ranks, call); */
#define RankTest(suite, name, ranks, call) \
    ThreadTest(suite, name, ranks) {       \
        call;                              \
    }                                      \
    static void suite##_##name##_body(const EpBootstrap *bootstrap, void *arg)
/** Two tests: of two and four ranks; three: also of one. */
#define RankTests24(suite, name, call)  \
    RankTest(suite, name##_2, 2, call); \
    RankTest(suite, name##_4, 4, call)
#define RankTests(suite, name, call)    \
    RankTest(suite, name##_1, 1, call); \
    RankTests24(suite, name, call)

/** Likewise of latency mode. */
#define LatencyTest(suite, name, ranks, call) RankTest(suite, name, ranks, needs_latency(); call)
#define LatencyTests24(suite, name, call) RankTests24(suite, name, needs_latency(); call)
#define LatencyTests(suite, name, call) RankTests(suite, name, needs_latency(); call)

#endif
