/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/arena.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/harness/ranked.h"

/* An arena of blocks: pinning is slow, and may wait for kernels that wait for this very thread, so
 * it is done once, before there are any. Blocks are of 2^n bytes, or 5, 6 or 7 quarters of that. */
#define ARENA_BYTES ((size_t)160 << 20)
#define HEADER 128 /* of a block: keeps 128-byte alignment */
#define KINDS 128

#define MOST_SHARERS 4 /* of a GPU: of many more, a test takes minutes */

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
    const char *setting = getenv("EP_SHARE_GPUS");
    int count = gpu_count();
    return setting && strcmp(setting, "yes") == 0 && ranks > count && ranks <= MOST_SHARERS * count;
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

/* Tests of few ranks that run side by side begin at different GPUs; MPI ranks must agree. */
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
static char *arena;
static size_t arena_bytes = ARENA_BYTES, used;
static Block *empty[KINDS];

void gpu_reserve(size_t bytes) {
    if (!arena && bytes > arena_bytes) arena_bytes = bytes;
}

static void open_arena(void) {
    if (!taken) gpu_take(0);
    cudaError_t error = cudaHostAlloc((void **)&arena, arena_bytes, cudaHostAllocPortable);
    if (error != cudaSuccess) {
        fprintf(stderr, "cudaHostAlloc: %s\n", cudaGetErrorString(error));
        exit(1);
    }
}

int gpu_owns(const void *memory) {
    return arena && (const char *)memory >= arena && (const char *)memory < arena + arena_bytes;
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
    if (used + bytes > arena_bytes) {
        fprintf(stderr, "a test needs more than %zu bytes: see GPU_ROOM\n", arena_bytes);
        return NULL;
    }
    block = (Block *)(arena + used);
    used += bytes;
    return block;
}

/* All blocks lie on 128 bytes: enough for every alignment that is asked for. */
void *gpu_allocate(size_t alignment, size_t bytes) {
    (void)alignment;
    int kind = 0;
    while (block_bytes(kind) < bytes)
        kind++;
    pthread_mutex_lock(&mutex);
    if (!arena) open_arena();
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
