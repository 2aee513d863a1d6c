/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_GPU_ARENA_H
#define TESTS_GPU_ARENA_H

/**
 * The GPUs of this machine, and pinned memory that they and the host can read and write.
 */

#include <stddef.h>

/** GPUs that there are; 0 also without a driver. */
int gpu_count(void);
/** The least of that and `wanted`. */
int gpu_least(int wanted);
/** 1, and a sentence on stdout, where there are none. */
int gpu_missing(void);
/** Whether there are fewer for so many ranks, but not by far, and EP_SHARE_GPUS lets them share:
 *  then each rank takes a process. */
int gpu_shares(int ranks);
/** Whether there are enough for so many ranks, each for one or shared. */
int gpu_serve(int ranks);
/** The calling thread uses the GPU of a rank from now on. */
void gpu_take(int rank);

/** Memory from the arena, 128-byte aligned; NULL where it is full. */
void *gpu_allocate(size_t alignment, size_t bytes);
void *gpu_allocate_zeroed(size_t count, size_t bytes);
/** Gives memory of the arena back to it, and other memory to the C library. */
void gpu_release(void *memory);
/** Whether memory is the arena's. */
int gpu_owns(const void *memory);
/** Make the arena this large; before anything was allocated. */
void gpu_reserve(size_t bytes);

#endif
