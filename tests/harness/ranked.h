/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_HARNESS_RANKED_H
#define TESTS_HARNESS_RANKED_H

/**
 * Tests whose ranks are MPI processes.
 *
 * Criterion runs every test in a process of its own, and a process may enter MPI once. So a ranked
 * test, when it runs, starts mpirun on its own binary with a filter that selects just this test;
 * the copies find themselves under mpirun and play the ranks.
 */

#include "tests/harness/threads.h"

/** What one rank does. */
typedef void (*RankedBody)(const EpBootstrap *bootstrap);

/** Start mpirun on this test, or, under mpirun already, run the body. */
void ranked_run(const char *test, int ranks, int seconds, RankedBody body);

/**
 * On GPUs: ranks that would be threads, but share GPUs, as processes: the same for a body of a test
 * that may have several, of different numbers of ranks. Each number is started once, and plays
 * those bodies of the test that are of this number.
 */
void ranked_instead(int ranks, RankBody body, void *arg);

/** Whether this process is a rank of mpirun's. */
bool ranked_is(void);

/** At the end of a process under mpirun: leave MPI, if it was entered. */
void ranked_leave(void);

/** Name the suite mpi_...; it is skipped in sanitizer builds, which MPI itself does not survive. */
#define RankedTest(suite, name, ranks, seconds)                              \
    static void suite##_##name##_body(const EpBootstrap *bootstrap);         \
    Test(suite, name, .timeout = (seconds) + 10) {                           \
        ranked_run(#suite "/" #name, ranks, seconds, suite##_##name##_body); \
    }                                                                        \
    static void suite##_##name##_body(const EpBootstrap *bootstrap)

/** One that the CUDA backend is not put to: HOST_ONLY before mpirun is started. */
#define HostRankedTest(suite, name, ranks, seconds, why)                     \
    static void suite##_##name##_body(const EpBootstrap *bootstrap);         \
    Test(suite, name, .timeout = (seconds) + 10) {                           \
        HOST_ONLY(why);                                                      \
        ranked_run(#suite "/" #name, ranks, seconds, suite##_##name##_body); \
    }                                                                        \
    static void suite##_##name##_body(const EpBootstrap *bootstrap)

#endif
