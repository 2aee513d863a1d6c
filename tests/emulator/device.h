/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_EMULATOR_DEVICE_H
#define TESTS_EMULATOR_DEVICE_H

#include <cuda_runtime_api.h>

#define EMULATED_MAX_GPUS 16

/** Returns the calling thread's device. */
int emulated_device(void);
/** Returns whether this process has used the device. */
int emulated_is_in_use(int device);
/** Wait until the calling thread's device is idle, and let nobody copy to it meanwhile. */
void emulated_drain(void);
/** Record an error for cudaGetLastError, and return it. */
cudaError_t emulated_error(cudaError_t error);

#endif
