/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/harness/check.h"

#include <setjmp.h>
#include <stdarg.h>
#include <time.h>

static _Thread_local char failure[2048];
static _Thread_local char note[800];

bool check_that(bool ok, const char *file, int line, const char *what, const char *format, ...) {
    if (ok || failure[0]) return ok;
    int used = snprintf(failure, sizeof(failure), "%s:%d: %.300s: ", file, line, what);
    va_list arguments;
    va_start(arguments, format);
    used += vsnprintf(failure + used, sizeof(failure) - (size_t)used, format, arguments);
    va_end(arguments);
    if (note[0] && used < (int)sizeof(failure))
        snprintf(failure + used, sizeof(failure) - (size_t)used, "\n  %s", note);
    return false;
}

bool check_status(EpStatus got, EpStatus expected, const char *file, int line, const char *call) {
    const char *sentence = got == EP_OK ? "" : ep_last_error();
    return check_that(got == expected, file, line, call, "status %d instead of %d: %s", (int)got,
                      (int)expected, sentence);
}

bool check_refused(EpStatus got, EpStatus expected, const char *const *parts, const char *file,
                   int line, const char *call) {
    if (!check_status(got, expected, file, line, call)) return false;
    for (; *parts; parts++) {
        bool found = strstr(ep_last_error(), *parts) != NULL;
        if (!check_that(found, file, line, call, "no '%s' in: %s", *parts, ep_last_error()))
            return false;
    }
    return true;
}

void check_note(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(note, sizeof(note), format, arguments);
    va_end(arguments);
}

const char *check_noted(void) {
    return note;
}

const char *check_failure(void) {
    return failure;
}

static const char *_Atomic left_out;

void check_clear(void) {
    failure[0] = 0;
    left_out = NULL;
}

void check_left_out(const char *why) {
    if (gettid() == getpid()) cr_skip_test("%s", why);
    left_out = why;
    check_leave();
}

void check_skip(void) {
    const char *why = left_out;
    if (why) cr_skip_test("%s", why);
}

void needs_latency(void) {
    if (!TESTS_HAVE_LATENCY) check_left_out("this backend has no latency mode");
}

void check_assert(void) {
    cr_assert(failure[0] == 0, "%s", failure);
}

static _Thread_local jmp_buf *way_out;

void check_body(void (*body)(void *context), void *context) {
    jmp_buf here;
    way_out = &here;
    if (!setjmp(here)) body(context);
    way_out = NULL;
}

void check_leave(void) {
    if (way_out) longjmp(*way_out, 1);
    check_assert();
    abort();
}

double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

uint64_t environment_number(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 0) : otherwise;
}

void be_quiet(void) {
    setenv("LIBEP_LOG_FILE", "/dev/null", 1);
}

void read_file(const char *path, char *text, size_t size) {
    FILE *file = fopen(path, "r");
    text[0] = 0;
    REQUIRE(file, "no file %s", path);
    text[fread(text, 1, size - 1, file)] = 0;
    fclose(file);
}

const char *temporary_file(void) {
    static char path[32];
    snprintf(path, sizeof(path), "/tmp/ep_tests_XXXXXX");
    int file = mkstemp(path);
    CHECK(file >= 0, "no temporary file in /tmp");
    close(file);
    return path;
}

int count_lines(const char *path, const char *part) {
    char line[4096];
    int count = 0;
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof(line), file))
        count += strstr(line, part) != NULL;
    if (file) fclose(file);
    return count;
}
