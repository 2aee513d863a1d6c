/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/common/util.h"

#if EP_WITH_CUDA

bool device_finish(Case *c) {
    return cuda_ok(cudaStreamSynchronize(c->stream), "cudaStreamSynchronize");
}

/* ---- device copies of the buffers ---------------------------------------------------------- */

/* Divides one allocation into parts. Without a base it only adds up their sizes. */
typedef struct Suballocator {
    char *base;
    size_t used;
} Suballocator;

/* Round a part up to whole chunks: the floor's copy kernels read a chunk at a time. */
static void *suballocate(Suballocator *allocator, size_t count, size_t bytes) {
    size_t chunk = (PUSH_CHUNK + 1023) / 1024 * 1024;
    void *part = allocator->base ? allocator->base + allocator->used : NULL;
    allocator->used += (count * bytes / chunk + 1) * chunk;
    return part;
}

static void lay_out(const Case *c, Suballocator *allocator, Buffers *b) {
    Part parts[NUM_PARTS];
    buffers_list(c, parts);
    for (int i = 0; i < NUM_PARTS; i++) {
        const Part *p = &parts[i];
        buffers_set(b, p, p->zero_copy ? p->zero_copy : suballocate(allocator, p->count, p->bytes));
    }
}

static bool alloc_device_buffers(Case *c) {
    Device *d = c->device;
    Suballocator allocator = {NULL, 0};
    lay_out(c, &allocator, &d->buffers);
    cudaError_t status = cudaMalloc((void **)&d->memory, allocator.used);
    if (status != cudaSuccess)
        return bench_fail("no device memory for %zu bytes of tensors: %s", allocator.used,
                          cudaGetErrorString(status));
    allocator = (Suballocator){d->memory, 0};
    lay_out(c, &allocator, &d->buffers);
    return true;
}

/* ---- copies between host and device -------------------------------------------------------- */

typedef enum Transfer { UPLOAD, FETCH, POISON } Transfer;

static cudaError_t move(Transfer what, void *host, void *device, size_t bytes,
                        cudaStream_t stream) {
    switch (what) {
    case UPLOAD:
        return cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream);
    case FETCH:
        return cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream);
    default:
        return cudaMemsetAsync(device, POISON_BYTE, bytes, stream);
    }
}

/* Of the buffers of this use. */
static bool transfer(Case *c, Transfer what, int use) {
    Part parts[NUM_PARTS];
    bool ok = true;
    buffers_list(c, parts);
    for (int i = 0; ok && i < NUM_PARTS; i++)
        if (parts[i].use & use)
            ok = cuda_ok(move(what, buffers_get(&c->buffers, &parts[i]),
                              buffers_get(&c->device->buffers, &parts[i]),
                              parts[i].count * parts[i].bytes, c->stream),
                         what == POISON ? "cudaMemsetAsync" : "cudaMemcpyAsync");
    return ok;
}

bool device_upload(Case *c) {
    return transfer(c, UPLOAD, PART_INPUT) && device_finish(c);
}

bool device_poison(Case *c, PhaseId phase) {
    return transfer(c, POISON, BY(phase));
}

bool device_fetch(Case *c, PhaseId phase) {
    return transfer(c, FETCH, BY(phase)) && device_finish(c);
}

/* ---- creating and destroying --------------------------------------------------------------- */

static bool create_stream(Case *c) {
    cudaStream_t stream;
    if (!cuda_ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                 "cudaStreamCreateWithFlags"))
        return false;
    c->stream = stream;
    return true;
}

uint32_t *device_words(const Case *c, int rank) {
    return c->device->flags ? c->device->flags->at[rank] : NULL;
}

/* Without flags the run continues, but does not measure the floor. */
bool device_open(Case *c) {
    c->device = bench_alloc(1, sizeof(Device), "device");
    if (!world_all(c->world, c->device && create_stream(c))) return false;
    Device *d = c->device;
    d->flags = peers_open(c->world, NUM_WORDS * sizeof(uint32_t));
    if (!d->flags) snprintf(d->reason, sizeof(d->reason), "%s", bench_error_message());
    return !c->world->broken;
}

static bool fill(Case *c) {
    if (!alloc_device_buffers(c)) return false;
    buffers_describe(c, &c->device->buffers);
    return device_upload(c);
}

bool device_create(Case *c) {
    return device_open(c) && world_all(c->world, fill(c));
}

/* Graphs hold no references to the library's memory, so the group may be destroyed before. */
void device_destroy(Case *c) {
    graphs_close(c->device->graphs);
    peers_close(c->device->flags);
    if (c->stream) cudaStreamDestroy(c->stream);
    cudaFree(c->device->memory);
    free(c->device);
    c->device = NULL;
    c->stream = NULL;
}

#endif
