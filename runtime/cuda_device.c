/* SPDX-License-Identifier: Apache-2.0 */
/* What surrounds the library's calls on a GPU: the current device, profilers' ranges, and whether
 * the GPU reaches the memory it is given. */
#include <cuda.h>
#include <dlfcn.h>
#include <nvtx3/nvToolsExt.h>
#include <pthread.h>

#include "runtime/cuda_host.h"

/* ---- the current device -------------------------------------------------------------------- */

typedef CUresult (*PrimaryState)(CUdevice device, unsigned *flags, int *active);

static pthread_once_t once = PTHREAD_ONCE_INIT;
static PrimaryState primary_state;

static void find_primary_state(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void *symbol = driver ? dlsym(driver, "cuDevicePrimaryCtxGetState") : NULL;
    primary_state = (PrimaryState)(uintptr_t)symbol;
}

/* Going back to a device that was never used would make a context on it, which takes hundreds of
 * megabytes there. Devices of the driver and of the runtime are counted alike. */
static int is_in_use(int device) {
    unsigned flags = 0;
    int active = 0;
    pthread_once(&once, find_primary_state);
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

EpStatus ep_cuda_check_pointer(const EpGroup *group, const EpCall *call, const char *argument,
                               const void *data) {
    struct cudaPointerAttributes attributes;
    if (ep_cuda(group)->pageable) return EP_OK;
    int before = ep_cuda_use(ep_cuda(group)->ordinal);
    cudaError_t error = cudaPointerGetAttributes(&attributes, data);
    if (error != cudaSuccess) (void)cudaGetLastError();
    ep_cuda_restore(before);
    if (error != cudaSuccess) return refuse(group, call, argument, cudaGetErrorString(error), data);
    return judge(group, call, argument, data, &attributes);
}
