/* SPDX-License-Identifier: Apache-2.0 */
#ifndef COMMON_UTIL_H
#define COMMON_UTIL_H

/**
 * Errors, memory, output files.
 *
 * The function that decides a failure writes one message, per thread since a rank may be a thread.
 * Callers only return false.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "ep/ep.h"

/* ---- errors -------------------------------------------------------------------------------- */

/** The tool's name, which begins its messages. Each tool defines it. */
extern const char *const bench_program;

#define BENCH_MESSAGE_BYTES 512

enum { BENCH_EXIT_OK = 0, BENCH_EXIT_WRONG = 1, BENCH_EXIT_USAGE = 2 };

/** A failure while running: exit status 1. Returns false. */
bool bench_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/** An invalid request of the user: exit status 2. Returns false. */
bool bench_refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

/** True for EP_OK. Else copies the library's error message and returns false. The exit status is
 *  that of an invalid request for a malformed setting. */
bool bench_ok(EpStatus status, const char *call);

/** Whether this rank has waited in vain for another rank, or another has given up. bench_ok sees
 *  that in the library's status; a tool's own waits call bench_lose_peer. */
bool bench_peer_lost(void);
void bench_lose_peer(void);

/** Set or read this thread's message and exit status. */
void bench_error_set(int exit_status, const char *message);
const char *bench_error_message(void);
int bench_error_exit_status(void);

/* ---- memory -------------------------------------------------------------------------------- */

/** Zeroed memory, 64-byte aligned, released with free(). Returns NULL with a message on failure. */
void *bench_alloc(size_t count, size_t bytes, const char *what);

/** Memory that is released together. After a failure pool_alloc returns NULL, and `failed` is set.
 *  A pool of zeros is empty. */
typedef struct Pool {
    void **blocks;
    int count;
    bool failed;
} Pool;

void *pool_alloc(Pool *pool, size_t count, size_t bytes, const char *what);
void pool_free(Pool *pool);

/* ---- output files: complete or absent ------------------------------------------------------ */

typedef struct OutputFile {
    const char *path;
    char temporary[4096 + 32]; /**< "" if `path` is written directly */
    FILE *stream;
} OutputFile;

/** Open a temporary file beside `path`, or `path` itself if it is a pipe or a device. */
bool output_open(OutputFile *file, const char *path);

/** Close the file and rename it to `path`. False, with a message, if any write failed. */
bool output_commit(OutputFile *file);

/** Close the file and delete it. */
void output_discard(OutputFile *file);

/** Whether `path` can be written. Called before the measurement, which may take hours. */
bool output_probe(const char *path);

#endif
