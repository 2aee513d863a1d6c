/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_HARNESS_WATCH_H
#define TESTS_HARNESS_WATCH_H

/**
 * Counts a thread's calls of malloc and getenv: this program replaces them with functions that
 * count and forward. Not in sanitizer builds, which bring their own.
 */

typedef struct Watch {
    int allocations; /**< malloc, calloc, realloc, aligned_alloc, posix_memalign */
    int look_ups;    /**< getenv, secure_getenv */
} Watch;

/** Returns this thread's counts so far. */
Watch watch_now(void);

/** Let one allocation of this thread return NULL: the next for 1, the one after it for 2. With 0 no
 *  allocation fails. Returns what was left of the last such count: 0 if that allocation failed. */
int watch_fail(int allocation);

#endif
