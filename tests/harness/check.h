/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_HARNESS_CHECK_H
#define TESTS_HARNESS_CHECK_H

/**
 * Checks that any thread may make. Criterion's assertions unwind the test and are safe on its main
 * thread alone; these checks keep the thread's first failure and go on. run_on_threads, RankedTest
 * and SoloTest turn a kept failure into an assertion.
 */

/* What nearly every test needs of the C library. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "ep/ep.h"

/** Record a failure unless `ok`, if it is this thread's first. Returns `ok`. */
__attribute__((format(printf, 5, 6))) bool check_that(bool ok, const char *file, int line,
                                                      const char *what, const char *format, ...);

bool check_status(EpStatus got, EpStatus expected, const char *file, int line, const char *call);

/** Check the status, and that the error contains each of `parts` (ends with NULL). */
bool check_refused(EpStatus got, EpStatus expected, const char *const *parts, const char *file,
                   int line, const char *call);

/** Set a note that is printed with this thread's first failure from now on. */
__attribute__((format(printf, 1, 2))) void check_note(const char *format, ...);

/** Returns this thread's note, or "". */
const char *check_noted(void);

/** Returns this thread's first failure, or "". */
const char *check_failure(void);
void check_clear(void);

/** Assert, on Criterion's thread, that none of its checks failed. */
void check_assert(void);

/** Skip the test and leave its body. A rank's thread records the reason, and the harness skips with
 * check_skip. */
_Noreturn void check_left_out(const char *why);
void check_skip(void);

#define CHECK(condition, ...) check_that((condition), __FILE__, __LINE__, #condition, __VA_ARGS__)
#define CHECK_OK(call) check_status((call), EP_OK, __FILE__, __LINE__, #call)
#define CHECK_STATUS(call, expected) check_status((call), (expected), __FILE__, __LINE__, #call)

/** Check that the call returns a status and an error that contains all given parts. */
#define CHECK_REFUSED(call, expected, ...)                                                \
    check_refused((call), (expected), (const char *const[]){__VA_ARGS__, NULL}, __FILE__, \
                  __LINE__, #call)

/** Likewise of a call that fails at its deadline, and not before so many seconds. */
#define CHECK_TIMEOUT(call, seconds, ...)                                                       \
    do {                                                                                        \
        double begun = seconds_now();                                                           \
        CHECK_REFUSED(call, EP_ERR_TIMEOUT, __VA_ARGS__);                                       \
        CHECK(seconds_now() - begun > 0.95 * (seconds), "after %.2f s", seconds_now() - begun); \
    } while (0)

#define LENGTH(array) (int)(sizeof(array) / sizeof((array)[0]))

/** Returns the seconds of a clock that only goes forward. */
double seconds_now(void);

/** Returns the number that a variable of the environment holds, or `otherwise`. */
uint64_t environment_number(const char *name, uint64_t otherwise);

/** Send the log to /dev/null: groups that fail on purpose log a warning. */
void be_quiet(void);

/** Read at most size - 1 bytes of a file as a string. */
void read_file(const char *path, char *text, size_t size);

/** Make an empty file in /tmp. Its path is valid until the next call. */
const char *temporary_file(void);

/** Returns how many lines of a file, such as a log, have `part`. */
int count_lines(const char *path, const char *part);

/** Run a body. A failed REQUIRE leaves it at once, from any function that it has called. */
void check_body(void (*body)(void *context), void *context);
_Noreturn void check_leave(void);

#define REQUIRE(condition, ...)                            \
    do {                                                   \
        if (!CHECK(condition, __VA_ARGS__)) check_leave(); \
    } while (0)
#define REQUIRE_OK(call)                    \
    do {                                    \
        if (!CHECK_OK(call)) check_leave(); \
    } while (0)

/** A test without ranks, with checks instead of assertions. */
#define SoloTest(suite, name)                        \
    static void suite##_##name##_body(void *unused); \
    Test(suite, name, .timeout = 120) {              \
        GPU_NEEDS(1);                                \
        GPU_TAKE(0);                                 \
        check_body(suite##_##name##_body, NULL);     \
        check_assert();                              \
    }                                                \
    static void suite##_##name##_body(__attribute__((unused)) void *unused)

/** Likewise of one call: SoloCall(suite, name, call); */
#define SoloCall(suite, name, call) \
    SoloTest(suite, name) {         \
        call;                       \
    }                               \
    static void suite##_##name##_body(void *unused)

/**
 * Defaults for the host backend; tests/gpu/on_gpu.h defines these for the CUDA backend.
 */
#ifndef TESTS_ON_GPU
#define TESTS_ON_GPU 0
#define TEST_BACKEND EP_BACKEND_HOST
/** Whether the backend has latency mode. */
#define TESTS_HAVE_LATENCY 1
/** Skip, on Criterion's thread, a test of more ranks than the GPUs serve, shared or not. */
#define GPU_NEEDS(ranks) (void)(ranks)
/** Skip, on Criterion's thread, a test of more ranks than GPUs. */
#define THREADS_NEED(ranks) (void)(ranks)
/** Make the GPU of a rank current on the calling thread. */
#define GPU_TAKE(rank) (void)(rank)
/** Returns the number of ranks of a case: `wanted`, or fewer where GPUs are few. */
#define GPU_RANKS(wanted) (wanted)
/** Returns whether there is no GPU, and then prints so to stdout. */
#define GPU_MISSING() 0
/** Reserve memory for a test that needs more than usual at once. */
#define GPU_ROOM(bytes) (void)(bytes)
/** Say whether this thread's calls only enqueue, with tensors that GPUs reach. */
#define GPU_ENQUEUES(only) (void)(only)
/** Skip the test on the CUDA backend, for the reason `why`. */
#define HOST_ONLY(why) (void)(why)
#endif

/** Skip a test of latency mode where the backend has none. */
void needs_latency(void);

/** Reserve memory for the tests of a suite, which needs more than usual at once. */
#define GpuSuite(suite, megabytes)              \
    static void suite##_reserve(void) {         \
        gpu_reserve((size_t)(megabytes) << 20); \
    }                                           \
    TestSuite(suite, .init = suite##_reserve)

/** Whether suites.h runs the tests instead of Criterion's runner. */
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
