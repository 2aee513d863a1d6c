/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_RECORDER_H
#define EP_RUNTIME_RECORDER_H

/**
 * The flight recorder. A group keeps its last operations and writes them to the log when it fails.
 * Times are the host's: on GPUs they say when a call enqueued its operation. Replays of a graph
 * pass no call, so the recorder does not see them.
 */

#include <stddef.h>
#include <stdint.h>

#include "runtime/log.h"
#include "runtime/status.h"

#define EP_RECORDS 64

/** What a call does, for the recorder and for profilers. */
typedef struct EpActivity {
    const char *call;  /**< a literal: "ep_dispatch" */
    const char *owner; /**< a literal: "handle" or "weight" */
    int32_t id;        /**< of the owner; 0: none */
    int64_t tokens;    /**< T; -1: unknown, or the call moves no tokens */
} EpActivity;

#define EP_ACTIVITY_BYTES 96

/** Write "ep_dispatch on handle 2, T 4096" into `out`. Returns `out`. */
const char *ep_activity_text(const EpActivity *activity, char out[EP_ACTIVITY_BYTES]);

typedef struct EpCallRecord {
    EpActivity activity;
    double begin, end; /**< seconds of ep_clock; end 0: the call has not returned */
    EpStatus status;
} EpCallRecord;

typedef struct EpRecorder {
    uint64_t count; /**< calls so far */
    EpCallRecord records[EP_RECORDS];
} EpRecorder;

/** Surround an operation. The thread that uses the group calls both. */
void ep_record_begin(EpRecorder *recorder, const EpActivity *activity);
void ep_record_end(EpRecorder *recorder, EpStatus status);

/** Log the records, the oldest first. Their times are seconds from now. */
void ep_record_log(const EpRecorder *recorder, EpLogLevel level);

#endif
