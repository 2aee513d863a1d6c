/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_HARNESS_RANKED_H
#define TESTS_HARNESS_RANKED_H

/**
 * Tests whose ranks are MPI processes.
 *
 * Criterion runs every test in a process of its own, and a process may initialise MPI once. So a
 * ranked test starts mpirun on its own program with a filter that selects this test alone; the
 * copies run under mpirun and act as the ranks.
 */

#include "tests/harness/threads.h"

/** Start mpirun on this test; under mpirun, run the body. */
void ranked_run(const char *test, int ranks, int seconds, RankBody body);

/**
 * Run a body that was written for threads on processes that share GPUs. A test may call this with
 * several numbers of ranks: mpirun starts once for each number, and those processes run the bodies
 * that have this number of ranks.
 */
void ranked_instead(int ranks, RankBody body, void *arg);

/** Returns whether this process runs under mpirun. */
bool ranked_is(void);

/** Set a variable of the environment on all ranks, which call this together: threads share it. */
void set_on_ranks(const EpBootstrap *bootstrap, const char *name, const char *value);

/** Finalise MPI at the end of a process under mpirun, if it was initialised. */
void ranked_leave(void);

/** A test on MPI ranks. The suite's name begins with mpi_; sanitizer builds skip it, because MPI
 * does not run under a sanitizer. `skips` comes before mpirun starts. */
#define MpiTest(suite, name, ranks, seconds, skips)                                         \
    static void suite##_##name##_body(const EpBootstrap *bootstrap, void *arg);             \
    Test(suite, name, .timeout = (seconds) + 10) {                                          \
        skips;                                                                              \
        ranked_run(#suite "/" #name, ranks, seconds, suite##_##name##_body);                \
    }                                                                                       \
    static void suite##_##name##_body(__attribute__((unused)) const EpBootstrap *bootstrap, \
                                      __attribute__((unused)) void *arg)
#define RankedTest(suite, name, ranks, seconds) MpiTest(suite, name, ranks, seconds, )
/** One that the CUDA backend skips. */
#define HostRankedTest(suite, name, ranks, seconds, why) \
    MpiTest(suite, name, ranks, seconds, HOST_ONLY(why))
/** Tests of one call: RankedCall(suite, name, ranks, seconds, call); */
#define RankedCall(suite, name, ranks, seconds, call) \
    RankedTest(suite, name, ranks, seconds) {         \
        call;                                         \
    }                                                 \
    static void suite##_##name##_body(const EpBootstrap *bootstrap, void *arg)
/** Likewise: HostRankedCall(suite, name, ranks, seconds, why, call); */
#define HostRankedCall(suite, name, ranks, seconds, why, call) \
    HostRankedTest(suite, name, ranks, seconds, why) {         \
        call;                                                  \
    }                                                          \
    static void suite##_##name##_body(const EpBootstrap *bootstrap, void *arg)

#endif
