/* SPDX-License-Identifier: Apache-2.0 */

/** Device memory that the other ranks' kernels store to: by handle between processes, as it is
 *  between threads. */

#if EP_WITH_CUDA

#include <stdlib.h>
#include <string.h>

#include "bench_cuda.h"
#include "bench_error.h"
#include "bench_kernels.h"

/* What a rank tells the others of its piece. */
typedef struct Card {
    cudaIpcMemHandle_t handle;
    void *pointer;
    int device;
} Card;

/* Small allocations share a block, all of which a handle opens: take one for ourselves. */
static const size_t least_bytes = 2 << 20;

static bool alloc_own(Peers *p, size_t bytes) {
    if (p->world->size > KERNEL_MAX_PEERS)
        return bench_fail("memory that all ranks reach: expected at most %d ranks, got %d",
                          KERNEL_MAX_PEERS, p->world->size);
    if (bytes < least_bytes) bytes = least_bytes;
    return cuda_ok(cudaMalloc(&p->own, bytes), "cudaMalloc") &&
           cuda_ok(cudaMemset(p->own, 0, bytes), "cudaMemset") &&
           cuda_ok(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

static bool make_card(const Peers *p, Card *card) {
    memset(card, 0, sizeof(*card));
    card->pointer = p->own;
    return cuda_ok(cudaGetDevice(&card->device), "cudaGetDevice") &&
           (p->world->threads ||
            cuda_ok(cudaIpcGetMemHandle(&card->handle, p->own), "cudaIpcGetMemHandle"));
}

/* Once for each pair of devices and process; again is no error. */
static bool reach(int device) {
    int own;
    cudaGetDevice(&own);
    if (own == device) return true;
    cudaError_t status = cudaDeviceEnablePeerAccess(device, 0);
    if (status != cudaErrorPeerAccessAlreadyEnabled)
        return cuda_ok(status, "cudaDeviceEnablePeerAccess");
    cudaGetLastError();
    return true;
}

static bool map_one(Peers *p, const Card *cards, int rank) {
    if (rank == p->world->rank) {
        p->at[rank] = p->own;
        return true;
    }
    if (p->world->threads) {
        p->at[rank] = cards[rank].pointer;
        return reach(cards[rank].device);
    }
    return cuda_ok(
        cudaIpcOpenMemHandle(&p->at[rank], cards[rank].handle, cudaIpcMemLazyEnablePeerAccess),
        "cudaIpcOpenMemHandle");
}

static bool map_all(Peers *p, const Card *cards) {
    for (int r = 0; r < p->world->size; r++) {
        if (!map_one(p, cards, r)) return false;
    }
    return true;
}

static bool exchange(Peers *p, size_t bytes) {
    Card mine, *cards = bench_alloc((size_t)p->world->size, sizeof(Card), "peers");
    bool ok = cards && p->at && alloc_own(p, bytes) && make_card(p, &mine);
    ok = world_all(p->world, ok) && world_allgather(p->world, &mine, cards, sizeof(mine));
    ok = world_all(p->world, ok && map_all(p, cards));
    free(cards);
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

/* Collective: nobody may free what another still has mapped. */
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
