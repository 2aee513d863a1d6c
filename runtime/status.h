/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_STATUS_H
#define EP_RUNTIME_STATUS_H

/**
 * The only way to report errors. The function that finds an error sets its sentence, once, by
 * ep_fail or ep_refuse; its callers only return the status.
 */

#include "ep/ep.h"

#define EP_SENTENCE_BYTES 512

/** The public call that runs, and its rank: the start of every sentence. */
typedef struct EpCall {
    const char *name; /**< "ep_dispatch" */
    int rank;         /**< -1 where no rank is known yet */
} EpCall;

/** Store the sentence for ep_last_error() and return `status`. */
EpStatus ep_fail(EpStatus status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/** Like ep_fail, with the prefix "rank R: call: argument: " (no "rank R: " if it is unknown). */
EpStatus ep_refuse(const EpCall *call, EpStatus status, const char *argument, const char *format,
                   ...) __attribute__((format(printf, 4, 5)));

/** Check the leading struct_size of a caller's struct. */
EpStatus ep_check_struct(const EpCall *call, const char *argument, const void *object,
                         size_t expected);

/** Like ep_check_struct, for a struct that may also have an earlier version's size, `first`. */
EpStatus ep_check_grown_struct(const EpCall *call, const char *argument, const void *object,
                               size_t first, size_t expected);

#define EP_TRY(expression)                                \
    do {                                                  \
        EpStatus ep_try_status = (expression);            \
        if (ep_try_status != EP_OK) return ep_try_status; \
    } while (0)

#endif
