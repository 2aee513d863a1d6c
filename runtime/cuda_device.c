/* SPDX-License-Identifier: Apache-2.0 */
/* What surrounds the library's calls on a GPU: the current device, profilers' ranges, and whether
 * the GPU reaches the memory it is given. */
#include <cuda.h>
#include <dlfcn.h>
#include <nvtx3/nvToolsExt.h>
#include <pthread.h>

#include "runtime/cuda_host.h"

/* ---- the driver's own interface ------------------------------------------------------------ */

typedef CUresult (*PrimaryState)(CUdevice device, unsigned *flags, int *active);
typedef CUresult (*AddressRange)(CUdeviceptr *begin, size_t *bytes, CUdeviceptr address);

static pthread_once_t once = PTHREAD_ONCE_INIT;
static PrimaryState primary_state;
static AddressRange address_range;

static void find_driver(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!driver) return;
    primary_state = (PrimaryState)(uintptr_t)dlsym(driver, "cuDevicePrimaryCtxGetState");
    address_range = (AddressRange)(uintptr_t)dlsym(driver, "cuMemGetAddressRange_v2");
}

void *ep_cuda_allocation(const void *memory) {
    CUdeviceptr begin = 0;
    size_t bytes = 0;
    pthread_once(&once, find_driver);
    if (!address_range) return NULL;
    CUresult result = address_range(&begin, &bytes, (CUdeviceptr)(uintptr_t)memory);
    return result == CUDA_SUCCESS ? (void *)(uintptr_t)begin : NULL;
}

/* ---- the current device -------------------------------------------------------------------- */

/* Going back to a device that was never used would make a context on it, which takes hundreds of
 * megabytes there. Devices of the driver and of the runtime are counted alike. */
static int is_in_use(int device) {
    unsigned flags = 0;
    int active = 0;
    pthread_once(&once, find_driver);
    return primary_state && primary_state(device, &flags, &active) == CUDA_SUCCESS && active;
}

int ep_cuda_switch(int device, int before) {
    int back = before >= 0 && is_in_use(before) ? before : EP_STAY;
    (void)cudaSetDevice(device);
    return back;
}

void ep_cuda_switch_back(int before) {
    (void)cudaSetDevice(before);
}

int ep_cuda_enter(const EpGroup *group, const char *call) {
    (void)nvtxRangePushA(call);
    return ep_cuda_use(group->choice.device);
}

void ep_cuda_leave(const EpGroup *group, int before) {
    (void)group;
    ep_cuda_restore(before);
    (void)nvtxRangePop();
}

/* ---- tensors ------------------------------------------------------------------------------- */

static EpStatus refuse(const EpGroup *group, const EpCall *call, const char *argument,
                       const char *got, const void *data) {
    return ep_refuse(call, EP_ERR_ADDRESS, argument,
                     "expected memory of device %d or pinned host memory, got %s at %p",
                     ep_cuda(group)->ordinal, got, data);
}

static EpStatus judge(const EpGroup *group, const EpCall *call, const char *argument,
                      const void *data, const struct cudaPointerAttributes *a) {
    if (a->type == cudaMemoryTypeManaged) return EP_OK;
    if (a->type == cudaMemoryTypeUnregistered)
        return refuse(group, call, argument, "plain host memory", data);
    if (a->type == cudaMemoryTypeHost) {
        if (a->devicePointer == data) return EP_OK;
        return refuse(group, call, argument, "host memory that GPUs see at another address", data);
    }
    if (a->device == ep_cuda(group)->ordinal) return EP_OK;
    return ep_refuse(call, EP_ERR_ADDRESS, argument,
                     "expected memory of device %d or pinned host memory, got memory of device %d "
                     "at %p",
                     ep_cuda(group)->ordinal, a->device, data);
}

/* Where an address is remembered. Tensors lie on multiples of 16 or more, often of large powers of
 * two: the upper bits of the product depend on all of the address. */
static const void **reached_at(EpCuda *cuda, const void *data) {
    uint64_t hash = (uint64_t)(uintptr_t)data * 0x9e3779b97f4a7c15ull;
    return &cuda->reached[(hash >> 32) % EP_REACHED];
}

static EpStatus look_up(const EpGroup *group, const EpCall *call, const char *argument,
                        const void *data) {
    struct cudaPointerAttributes attributes;
    int before = ep_cuda_use(ep_cuda(group)->ordinal);
    cudaError_t error = cudaPointerGetAttributes(&attributes, data);
    if (error != cudaSuccess) (void)cudaGetLastError();
    ep_cuda_restore(before);
    if (error != cudaSuccess) return refuse(group, call, argument, cudaGetErrorString(error), data);
    return judge(group, call, argument, data, &attributes);
}

/* The driver is asked once for each address: that takes as long as half a launch. What is freed and
 * comes back as other memory at the same address is not noticed; a diagnosis is lost, no more. */
EpStatus ep_cuda_check_pointer(const EpGroup *group, const EpCall *call, const char *argument,
                               const void *data) {
    EpCuda *cuda = ep_cuda(group);
    if (cuda->pageable) return EP_OK;
    const void **place = reached_at(cuda, data);
    if (*place == data) return EP_OK;
    EP_TRY(look_up(group, call, argument, data));
    *place = data;
    return EP_OK;
}
