/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_MACHINE_H
#define BENCH_MACHINE_H

#include <stdint.h>

/** Where and when a run took place. */
typedef struct Machine {
    char hostname[256];
    char cpu[128];
    long cores;
    int64_t memory; /**< bytes */
    char date[32];  /**< ISO 8601, UTC */
} Machine;

void machine_describe(Machine *out);

#endif
