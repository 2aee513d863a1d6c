/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CALLBACK_H
#define EP_RUNTIME_CALLBACK_H

/**
 * Calls of a bootstrap's callbacks. The library makes all of them here, but for those that return
 * nothing. What a callback returns is checked: a failure without a sentence gets one, and a number
 * that is no EpStatus becomes EP_ERR_BOOTSTRAP.
 */

#include "runtime/status.h"

EpStatus ep_call_allgather(const EpBootstrap *b, const void *in, void *out, size_t bytes,
                           double timeout);
EpStatus ep_call_barrier(const EpBootstrap *b, double timeout);
EpStatus ep_call_share(const EpBootstrap *b, int32_t node, size_t bytes, double timeout,
                       void **segments, void **memory);
EpStatus ep_call_isend(const EpBootstrap *b, int32_t peer, int32_t tag, const void *data,
                       size_t bytes, void **request);
EpStatus ep_call_irecv(const EpBootstrap *b, int32_t peer, int32_t tag, void *data, size_t bytes,
                       void **request);
EpStatus ep_call_test(const EpBootstrap *b, void **request, int *done);

#endif
