/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/callback.h"

/* `before`: the thread's sentences before the call. */
static EpStatus check(const EpBootstrap *b, const char *callback, unsigned before,
                      EpStatus status) {
    if (status == EP_OK) return EP_OK;
    int has_sentence = ep_sentences() != before && ep_last_error()[0];
    if (!ep_is_status((int)status))
        return ep_fail(EP_ERR_BOOTSTRAP, "rank %d: bootstrap.%s: expected an EpStatus, got %d%s%s",
                       b->rank, callback, (int)status, has_sentence ? ": " : "",
                       has_sentence ? ep_last_error() : "");
    if (has_sentence) return status;
    return ep_fail(status, "rank %d: bootstrap.%s: expected EP_OK, got %s", b->rank, callback,
                   ep_status_string(status));
}

EpStatus ep_call_allgather(const EpBootstrap *b, const void *in, void *out, size_t bytes,
                           double timeout) {
    unsigned before = ep_sentences();
    return check(b, "allgather", before, b->allgather(b->context, in, out, bytes, timeout));
}

EpStatus ep_call_barrier(const EpBootstrap *b, double timeout) {
    unsigned before = ep_sentences();
    return check(b, "barrier", before, b->barrier(b->context, timeout));
}

EpStatus ep_call_share(const EpBootstrap *b, int32_t node, size_t bytes, double timeout,
                       void **segments, void **memory) {
    unsigned before = ep_sentences();
    return check(b, "share", before, b->share(b->context, node, bytes, timeout, segments, memory));
}

EpStatus ep_call_isend(const EpBootstrap *b, int32_t peer, int32_t tag, const void *data,
                       size_t bytes, void **request) {
    unsigned before = ep_sentences();
    return check(b, "isend", before, b->isend(b->context, peer, tag, data, bytes, request));
}

EpStatus ep_call_irecv(const EpBootstrap *b, int32_t peer, int32_t tag, void *data, size_t bytes,
                       void **request) {
    unsigned before = ep_sentences();
    return check(b, "irecv", before, b->irecv(b->context, peer, tag, data, bytes, request));
}

EpStatus ep_call_test(const EpBootstrap *b, void **request, int *done) {
    unsigned before = ep_sentences();
    return check(b, "test", before, b->test(b->context, request, done));
}
