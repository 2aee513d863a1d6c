/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_WAIT_H
#define EP_RUNTIME_WAIT_H

/**
 * Polling with a timeout. A wait first spins, then yields its CPU, and after 10 ms sleeps briefly
 * between polls, so that waiting ranks leave the CPUs to ranks with work. A pause orders no memory:
 * what is polled is loaded with acquire.
 *
 *     EpWait wait;
 *     ep_wait_begin(&wait, timeout_seconds, spins);
 *     while (!arrived())
 *         if (!ep_wait_pause(&wait))
 *             return ...timeout...;
 */

#include <stdint.h>

typedef struct EpWait {
    double timeout; /* seconds */
    double start;   /* seconds, 0 until the clock is first read */
    int64_t spins;  /* polls left before yielding; or see ep_wait_begin */
    int sleeps;     /* whether each pause is a sleep */
    unsigned pauses;
} EpWait;

/** `spins` < 0: -spins ranks wait, many more than there are CPUs, so each sleeps between polls. */
void ep_wait_begin(EpWait *wait, double timeout, int64_t spins);

/** Pause once. Returns 0 after the timeout. */
int ep_wait_pause(EpWait *wait);

/** Returns the monotonic time in seconds. */
double ep_clock(void);

#endif
