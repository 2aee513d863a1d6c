/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Windows: device memory that all ranks of a group map, registered with NCCL (but see
 * cuda_share.h). The library's own is made here, and those of ep_mem_alloc and ep_window_register.
 */
#include <stdlib.h>
#include <string.h>

#include "bootstrap/cuda_comm.h"
#include "bootstrap/cuda_share.h"
#include "bootstrap/meet.h"
#include "runtime/cuda_host.h"
#include "runtime/log.h"
#include "runtime/window.h"

#define GREETING 0x65702100u
#define PAGE_BYTES 4096

/* ---- one window ---------------------------------------------------------------------------- */

/* A window that is being opened. */
typedef struct Opening {
    EpGroup *group;
    const EpCall *call;
    EpCudaWindow *window;
    char **peers;
    uint32_t words[EP_CUDA_MAX_RANKS]; /* what was where the greetings go */
} Opening;

static EpStatus allocate(const Opening *o) {
    EpCudaWindow *w = o->window;
    const EpNccl *nccl = ep_cuda(o->group)->nccl;
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

/* Collective within NCCL. Where it has not answered, it may still write the window later: to where
 * nothing else will be. A window that cannot be used may come with success. */
static EpStatus register_memory(Opening *o) {
    EpCudaWindow *w = o->window;
    const EpCuda *cuda = ep_cuda(o->group);
    if (!cuda->nccl) return EP_OK;
    ncclWindow_t *answer = calloc(1, sizeof(*answer));
    if (!answer) return ep_refuse(o->call, EP_ERR_NO_MEMORY, "window", "out of memory");
    EpStatus status = ep_cuda_comm_settle(
        o->group, "ncclCommWindowRegister",
        cuda->nccl->ncclCommWindowRegister(cuda->comm, w->memory, (size_t)w->bytes, answer, 0));
    w->unanswered = status == EP_ERR_TIMEOUT;
    if (w->unanswered) return status;
    w->nccl = *answer;
    free(answer);
    if (status != EP_OK || w->nccl) return status;
    return ep_refuse(o->call, EP_ERR_UNSUPPORTED, "window", "expected one from NCCL, got none");
}

static EpStatus find_peers(Opening *o) {
    int32_t size = o->group->size, missing = 0;
    if (o->group->choice.shared) return ep_cuda_share(o->group, o->call, o->window, o->peers);
    if (o->window->nccl)
        EP_TRY(ep_cuda_check(o->group, "finding the window's pointers",
                             ep_window_pointers(o->window->nccl, size, o->peers)));
    else
        o->peers[0] = o->window->memory;
    for (int32_t r = 0; r < size; r++)
        missing += o->peers[r] == NULL;
    if (!missing) return EP_OK;
    return ep_refuse(o->call, EP_ERR_UNSUPPORTED, "window",
                     "expected to reach %d ranks over NVLink, cannot reach %d of them", size,
                     missing);
}

/* Every rank greets every other, and counts. What the memory held is put back afterwards. */
static EpStatus make_room(Opening *o) {
    size_t bytes = (size_t)o->group->size * sizeof(uint32_t);
    char *own = o->peers[o->group->rank];
    EP_TRY(ep_cuda_check(o->group, "reading the window",
                         cudaMemcpy(o->words, own, bytes, cudaMemcpyDeviceToHost)));
    /* The own mapping of the window need not be that of its memory. */
    if (o->window->owned) bytes = (size_t)o->window->bytes;
    EP_TRY(ep_cuda_check(o->group, "cudaMemset", cudaMemset(own, 0, bytes)));
    return ep_cuda_check(o->group, "cudaDeviceSynchronize", cudaDeviceSynchronize());
}

static EpStatus greet(Opening *o) {
    return ep_cuda_check(o->group, "greeting the peers",
                         ep_window_greet(o->peers, o->group->rank, o->group->size, GREETING));
}

static EpStatus count_greetings(Opening *o) {
    int32_t size = o->group->size;
    int greetings = 0;
    char *own = o->peers[o->group->rank];
    EP_TRY(ep_cuda_check(o->group, "reading greetings",
                         ep_window_count_greetings(own, size, GREETING, &greetings)));
    EP_TRY(ep_cuda_put(o->group, own, o->words, (size_t)size * sizeof(uint32_t)));
    if (greetings == size) return EP_OK;
    return ep_refuse(o->call, EP_ERR_UNSUPPORTED, "window",
                     "expected greetings of %d ranks, got %d", size, greetings);
}

EpStatus ep_cuda_window_open(EpGroup *group, const EpCall *call, EpCudaWindow *window,
                             char **peers) {
    EpStatus (*const steps[])(Opening *) = {take_memory, register_memory, find_peers,
                                            make_room,   greet,           count_greetings};
    Opening opening = {.group = group, .call = call, .window = window, .peers = peers};
    for (size_t i = 0; i < sizeof(steps) / sizeof(*steps); i++) {
        EpStatus status = steps[i](&opening);
        status = steps[i] == register_memory ? ep_cuda_comm_agree(group, call, status)
                                             : ep_group_agree(group, call, status);
        if (status == EP_OK) continue;
        /* A window that only some ranks have cannot be given back: that takes all of them. */
        ep_cuda_window_close(group, window, steps[i] != register_memory && !group->lost);
        (void)cudaGetLastError(); /* or the next launch would report it as its own */
        return status;
    }
    return EP_OK;
}

void ep_cuda_window_close(EpGroup *group, EpCudaWindow *window, int together) {
    const EpCuda *cuda = ep_cuda(group);
    EpCudaWindow w = *window;
    *window = (EpCudaWindow){.memory = NULL};
    if ((w.nccl || w.shared || w.unanswered) && !together) return;
    if (w.shared && !ep_cuda_unshare(group, &w)) return;
    if (w.nccl)
        (void)ep_cuda_comm_settle(group, "ncclCommWindowDeregister",
                                  cuda->nccl->ncclCommWindowDeregister(cuda->comm, w.nccl));
    if (!w.owned || !w.memory) return;
    if (cuda->nccl)
        cuda->nccl->ncclMemFree(w.memory);
    else
        (void)cudaFree(w.memory);
}

/* ---- the table of a group's windows -------------------------------------------------------- */

EpStatus ep_cuda_finish(EpGroup *group) {
    return ep_cuda_check(group, "cudaDeviceSynchronize", cudaDeviceSynchronize());
}

/* For kernels: no operation is running now. */
static EpStatus write_row(const EpGroup *group, int32_t number, char *const *peers) {
    char *const *row = ep_cuda(group)->device.peers + (size_t)number * EP_CUDA_MAX_RANKS;
    return ep_cuda_put(group, (void *)(uintptr_t)row, peers, (size_t)group->size * sizeof(*peers));
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

int ep_cuda_window_find(const EpCuda *cuda, const void *data, int64_t bytes, int64_t *offset) {
    for (int i = 0; i < cuda->num_windows; i++) {
        const EpCudaWindow *w = &cuda->windows[i];
        uint64_t at = (uint64_t)(uintptr_t)data - (uint64_t)(uintptr_t)w->memory;
        if (at >= (uint64_t)w->bytes || (uint64_t)bytes > (uint64_t)w->bytes - at) continue;
        *offset = (int64_t)at;
        return i;
    }
    return -1;
}
