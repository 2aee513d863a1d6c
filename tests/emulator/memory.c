/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of the emulated GPUs and pinned memory: pages of this process, in a table with their
 * device. Each allocation ends close before an inaccessible page; a free checks that the bytes
 * between the two are unchanged.
 */
#include <cuda.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/emulator/device.h"
#include "tests/emulator/launch.h"

#define MAX_ALLOCATIONS 4096
#define PAGE ((size_t)4096)
#define ALIGNMENT ((size_t)256)
#define TOTAL_BYTES ((size_t)24 << 30) /* of all GPUs and pinned memory */
#define SLACK 0x5c
#define GARBAGE 0x5b                     /* as an integer neither -1 nor a valid index */
#define GARBAGE_BYTES ((size_t)16 << 20) /* larger allocations (pinned buffers) stay zero */

typedef struct Allocation {
    char *memory, *pages;
    size_t bytes, page_bytes;
    int device; /* -1: pinned */
} Allocation;

static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static Allocation table[MAX_ALLOCATIONS]; /* sorted by address */
static int count;
static size_t used;

/* ---- the table, under the lock ---- */

/* Returns the index of the last allocation at or before `memory`, or -1. */
static int find(const void *memory) {
    int low = 0, high = count;
    while (low < high) {
        int middle = (low + high) / 2;
        if ((const char *)memory < table[middle].memory)
            high = middle;
        else
            low = middle + 1;
    }
    return low - 1;
}

static const Allocation *find_holder(const void *memory) {
    int i = find(memory);
    return i >= 0 && (const char *)memory < table[i].memory + table[i].bytes ? &table[i] : NULL;
}

static int insert(const Allocation *a) {
    int i = find(a->memory) + 1;
    if (count == MAX_ALLOCATIONS) return 0;
    memmove(&table[i + 1], &table[i], (size_t)(count - i) * sizeof(*table));
    table[i] = *a;
    count++, used += a->page_bytes;
    return 1;
}

static int take_out(const void *memory, Allocation *out) {
    int i = find(memory);
    if (i < 0 || table[i].memory != memory) return 0;
    *out = table[i];
    count--, used -= out->page_bytes;
    memmove(&table[i], &table[i + 1], (size_t)(count - i) * sizeof(*table));
    return 1;
}

/* ---- allocation ---- */

static size_t slack_of(const Allocation *a) {
    return (size_t)(a->pages + a->page_bytes - PAGE - (a->memory + a->bytes));
}

static int map(Allocation *a, size_t bytes, int device) {
    size_t room = (bytes + ALIGNMENT - 1) & ~(ALIGNMENT - 1);
    size_t pages = (room + PAGE - 1) & ~(PAGE - 1);
    if (bytes > TOTAL_BYTES || used + pages > TOTAL_BYTES) return 0;
    *a = (Allocation){.bytes = bytes, .page_bytes = pages + PAGE, .device = device};
    a->pages = mmap(NULL, a->page_bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (a->pages == MAP_FAILED) return 0;
    if (mprotect(a->pages + pages, PAGE, PROT_NONE)) emulated_die("mprotect");
    a->memory = a->pages + (pages - room);
    if (bytes < GARBAGE_BYTES) memset(a->memory, GARBAGE, bytes);
    memset(a->memory + bytes, SLACK, slack_of(a));
    return 1;
}

static cudaError_t allocate(void **out, size_t bytes, int device) {
    Allocation a;
    *out = NULL;
    pthread_rwlock_wrlock(&lock);
    int done = map(&a, bytes ? bytes : 1, device) && insert(&a);
    pthread_rwlock_unlock(&lock);
    if (!done) return emulated_error(cudaErrorMemoryAllocation);
    *out = a.memory;
    return cudaSuccess;
}

static cudaError_t release(void *memory) {
    Allocation a;
    if (!memory) return cudaSuccess;
    pthread_rwlock_wrlock(&lock);
    int found = take_out(memory, &a);
    pthread_rwlock_unlock(&lock);
    if (!found) return emulated_error(cudaErrorInvalidValue);
    for (size_t i = 0; i < slack_of(&a); i++)
        if ((unsigned char)a.memory[a.bytes + i] != SLACK)
            emulated_die("byte %zu behind %zu bytes at %p was written", i, a.bytes, memory);
    munmap(a.pages, a.page_bytes);
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **out, size_t bytes) {
    return allocate(out, bytes, emulated_device());
}

/* Synchronise first: outstanding tasks may still use the memory. */
cudaError_t cudaFree(void *memory) {
    if (memory) emulated_drain();
    return release(memory);
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
    (void)flags;
    return allocate(out, bytes, -1);
}

cudaError_t cudaFreeHost(void *memory) {
    return cudaFree(memory);
}

cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream) {
    (void)stream;
    return cudaMalloc(out, bytes);
}

cudaError_t cudaFreeAsync(void *memory, cudaStream_t stream) {
    cudaError_t error = cudaStreamSynchronize(stream);
    return error == cudaSuccess ? cudaFree(memory) : error;
}

/* ---- queries ---- */

cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
    *left = TOTAL_BYTES - used, *total = TOTAL_BYTES;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *memory) {
    pthread_rwlock_rdlock(&lock);
    const Allocation *a = find_holder(memory);
    int pinned = a && a->device < 0, found = a != NULL;
    *out = (struct cudaPointerAttributes){.type = !found   ? cudaMemoryTypeUnregistered
                                                  : pinned ? cudaMemoryTypeHost
                                                           : cudaMemoryTypeDevice,
                                          .device = found && !pinned ? a->device : -2};
    pthread_rwlock_unlock(&lock);
    if (found) out->devicePointer = (void *)(uintptr_t)memory;
    return cudaSuccess;
}

