/* SPDX-License-Identifier: Apache-2.0 */
/* Windows of a group whose ranks share GPUs. NCCL does not support such groups, so each process
 * maps the memory of all others of its node by CUDA IPC. */
#include <stdlib.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/memory/cuda/cuda_memory.h"

/* A rank's part of the window: its allocation, and where it lies there. */
typedef struct Descriptor {
    cudaIpcMemHandle_t handle;
    int64_t offset, bytes; /* of the part in the allocation, and of the allocation */
    int32_t valid;
} Descriptor;

_Static_assert(sizeof(Descriptor) <= EP_RENDEZVOUS_BYTES, "the group has memory for it");

static EpStatus refuse(const EpCall *call, const EpCudaWindow *window, const char *why) {
    (void)cudaGetLastError();
    return ep_refuse(call, EP_ERR_UNSUPPORTED, window->owned ? "window" : "memory",
                     "expected memory of cudaMalloc's, which other processes can map, got %p: %s",
                     (void *)window->memory, why);
}

static EpStatus describe(const EpCall *call, const EpCudaWindow *window, Descriptor *out) {
    if (!window->mapped) return ep_refuse(call, EP_ERR_NO_MEMORY, "window", "out of memory");
    void *begin = ep_cuda_allocation(window->memory, &out->bytes);
    if (!begin) return refuse(call, window, "its allocation is not known");
    cudaError_t error = cudaIpcGetMemHandle(&out->handle, begin);
    if (error != cudaSuccess) return refuse(call, window, cudaGetErrorString(error));
    out->offset = window->memory - (char *)begin;
    out->valid = 1;
    return EP_OK;
}

/* What a peer says may be anything: its part must be within its allocation. */
static EpStatus check_part(const EpCall *call, int32_t r, const Descriptor *part, int64_t bytes) {
    if (part->offset >= 0 && part->bytes >= bytes && part->offset <= part->bytes - bytes)
        return EP_OK;
    return ep_refuse(call, EP_ERR_BOOTSTRAP, "bootstrap.allgather",
                     "expected %lld bytes of rank %d within its allocation of %lld bytes, got "
                     "offset %lld",
                     (long long)bytes, r, (long long)part->bytes, (long long)part->offset);
}

/* Map the part of a rank, which has number `i` on this node. A rank that has none says why, in the
 * rendezvous that follows. */
static EpStatus map(const EpGroup *group, const EpCall *call, int32_t i, const Descriptor *all,
                    EpCudaWindow *window, char **peers) {
    int32_t r = ep_nodes_member(&group->nodes, group->nodes.node, i);
    peers[i] = r == group->rank ? window->memory : NULL;
    if (r == group->rank || !all[r].valid) return EP_OK;
    EP_TRY(check_part(call, r, &all[r], window->bytes));
    EP_TRY(ep_cuda_check(
        group, "cudaIpcOpenMemHandle",
        cudaIpcOpenMemHandle(&window->mapped[i], all[r].handle, cudaIpcMemLazyEnablePeerAccess)));
    peers[i] = (char *)window->mapped[i] + all[r].offset;
    return EP_OK;
}

EpStatus ep_cuda_ipc_map(EpGroup *group, const EpCall *call, EpCudaWindow *window, char **peers) {
    Descriptor mine = {.valid = 0};
    int32_t size = group->nodes.sizes.ranks;
    window->mapped = calloc((size_t)size, sizeof(*window->mapped));
    window->kind = EP_WINDOW_IPC;
    EpStatus status = describe(call, window, &mine);
    EP_TRY(ep_group_gather(group, &mine, group->gathered, sizeof(mine)));
    EP_TRY(status);
    for (int32_t i = 0; i < size; i++)
        EP_TRY(map(group, call, i, group->gathered, window, peers));
    return EP_OK;
}

int ep_cuda_ipc_unmap(EpGroup *group, EpCudaWindow *window) {
    for (int32_t i = 0; window->mapped && i < group->nodes.sizes.ranks; i++)
        if (window->mapped[i]) (void)cudaIpcCloseMemHandle(window->mapped[i]);
    free(window->mapped);
    window->mapped = NULL;
    (void)ep_group_meet(group);
    return !group->lost;
}
