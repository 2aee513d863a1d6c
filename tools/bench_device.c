/* SPDX-License-Identifier: Apache-2.0 */
#if EP_WITH_CUDA

#include "bench_device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench_cuda.h"
#include "bench_error.h"
#include "bench_kernels.h"

bool cuda_ok(cudaError_t status, const char *call) {
    return status == cudaSuccess || bench_fail("%s: %s", call, cudaGetErrorString(status));
}

bool device_finish(Case *c) {
    return cuda_ok(cudaStreamSynchronize(c->stream), "cudaStreamSynchronize");
}

/* ---- which GPU ----------------------------------------------------------------------------- */

bool device_built(void) {
    return true;
}

enum { HOST_BYTES = 256 };

/* Ranks before this one on the same machine. */
static bool node_rank(World *world, int *out) {
    char name[HOST_BYTES] = "", *all = bench_alloc((size_t)world->size, HOST_BYTES, "host names");
    gethostname(name, sizeof(name) - 1);
    bool ok = world_all(world, all != NULL) && world_allgather(world, name, all, HOST_BYTES);
    *out = 0;
    for (int r = 0; ok && r < world->rank; r++)
        *out += strcmp(all + (size_t)r * HOST_BYTES, name) == 0;
    free(all);
    return ok;
}

/* A machine without GPUs is the library's to speak of: it knows whether that matters. */
bool device_select(World *world, const Options *options) {
    int place, count = 0;
    if (options->backend == EP_BACKEND_HOST) return true;
    if (!node_rank(world, &place)) return false;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        cudaGetLastError();
        return true;
    }
    return world_all(world, cuda_ok(cudaSetDevice(place % count), "cudaSetDevice"));
}

void device_name(char *out, size_t bytes) {
    struct cudaDeviceProp properties;
    int device, count = 0;
    out[0] = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0 &&
        cudaGetDevice(&device) == cudaSuccess &&
        cudaGetDeviceProperties(&properties, device) == cudaSuccess)
        snprintf(out, bytes, "%s, %d multiprocessors", properties.name,
                 properties.multiProcessorCount);
    cudaGetLastError();
}

/* ---- a shadow of every buffer -------------------------------------------------------------- */

/* Parts of one piece of memory; without a base it only adds them up. */
typedef struct Arena {
    char *base;
    size_t used;
} Arena;

/* Every part has room for a chunk, which is what the wire floor reads at a time. */
static void *carve(Arena *arena, size_t count, size_t bytes) {
    size_t chunk = (PUSH_CHUNK + 1023) / 1024 * 1024;
    void *part = arena->base ? arena->base + arena->used : NULL;
    arena->used += (count * bytes / chunk + 1) * chunk;
    return part;
}

static void lay_out(const Case *c, Arena *arena, Buffers *b) {
    size_t tokens = (size_t)c->tokens, entries = tokens * (size_t)c->options->top_k;
    size_t rows = (size_t)c->slots.num_rows, wide = rows * (size_t)c->weights_width;
    size_t scale_bytes = (size_t)c->options->scale_bytes;
    b->index = carve(arena, entries, sizeof(int64_t));
    b->topk_weights = carve(arena, entries, sizeof(float));
    b->topk_grads = carve(arena, entries, sizeof(float));
    b->tokens_in = carve(arena, tokens, c->row_bytes);
    b->tokens_out = carve(arena, tokens, c->row_bytes);
    b->scales = carve(arena, tokens, scale_bytes);
    b->slots_in = c->reachable_in ? c->reachable_in : carve(arena, rows, c->row_bytes);
    b->slots_out = c->reachable_out ? c->reachable_out : carve(arena, rows, c->row_bytes);
    b->recv_weights = carve(arena, wide, sizeof(float));
    b->recv_scales = carve(arena, rows, c->recv_scale_bytes);
    b->recv_index = carve(arena, wide, sizeof(int32_t));
    b->slot_weights = carve(arena, rows, sizeof(float));
    b->slot_grads_in = carve(arena, wide, sizeof(float));
    b->slot_grads_out = carve(arena, rows, sizeof(float));
    b->plan = carve(arena, (size_t)c->slots.num_local * 3 + 4, sizeof(int64_t));
}

static bool alloc_shadow(Case *c) {
    Device *d = c->device;
    Arena arena = {NULL, 0};
    lay_out(c, &arena, &d->buffers);
    cudaError_t status = cudaMalloc((void **)&d->memory, arena.used);
    if (status != cudaSuccess)
        return bench_fail("no device memory for %zu bytes of tensors: %s", arena.used,
                          cudaGetErrorString(status));
    arena = (Arena){d->memory, 0};
    lay_out(c, &arena, &d->buffers);
    return true;
}

/* ---- up and down --------------------------------------------------------------------------- */

/* A buffer on either side. */
typedef struct Part {
    void *host, *device;
    size_t bytes;
} Part;

enum { MAX_PARTS = 8 };

