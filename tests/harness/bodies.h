/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_HARNESS_BODIES_H
#define TESTS_HARNESS_BODIES_H

/**
 * Criterion's tests without Criterion's library: its macros leave a pointer to each test in a
 * section of the program; here is what they call. For the two runners of our own, forks.h and
 * suites.h.
 */

#include <criterion/criterion.h>

typedef enum Outcome { BODY_PASSED, BODY_FAILED, BODY_SKIPPED } Outcome;

/** All tests of the program, as the linker has put them. */
struct criterion_test **bodies_first(void);
struct criterion_test **bodies_end(void);

/** Does "suite/test" match a pattern of fnmatch's extended kind? */
int body_selected(const struct criterion_test *test, const char *pattern);

/** Run a test on this thread, in this process. What it does to the environment is undone. */
Outcome body_run(const struct criterion_test *test);

/** "suite/test": the one that runs. */
const char *body_name(void);

/** The argument behind an option, or `otherwise`. */
const char *bodies_option(int argc, char **argv, const char *name, const char *otherwise);

#endif
