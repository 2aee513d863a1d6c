/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_HARNESS_CHECK_H
#define TESTS_HARNESS_CHECK_H

/**
 * Checks that any thread may make. Criterion's own assertions unwind the test and are safe on its
 * main thread alone; these keep the thread's first failure and go on. run_on_threads, RankedTest
 * and SoloTest turn what was kept into an assertion.
 */

#include <stdbool.h>

#include <criterion/criterion.h>

#include "ep/ep.h"

/** Keep a failure of this thread, if it is the first, unless `ok`; returns `ok`. */
__attribute__((format(printf, 5, 6))) bool check_that(bool ok, const char *file, int line,
                                                      const char *what, const char *format, ...);

bool check_status(EpStatus got, EpStatus expected, const char *file, int line, const char *call);

/** As check_status, and the sentence of the failed call has every one of `parts` (NULL ends). */
bool check_refused(EpStatus got, EpStatus expected, const char *const *parts, const char *file,
                   int line, const char *call);

/** What this thread is about to try: goes with its first failure from now on. */
__attribute__((format(printf, 1, 2))) void check_note(const char *format, ...);

/** What failed first on this thread, or "". */
const char *check_failure(void);
void check_clear(void);

/** Assert, on Criterion's thread, that nothing failed on it. */
void check_assert(void);

/** Skip the test; on a rank's thread it is the harness that then does so, by check_skip. */
void check_left_out(const char *why);
void check_skip(void);

#define CHECK(condition, ...) check_that((condition), __FILE__, __LINE__, #condition, __VA_ARGS__)
#define CHECK_OK(call) check_status((call), EP_OK, __FILE__, __LINE__, #call)
#define CHECK_STATUS(call, expected) check_status((call), (expected), __FILE__, __LINE__, #call)

/** The call is refused with a status and a sentence that has all the given parts. */
#define CHECK_REFUSED(call, expected, ...)                                                \
    check_refused((call), (expected), (const char *const[]){__VA_ARGS__, NULL}, __FILE__, \
                  __LINE__, #call)

/** Leave the (void) function when a check fails: what follows could not run. */
#define REQUIRE(condition, ...)                     \
    do {                                            \
        if (!CHECK(condition, __VA_ARGS__)) return; \
    } while (0)
#define REQUIRE_OK(call)             \
    do {                             \
        if (!CHECK_OK(call)) return; \
    } while (0)

/** A test of no ranks at all, with checks instead of assertions. */
#define SoloTest(suite, name)                \
    static void suite##_##name##_body(void); \
    Test(suite, name, .timeout = 120) {      \
        GPU_NEEDS(1);                        \
        GPU_TAKE(0);                         \
        suite##_##name##_body();             \
        check_assert();                      \
    }                                        \
    static void suite##_##name##_body(void)

/**
 * What differs where the same tests are built for the CUDA backend (tests/gpu/on_gpu.h).
 */
#ifndef TESTS_ON_GPU
#define TESTS_ON_GPU 0
#define TEST_BACKEND EP_BACKEND_HOST
/** Whether the backend has latency mode. */
#define TESTS_HAVE_LATENCY 1
/** Whether it quantises, and orders scales by column. */
#define TESTS_HAVE_QUANT 1
/** Whether it counts by source. */
#define TESTS_HAVE_SOURCE_COUNTS 1
/** Skip, on Criterion's thread, a test of more ranks than GPUs serve, each one or several. */
#define GPU_NEEDS(ranks) (void)(ranks)
/** The same where each takes one of its own. */
#define THREADS_NEED(ranks) (void)(ranks)
/** Give the calling thread the GPU of a rank. */
#define GPU_TAKE(rank) (void)(rank)
/** The most ranks that a case may have here. */
#define GPU_RANKS(wanted) (wanted)
/** There is no GPU; stdout has said so. */
#define GPU_MISSING() 0
/** This test needs so many bytes of memory at once: more than usual. */
#define GPU_ROOM(bytes) (void)(bytes)
/** First in the body of a test that the CUDA backend is not put to: why. It is skipped there. */
#define HOST_ONLY(why) (void)(why)
#endif

/** First in the body of a test of latency mode. */
#define NEEDS_LATENCY()                                                         \
    do {                                                                        \
        if (!TESTS_HAVE_LATENCY) HOST_ONLY("this backend has no latency mode"); \
    } while (0)

/** Whether tests are run by forks.h or suites.h instead of by Criterion's own runner. */
#if defined(__SANITIZE_THREAD__) || TESTS_ON_GPU
#define TESTS_OWN_RUNNER 1
#else
#define TESTS_OWN_RUNNER 0
#endif

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TESTS_SANITIZED 1
#else
#define TESTS_SANITIZED 0
#endif

#endif
