/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_WINDOW_H
#define EP_RUNTIME_WINDOW_H

/**
 * Windows: device memory that all ranks of a communicator map.
 */

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Where each of `size` ranks' part of an NCCL window is mapped on this GPU; NULLs where it is not.
 * Synchronous. Returns a cudaError_t.
 */
int ep_window_pointers(void *nccl_window, int size, char **out);

/** Store `value` into the first word of every rank's part at [`rank`], to see that they can be
 *  reached; then, after a barrier, count the words of the own part that are as expected. */
int ep_window_greet(char *const *windows, int rank, int size, unsigned value);
int ep_window_count_greetings(const char *own, int size, unsigned value, int *out);

#ifdef __cplusplus
}
#endif

#endif
