/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_HARNESS_WATCH_H
#define TESTS_HARNESS_WATCH_H

/**
 * Watches what a thread asks of the C library: this program has malloc and getenv of its own, which
 * count and pass on. Not in sanitizer builds, which bring theirs.
 */

typedef struct Watch {
    int allocations; /**< malloc, calloc, realloc, aligned_alloc, posix_memalign */
    int look_ups;    /**< getenv, secure_getenv */
} Watch;

/** What this thread has asked for so far. */
Watch watch_now(void);

#endif
