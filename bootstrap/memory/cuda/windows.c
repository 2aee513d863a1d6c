/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Windows: device memory that all ranks of a node map. NCCL maps them or, where ranks share GPUs,
 * ipc.c. Opens the library's own window and those of ep_mem_alloc and ep_window_register.
 */
#include <stdlib.h>
#include <string.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/cuda/nccl_bootstrap.h"
#include "bootstrap/memory/cuda/cuda_memory.h"
#include "bootstrap/memory/cuda/places.h"
#include "bootstrap/memory/cuda/probe.h"
#include "bootstrap/network/cuda/network.h"

#define PROBE_VALUE 0x65702100u
#define PAGE_BYTES 4096

/* ---- one window ---------------------------------------------------------------------------- */

/* State of opening a window. */
typedef struct Opening {
    EpGroup *group;
    const EpCall *call;
    EpCudaWindow *window;
    char **peers;
    uint32_t words[EP_CUDA_MAX_RANKS]; /* the words that probes overwrite */
} Opening;

/* Windows reach the ranks of a node. */
static int32_t node_size(const Opening *o) {
    return o->group->nodes.sizes.ranks;
}

static char *own_part(const Opening *o) {
    return o->peers[o->group->nodes.rank];
}

/* Returns the NCCL that maps the group's windows, or NULL: its rank is alone, or ranks share GPUs.
 */
static const EpNccl *mapping_nccl(const EpGroup *group) {
    return group->choice.shared ? NULL : ep_cuda(group)->nccl;
}

static EpStatus allocate(const Opening *o) {
    EpCudaWindow *w = o->window;
    const EpNccl *nccl = mapping_nccl(o->group);
    void *memory = NULL;
    int failed = nccl ? nccl->ncclMemAlloc(&memory, (size_t)w->bytes) != ncclSuccess
                      : cudaMalloc(&memory, (size_t)w->bytes) != cudaSuccess;
    if (failed)
        return ep_refuse(o->call, EP_ERR_NO_MEMORY, "window",
                         "expected %lld bytes of device memory, got none", (long long)w->bytes);
    w->memory = memory;
    return ep_cuda_check(o->group, "cudaMemset", cudaMemset(memory, 0, (size_t)w->bytes));
}

static EpStatus check_device_memory(const Opening *o) {
    struct cudaPointerAttributes attributes;
    int device = ep_cuda(o->group)->ordinal;
    EP_TRY(ep_cuda_check(o->group, "cudaPointerGetAttributes",
                         cudaPointerGetAttributes(&attributes, o->window->memory)));
    if (attributes.type == cudaMemoryTypeDevice && attributes.device == device) return EP_OK;
    return ep_refuse(o->call, EP_ERR_UNSUPPORTED, "memory",
                     "expected memory of device %d, got %p, which is not", device,
                     (void *)o->window->memory);
}

static EpStatus take_memory(Opening *o) {
    EP_TRY(o->window->owned ? allocate(o) : check_device_memory(o));
    return ep_cuda_check(o->group, "cudaDeviceSynchronize", cudaDeviceSynchronize());
}

/* Register the memory with NCCL, which makes this collective. If the wait for NCCL's answer ends
 * early, NCCL may still write the answer later, so it has memory of its own that is then never
 * freed. NCCL may return success without a window. */
static EpStatus register_memory(Opening *o) {
    EpCudaWindow *w = o->window;
    const EpCuda *cuda = ep_cuda(o->group);
    if (!cuda->comm || !mapping_nccl(o->group)) return EP_OK;
    ncclWindow_t *answer = calloc(1, sizeof(*answer));
    if (!answer) return ep_refuse(o->call, EP_ERR_NO_MEMORY, "window", "out of memory");
    EpStatus status = ep_cuda_comm_settle(
        o->group, cuda->comm, "ncclCommWindowRegister",
        cuda->nccl->ncclCommWindowRegister(cuda->comm, w->memory, (size_t)w->bytes, answer, 0));
    if (status != EP_OK && status != EP_ERR_SYSTEM) {
        w->kind = EP_WINDOW_ABANDONED;
        return status;
    }
    w->nccl = *answer;
    w->kind = w->nccl ? EP_WINDOW_NCCL : EP_WINDOW_UNSHARED;
    free(answer);
    if (status != EP_OK || w->nccl) return status;
    return ep_refuse(o->call, EP_ERR_UNSUPPORTED, "window", "expected one from NCCL, got none");
}

static EpStatus check_reached(const Opening *o) {
    int32_t size = node_size(o), missing = 0;
    for (int32_t r = 0; r < size; r++)
        missing += o->peers[r] == NULL;
    if (!missing) return EP_OK;
    return ep_refuse(o->call, EP_ERR_UNSUPPORTED, "window",
                     "expected to reach %d ranks over NVLink, cannot reach %d of them", size,
                     missing);
}

static EpStatus find_peers(Opening *o) {
    int32_t size = node_size(o);
    if (o->group->choice.shared) return ep_cuda_ipc_map(o->group, o->call, o->window, o->peers);
    if (o->window->kind == EP_WINDOW_NCCL)
        EP_TRY(ep_cuda_check(o->group, "finding the window's pointers",
                             ep_window_pointers(o->window->nccl, size, o->peers)));
    else
        o->peers[0] = o->window->memory;
    return check_reached(o);
}

/* A probe: every rank stores a value into every rank's part, then counts the values in its own.
 * This step saves and clears the words that probes overwrite; count_probes restores them. */
