/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_CUDA_PROBE_H
#define EP_BOOTSTRAP_CUDA_PROBE_H

/**
 * Kernels that find a window's addresses and probe whether peers can be reached. Each call is
 * synchronous and returns a cudaError_t.
 */

#ifdef __cplusplus
extern "C" {
#endif

/** Find where each of `size` ranks' parts of an NCCL window is mapped on this GPU: out[size], NULL
 *  where a part is not mapped. */
int ep_window_pointers(void *nccl_window, int size, char **out);

/** Store `value` into word [`rank`] of every rank's part. */
int ep_window_probe(char *const *windows, int rank, int size, unsigned value);

/** Count the words of the own part that hold `value`. Call it after a barrier. */
int ep_window_count_probes(const char *own, int size, unsigned value, int *out);

#ifdef __cplusplus
}
#endif

#endif
