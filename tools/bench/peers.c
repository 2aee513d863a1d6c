/* SPDX-License-Identifier: Apache-2.0 */

/** Device memory to which the other ranks' kernels can store. Processes share it by IPC handle,
 *  threads by pointer. */

#if EP_WITH_CUDA

#include <stdlib.h>
#include <string.h>

#include "tools/bench/device.h"
#include "tools/common/util.h"

/* Describes a rank's allocation to the other ranks. */
typedef struct PeerDescriptor {
    cudaIpcMemHandle_t handle;
    void *pointer;
    int device;
} PeerDescriptor;

/* Small allocations share a block, and an IPC handle opens the whole block. This size gets a block
 * of its own. */
static const size_t least_bytes = 2 << 20;

static bool alloc_own(Peers *p, size_t bytes) {
    if (p->world->size > KERNEL_MAX_PEERS)
        return bench_fail("peer-accessible memory: expected at most %d ranks, got %d",
                          KERNEL_MAX_PEERS, p->world->size);
    if (bytes < least_bytes) bytes = least_bytes;
    return cuda_ok(cudaMalloc(&p->own, bytes), "cudaMalloc") &&
           cuda_ok(cudaMemset(p->own, 0, bytes), "cudaMemset") &&
           cuda_ok(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

static bool make_descriptor(const Peers *p, PeerDescriptor *descriptor) {
    memset(descriptor, 0, sizeof(*descriptor));
    descriptor->pointer = p->own;
    return cuda_ok(cudaGetDevice(&descriptor->device), "cudaGetDevice") &&
           (p->world->threads ||
            cuda_ok(cudaIpcGetMemHandle(&descriptor->handle, p->own), "cudaIpcGetMemHandle"));
}

/* Enable peer access to a device. It may have been enabled before in this process. */
static bool enable_peer(int device) {
    int own;
    cudaGetDevice(&own);
    if (own == device) return true;
    cudaError_t status = cudaDeviceEnablePeerAccess(device, 0);
    if (status != cudaErrorPeerAccessAlreadyEnabled)
        return cuda_ok(status, "cudaDeviceEnablePeerAccess");
    cudaGetLastError();
    return true;
}

static bool map_one(Peers *p, const PeerDescriptor *descriptors, int rank) {
    if (rank == p->world->rank) {
        p->at[rank] = p->own;
        return true;
    }
    if (p->world->threads) {
        p->at[rank] = descriptors[rank].pointer;
        return enable_peer(descriptors[rank].device);
    }
    return cuda_ok(cudaIpcOpenMemHandle(&p->at[rank], descriptors[rank].handle,
                                        cudaIpcMemLazyEnablePeerAccess),
                   "cudaIpcOpenMemHandle");
}

static bool exchange(Peers *p, size_t bytes) {
    PeerDescriptor mine,
        *descriptors = bench_alloc((size_t)p->world->size, sizeof(PeerDescriptor), "peers");
    bool ok = descriptors && p->at && alloc_own(p, bytes) && make_descriptor(p, &mine);
    ok = world_all(p->world, ok) && world_allgather(p->world, &mine, descriptors, sizeof(mine));
    for (int r = 0; ok && r < p->world->size; r++)
        ok = map_one(p, descriptors, r);
    ok = world_all(p->world, ok);
    free(descriptors);
    return ok;
}

Peers *peers_open(World *world, size_t bytes) {
    Peers *p = bench_alloc(1, sizeof(Peers), "peers");
    if (!world_all(world, p != NULL)) {
        free(p);
        return NULL;
    }
    p->world = world;
    p->at = bench_alloc((size_t)world->size, sizeof(void *), "peers");
    if (exchange(p, bytes)) return p;
    peers_close(p);
    return NULL;
}

/* Collective: a rank frees its memory only after all ranks have unmapped it. */
void peers_close(Peers *p) {
    if (!p) return;
    cudaDeviceSynchronize();
    for (int r = 0; p->at && !p->world->threads && r < p->world->size; r++) {
        if (p->at[r] && p->at[r] != p->own) cudaIpcCloseMemHandle(p->at[r]);
    }
    world_barrier(p->world);
    cudaFree(p->own);
    cudaGetLastError();
    free(p->at);
    free(p);
}

#endif
