/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_EMULATOR_LAUNCH_H
#define TESTS_EMULATOR_LAUNCH_H

/**
 * Launches, from the stand-in for CUDA's C++ to the streams.
 */

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct EmulatedGrid {
    unsigned blocks, threads;
    size_t shared; /**< bytes of dynamic shared memory of a block */
    cudaStream_t stream;
} EmulatedGrid;

/** Every thread of the grid will call kernel(arguments), with a copy of the arguments. */
void emulated_enqueue_kernel(const EmulatedGrid *grid, void (*kernel)(const void *arguments),
                             const void *arguments, size_t bytes);

/** Run all blocks of a grid, each in an OS thread of its own, until the last has ended. */
void emulated_run_grid(const EmulatedGrid *grid, void (*kernel)(const void *arguments),
                       const void *arguments);

/** Stop the process: the kernels or the library have done what no GPU would let pass. */
void emulated_die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/** Is all of this memory in one allocation of the emulated GPUs' or pinned? */
int emulated_reaches(const void *memory, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
