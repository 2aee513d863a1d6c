/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/bench/measure.h"
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
    size_t tokens = (size_t)c->tokens, entries = tokens * (size_t)c->options->top_k;
    size_t rows = (size_t)c->slots.num_rows, wide = rows * (size_t)c->weights_width;
    size_t scale_bytes = (size_t)c->options->scale_bytes;
    b->index = suballocate(allocator, entries, sizeof(int64_t));
    b->topk_weights = suballocate(allocator, entries, sizeof(float));
    b->topk_grads = suballocate(allocator, entries, sizeof(float));
    b->tokens_in = suballocate(allocator, tokens, c->row_bytes);
    b->tokens_out = suballocate(allocator, tokens, c->row_bytes);
    b->scales = suballocate(allocator, tokens, scale_bytes);
    b->slots_in = c->zero_copy_in ? c->zero_copy_in : suballocate(allocator, rows, c->row_bytes);
    b->slots_out = c->zero_copy_out ? c->zero_copy_out : suballocate(allocator, rows, c->row_bytes);
    b->recv_weights = suballocate(allocator, wide, sizeof(float));
    b->recv_scales = suballocate(allocator, rows, c->recv_scale_bytes);
    b->recv_index = suballocate(allocator, wide, sizeof(int32_t));
    b->slot_weights = suballocate(allocator, rows, sizeof(float));
    b->slot_grads_in = suballocate(allocator, wide, sizeof(float));
    b->slot_grads_out = suballocate(allocator, rows, sizeof(float));
    b->plan = suballocate(allocator, (size_t)c->slots.num_local * 3 + 4, sizeof(int64_t));
    b->plan_memory = suballocate(allocator, (size_t)c->plan_bytes, 1);
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

/* A buffer on the host and its copy on the device. */
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

static bool create(Case *c) {
    c->device = bench_alloc(1, sizeof(Device), "device");
    if (!c->device || !alloc_device_buffers(c) || !create_stream(c)) return false;
    buffers_describe(c, &c->device->buffers);
    return upload(c);
}

bool device_create(Case *c) {
    if (!c->cuda) return true;
    if (!world_all(c->world, create(c))) return false;
    Device *d = c->device;
    d->flags = peers_open(c->world, NUM_WORDS * sizeof(uint32_t));
    /* Without flags the run continues, but does not measure the floor. */
    if (!d->flags) snprintf(d->reason, sizeof(d->reason), "%s", bench_error_message());
    return !c->world->broken;
}

/* Graphs hold no references to the library's memory, so the group may be destroyed before. */
void device_destroy(Case *c) {
    if (!c->device) return;
    graphs_close(c->device->graphs);
    peers_close(c->device->flags);
    if (c->stream) cudaStreamDestroy(c->stream);
    cudaFree(c->device->memory);
    free(c->device);
    c->device = NULL;
    c->stream = NULL;
}

#else

/* ---- builds without CUDA: no case has a device --------------------------------------------- */

static bool without_cuda(void) {
    return bench_fail("this ep_bench was built without CUDA");
}

bool device_create(Case *c) {
    (void)c;
    return true;
}

void device_destroy(Case *c) {
    (void)c;
}

bool device_poison(Case *c, PhaseId phase) {
    (void)c;
    (void)phase;
    return true;
}

bool device_fetch(Case *c, PhaseId phase) {
    (void)c;
    (void)phase;
    return true;
}

bool device_capture(Case *c) {
    (void)c;
    return without_cuda();
}

bool device_replay(Case *c, PhaseId phase) {
    (void)c;
    (void)phase;
    return without_cuda();
}

bool device_replay_step(Case *c) {
    (void)c;
    return without_cuda();
}

bool device_time_calls(Case *c, int64_t iterations, TimedCall call, void *context, int count,
                       Quantiles *out, double *issue_us) {
    (void)c;
    (void)iterations;
    (void)call;
    (void)context;
    (void)count;
    (void)out;
    (void)issue_us;
    return without_cuda();
}

bool floor_measure_signals(Case *c, double *empty_node_us, double *flag_us) {
    (void)c;
    (void)empty_node_us;
    (void)flag_us;
    return without_cuda();
}

bool floor_measure_device(Case *c, Floor *out) {
    (void)c;
    (void)out;
    return without_cuda();
}

bool baseline_measure_nccl(Case *c, Check *check, BaselineResult *out) {
    (void)c;
    (void)check;
    (void)out;
    return without_cuda();
}

#endif
