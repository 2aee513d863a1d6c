/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_LOG_H
#define EP_RUNTIME_LOG_H

/**
 * Logging: LIBEP_LOG=warn|info|debug|trace, to stderr or to LIBEP_LOG_FILE. Silent on success at
 * warn.
 */

typedef enum EpLogLevel { EP_LOG_WARN, EP_LOG_INFO, EP_LOG_DEBUG, EP_LOG_TRACE } EpLogLevel;

/** Set the process-wide level and destination ("" is stderr). Called when a group is created. */
void ep_log_configure(EpLogLevel level, const char *file);

/** Set the rank that this thread's lines carry; -1: none. In a group of a mesh it is the rank of
 * the mesh, since a thread may have a rank in several groups. */
void ep_log_set_rank(int rank);

int ep_log_enabled(EpLogLevel level);
#define EP_LOG_LINE_BYTES 1024 /* of a line, without its prefix */

void ep_log_write(EpLogLevel level, const char *format, ...)
    __attribute__((cold, format(printf, 2, 3)));

#define EP_LOG_AT(level, ...)                                        \
    do {                                                             \
        if (ep_log_enabled(level)) ep_log_write(level, __VA_ARGS__); \
    } while (0)
#define EP_WARN(...) EP_LOG_AT(EP_LOG_WARN, __VA_ARGS__)
#define EP_INFO(...) EP_LOG_AT(EP_LOG_INFO, __VA_ARGS__)
#define EP_DEBUG(...) EP_LOG_AT(EP_LOG_DEBUG, __VA_ARGS__)
#define EP_TRACE(...) EP_LOG_AT(EP_LOG_TRACE, __VA_ARGS__)

#endif
