/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_STATUS_H
#define EP_RUNTIME_STATUS_H

/**
 * The one error path. The function that finds an error says it, once, through ep_fail or
 * ep_refuse; everyone above only passes the status on.
 */

#include "ep/ep.h"

#define EP_SENTENCE_BYTES 512

/** Which public call is running, on which rank: the start of every sentence. */
typedef struct EpCall {
    const char *name; /**< "ep_dispatch" */
    int rank;         /**< -1 where no rank is known yet */
} EpCall;

/** Store the sentence for ep_last_error() and return `status`. */
EpStatus ep_fail(EpStatus status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/** The same with the prefix "rank R: call: argument: ". */
EpStatus ep_refuse(const EpCall *call, EpStatus status, const char *argument, const char *format,
                   ...) __attribute__((format(printf, 4, 5)));

/** Check the leading struct_size of a caller's struct. */
EpStatus ep_check_struct(const EpCall *call, const char *argument, const void *object,
                         size_t expected);

/** The same for a struct that has grown: `first` is the size it had before. */
EpStatus ep_check_grown_struct(const EpCall *call, const char *argument, const void *object,
                               size_t first, size_t expected);

#define EP_TRY(expression)                                \
    do {                                                  \
        EpStatus ep_try_status = (expression);            \
        if (ep_try_status != EP_OK) return ep_try_status; \
    } while (0)

#endif
