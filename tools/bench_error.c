/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_error.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local char sentence[BENCH_SENTENCE_BYTES];
static _Thread_local int exit_status;

bool bench_fail(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(sentence, sizeof(sentence), format, args);
    va_end(args);
    exit_status = BENCH_EXIT_WRONG;
    return false;
}

bool bench_refuse(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(sentence, sizeof(sentence), format, args);
    va_end(args);
    exit_status = BENCH_EXIT_USAGE;
    return false;
}

bool bench_library(EpStatus status, const char *call) {
    if (status == EP_OK) return true;
    const char *detail = ep_last_error(); /* names rank and call itself */
    if (detail[0]) return bench_fail("%s", detail);
    return bench_fail("%s: %s", call, ep_status_string(status));
}

void bench_error_set(int status, const char *text) {
    exit_status = status;
    snprintf(sentence, sizeof(sentence), "%s", text);
}

const char *bench_error_sentence(void) {
    return sentence;
}

int bench_error_exit_status(void) {
    return exit_status;
}

void *bench_alloc(size_t count, size_t bytes, const char *what) {
    size_t total;
    if (__builtin_mul_overflow(count, bytes, &total) || total > SIZE_MAX - 64) {
        bench_fail("%s: %zu x %zu bytes do not fit the address space", what, count, bytes);
        return NULL;
    }
    total = (total + 64) & ~(size_t)63;
    void *memory = aligned_alloc(64, total);
    if (!memory)
        bench_fail("%s: no memory for %zu bytes", what, total);
    else
        memset(memory, 0, total);
    return memory;
}
