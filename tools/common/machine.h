/* SPDX-License-Identifier: Apache-2.0 */
#ifndef COMMON_MACHINE_H
#define COMMON_MACHINE_H

#include <stdint.h>

/** Where and when the run took place. */
typedef struct Machine {
    char hostname[256];
    char cpu[128];
    long cores;
    int64_t memory; /**< bytes */
    char date[32];  /**< ISO 8601, UTC */
} Machine;

void machine_describe(Machine *out);

#endif
