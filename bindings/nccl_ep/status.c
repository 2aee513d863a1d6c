/* SPDX-License-Identifier: Apache-2.0 */
/* Errors: NCCL's results, and sentences on stderr. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "bindings/nccl_ep/adapter.h"

enum { SENTENCE_BYTES = 1024 };

int nep_fail(const char *call, int result, const char *format, ...) {
    static _Thread_local char last[SENTENCE_BYTES];
    char sentence[SENTENCE_BYTES];
    va_list args;
    int used = snprintf(sentence, sizeof(sentence), "libnccl_ep: %s: ", call);
    va_start(args, format);
    vsnprintf(sentence + used, sizeof(sentence) - (size_t)used, format, args);
    va_end(args);
    if (strcmp(sentence, last)) {
        memcpy(last, sentence, sizeof(last));
        fprintf(stderr, "%s\n", sentence);
    }
    return result;
}

static int result_of(EpStatus status) {
    switch (status) {
    case EP_OK:
        return NCCL_SUCCESS;
    case EP_ERR_ORDER:
    case EP_ERR_NOT_PREPARED:
    case EP_ERR_DESTROYED:
    case EP_ERR_UNSUPPORTED:
    case EP_ERR_MISMATCH:
    case EP_ERR_OVERFLOW:
    case EP_ERR_SETTING:
        return NCCL_INVALID_USAGE;
    case EP_ERR_TIMEOUT:
    case EP_ERR_PEER:
    case EP_ERR_ABORTED:
        return NCCL_REMOTE_ERROR;
    case EP_ERR_NO_MEMORY:
    case EP_ERR_BOOTSTRAP:
    case EP_ERR_SYSTEM:
        return NCCL_SYSTEM_ERROR;
    default:
        return NCCL_INVALID_ARGUMENT;
    }
}

int nep_result(const char *call, EpStatus status) {
    if (status == EP_OK) return NCCL_SUCCESS;
    return nep_fail(call, result_of(status), "%s", ep_last_error());
}
