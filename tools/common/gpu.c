/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/common/gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/common/util.h"

#if EP_WITH_CUDA

bool cuda_ok(cudaError_t status, const char *call) {
    return status == cudaSuccess || bench_fail("%s: %s", call, cudaGetErrorString(status));
}

int gpu_capability(void) {
    struct cudaDeviceProp properties;
    int device;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaGetDeviceProperties(&properties, device) != cudaSuccess)
        return 0;
    return 10 * properties.major + properties.minor;
}

bool gpu_multiprocessors(int *out) {
    int device;
    return cuda_ok(cudaGetDevice(&device), "cudaGetDevice") &&
           cuda_ok(cudaDeviceGetAttribute(out, cudaDevAttrMultiProcessorCount, device),
                   "cudaDeviceGetAttribute");
}

bool gpu_built(void) {
    return true;
}

enum { HOST_BYTES = 256 };

/* Number of lower ranks on the same machine. */
static bool find_local_rank(World *world, int *out) {
    char name[HOST_BYTES] = "", *all = bench_alloc((size_t)world->size, HOST_BYTES, "host names");
    gethostname(name, sizeof(name) - 1);
    bool ok = world_all(world, all != NULL) && world_allgather(world, name, all, HOST_BYTES);
    *out = 0;
    for (int r = 0; ok && r < world->rank; r++)
        *out += strcmp(all + (size_t)r * HOST_BYTES, name) == 0;
    free(all);
    return ok;
}

/* A machine without GPUs is not an error here: the library decides whether it needs one. */
bool gpu_select(World *world) {
    int local_rank, count = 0;
    if (!find_local_rank(world, &local_rank)) return false;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        cudaGetLastError();
        return true;
    }
    return world_all(world, cuda_ok(cudaSetDevice(local_rank % count), "cudaSetDevice"));
}

void gpu_name(char *out, size_t bytes) {
    struct cudaDeviceProp properties;
    int device, count = 0;
    out[0] = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0 &&
        cudaGetDevice(&device) == cudaSuccess &&
        cudaGetDeviceProperties(&properties, device) == cudaSuccess)
        snprintf(out, bytes, "%s, %d multiprocessors", properties.name,
                 properties.multiProcessorCount);
    cudaGetLastError();
}

#else

bool gpu_built(void) {
    return false;
}

bool gpu_select(World *world) {
    (void)world;
    return true;
}

void gpu_name(char *out, size_t bytes) {
    if (bytes) out[0] = 0;
}

#endif
