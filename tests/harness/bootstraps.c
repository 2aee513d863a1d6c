/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/harness/bootstraps.h"

EpBootstrap without_messages(const EpBootstrap *whole) {
    EpBootstrap b = *whole;
    b.isend = NULL, b.irecv = NULL, b.test = NULL, b.cancel = NULL;
    return b;
}

EpBootstrap gathers_alone(const EpBootstrap *whole) {
    EpBootstrap b = without_messages(whole);
    b.share = NULL, b.share_free = NULL;
    return b;
}

EpStatus forward_gather(const Wrapped *wrapped, const void *in, void *out, size_t bytes,
                        double timeout) {
    const EpBootstrap *b = &wrapped->whole;
    return in ? b->allgather(b->context, in, out, bytes, timeout) : b->barrier(b->context, timeout);
}

static EpStatus wrapped_allgather(void *context, const void *in, void *out, size_t bytes,
                                  double timeout) {
    const Wrapped *wrapped = context;
    return wrapped->gather(wrapped->test, wrapped, in, out, bytes, timeout);
}

static EpStatus wrapped_barrier(void *context, double timeout) {
    return wrapped_allgather(context, NULL, NULL, 0, timeout);
}

void wrap_bootstrap(EpBootstrap *own, Wrapped *wrapped) {
    wrapped->whole = *own;
    own->context = wrapped, own->allgather = wrapped_allgather, own->barrier = wrapped_barrier;
}
