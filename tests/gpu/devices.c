/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/devices.h"

#include <cuda_runtime_api.h>
#include <pthread.h>

#include "tests/harness/ranked.h"

/* Pinning is slow and may wait for kernels that wait for this thread. So one buffer is pinned once,
 * before any kernel runs, and divided into blocks of 2^n bytes or 5, 6 or 7 quarters of that. */
#define BUFFER_BYTES ((size_t)160 << 20)
#define HEADER 128 /* bytes before a block; keeps 128-byte alignment */
#define KINDS 128

#define MAX_RANKS_PER_GPU 4 /* with many more, a test takes minutes */

/* ---- GPUs ---------------------------------------------------------------------------------- */

static cudaError_t count_gpus(int *count) {
    *count = 0;
    cudaError_t error = cudaGetDeviceCount(count);
    (void)cudaGetLastError();
    return error;
}

int gpu_count(void) {
    int count;
    return count_gpus(&count) == cudaSuccess ? count : 0;
}

int gpu_least(int wanted) {
    int count = gpu_count();
    return wanted < count ? wanted : count;
}

int gpu_shares(int ranks) {
    const char *setting = getenv("LIBEP_SHARE_GPUS");
    int count = gpu_count();
    return setting && strcmp(setting, "yes") == 0 && ranks > count &&
           ranks <= MAX_RANKS_PER_GPU * count;
}

int gpu_serve(int ranks) {
    return ranks <= gpu_count() || gpu_shares(ranks);
}

int gpu_missing(void) {
    int count;
    cudaError_t error = count_gpus(&count);
    if (error == cudaSuccess && count > 0) return 0;
    printf("SKIP: all tests: there is no GPU here: %s\n",
           error == cudaSuccess ? "none is visible" : cudaGetErrorString(error));
    return 1;
}

static _Thread_local int taken;

/* Test processes that run side by side begin at different GPUs. MPI ranks are processes too and
 * must agree, so they begin at GPU 0. */
void gpu_take(int rank) {
    int count = gpu_count(), first = ranked_is() ? 0 : (int)getpid();
    if (count > 0) (void)cudaSetDevice((first + rank) % count);
    taken = 1;
}

/* ---- memory -------------------------------------------------------------------------------- */

typedef struct Block {
    struct Block *next;
    int kind;
} Block;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char *buffer;
static size_t buffer_bytes = BUFFER_BYTES, used;
static Block *empty[KINDS];

void gpu_reserve(size_t bytes) {
    if (!buffer && bytes > buffer_bytes) buffer_bytes = bytes;
}

static void open_buffer(void) {
    if (!taken) gpu_take(0);
    cudaError_t error = cudaHostAlloc((void **)&buffer, buffer_bytes, cudaHostAllocPortable);
    if (error != cudaSuccess) {
        fprintf(stderr, "cudaHostAlloc: %s\n", cudaGetErrorString(error));
        exit(1);
    }
}

int gpu_owns(const void *memory) {
    return buffer && (const char *)memory >= buffer && (const char *)memory < buffer + buffer_bytes;
}

static size_t block_bytes(int kind) {
    return ((size_t)4 + (size_t)kind % 4) << (kind / 4 + 7);
}

static Block *take(int kind) {
    Block *block = empty[kind];
    if (block) {
        empty[kind] = block->next;
        return block;
    }
    size_t bytes = block_bytes(kind) + HEADER;
    if (used + bytes > buffer_bytes) {
        fprintf(stderr, "a test needs more than %zu bytes: see GPU_ROOM\n", buffer_bytes);
        return NULL;
    }
    block = (Block *)(buffer + used);
    used += bytes;
    return block;
}

/* Every block has 128-byte alignment, which is enough for all callers. */
void *gpu_allocate(size_t alignment, size_t bytes) {
    (void)alignment;
    int kind = 0;
    while (block_bytes(kind) < bytes)
        kind++;
    pthread_mutex_lock(&mutex);
    if (!buffer) open_buffer();
    Block *block = take(kind);
    pthread_mutex_unlock(&mutex);
    if (!block) return NULL;
    block->kind = kind;
    return (char *)block + HEADER;
}

void *gpu_allocate_zeroed(size_t count, size_t bytes) {
    void *memory = gpu_allocate(64, count * bytes);
    return memory ? memset(memory, 0, count * bytes) : NULL;
}

void gpu_release(void *memory) {
    if (!gpu_owns(memory)) {
        free(memory);
        return;
    }
    Block *block = (Block *)((char *)memory - HEADER);
    pthread_mutex_lock(&mutex);
    block->next = empty[block->kind];
    empty[block->kind] = block;
    pthread_mutex_unlock(&mutex);
}