int emulated_allocation(const void *memory, void **begin, size_t *bytes) {
    pthread_rwlock_rdlock(&lock);
    const Allocation *a = find_holder(memory);
    int found = a && a->device >= 0;
    if (found) *begin = a->memory, *bytes = a->bytes;
    pthread_rwlock_unlock(&lock);
    return found;
}

int emulated_reaches(const void *memory, size_t bytes) {
    pthread_rwlock_rdlock(&lock);
    const Allocation *a = find_holder(memory);
    int reaches = a && (const char *)memory + bytes <= a->memory + a->bytes;
    pthread_rwlock_unlock(&lock);
    return reaches;
}

/* ---- other processes, which are threads ---- */

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *out, void *memory) {
    void *begin = NULL;
    size_t bytes;
    if (!emulated_allocation(memory, &begin, &bytes) || begin != memory)
        return cudaErrorInvalidValue;
    memset(out, 0, sizeof(*out));
    memcpy(out, &memory, sizeof(memory));
    return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void **out, cudaIpcMemHandle_t handle, unsigned flags) {
    (void)flags;
    memcpy(out, &handle, sizeof(*out));
    return emulated_reaches(*out, 1) ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaIpcCloseMemHandle(void *memory) {
    return emulated_reaches(memory, 1) ? cudaSuccess : cudaErrorInvalidValue;
}

/* ---- memory that is mapped into reserved addresses: files without names ---- */

#define UNIT ((size_t)2 << 20)

CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *form,
                                       CUmemAllocationGranularity_flags option) {
    (void)form, (void)option;
    *out = UNIT;
    return CUDA_SUCCESS;
}

static int reserve(void *wish, size_t bytes, void **out) {
    *out = mmap(wish, bytes, PROT_NONE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (wish ? MAP_FIXED : 0), -1, 0);
    return *out != MAP_FAILED;
}

CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr wish,
                             unsigned long long flags) {
    void *memory;
    (void)alignment, (void)wish, (void)flags;
    if (bytes % UNIT) return CUDA_ERROR_INVALID_VALUE;
    if (!reserve(NULL, bytes, &memory)) return CUDA_ERROR_OUT_OF_MEMORY;
    *out = (CUdeviceptr)(uintptr_t)memory;
    return CUDA_SUCCESS;
}

/* What is still mapped there is a mistake. */
CUresult cuMemAddressFree(CUdeviceptr range, size_t bytes) {
    for (size_t at = 0; at < bytes; at += UNIT)
        if (emulated_reaches((void *)(uintptr_t)(range + at), 1)) return CUDA_ERROR_INVALID_VALUE;
    return munmap((void *)(uintptr_t)range, bytes) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* A handle is 1 + a descriptor. That of cudaMalloc's memory is its address: see libraries.c. */
#define MOST_FILES 0x100000u
CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes,
                     const CUmemAllocationProp *form, unsigned long long flags) {
    char garbage[4096];
    (void)form, (void)flags;
    int file = memfd_create("emulated GPU", MFD_CLOEXEC);
    memset(garbage, GARBAGE, sizeof(garbage));
    if (file < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t at = 0; at < bytes; at += sizeof(garbage))
        if (write(file, garbage, sizeof(garbage)) < 0) emulated_die("write");
    *out = 1 + (CUmemGenericAllocationHandle)file;
    return CUDA_SUCCESS;
}

static int file_of(CUmemGenericAllocationHandle memory) {
    return (int)memory - 1;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle memory) {
    if (memory > MOST_FILES) return CUDA_SUCCESS;
    return close(file_of(memory)) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle memory,
                  unsigned long long flags) {
    Allocation a = {.memory = (char *)(uintptr_t)at, .bytes = bytes, .page_bytes = bytes};
    (void)flags;
    a.device = emulated_device(), a.pages = a.memory;
    struct stat file;
    int fits = fstat(file_of(memory), &file) == 0 && (off_t)(offset + bytes) <= file.st_size;
    if (!fits || emulated_reaches(a.memory, 1)) return CUDA_ERROR_INVALID_VALUE;
    if (mmap(a.memory, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file_of(memory), (off_t)offset) ==
        MAP_FAILED)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_wrlock(&lock);
    int done = insert(&a);
    pthread_rwlock_unlock(&lock);
    return done ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Outstanding tasks may still use the memory, which would be a mistake of the library's. */
CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
    Allocation a;
    void *memory = (void *)(uintptr_t)at;
    pthread_rwlock_wrlock(&lock);
    int found = take_out(memory, &a);
    pthread_rwlock_unlock(&lock);
    if (!found || a.bytes != bytes || !reserve(memory, bytes, &memory))
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access,
                        size_t number) {
    (void)access, (void)number;
    if (!emulated_reaches((void *)(uintptr_t)at, bytes)) return CUDA_ERROR_INVALID_VALUE;
    int failed = mprotect((void *)(uintptr_t)at, bytes, PROT_READ | PROT_WRITE);
    return failed ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle memory,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
    (void)type, (void)flags;
    int file = dup(file_of(memory));
    memcpy(out, &file, sizeof(file));
    return file < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *handle,
                                        CUmemAllocationHandleType type) {
    (void)type;
    int file = dup((int)(uintptr_t)handle);
    *out = 1 + (CUmemGenericAllocationHandle)file;
    return file < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
