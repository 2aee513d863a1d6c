/* SPDX-License-Identifier: Apache-2.0 */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>

#include "tests/gpu/on_gpu.h"

#undef malloc
#undef calloc
#undef aligned_alloc
#undef free
#undef ep_group_create
#undef ep_prepare
#undef ep_dispatch
#undef ep_combine
#undef ep_dispatch_backward
#undef ep_combine_backward

/* An arena of blocks of 2^n bytes: pinning is far too slow to do for each buffer. */
#define ARENA_BYTES ((size_t)1 << 30)
#define HEADER 128
#define CLASSES 40

typedef struct Block {
    struct Block *next;
    int class;
} Block;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char *arena;
static size_t used;
static Block *empty[CLASSES];

static void open_arena(void) {
    cudaError_t error = cudaHostAlloc((void **)&arena, ARENA_BYTES, cudaHostAllocPortable);
    if (error != cudaSuccess) {
        fprintf(stderr, "cudaHostAlloc: %s\n", cudaGetErrorString(error));
        exit(1);
    }
}

static Block *take(int class) {
    Block *block = empty[class];
    if (block) {
        empty[class] = block->next;
        return block;
    }
    size_t bytes = ((size_t)1 << class) + HEADER;
    if (used + bytes > ARENA_BYTES) return NULL;
    block = (Block *)(arena + used);
    used += bytes;
    return block;
}

/* All blocks lie on 128 bytes: enough for every alignment that is asked for. */
void *gpu_allocate(size_t alignment, size_t bytes) {
    (void)alignment;
    int class = 7;
    while (((size_t)1 << class) < bytes)
        class ++;
    pthread_mutex_lock(&mutex);
    if (!arena) open_arena();
    Block *block = take(class);
    pthread_mutex_unlock(&mutex);
    if (!block) return NULL;
    block->class = class;
    return (char *)block + HEADER;
}

void *gpu_allocate_zeroed(size_t count, size_t bytes) {
    void *memory = gpu_allocate(64, count * bytes);
    return memory ? memset(memory, 0, count * bytes) : NULL;
}

void gpu_release(void *memory) {
    char *address = memory;
    if (!arena || address < arena || address >= arena + ARENA_BYTES) {
        free(memory);
        return;
    }
    Block *block = (Block *)(address - HEADER);
    pthread_mutex_lock(&mutex);
    block->next = empty[block->class];
    empty[block->class] = block;
    pthread_mutex_unlock(&mutex);
}

