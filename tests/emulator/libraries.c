/* SPDX-License-Identifier: Apache-2.0 */
/* What the library finds by dlopen and dlsym: NCCL, the CUDA driver and cuBLAS. */
#include <cublas_v2.h>
#include <cuda.h>
#include <nccl_device.h>
#include <stdint.h>
#include <string.h>

#include "tests/emulator/device.h"
#include "tests/emulator/launch.h"
#include "tests/emulator/nccl_state.h"

#define EMULATOR_REAL_DLFCN
#include <dlfcn.h>
#undef dlopen
#undef dlsym

static int primary_state(int device, unsigned *flags, int *active) {
    *flags = 0, *active = emulated_is_in_use(device);
    return 0;
}

static int pointer_attribute(void *out, int what, unsigned long long address) {
    struct cudaPointerAttributes a;
    if (cudaPointerGetAttributes(&a, (const void *)(uintptr_t)address) != cudaSuccess ||
        a.type == cudaMemoryTypeUnregistered)
        return CUDA_ERROR_INVALID_VALUE;
    int type = a.type == cudaMemoryTypeDevice ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    *(int *)out = what == CU_POINTER_ATTRIBUTE_MEMORY_TYPE  ? type
                  : what == CU_POINTER_ATTRIBUTE_IS_MANAGED ? 0
                                                            : a.device;
    return 0;
}

static int address_range(unsigned long long *begin, size_t *bytes, unsigned long long address) {
    void *start = NULL;
    if (!emulated_allocation((const void *)(uintptr_t)address, &start, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    *begin = (unsigned long long)(uintptr_t)start;
    return 0;
}

/* The start of an allocation serves as its handle. */
static int retain_handle(unsigned long long *out, void *address) {
    size_t bytes;
    return address_range(out, &bytes, (unsigned long long)(uintptr_t)address);
}

/* Not in stream order: the stream's work ends first. */
static int set_words(unsigned long long address, unsigned value, size_t words,
                     cudaStream_t stream) {
    unsigned *word = (unsigned *)(uintptr_t)address;
    if (cudaStreamSynchronize(stream) != cudaSuccess || !emulated_reaches(word, words * 4))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < words; i++)
        word[i] = value;
    return 0;
}

static int is_capturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    unsigned long long id;
    return (int)cudaStreamGetCaptureInfo_v2(stream, status, &id, NULL, NULL, NULL);
}

static const struct {
    const char *name;
    void *function;
} functions[] = {
#define FUNCTION(name) \
    { #name, (void *)name }
    FUNCTION(ncclGetVersion),
    FUNCTION(ncclGetErrorString),
    FUNCTION(ncclGetLastError),
    FUNCTION(ncclGetUniqueId),
    FUNCTION(ncclCommInitRankConfig),
    FUNCTION(ncclCommSplit),
    FUNCTION(ncclCommGetAsyncError),
    FUNCTION(ncclCommCount),
    FUNCTION(ncclCommUserRank),
    FUNCTION(ncclCommCuDevice),
    FUNCTION(ncclAllGather),
    FUNCTION(ncclAllReduce),
    FUNCTION(ncclReduceScatter),
    FUNCTION(ncclSend),
    FUNCTION(ncclRecv),
    FUNCTION(ncclGroupStart),
    FUNCTION(ncclGroupEnd),
    FUNCTION(ncclCommAbort),
    FUNCTION(ncclCommDestroy),
    FUNCTION(ncclMemAlloc),
    FUNCTION(ncclMemFree),
    FUNCTION(ncclCommWindowRegister),
    FUNCTION(ncclCommWindowDeregister),
    FUNCTION(ncclWinGetUserPtr),
    FUNCTION(ncclGetPeerDevicePointer),
    {"cuDevicePrimaryCtxGetState", (void *)primary_state},
    {"cuMemGetAddressRange_v2", (void *)address_range},
    {"cuMemRetainAllocationHandle", (void *)retain_handle},
    FUNCTION(cuMemRelease),
    FUNCTION(cuMemGetAllocationGranularity),
    FUNCTION(cuMemAddressReserve),
    FUNCTION(cuMemAddressFree),
    FUNCTION(cuMemCreate),
    FUNCTION(cuMemMap),
    FUNCTION(cuMemUnmap),
    FUNCTION(cuMemSetAccess),
    FUNCTION(cuMemExportToShareableHandle),
    FUNCTION(cuMemImportFromShareableHandle),
    {"cuMemsetD32Async", (void *)set_words},
    {"cuStreamIsCapturing", (void *)is_capturing},
    {"cuStreamSynchronize", (void *)cudaStreamSynchronize},
    {"cuPointerGetAttribute", (void *)pointer_attribute}};

static char library, blas;

void *emulated_dlopen(const char *name, int flags) {
    if (name && (strncmp(name, "libnccl", 7) == 0 || strncmp(name, "libcuda", 7) == 0))
        return &library;
    if (name && strncmp(name, "libcublas", 9) == 0) return &blas;
    return dlopen(name, flags);
}

void *emulated_dlsym(void *handle, const char *name) {
    int version = VERSION;
    if (handle == &blas) return emulated_cublas(name);
    if (handle != &library) return dlsym(handle, name);
    ncclGetVersion(&version);
    if (version < 22900 && strcmp(name, "ncclWinGetUserPtr") == 0) return NULL;
    if (version < 23000 && strcmp(name, "ncclGetPeerDevicePointer") == 0) return NULL;
    for (size_t i = 0; i < sizeof(functions) / sizeof(*functions); i++)
        if (strcmp(functions[i].name, name) == 0) return functions[i].function;
    return NULL;
}
