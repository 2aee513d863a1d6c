/* SPDX-License-Identifier: Apache-2.0 */
#include <nccl.h>
#include <nccl_device.h>
#include <stdint.h>

#include "bootstrap/memory/cuda/probe.h"
#include "runtime/cuda/device.h"
#include "runtime/cuda/ptx.cuh"

#define THREADS 128

struct FindArgs {
    ncclWindow_t window;
    int size;
    char **out; /* [size], device or pinned */
};

/* Collect a window's address on each rank. NCCL offers these in device code only; they stay valid
 * as long as the window. By one block. */
__global__ void find_pointers(const __grid_constant__ FindArgs a) {
    for (int r = threadIdx.x; r < a.size; r += blockDim.x)
        a.out[r] = (char *)ncclGetLsaPointer(a.window, 0, r);
}

/* cudaLaunchKernel returns the launch's own error, whatever other calls have left in
 * cudaGetLastError. Without it a kernel that did not run would leave garbage in `out`. */
extern "C" int ep_window_find(void *window, int size, char **out, cudaStream_t stream) {
    FindArgs args = {(ncclWindow_t)window, size, out};
    void *arguments[] = {&args};
    return cudaLaunchKernel(find_pointers, dim3(1), dim3(THREADS), arguments, 0, stream);
}

extern "C" int ep_window_pointers(void *window, int size, char **out) {
    char **device = NULL;
    cudaError_t error = cudaMalloc(&device, (size_t)size * sizeof(*device));
    if (error != cudaSuccess) return error;
    error = (cudaError_t)ep_window_find(window, size, device, NULL);
    if (error == cudaSuccess)
        error = cudaMemcpy(out, device, (size_t)size * sizeof(*device), cudaMemcpyDeviceToHost);
    cudaFree(device);
    return error;
}

struct PublishArgs {
    uint64_t *row; /* device [size] */
    int size;
    uint64_t peers[EP_CUDA_MAX_RANKS];
};

/* Store a window's addresses where kernels may be reading. By one block. */
__global__ void publish_pointers(const __grid_constant__ PublishArgs a) {
    for (int r = threadIdx.x; r < a.size; r += blockDim.x)
        ep_store_relaxed_gpu(a.row + r, a.peers[r]);
}

extern "C" int ep_window_publish(char **row, char *const *peers, int size, cudaStream_t stream) {
    PublishArgs args = {(uint64_t *)row, size, {0}};
    void *arguments[] = {&args};
    for (int r = 0; peers && r < size; r++)
        args.peers[r] = (uint64_t)(uintptr_t)peers[r];
    return cudaLaunchKernel(publish_pointers, dim3(1), dim3(THREADS), arguments, 0, stream);
}

extern "C" int ep_window_open_kernels(void) {
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, find_pointers);
    return error != cudaSuccess ? error : cudaFuncGetAttributes(&attributes, publish_pointers);
}

struct ProbeArgs {
    char **windows; /* device [size] */
    int rank, size;
    unsigned value;
};

/* Store `value` into word [`rank`] of each rank's part. By one block. */
__global__ void store_probe(const __grid_constant__ ProbeArgs a) {
    for (int r = threadIdx.x; r < a.size; r += blockDim.x)
        ((volatile uint32_t *)a.windows[r])[a.rank] = a.value;
}

extern "C" int ep_window_probe(char *const *windows, int rank, int size, unsigned value) {
    char **device = NULL;
    cudaError_t error = cudaMalloc(&device, (size_t)size * sizeof(*device));
    if (error != cudaSuccess) return error;
    error = cudaMemcpy(device, windows, (size_t)size * sizeof(*device), cudaMemcpyHostToDevice);
    ProbeArgs args = {device, rank, size, value};
    void *arguments[] = {&args};
    if (error == cudaSuccess)
        error = cudaLaunchKernel(store_probe, dim3(1), dim3(THREADS), arguments, 0, NULL);
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
