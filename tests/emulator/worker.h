/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_EMULATOR_WORKER_H
#define TESTS_EMULATOR_WORKER_H

#include <stdint.h>

#include "tests/emulator/launch.h"

/** Call run(context) in another thread. */
void emulated_start(void (*run)(void *context), void *context);

/** Run one block in the calling thread. */
void emulated_run_block(const EmulatedGrid *grid, unsigned index, uint64_t seed,
                        void (*kernel)(const void *arguments), const void *arguments);

#endif
