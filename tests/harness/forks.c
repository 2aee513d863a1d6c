/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/harness/forks.h"

#ifdef __SANITIZE_THREAD__

#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/harness/bodies.h"

enum { EXIT_SKIPPED = 77, SECONDS = 300 };

static void child_main(const struct criterion_test *test) {
    static const int status[] = {EXIT_SUCCESS, EXIT_FAILURE, EXIT_SKIPPED};
    alarm(SECONDS);
    exit(status[body_run(test)]);
}

/* Returns 1 if the test failed. */
static int run_test(const struct criterion_test *test) {
    int status = 0;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) child_main(test);
    if (child < 0 || waitpid(child, &status, 0) != child) return 1;
    int passed =
        WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == EXIT_SKIPPED);
    if (!passed)
        printf("[FAIL] %s::%s: status %#x\n", test->category, test->name, (unsigned)status);
    return !passed;
}

int forks_main(int argc, char **argv) {
    const char *pattern = bodies_option(argc, argv, "--filter", "*");
    int tested = 0, failed = 0;
    for (struct criterion_test **t = bodies_first(); t < bodies_end(); t++) {
        if (!*t || !body_selected(*t, pattern)) continue;
        tested++;
        failed += run_test(*t);
    }
    printf("[====] Synthesis: Tested: %d | Failing: %d\n", tested, failed);
    return failed || !tested;
}

#else

int forks_main(int argc, char **argv) {
    (void)argc;
    (void)argv;
    return 1;
}

#endif
