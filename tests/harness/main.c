/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/harness/check.h"
#include "tests/harness/suites.h"

#include <criterion/options.h>

#if TESTS_OWN_RUNNER

int main(int argc, char **argv) {
    return suites_main(argc, argv);
}

#else

/* Criterion's main with one test at a time as the default, because each test has many ranks. -j
 * overrides it. */
int main(int argc, char **argv) {
    struct criterion_test_set *tests = criterion_initialize();
    criterion_options.jobs = 1;
    int result = 0;
    if (criterion_handle_args(argc, argv, true)) result = !criterion_run_all_tests(tests);
    criterion_finalize(tests);
#if TESTS_SANITIZED
    /* Of jobs that ran side by side Criterion keeps some memory, which is no leak of a test. */
    fflush(NULL);
    _exit(result);
#endif
    return result;
}

#endif
