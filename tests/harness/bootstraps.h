/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_HARNESS_BOOTSTRAPS_H
#define TESTS_HARNESS_BOOTSTRAPS_H

/**
 * Bootstraps made of others: with fewer callbacks, or with a test's own code around them.
 */

#include "ep/ep.h"

/** Returns the bootstrap without messages, so that ranks gather in their place, or with its own
 * rank, size, allgather and barrier alone. */
EpBootstrap without_messages(const EpBootstrap *whole);
EpBootstrap gathers_alone(const EpBootstrap *whole);

/** A bootstrap whose allgather and barrier a test has wrapped. */
typedef struct Wrapped {
    EpBootstrap whole;
    /** Make one collective call, with forward_gather or without; in == NULL: a barrier. */
    EpStatus (*gather)(void *test, const struct Wrapped *wrapped, const void *in, void *out,
                       size_t bytes, double timeout);
    void *test; /**< its first argument */
} Wrapped;

/** Make the call that was wrapped. */
EpStatus forward_gather(const Wrapped *wrapped, const void *in, void *out, size_t bytes,
                        double timeout);

/** Let a bootstrap call `wrapped`, which lives as long as it. */
void wrap_bootstrap(EpBootstrap *own, Wrapped *wrapped);

#endif
