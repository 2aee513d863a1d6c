/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_EMULATOR_DEVICE_H
#define TESTS_EMULATOR_DEVICE_H

#include <cuda_runtime_api.h>

#define EMULATED_MOST_GPUS 16

/** Of the calling thread. */
int emulated_device(void);
/** Has a process used the device? */
int emulated_is_in_use(int device);
/** Remembers an error for cudaGetLastError, and returns it. */
cudaError_t emulated_error(cudaError_t error);

#endif