int gpu_count(void) {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

EpStatus gpu_group_create(const EpBootstrap *bootstrap, const EpGroupConfig *config,
                          EpGroup **out) {
    int count = gpu_count();
    if (bootstrap && bootstrap->struct_size == sizeof(*bootstrap) && count > 0)
        cudaSetDevice(bootstrap->rank % count);
    if (!config || config->struct_size != sizeof(*config) || config->backend != EP_BACKEND_HOST)
        return ep_group_create(bootstrap, config, out);
    EpGroupConfig moved = *config;
    moved.backend = EP_BACKEND_CUDA;
    return ep_group_create(bootstrap, &moved, out);
}

/* ---- operations ---------------------------------------------------------------------------- */

/* The tensors of one call, as they are passed. */
typedef struct Moved {
    EpTensor tensor[8];
    void *home[8]; /* where an output belongs; NULL for inputs, which may be constants */
    int count;
} Moved;

static int in_arena(const void *memory) {
    return arena && (const char *)memory >= arena && (const char *)memory < arena + ARENA_BYTES;
}

static size_t tensor_bytes(const EpTensor *t) {
    size_t bytes = ep_type_bytes(t->type);
    if (t->struct_size != sizeof(*t) || t->ndim < 1 || t->ndim > EP_MAX_DIMS) return 0;
    for (int i = 0; i < t->ndim; i++)
        bytes *= t->shape[i] > 0 ? (size_t)t->shape[i] : 0;
    return bytes;
}

/* What is wrong on purpose is passed as it is. */
static const EpTensor *move(Moved *m, const EpTensor *t, int is_output) {
    size_t bytes = t ? tensor_bytes(t) : 0;
    if (!bytes || !t->data || in_arena(t->data) || (uintptr_t)t->data % 4) return t;
    void *data = gpu_allocate(64, bytes);
    if (!data) return t;
    EpTensor *moved = &m->tensor[m->count];
    *moved = *t;
    moved->data = memcpy(data, t->data, bytes);
    m->home[m->count++] = is_output ? t->data : NULL;
    return moved;
}

static EpStatus settle(Moved *m, EpStatus status) {
    cudaError_t error = status == EP_OK ? cudaDeviceSynchronize() : cudaSuccess;
    for (int i = 0; i < m->count; i++) {
        if (m->home[i]) memcpy(m->home[i], m->tensor[i].data, tensor_bytes(&m->tensor[i]));
        gpu_release(m->tensor[i].data);
    }
    if (error == cudaSuccess) return status;
    return ep_set_last_error(EP_ERR_SYSTEM, cudaGetErrorString(error));
}

EpStatus gpu_prepare(EpHandle *handle, const EpTensor *topk_idx, const EpTensor *num_tokens,
                     EpStream stream, const EpPlanTensors *out) {
    Moved m = {.count = 0};
    EpPlanTensors moved;
    if (out && out->struct_size == sizeof(*out)) {
        moved = *out;
        moved.expert_counts = move(&m, out->expert_counts, 1);
        moved.expert_padded = move(&m, out->expert_padded, 1);
        moved.expert_offsets = move(&m, out->expert_offsets, 1);
        moved.totals = move(&m, out->totals, 1);
        out = &moved;
    }
    topk_idx = move(&m, topk_idx, 0), num_tokens = move(&m, num_tokens, 0);
    return settle(&m, ep_prepare(handle, topk_idx, num_tokens, stream, out));
}

EpStatus gpu_dispatch(EpHandle *handle, const EpTensor *tokens, const EpTensor *topk_weights,
                      const EpTensor *scales, EpStream stream, const EpTensor *recv_tokens,
                      const EpTensor *recv_topk_weights, const EpTensor *recv_scales,
                      const EpTensor *recv_topk_idx) {
    Moved m = {.count = 0};
    tokens = move(&m, tokens, 0), topk_weights = move(&m, topk_weights, 0),
    scales = move(&m, scales, 0);
    recv_tokens = move(&m, recv_tokens, 1), recv_topk_weights = move(&m, recv_topk_weights, 1);
    recv_scales = move(&m, recv_scales, 1), recv_topk_idx = move(&m, recv_topk_idx, 1);
    return settle(&m, ep_dispatch(handle, tokens, topk_weights, scales, stream, recv_tokens,
                                  recv_topk_weights, recv_scales, recv_topk_idx));
}

EpStatus gpu_combine(EpHandle *handle, const EpTensor *expert_out, const EpTensor *slot_weights,
                     EpStream stream, const EpTensor *out) {
    Moved m = {.count = 0};
    expert_out = move(&m, expert_out, 0), slot_weights = move(&m, slot_weights, 0),
    out = move(&m, out, 1);
    return settle(&m, ep_combine(handle, expert_out, slot_weights, stream, out));
}

EpStatus gpu_dispatch_backward(EpHandle *handle, const EpTensor *grad_recv_tokens,
                               const EpTensor *grad_slot_weights, EpStream stream,
                               const EpTensor *grad_tokens, const EpTensor *grad_topk_weights) {
    Moved m = {.count = 0};
    grad_recv_tokens = move(&m, grad_recv_tokens, 0);
    grad_slot_weights = move(&m, grad_slot_weights, 0);
    grad_tokens = move(&m, grad_tokens, 1), grad_topk_weights = move(&m, grad_topk_weights, 1);
    return settle(&m, ep_dispatch_backward(handle, grad_recv_tokens, grad_slot_weights, stream,
                                           grad_tokens, grad_topk_weights));
}

EpStatus gpu_combine_backward(EpHandle *handle, const EpTensor *grad_out,
                              const EpTensor *slot_weights, const EpTensor *expert_out,
                              EpStream stream, const EpTensor *grad_expert_out,
                              const EpTensor *grad_slot_weights) {
    Moved m = {.count = 0};
    grad_out = move(&m, grad_out, 0), slot_weights = move(&m, slot_weights, 0);
    expert_out = move(&m, expert_out, 0), grad_expert_out = move(&m, grad_expert_out, 1);
    grad_slot_weights = move(&m, grad_slot_weights, 1);
    return settle(&m, ep_combine_backward(handle, grad_out, slot_weights, expert_out, stream,
                                          grad_expert_out, grad_slot_weights));
}
