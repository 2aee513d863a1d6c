/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_GPU_DEVICES_H
#define TESTS_GPU_DEVICES_H

/**
 * The GPUs of this machine, and a pinned buffer that they and the host can read and write.
 */

#include <stddef.h>

/** Returns the number of GPUs; 0 without a driver. */
int gpu_count(void);
/** Returns the smaller of gpu_count() and `wanted`. */
int gpu_least(int wanted);
/** Returns 1 and prints a line to stdout if there is no GPU. */
int gpu_missing(void);
/** Whether `ranks` ranks share GPUs: LIBEP_SHARE_GPUS is "yes" and there are more ranks than GPUs,
 * up to four for each. Then each rank is a process. */
int gpu_shares(int ranks);
/** Whether `ranks` ranks can run, on a GPU each or on shared ones. */
int gpu_serve(int ranks);
/** Make the GPU of a rank the calling thread's current device. */
void gpu_take(int rank);

/** Whether the CUDA backend has latency mode, and whether it quantises: as on_gpu.h says. */
int gpu_has_latency(void);

/** Whether calls copy tensors that GPUs cannot reach, as on_gpu.h says. They do, until a test says
 * otherwise. */
void gpu_copy_tensors(int copies);
/** Whether this thread's calls only enqueue, with tensors that GPUs reach: its test waits. */
void gpu_only_enqueue(int only);

/** Allocate from the pinned buffer, 128-byte aligned. Returns NULL if it is full. */
void *gpu_allocate(size_t alignment, size_t bytes);
void *gpu_allocate_zeroed(size_t count, size_t bytes);
/** Free memory of the pinned buffer, or of the C library. */
void gpu_release(void *memory);
/** Whether memory lies in the pinned buffer. */
int gpu_owns(const void *memory);
/** Make the pinned buffer at least this large. Has no effect after the first allocation. */
void gpu_reserve(size_t bytes);

#endif
