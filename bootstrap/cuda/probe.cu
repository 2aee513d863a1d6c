/* SPDX-License-Identifier: Apache-2.0 */
#include <nccl.h>
#include <nccl_device.h>
#include <stdint.h>

#include "bootstrap/cuda/probe.h"

/* Collect a window's address on each rank. NCCL offers these in device code only; they stay valid
 * as long as the window. By one block. */
__global__ void find_pointers(ncclWindow_t window, int size, char **out) {
    for (int r = threadIdx.x; r < size; r += blockDim.x)
        out[r] = (char *)ncclGetLsaPointer(window, 0, r);
}

extern "C" int ep_window_pointers(void *window, int size, char **out) {
    char **device = NULL;
    cudaError_t error = cudaMalloc(&device, (size_t)size * sizeof(*device));
    if (error != cudaSuccess) return error;
    find_pointers<<<1, 128>>>((ncclWindow_t)window, size, device);
    error = cudaMemcpy(out, device, (size_t)size * sizeof(*device), cudaMemcpyDeviceToHost);
    cudaFree(device);
    return error;
}

/* Store `value` into word [`rank`] of each rank's part. By one block. */
__global__ void store_probe(char **windows, int rank, int size, unsigned value) {
    for (int r = threadIdx.x; r < size; r += blockDim.x)
        ((volatile uint32_t *)windows[r])[rank] = value;
}

extern "C" int ep_window_probe(char *const *windows, int rank, int size, unsigned value) {
    char **device = NULL;
    cudaError_t error = cudaMalloc(&device, (size_t)size * sizeof(*device));
    if (error != cudaSuccess) return error;
    error = cudaMemcpy(device, windows, (size_t)size * sizeof(*device), cudaMemcpyHostToDevice);
    if (error == cudaSuccess) store_probe<<<1, 128>>>(device, rank, size, value);
    cudaError_t finished = cudaDeviceSynchronize();
    cudaFree(device);
    return error != cudaSuccess ? error : finished;
}

extern "C" int ep_window_count_probes(const char *own, int size, unsigned value, int *out) {
    *out = 0;
    for (int r = 0; r < size; r++) {
        uint32_t word = 0;
        cudaError_t error =
            cudaMemcpy(&word, (const uint32_t *)own + r, sizeof(word), cudaMemcpyDefault);
        if (error != cudaSuccess) return error;
        *out += word == value;
    }
    return cudaSuccess;
}
