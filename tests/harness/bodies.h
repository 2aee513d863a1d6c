/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_HARNESS_BODIES_H
#define TESTS_HARNESS_BODIES_H

/**
 * Runs Criterion's tests without Criterion's library, for the runner of suites.h.
 * Criterion's macros leave a pointer to each test in a section of the program; bodies.c defines the
 * functions that they call.
 */

#include <criterion/criterion.h>

typedef enum Outcome { BODY_PASSED, BODY_FAILED, BODY_SKIPPED } Outcome;

/** First and end of all tests of the program, in link order. */
struct criterion_test **bodies_first(void);
struct criterion_test **bodies_end(void);

/** Returns whether "suite/test" matches an extended fnmatch pattern. */
int body_selected(const struct criterion_test *test, const char *pattern);

/** Run a test on this thread, in this process, and restore the environment afterwards. */
Outcome body_run(const struct criterion_test *test);

/** Returns the running test as "suite/test". */
const char *body_name(void);

/** Returns the argument that follows an option, or `otherwise`. */
const char *bodies_option(int argc, char **argv, const char *name, const char *otherwise);

/** Returns how many tests shall run at a time: N of -jN, else 1. */
enum { BODIES_MOST_JOBS = 64 };
int bodies_jobs(int argc, char **argv);

#endif
