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

typedef struct Job {
    pid_t child;
    const struct criterion_test *test;
} Job;

static Job start(const struct criterion_test *test) {
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) child_main(test);
    return (Job){child, test};
}

/* Wait for one of the jobs, and forget it. Returns 1 if its test failed. */
static int end_one(Job *jobs, int *count) {
    int status = 0, j = 0;
    pid_t child = waitpid(-1, &status, 0);
    while (j < *count - 1 && jobs[j].child != child)
        j++;
    const struct criterion_test *test = jobs[j].test;
    jobs[j] = jobs[--*count];
    int passed = child > 0 && WIFEXITED(status) &&
                 (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == EXIT_SKIPPED);
    if (!passed)
        printf("[FAIL] %s::%s: status %#x\n", test->category, test->name, (unsigned)status);
    return !passed;
}

int forks_main(int argc, char **argv) {
    const char *pattern = bodies_option(argc, argv, "--filter", "*");
    int most = bodies_jobs(argc, argv), tested = 0, failed = 0, count = 0;
    Job jobs[BODIES_MOST_JOBS];
    for (struct criterion_test **t = bodies_first(); t < bodies_end(); t++) {
        if (!*t || !body_selected(*t, pattern)) continue;
        tested++;
        if (count == most) failed += end_one(jobs, &count);
        jobs[count++] = start(*t);
    }
    while (count)
        failed += end_one(jobs, &count);
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
