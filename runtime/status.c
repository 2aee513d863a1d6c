/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "runtime/group.h"
#include "runtime/log.h"

static _Thread_local char last_sentence[EP_SENTENCE_BYTES];

int ep_version(void) {
    return EP_VERSION_MAJOR * 10000 + EP_VERSION_MINOR * 100 + EP_VERSION_PATCH;
}

const char *ep_status_string(EpStatus status) {
    switch (status) {
#define STATUS_CASE(name, number, text) \
    case name:                          \
        return #name ": " text;
        EP_STATUS_MAP(STATUS_CASE)
#undef STATUS_CASE
    }
    return "unknown status";
}

const char *ep_last_error(void) {
    return last_sentence;
}

EpStatus ep_set_last_error(EpStatus status, const char *sentence) {
    return ep_fail(status, "%s", sentence ? sentence : "");
}

EpStatus ep_fail(EpStatus status, const char *format, ...) {
    /* Format into a local buffer, since the arguments may point into last_sentence. */
    char sentence[EP_SENTENCE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(sentence, sizeof(sentence), format, args);
    va_end(args);
    memcpy(last_sentence, sentence, sizeof(last_sentence));
    EP_DEBUG("%s", sentence);
    return status;
}

EpStatus ep_refuse(const EpCall *call, EpStatus status, const char *argument, const char *format,
                   ...) {
    char reason[EP_SENTENCE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(reason, sizeof(reason), format, args);
    va_end(args);
    if (call->rank < 0) return ep_fail(status, "%s: %s: %s", call->name, argument, reason);
    ep_fail(status, "rank %d: %s: %s: %s", call->rank, call->name, argument, reason);
    if (call->group) ep_group_refuse(call->group);
    return status;
}

/* ---- structs of callers -------------------------------------------------------------------- */

static size_t struct_size(const void *object) {
    size_t size;
    memcpy(&size, object, sizeof(size));
    return size;
}

EpStatus ep_check_grown_struct(const EpCall *call, const char *argument, const void *object,
                               size_t first, size_t today) {
    if (!object) return ep_refuse(call, EP_ERR_NULL, argument, "expected a pointer, got NULL");
    size_t got = struct_size(object);
    if (got >= first && got <= today) return EP_OK;
    char sizes[64];
    if (first == today)
        snprintf(sizes, sizeof(sizes), "%zu", today);
    else
        snprintf(sizes, sizeof(sizes), "%zu .. %zu", first, today);
    return ep_refuse(call, EP_ERR_STRUCT_SIZE, argument,
                     "expected struct_size %s, got %zu (initialize it with EP_..._INIT, a tensor "
                     "with ep_tensor_2d%s)",
                     sizes, got, got > today ? "; a newer ep.h has larger structs" : "");
}

EpStatus ep_check_struct(const EpCall *call, const char *argument, const void *object,
                         size_t expected) {
    return ep_check_grown_struct(call, argument, object, expected, expected);
}

EpStatus ep_read_struct(const EpCall *call, const char *argument, const void *given, size_t first,
                        void *out) {
    size_t today = struct_size(out);
    EP_TRY(ep_check_grown_struct(call, argument, given, first, today));
    memcpy(out, given, struct_size(given));
    memcpy(out, &today, sizeof(today));
    return EP_OK;
}

void ep_write_struct(void *out, const void *value) {
    size_t size = struct_size(out);
    memcpy(out, value, size);
    memcpy(out, &size, sizeof(size));
}
