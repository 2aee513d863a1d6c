/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/recorder.h"

#include <stdio.h>

#include "runtime/wait.h"

#define RECORDS_PER_LINE 4

const char *ep_activity_text(const EpActivity *activity, char out[EP_ACTIVITY_BYTES]) {
    int used = snprintf(out, EP_ACTIVITY_BYTES, "%s", activity->call);
    if (activity->id)
        used += snprintf(out + used, EP_ACTIVITY_BYTES - (size_t)used, " on %s %d", activity->owner,
                         activity->id);
    if (activity->tokens >= 0)
        snprintf(out + used, EP_ACTIVITY_BYTES - (size_t)used, ", T %lld",
                 (long long)activity->tokens);
    return out;
}

static EpCallRecord *last(EpRecorder *recorder) {
    return &recorder->records[(recorder->count - 1) % EP_RECORDS];
}

void ep_record_begin(EpRecorder *recorder, const EpActivity *activity) {
    recorder->count++;
    *last(recorder) = (EpCallRecord){.activity = *activity, .begin = ep_clock()};
}

void ep_record_end(EpRecorder *recorder, EpStatus status) {
    last(recorder)->end = ep_clock();
    last(recorder)->status = status;
}

/* Write "-0.002310 s ep_dispatch on handle 2, T 4096: 14 us" into `out`. Returns its length. */
static size_t write_record(const EpCallRecord *record, double now, char *out, size_t bytes) {
    char text[EP_ACTIVITY_BYTES];
    int used = snprintf(out, bytes, "%.6f s %s: ", record->begin - now,
                        ep_activity_text(&record->activity, text));
    char *rest = out + used;
    if (!record->end)
        used += snprintf(rest, bytes - (size_t)used, "has not returned");
    else if (record->status != EP_OK)
        used += snprintf(rest, bytes - (size_t)used, "%s", ep_status_string(record->status));
    else
        used +=
            snprintf(rest, bytes - (size_t)used, "%.0f us", 1e6 * (record->end - record->begin));
    return (size_t)used;
}

void ep_record_log(const EpRecorder *recorder, EpLogLevel level) {
    uint64_t kept = recorder->count < EP_RECORDS ? recorder->count : EP_RECORDS;
    double now = ep_clock();
    if (!kept || !ep_log_enabled(level)) return;
    ep_log_write(level,
                 "the last %d of %llu operations of this group, the oldest first:", (int)kept,
                 (unsigned long long)recorder->count);
    char line[EP_LOG_LINE_BYTES];
    size_t used = 0;
    for (uint64_t i = 0; i < kept; i++) {
        const EpCallRecord *record = &recorder->records[(recorder->count - kept + i) % EP_RECORDS];
        used += write_record(record, now, line + used, sizeof(line) - used);
        int is_full = i % RECORDS_PER_LINE == RECORDS_PER_LINE - 1 || i == kept - 1;
        if (!is_full) used += (size_t)snprintf(line + used, sizeof(line) - used, "; ");
        if (is_full) ep_log_write(level, "%s", line);
        if (is_full) used = 0;
    }
}
