/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_EMULATOR_LAUNCH_H
#define TESTS_EMULATOR_LAUNCH_H

/**
 * Kernel launches: between the CUDA C++ stand-in and the streams.
 */

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct EmulatedGrid {
    unsigned blocks, threads;
    size_t shared; /**< bytes of dynamic shared memory per block */
    cudaStream_t stream;
} EmulatedGrid;

/** Enqueue a grid whose threads each call kernel(arguments), with a copy of the arguments. */
void emulated_enqueue_kernel(const EmulatedGrid *grid, void (*kernel)(const void *arguments),
                             const void *arguments, size_t bytes);

/** What becomes of the arguments of a task that a graph has recorded. */
typedef struct EmulatedReplays {
    void (*renew)(void *arguments); /**< a replay is launched, which uses this copy of them */
    void (*drop)(void *arguments);  /**< the graph is gone */
} EmulatedReplays;

/** Enqueue a call of run(arguments) on a stream, with a copy of the arguments. A stream under
 *  capture records it: see EmulatedReplays, which may be NULL. */
void emulated_enqueue(cudaStream_t stream, void (*run)(void *arguments),
                      const EmulatedReplays *replays, const void *arguments, size_t bytes);

/** Returns whether a stream is under capture. */
int emulated_captures(cudaStream_t stream);

/** Run all blocks of a grid, each in its own OS thread, and wait for the last. */
void emulated_run_grid(const EmulatedGrid *grid, void (*kernel)(const void *arguments),
                       const void *arguments);

/** Take and leave places for blocks, of which a GPU has EMULATED_PLACES: for what has blocks and is
 *  not run by emulated_run_grid. */
void emulated_take_places(int device, int count);
void emulated_leave_places(int device, int count);

/** Abort the process: a kernel or the library did what no GPU would accept. */
void emulated_die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/** Returns whether all of the memory is in one allocation, of an emulated GPU or pinned. */
int emulated_reaches(const void *memory, size_t bytes);

/** Find the allocation of an emulated GPU that has this address. Returns 0 if there is none. */
int emulated_allocation(const void *memory, void **begin, size_t *bytes);

#ifdef __cplusplus
}
#endif

#endif
