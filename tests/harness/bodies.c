/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/harness/bodies.h"

#include "tests/harness/check.h"

#if TESTS_OWN_RUNNER

#include <fnmatch.h>
#include <setjmp.h>
#include <stdarg.h>

static const struct criterion_test *current;
static jmp_buf leave;

extern struct criterion_test *__start_cr_tst[], *__stop_cr_tst[];
extern struct criterion_suite *__start_cr_sts[], *__stop_cr_sts[];

struct criterion_test **bodies_first(void) {
    return __start_cr_tst;
}

struct criterion_test **bodies_end(void) {
    return __stop_cr_tst;
}

int body_selected(const struct criterion_test *test, const char *pattern) {
    char name[512];
    snprintf(name, sizeof(name), "%s/%s", test->category, test->name);
    return fnmatch(pattern, name, FNM_EXTMATCH) == 0;
}

const char *bodies_option(int argc, char **argv, const char *name, const char *otherwise) {
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], name) == 0) return argv[i + 1];
    return otherwise;
}

int bodies_jobs(int argc, char **argv) {
    int jobs = 1;
    for (int i = 1; i < argc; i++)
        if (strncmp(argv[i], "-j", 2) == 0) jobs = atoi(argv[i] + 2);
    return jobs < 1 ? 1 : jobs > BODIES_MOST_JOBS ? BODIES_MOST_JOBS : jobs;
}

const char *body_name(void) {
    static char name[512];
    snprintf(name, sizeof(name), "%s/%s", current->category, current->name);
    return name;
}

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
    longjmp(leave, 1 + BODY_FAILED);
}

void criterion_skip_test(const char *format, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof(line), format, arguments);
    va_end(arguments);
    fprintf(stderr, "%s\n", line);
    longjmp(leave, 1 + BODY_SKIPPED);
}

static char *before[4096];

static void keep_environment(void) {
    size_t count = 0;
    for (; environ[count] && count + 1 < sizeof(before) / sizeof(*before); count++)
        before[count] = environ[count];
    before[count] = NULL;
}

/* Restore the saved pointers. setenv does not free the strings that it replaces. */
static void restore_environment(void) {
    size_t i = 0;
    for (; before[i]; i++)
        environ[i] = before[i];
    environ[i] = NULL;
}

Outcome body_run(const struct criterion_test *test) {
    current = test;
    check_clear();
    keep_environment();
    int left = setjmp(leave);
    if (!left) test->test();
    restore_environment();
    return left ? (Outcome)(left - 1) : BODY_PASSED;
}

#endif
