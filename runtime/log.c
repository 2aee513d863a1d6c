/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "runtime/status.h"

static _Atomic int log_level = EP_LOG_WARN; /* relaxed: orders nothing; the mutex has the file */
static pthread_mutex_t log_mutex = PTHREAD_MUTEX_INITIALIZER;
static FILE *log_file; /* NULL: stderr */
static char log_path[4096];
static _Thread_local int log_rank = -1;

void ep_log_configure(EpLogLevel level, const char *file) {
    pthread_mutex_lock(&log_mutex);
    atomic_store_explicit(&log_level, level, memory_order_relaxed);
    if (strcmp(file, log_path) != 0) {
        if (log_file) fclose(log_file);
        log_file = file[0] ? fopen(file, "a") : NULL;
        if (file[0] && !log_file)
            fprintf(stderr, "libep: warn: LIBEP_LOG_FILE: cannot open %s, logging to stderr\n",
                    file);
        snprintf(log_path, sizeof(log_path), "%s", file);
    }
    pthread_mutex_unlock(&log_mutex);
}

void ep_log_set_rank(int rank) {
    log_rank = rank;
}

int ep_log_enabled(EpLogLevel level) {
    return (int)level <= atomic_load_explicit(&log_level, memory_order_relaxed);
}

void ep_log_write(EpLogLevel level, const char *format, ...) {
    static const char *const names[] = {"warn", "info", "debug", "trace"};
    char text[EP_LOG_LINE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    ep_escape(text, sizeof(text));
    pthread_mutex_lock(&log_mutex);
    FILE *out = log_file ? log_file : stderr;
    if (log_rank >= 0)
        fprintf(out, "libep: %s: rank %d: %s\n", names[level], log_rank, text);
    else
        fprintf(out, "libep: %s: %s\n", names[level], text);
    fflush(out);
    pthread_mutex_unlock(&log_mutex);
}