static int list_inputs(Case *c, Part *out) {
    Buffers *h = &c->buffers, *d = &c->device->buffers;
    size_t tokens = (size_t)c->tokens, entries = tokens * (size_t)c->options->top_k;
    size_t rows = (size_t)c->slots.num_rows, wide = rows * (size_t)c->weights_width;
    int n = 0;
    out[n++] = (Part){h->index, d->index, entries * ep_type_bytes((EpType)c->options->index_type)};
    out[n++] = (Part){h->topk_weights, d->topk_weights, entries * sizeof(float)};
    out[n++] = (Part){h->tokens_in, d->tokens_in, tokens * c->row_bytes};
    out[n++] = (Part){h->scales, d->scales, tokens * (size_t)c->options->scale_bytes};
    out[n++] = (Part){h->slots_in, d->slots_in, rows * c->row_bytes};
    out[n++] = (Part){h->slot_weights, d->slot_weights, rows * sizeof(float)};
    out[n++] = (Part){h->slot_grads_in, d->slot_grads_in, wide * sizeof(float)};
    return n;
}

static int list_dispatched(Case *c, Part *out) {
    Buffers *h = &c->buffers, *d = &c->device->buffers;
    size_t rows = (size_t)c->slots.num_rows, wide = rows * (size_t)c->weights_width;
    int n = 0;
    out[n++] = (Part){h->slots_out, d->slots_out, rows * c->row_bytes};
    out[n++] = (Part){h->recv_weights, d->recv_weights, wide * sizeof(float)};
    out[n++] = (Part){h->recv_index, d->recv_index, wide * sizeof(int32_t)};
    out[n++] = (Part){h->recv_scales, d->recv_scales, rows * c->recv_scale_bytes};
    return n;
}

static int list_outputs(Case *c, PhaseId phase, Part *out) {
    Buffers *h = &c->buffers, *d = &c->device->buffers;
    size_t tokens = (size_t)c->tokens, entries = tokens * (size_t)c->options->top_k;
    size_t rows = (size_t)c->slots.num_rows;
    int n = 0;
    if (phase == PHASE_DISPATCH) return list_dispatched(c, out);
    if (phase == PHASE_PREPARE)
        out[n++] = (Part){h->plan, d->plan, ((size_t)c->slots.num_local * 3 + 4) * sizeof(int64_t)};
    if (phase == PHASE_COMBINE_BACKWARD) {
        out[n++] = (Part){h->slots_out, d->slots_out, rows * c->row_bytes};
        out[n++] = (Part){h->slot_grads_out, d->slot_grads_out, rows * sizeof(float)};
    }
    if (phase == PHASE_COMBINE || phase == PHASE_DISPATCH_BACKWARD)
        out[n++] = (Part){h->tokens_out, d->tokens_out, tokens * c->row_bytes};
    if (phase == PHASE_DISPATCH_BACKWARD)
        out[n++] = (Part){h->topk_grads, d->topk_grads, entries * sizeof(float)};
    return n;
}

static bool upload(Case *c) {
    Part parts[MAX_PARTS];
    int count = list_inputs(c, parts);
    bool ok = true;
    for (int i = 0; ok && i < count; i++)
        ok = cuda_ok(cudaMemcpyAsync(parts[i].device, parts[i].host, parts[i].bytes,
                                     cudaMemcpyHostToDevice, c->stream),
                     "cudaMemcpyAsync");
    return ok && device_finish(c);
}

bool device_poison(Case *c, PhaseId phase) {
    Part parts[MAX_PARTS];
    int count = list_outputs(c, phase, parts);
    bool ok = true;
    for (int i = 0; ok && i < count; i++)
        ok = cuda_ok(cudaMemsetAsync(parts[i].device, POISON_BYTE, parts[i].bytes, c->stream),
                     "cudaMemsetAsync");
    return ok;
}

bool device_fetch(Case *c, PhaseId phase) {
    Part parts[MAX_PARTS];
    int count = list_outputs(c, phase, parts);
    bool ok = true;
    for (int i = 0; ok && i < count; i++)
        ok = cuda_ok(cudaMemcpyAsync(parts[i].host, parts[i].device, parts[i].bytes,
                                     cudaMemcpyDeviceToHost, c->stream),
                     "cudaMemcpyAsync");
    return ok && device_finish(c);
}

/* ---- life ---------------------------------------------------------------------------------- */

static bool create_stream(Case *c) {
    cudaStream_t stream;
    if (!cuda_ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                 "cudaStreamCreateWithFlags"))
        return false;
    c->stream = stream;
    return true;
}

/* Without memory that all ranks reach, the run goes on without the floor: *flags stays NULL. */
static void open_flags(Case *c) {
    Device *d = c->device;
    d->flags = peers_open(c->world, NUM_WORDS * sizeof(uint32_t));
    if (!d->flags) snprintf(d->reason, sizeof(d->reason), "%s", bench_error_sentence());
}

uint32_t *device_words(const Case *c, int rank) {
    return c->device->flags ? c->device->flags->at[rank] : NULL;
}

static bool create(Case *c) {
    c->device = bench_alloc(1, sizeof(Device), "device");
    if (!c->device || !alloc_shadow(c) || !create_stream(c)) return false;
    buffers_describe(c, &c->device->buffers);
    return upload(c);
}

bool device_create(Case *c) {
    if (!c->cuda) return true;
    if (!world_all(c->world, create(c))) return false;
    open_flags(c);
    return !c->world->broken;
}

/* Graphs hold on to nothing of the library's, so the group may be gone already. */
void device_destroy(Case *c) {
    if (!c->device) return;
    chains_close(c->device->graphs);
    peers_close(c->device->flags);
    if (c->stream) cudaStreamDestroy(c->stream);
    cudaFree(c->device->memory);
    free(c->device);
    c->device = NULL;
    c->stream = NULL;
}

#endif
