/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/common/util.h"

#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- errors -------------------------------------------------------------------------------- */

static _Thread_local char message[BENCH_MESSAGE_BYTES];
static _Thread_local int exit_status;
static _Thread_local bool peer_lost;

bool bench_fail(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    exit_status = BENCH_EXIT_WRONG;
    return false;
}

bool bench_refuse(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    exit_status = BENCH_EXIT_USAGE;
    return false;
}

bool bench_ok(EpStatus status, const char *call) {
    if (status == EP_OK) return true;
    const char *detail = ep_last_error(); /* it names rank and call */
    peer_lost = peer_lost || status == EP_ERR_TIMEOUT || status == EP_ERR_PEER;
    if (detail[0])
        bench_fail("%s", detail);
    else
        bench_fail("%s: %s", call, ep_status_string(status));
    if (status == EP_ERR_SETTING) exit_status = BENCH_EXIT_USAGE;
    return false;
}

void bench_lose_peer(void) {
    peer_lost = true;
}

bool bench_peer_lost(void) {
    return peer_lost;
}

void bench_error_set(int status, const char *text) {
    exit_status = status;
    if (text != message) snprintf(message, sizeof(message), "%s", text);
}

const char *bench_error_message(void) {
    return message;
}

int bench_error_exit_status(void) {
    return exit_status;
}

/* ---- memory -------------------------------------------------------------------------------- */

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

void *pool_alloc(Pool *pool, size_t count, size_t bytes, const char *what) {
    void **grown = realloc(pool->blocks, (size_t)(pool->count + 1) * sizeof(void *));
    void *memory = grown ? bench_alloc(count, bytes, what) : NULL;
    if (grown) pool->blocks = grown;
    if (memory)
        pool->blocks[pool->count++] = memory;
    else
        pool->failed = true;
    return memory;
}

void pool_free(Pool *pool) {
    for (int i = 0; i < pool->count; i++)
        free(pool->blocks[i]);
    free(pool->blocks);
    *pool = (Pool){.count = 0};
}

/* ---- output files -------------------------------------------------------------------------- */

/* Renaming onto /dev/stdout would replace the device. */
static bool is_special(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && !S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode);
}

bool output_open(OutputFile *file, const char *path) {
    struct stat status;
    *file = (OutputFile){.path = path};
    if (stat(path, &status) == 0 && S_ISDIR(status.st_mode))
        return bench_refuse("cannot write %s: %s", path, strerror(EISDIR));
    if (strlen(path) > 4096)
        return bench_refuse("a path of %zu characters is too long to write to", strlen(path));
    if (!is_special(path))
        snprintf(file->temporary, sizeof(file->temporary), "%s.%ld.tmp", path, (long)getpid());
    file->stream = fopen(file->temporary[0] ? file->temporary : path, "w");
    if (!file->stream) return bench_refuse("cannot write %s: %s", path, strerror(errno));
    return true;
}

bool output_commit(OutputFile *file) {
    errno = 0;
    bool ok = !ferror(file->stream);
    ok = fclose(file->stream) == 0 && ok;
    if (ok && file->temporary[0]) ok = rename(file->temporary, file->path) == 0;
    if (ok) return true;
    int error = errno;
    if (file->temporary[0]) unlink(file->temporary);
    return bench_fail("cannot write %s: %s", file->path,
                      error ? strerror(error) : "not everything could be written");
}

void output_discard(OutputFile *file) {
    fclose(file->stream);
    if (file->temporary[0]) unlink(file->temporary);
}

bool output_probe(const char *path) {
    OutputFile file;
    if (!output_open(&file, path)) return false;
    output_discard(&file);
    return true;
}
