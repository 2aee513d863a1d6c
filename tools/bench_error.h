/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_ERROR_H
#define BENCH_ERROR_H

/**
 * One sentence per failure, written where the failure is decided, per thread (a rank may be a
 * thread). Callers only pass `false` on.
 */

#include <stdbool.h>
#include <stddef.h>

#include "ep/ep.h"

#define BENCH_SENTENCE_BYTES 512

enum { BENCH_EXIT_OK = 0, BENCH_EXIT_WRONG = 1, BENCH_EXIT_USAGE = 2 };

/** Something broke while running: exit status 1. Returns false. */
bool bench_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/** What the user asked for makes no sense: exit status 2. Returns false. */
bool bench_refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

/** True for EP_OK; else takes over the library's sentence and returns false. */
bool bench_library(EpStatus status, const char *call);

/** Set or read this thread's sentence and exit status. */
void bench_error_set(int exit_status, const char *sentence);
const char *bench_error_sentence(void);
int bench_error_exit_status(void);

/** Zeroed memory, 64-byte aligned, free() frees it; NULL with a sentence on failure. */
void *bench_alloc(size_t count, size_t bytes, const char *what);

#endif
