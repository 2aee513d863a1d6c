/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_HARNESS_NAMES_H
#define TESTS_HARNESS_NAMES_H

#include <time.h>

/** Returns how many names of libep, made since then, stay in the system's shared memory. Other
 *  tests run at the same time and have names for moments, so each name is waited for. */
int names_that_stay(time_t since);

#endif
