/* SPDX-License-Identifier: Apache-2.0 */
/* Windows of a group whose ranks share GPUs. NCCL does not support such groups, so each process
 * maps the memory of all others by CUDA IPC. */
#include <stdlib.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/cuda/setup.h"

/* A rank's part of the window: its allocation, and its offset in bytes there. */
typedef struct Descriptor {
    cudaIpcMemHandle_t handle;
    int64_t offset;
    int32_t valid;
} Descriptor;

static EpStatus refuse(const EpCall *call, const EpCudaWindow *window, const char *why) {
    (void)cudaGetLastError();
    return ep_refuse(call, EP_ERR_UNSUPPORTED, window->owned ? "window" : "memory",
                     "expected memory of cudaMalloc's, which other processes can map, got %p: %s",
                     (void *)window->memory, why);
}

static EpStatus describe(const EpCall *call, const EpCudaWindow *window, Descriptor *out) {
    if (!window->mapped) return ep_refuse(call, EP_ERR_NO_MEMORY, "window", "out of memory");
    void *begin = ep_cuda_allocation(window->memory);
    if (!begin) return refuse(call, window, "its allocation is not known");
    cudaError_t error = cudaIpcGetMemHandle(&out->handle, begin);
    if (error != cudaSuccess) return refuse(call, window, cudaGetErrorString(error));
    out->offset = window->memory - (char *)begin;
    out->valid = 1;
    return EP_OK;
}

static EpStatus map(const EpGroup *group, int32_t r, const Descriptor *part, EpCudaWindow *window,
                    char **peers) {
    if (r == group->rank) {
        peers[r] = window->memory;
        return EP_OK;
    }
    EP_TRY(ep_cuda_check(
        group, "cudaIpcOpenMemHandle",
        cudaIpcOpenMemHandle(&window->mapped[r], part->handle, cudaIpcMemLazyEnablePeerAccess)));
    peers[r] = (char *)window->mapped[r] + part->offset;
    return EP_OK;
}

EpStatus ep_cuda_ipc_map(EpGroup *group, const EpCall *call, EpCudaWindow *window, char **peers) {
    Descriptor mine = {.valid = 0}, all[EP_CUDA_MAX_RANKS];
    window->mapped = calloc((size_t)group->size, sizeof(*window->mapped));
    window->kind = EP_WINDOW_IPC;
    EpStatus status = describe(call, window, &mine);
    EP_TRY(ep_group_gather(group, &mine, all, sizeof(mine)));
    EP_TRY(status);
    for (int32_t r = 0; r < group->size; r++)
        if (all[r].valid) EP_TRY(map(group, r, &all[r], window, peers));
    return EP_OK;
}

int ep_cuda_ipc_unmap(EpGroup *group, EpCudaWindow *window) {
    for (int32_t r = 0; window->mapped && r < group->size; r++)
        if (window->mapped[r]) (void)cudaIpcCloseMemHandle(window->mapped[r]);
    free(window->mapped);
    window->mapped = NULL;
    (void)ep_group_meet(group);
    return !group->lost;
}
