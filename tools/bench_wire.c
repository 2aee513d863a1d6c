/* SPDX-License-Identifier: Apache-2.0 */

/**
 * The wire floor: the remote bytes of a phase pushed between the same GPUs by a kernel that does
 * nothing else, from all ranks at once. One rank alone copies its slots. In latency mode the kernel
 * is one of plain stores, in a graph.
 */

#if EP_WITH_CUDA

#include <stdio.h>

#include "bench_cuda.h"
#include "bench_error.h"
#include "bench_kernels.h"

/* What to try: which is best depends on the number of GPUs and on the bytes. blocks 0: one for
 * each multiprocessor. */
static const struct {
    int blocks, stages;
} shapes[] = {{8, 15}, {16, 15}, {32, 15}, {64, 8}, {64, 15}, {0, 15}};

/* Plain stores have no stages. */
static const int store_blocks[] = {8, 16, 32, 64, 0};

enum {
    NUM_SHAPES = sizeof(shapes) / sizeof(shapes[0]),
    NUM_STORES = sizeof(store_blocks) / sizeof(store_blocks[0]),
    MAX_TRIES = NUM_SHAPES > NUM_STORES ? NUM_SHAPES : NUM_STORES
};

typedef struct Wire {
    Case *c;
    PushArgs push;
    int multiprocessors;
} Wire;

/* What travels for the tokens of `source` that have slots on `owner`: each token once. */
static int64_t count_between(const Case *c, PhaseId phase, int source, int owner) {
    int64_t rows = 0, entries = 0;
    for (int64_t t = 0; t < c->routing.tokens[source]; t++) {
        const int64_t first = (c->routing.first[source] + t) * c->routing.top_k, before = entries;
        for (int64_t i = first; i < first + c->routing.top_k; i++)
            entries += c->slots.row_of[i] >= 0 &&
                       routing_owner(&c->routing, c->routing.experts[i]) == owner;
        rows += entries > before;
    }
    return phase_bytes(c, phase, rows, entries);
}

/* Bytes that this rank sends to `peer`, in units that the kernel copies. */
static int64_t count_bytes(const Case *c, int peer, PhaseId phase) {
    int rank = c->world->rank;
    bool there = phase == PHASE_DISPATCH || phase == PHASE_COMBINE_BACKWARD;
    int64_t bytes = 0;
    if (c->world->size == 1)
        bytes = phase_bytes(c, phase, c->slots.num_slots, c->slots.num_slots);
    else if (peer != rank)
        bytes = there ? count_between(c, phase, rank, peer) : count_between(c, phase, peer, rank);
    return (bytes + 15) / 16 * 16;
}

/* Peers in turn, each rank beginning with the next one. */
static int peer_at(const Case *c, int i) {
    return (c->world->rank + 1 + i) % c->world->size;
}

static void count_push(Wire *wire, PhaseId phase) {
    const Case *c = wire->c;
    int64_t chunks = c->slots.num_rows * (int64_t)c->row_bytes / PUSH_CHUNK;
    wire->push = (PushArgs){.count = c->world->size > 1 ? c->world->size - 1 : 1};
    wire->push.source = c->device->buffers.slots_in;
    wire->push.source_chunks = chunks > 0 ? (int32_t)chunks : 1;
    for (int i = 0; i < wire->push.count; i++)
        wire->push.bytes[i] = count_bytes(c, peer_at(c, i), phase);
}

#define PLACE_ALIGNMENT 4096 /* memory takes parts of lines more slowly */

/* Every rank has a place of the same size in every other's inbox. */
static bool longest_push(const Wire *wire, int64_t *out) {
    *out = 0;
    for (int i = 0; i < wire->push.count; i++)
        *out = wire->push.bytes[i] > *out ? wire->push.bytes[i] : *out;
    *out = (*out + PLACE_ALIGNMENT - 1) / PLACE_ALIGNMENT * PLACE_ALIGNMENT;
    return world_max(wire->c->world, out, 1);
}

static bool push(void *context, int which) {
    const Wire *wire = context;
    int blocks = shapes[which].blocks ? shapes[which].blocks : wire->multiprocessors;
    return cuda_ok(kernel_push(&wire->push, blocks, shapes[which].stages, wire->c->stream),
                   "the copying kernel");
}

static bool store(void *context, int which) {
    const Wire *wire = context;
    int blocks = store_blocks[which] ? store_blocks[which] : wire->multiprocessors;
    return cuda_ok(kernel_store(&wire->push, blocks, wire->c->stream), "the storing kernel");
}

static bool time_push(Wire *wire, double *best_us) {
    Case *c = wire->c;
    Quantiles times[MAX_TRIES];
    bool stores = c->options->mode == EP_MODE_LATENCY;
    int tries = stores ? NUM_STORES : NUM_SHAPES;
    if (!(stores ? device_time_chains(c, store, wire, tries, times)
                 : device_time_calls(c, c->options->iterations, push, wire, tries, times, NULL)))
        return false;
    *best_us = times[0].median_us;
    for (int i = 1; i < tries; i++)
        *best_us = times[i].median_us < *best_us ? times[i].median_us : *best_us;
    return true;
}

/* *us stays as it is where nothing travels, or where there is no memory for it. */
static bool measure(Wire *wire, PhaseId phase, double *us) {
    Case *c = wire->c;
    int64_t place;
    count_push(wire, phase);
    if (!longest_push(wire, &place)) return false;
    if (place == 0) return true;
    Peers *inbox = peers_open(c->world, (size_t)(place * c->world->size));
    if (!inbox) {
        snprintf(c->device->reason, sizeof(c->device->reason), "%s", bench_error_sentence());
        return !c->world->broken;
    }
    for (int i = 0; i < wire->push.count; i++)
        wire->push.to[i] = (char *)inbox->at[peer_at(c, i)] + place * c->world->rank;
    bool ok = time_push(wire, us);
    peers_close(inbox);
    return ok;
}

static bool count_multiprocessors(int *out) {
    int device;
    return cuda_ok(cudaGetDevice(&device), "cudaGetDevice") &&
           cuda_ok(cudaDeviceGetAttribute(out, cudaDevAttrMultiProcessorCount, device),
                   "cudaDeviceGetAttribute");
}

bool wire_measure(Case *c, double floor_us[NUM_PHASES]) {
    Wire wire = {.c = c};
    for (int p = 0; p < NUM_PHASES; p++)
        floor_us[p] = -1;
    if (!c->device->flags) return true;
    if (!world_all(c->world, count_multiprocessors(&wire.multiprocessors))) return false;
    for (int p = PHASE_PREPARE + 1; p < NUM_PHASES; p++)
        if (phase_is_there(c, (PhaseId)p) && !measure(&wire, (PhaseId)p, &floor_us[p]))
            return false;
    return true;
}

#endif