static EpStatus prepare_probe(Opening *o) {
    size_t bytes = (size_t)node_size(o) * sizeof(uint32_t);
    char *own = own_part(o);
    EP_TRY(check_reached(o)); /* all ranks have said that they have a part */
    EP_TRY(ep_cuda_check(o->group, "reading the window",
                         cudaMemcpy(o->words, own, bytes, cudaMemcpyDeviceToHost)));
    /* Zero owned memory again through the window, whose mapping may differ from the memory's. */
    if (o->window->owned) bytes = (size_t)o->window->bytes;
    EP_TRY(ep_cuda_check(o->group, "cudaMemset", cudaMemset(own, 0, bytes)));
    return ep_cuda_check(o->group, "cudaDeviceSynchronize", cudaDeviceSynchronize());
}

static EpStatus send_probes(Opening *o) {
    return ep_cuda_check(
        o->group, "probing the peers",
        ep_window_probe(o->peers, o->group->nodes.rank, node_size(o), PROBE_VALUE));
}

static EpStatus count_probes(Opening *o) {
    int32_t size = node_size(o);
    int probes = 0;
    char *own = own_part(o);
    EP_TRY(ep_cuda_check(o->group, "reading probes",
                         ep_window_count_probes(own, size, PROBE_VALUE, &probes)));
    EP_TRY(ep_cuda_put(o->group, own, o->words, (size_t)size * sizeof(uint32_t)));
    if (probes == size) return EP_OK;
    return ep_refuse(o->call, EP_ERR_UNSUPPORTED, "window",
                     "expected stores of %d ranks to arrive, got %d", size, probes);
}

EpStatus ep_cuda_window_open(EpGroup *group, const EpCall *call, EpCudaWindow *window,
                             char **peers) {
    EpStatus (*const steps[])(Opening *) = {take_memory,   register_memory, find_peers,
                                            prepare_probe, send_probes,     count_probes};
    Opening opening = {.group = group, .call = call, .window = window, .peers = peers};
    for (size_t i = 0; i < sizeof(steps) / sizeof(*steps); i++) {
        EpStatus status = steps[i](&opening);
        status = steps[i] == register_memory ? ep_cuda_comm_agree(group, call, status)
                                             : ep_group_agree(group, call, status);
        if (status == EP_OK) continue;
        /* Deregistering takes all ranks: if only some may have the window, it stays. */
        ep_cuda_window_close(group, window, steps[i] != register_memory && !group->lost);
        (void)cudaGetLastError(); /* else the next launch would report this error */
        return status;
    }
    return EP_OK;
}

EpStatus ep_cuda_window_reserve(EpGroup *group, const EpCall *call, EpCudaWindow *window,
                                char **peers) {
    EP_TRY(ep_cuda_places_open(group, call, window->bytes, &window->places));
    for (int32_t r = 0; r < group->size; r++)
        peers[r] = ep_cuda_places_part(window->places, r);
    window->memory = peers[group->rank];
    window->kind = EP_WINDOW_PLACES;
    return EP_OK;
}

void ep_cuda_window_close(EpGroup *group, EpCudaWindow *window, int together) {
    const EpCuda *cuda = ep_cuda(group);
    EpCudaWindow w = *window;
    *window = (EpCudaWindow){.memory = NULL};
    if (w.kind == EP_WINDOW_PLACES) {
        ep_cuda_places_close(w.places);
        return;
    }
    if (w.kind == EP_WINDOW_ABANDONED || (w.kind != EP_WINDOW_UNSHARED && !together)) return;
    if (!together && ep_nccl_bootstrap_is_pending(&group->bootstrap)) return;
    if (w.kind == EP_WINDOW_IPC && !ep_cuda_ipc_unmap(group, &w)) return;
    if (w.kind == EP_WINDOW_NCCL)
        (void)ep_cuda_comm_settle(group, cuda->comm, "ncclCommWindowDeregister",
                                  cuda->nccl->ncclCommWindowDeregister(cuda->comm, w.nccl));
    if (!w.owned || !w.memory) return;
    if (mapping_nccl(group))
        cuda->nccl->ncclMemFree(w.memory);
    else
        (void)cudaFree(w.memory);
}

/* ---- the table of a group's windows -------------------------------------------------------- */

/* Write a window's addresses into the table that kernels read. No operation is running now. */
static EpStatus write_row(const EpGroup *group, int32_t number, char *const *peers) {
    char *const *row = ep_cuda(group)->device.peers + (size_t)number * EP_CUDA_MAX_RANKS;
    return ep_cuda_put(group, (void *)(uintptr_t)row, peers,
                       (size_t)group->nodes.sizes.ranks * sizeof(*peers));
}

EpStatus ep_cuda_open_window(EpGroup *group, const EpCall *call, EpWindow *window) {
    EpCuda *cuda = ep_cuda(group);
    char *peers[EP_CUDA_MAX_RANKS];
    EpCudaWindow w = {
        .memory = window->memory,
        .bytes = (int64_t)(window->owned ? (window->most + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES
                                         : window->bytes),
        .owned = window->owned};
    EP_TRY(ep_cuda_window_open(group, call, &w, peers));
    EpStatus status = ep_group_agree(group, call, write_row(group, window->number, peers));
    if (status != EP_OK) {
        ep_cuda_window_close(group, &w, !group->lost);
        return status;
    }
    window->memory = w.memory;
    cuda->windows[window->number] = w;
    if (cuda->num_windows <= window->number) cuda->num_windows = window->number + 1;
    EP_DEBUG("%s: window %d of %lld bytes at %p", call->name, window->number, (long long)w.bytes,
             (void *)w.memory);
    return EP_OK;
}

void ep_cuda_close_window(EpGroup *group, EpWindow *window, int together) {
    EpCuda *cuda = ep_cuda(group);
    ep_cuda_window_close(group, &cuda->windows[window->number], together);
    while (cuda->num_windows > 0 && !cuda->windows[cuda->num_windows - 1].memory)
        cuda->num_windows--;
}
