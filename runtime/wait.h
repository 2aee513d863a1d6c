/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_WAIT_H
#define EP_RUNTIME_WAIT_H

/**
 * Polling with a deadline. A wait first spins, then yields its CPU, and after a while sleeps
 * briefly between looks, so that ranks which outnumber the CPUs do not starve those with work.
 *
 *     EpWait wait;
 *     ep_wait_begin(&wait, timeout_seconds, spins);
 *     while (!arrived())
 *         if (!ep_wait_pause(&wait))
 *             return ...deadline passed...;
 */

#include <stdint.h>

typedef struct EpWait {
    double timeout; /* seconds */
    double start;   /* seconds, 0 until the clock is first read */
    int64_t spins;  /* polls left before yielding */
    unsigned pauses;
} EpWait;

void ep_wait_begin(EpWait *wait, double timeout, int64_t spins);

/** Pause once; 0 when the deadline has passed. */
int ep_wait_pause(EpWait *wait);

/** Monotonic time in seconds. */
double ep_clock(void);

#endif
