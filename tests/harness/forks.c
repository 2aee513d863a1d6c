/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/harness/forks.h"

#ifdef __SANITIZE_THREAD__

#include <fnmatch.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <criterion/criterion.h>

enum { EXIT_SKIPPED = 77, SECONDS = 300 };

/* ---- what Criterion's macros call, in place of its library's ---- */

static const struct criterion_test *current;

/* Criterion's macros leave a pointer to each test and suite in a section of their own. */
extern struct criterion_test *__start_cr_tst[], *__stop_cr_tst[];
extern struct criterion_suite *__start_cr_sts[], *__stop_cr_sts[];

static const struct criterion_test_extra_data *suite_data(void) {
    for (struct criterion_suite **s = __start_cr_sts; s < __stop_cr_sts; s++)
        if (*s && strcmp((*s)->name, current->category) == 0) return (*s)->data;
    return NULL;
}

void criterion_internal_test_setup(void) {
    const struct criterion_test_extra_data *suite = suite_data();
    if (suite && suite->init) suite->init();
    if (current->data->init) current->data->init();
}

void criterion_internal_test_main(void (*body)(void)) {
    body();
}

void criterion_internal_test_teardown(void) {
    const struct criterion_test_extra_data *suite = suite_data();
    if (current->data->fini) current->data->fini();
    if (suite && suite->fini) suite->fini();
}

void criterion_send_assert(struct criterion_assert_stats *stats) {
    if (!stats->passed) fprintf(stderr, "%s:%u: %s\n", stats->file, stats->line, stats->message);
}

void criterion_abort_test(void) {
    exit(EXIT_FAILURE);
}

void criterion_skip_test(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n");
    exit(EXIT_SKIPPED);
}

/* ---- the runner ---- */

static void child_main(void) {
    alarm(SECONDS);
    current->test();
    exit(EXIT_SUCCESS);
}

/* 1: it failed */
static int run_test(const struct criterion_test *test) {
    int status = 0;
    current = test;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) child_main();
    if (child < 0 || waitpid(child, &status, 0) != child) return 1;
    int passed =
        WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == EXIT_SKIPPED);
    if (!passed)
        printf("[FAIL] %s::%s: status %#x\n", test->category, test->name, (unsigned)status);
    return !passed;
}

static int selected(const struct criterion_test *test, const char *pattern) {
    char name[512];
    snprintf(name, sizeof(name), "%s/%s", test->category, test->name);
    return fnmatch(pattern, name, FNM_EXTMATCH) == 0;
}

int forks_main(int argc, char **argv) {
    const char *pattern = "*";
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], "--filter") == 0) pattern = argv[i + 1];
    int tested = 0, failed = 0;
    for (struct criterion_test **t = __start_cr_tst; t < __stop_cr_tst; t++) {
        if (!*t || !selected(*t, pattern)) continue;
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
