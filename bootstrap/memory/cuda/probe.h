/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_MEMORY_CUDA_PROBE_H
#define EP_BOOTSTRAP_MEMORY_CUDA_PROBE_H

/**
 * Kernels that find a window's addresses and probe whether peers can be reached. Each call returns
 * a cudaError_t, and is synchronous unless it takes a stream.
 */

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Find where each of `size` ranks' parts of an NCCL window is mapped on this GPU: out[size], NULL
 *  where a part is not mapped. */
int ep_window_pointers(void *nccl_window, int size, char **out);

/** Enqueue the same, into pinned memory out[size]. */
int ep_window_find(void *nccl_window, int size, char **out, cudaStream_t stream);

/** Enqueue: store the addresses peers[size], which are read now, into device memory row[size], each
 *  at once. peers NULL: store NULL. */
int ep_window_publish(char **row, char *const *peers, int size, cudaStream_t stream);

/** Load these kernels, so that the first launch does not. */
int ep_window_open_kernels(void);

/** Store `value` into word [`rank`] of every rank's part. */
int ep_window_probe(char *const *windows, int rank, int size, unsigned value);

/** Count the words of the own part that hold `value`. Call it after a barrier. */
int ep_window_count_probes(const char *own, int size, unsigned value, int *out);

#ifdef __cplusplus
}
#endif

#endif
