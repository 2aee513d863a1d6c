/* SPDX-License-Identifier: Apache-2.0 */

/** Lower bounds for the times of the phases: plain copies of the same bytes, without libep. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/bench/device.h"
#include "tools/bench/measure.h"
#include "tools/bench/util.h"

/* ---- host: memcpy -------------------------------------------------------------------------- */

enum { COPY_INDEX, COPY_ROWS, NUM_COPIES };

typedef struct Floor {
    Case *c;
    void *index; /* destination of the indices */
} Floor;

static bool copy(void *context, int which) {
    Floor *floor = context;
    Case *c = floor->c;
    if (which == COPY_INDEX) {
        size_t entries = (size_t)(c->tokens * c->options->top_k);
        memcpy(floor->index, c->buffers.index,
               entries * ep_type_bytes((EpType)c->options->index_type));
        return true;
    }
    for (int64_t i = 0; i < c->slots.num_slots; i++)
        memcpy(c->buffers.slots_out + (size_t)i * c->row_bytes,
               c->buffers.slots_in + (size_t)i * c->row_bytes, c->row_bytes);
    return true;
}

bool floor_measure_host(Case *c, double floor_us[NUM_PHASES]) {
    Quantiles copies[NUM_COPIES];
    Floor floor = {c,
                   bench_alloc((size_t)(c->tokens * c->options->top_k), sizeof(int64_t), "floor")};
    bool ok = world_all(c->world, floor.index != NULL) &&
              time_calls(c->world, 1, c->options->iterations, copy, &floor, NUM_COPIES, copies);
    for (int p = 0; ok && p < NUM_PHASES; p++)
        floor_us[p] = copies[p == PHASE_PREPARE ? COPY_INDEX : COPY_ROWS].median_us;
    free(floor.index);
    return ok;
}

#if EP_WITH_CUDA

/* ---- GPUs: copy kernels -------------------------------------------------------------------- */

/*
 * A kernel that only copies pushes the remote bytes of a phase between the same GPUs, on all ranks
 * at once. A single rank copies its slots. In latency mode the kernel uses plain stores and is in a
 * graph.
 */

/* Launch shapes to try; the best one depends on the number of GPUs and of bytes. blocks 0: one per
 * multiprocessor. */
static const struct {
    int blocks, stages;
} shapes[] = {{8, 15}, {16, 15}, {32, 15}, {64, 8}, {64, 15}, {0, 15}};

/* The same for plain stores, which have no stages. */
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

/* Bytes that travel for the tokens of `source` with slots on `owner`, each token once. */
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

/* Bytes that this rank sends to `peer`, rounded up to the kernel's unit of 16 bytes. */
static int64_t count_bytes(const Case *c, int peer, PhaseId phase) {
    int rank = c->world->rank;
    bool to_experts = phase == PHASE_DISPATCH || phase == PHASE_COMBINE_BACKWARD;
    int64_t bytes = 0;
    if (c->world->size == 1)
        bytes = phase_bytes(c, phase, c->slots.num_slots, c->slots.num_slots);
    else if (peer != rank)
        bytes =
            to_experts ? count_between(c, phase, rank, peer) : count_between(c, phase, peer, rank);
    return (bytes + 15) / 16 * 16;
}

/* The i-th peer of this rank. Each rank begins with the next rank. */
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

#define INBOX_ALIGNMENT 4096 /* memory writes partial lines more slowly */

/* Bytes of one source rank's part of an inbox, equal on all ranks. */
static bool inbox_part_bytes(const Wire *wire, int64_t *out) {
    *out = 0;
    for (int i = 0; i < wire->push.count; i++)
        *out = wire->push.bytes[i] > *out ? wire->push.bytes[i] : *out;
    *out = (*out + INBOX_ALIGNMENT - 1) / INBOX_ALIGNMENT * INBOX_ALIGNMENT;
    return world_max(wire->c->world, out, 1);
}

static bool push(void *context, int which) {
    const Wire *wire = context;
    int blocks = shapes[which].blocks ? shapes[which].blocks : wire->multiprocessors;
    return cuda_ok(kernel_push(&wire->push, blocks, shapes[which].stages, wire->c->stream),
                   "the push kernel");
}

static bool store(void *context, int which) {
    const Wire *wire = context;
    int blocks = store_blocks[which] ? store_blocks[which] : wire->multiprocessors;
    return cuda_ok(kernel_store(&wire->push, blocks, wire->c->stream), "the store kernel");
}

static bool time_push(Wire *wire, double *best_us) {
    Case *c = wire->c;
    Quantiles times[MAX_TRIES];
    bool stores = c->options->mode == EP_MODE_LATENCY;
    int tries = stores ? NUM_STORES : NUM_SHAPES;
    if (!(stores ? device_time_graphs(c, store, wire, tries, times)
                 : device_time_calls(c, c->options->iterations, push, wire, tries, times, NULL)))
        return false;
    *best_us = times[0].median_us;
    for (int i = 1; i < tries; i++)
        *best_us = times[i].median_us < *best_us ? times[i].median_us : *best_us;
    return true;
}

/* *us stays unchanged if no bytes travel or if there is no memory for them. */
static bool measure(Wire *wire, PhaseId phase, double *us) {
    Case *c = wire->c;
    int64_t part;
    count_push(wire, phase);
    if (!inbox_part_bytes(wire, &part)) return false;
    if (part == 0) return true;
    Peers *inbox = peers_open(c->world, (size_t)(part * c->world->size));
    if (!inbox) {
        snprintf(c->device->reason, sizeof(c->device->reason), "%s", bench_error_message());
        return !c->world->broken;
    }
    for (int i = 0; i < wire->push.count; i++)
        wire->push.to[i] = (char *)inbox->at[peer_at(c, i)] + part * c->world->rank;
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

bool floor_measure_device(Case *c, double floor_us[NUM_PHASES]) {
    Wire wire = {.c = c};
    for (int p = 0; p < NUM_PHASES; p++)
        floor_us[p] = -1;
    if (!c->device->flags) return true;
    if (!world_all(c->world, count_multiprocessors(&wire.multiprocessors))) return false;
    for (int p = PHASE_PREPARE + 1; p < NUM_PHASES; p++)
        if (phase_exists(c, (PhaseId)p) && !measure(&wire, (PhaseId)p, &floor_us[p])) return false;
    return true;
}

/* ---- GPUs: an empty graph node and a flag -------------------------------------------------- */

/* Every call in latency mode takes at least these two: a node in a graph, and a word from one GPU
 * to another. */
enum { ROUNDS = 200 };

static bool empty(void *context, int which) {
    const Case *c = context;
    (void)which;
    return cuda_ok(kernel_empty(c->stream), "the empty kernel");
}

typedef struct Ping {
    Case *c;
    PingArgs args;
    uint32_t last;
} Ping;

/* Ranks 0 and 1 exchange words; the other ranks do nothing. */
static bool ping(void *context, int which) {
    Ping *p = context;
    (void)which;
    if (p->c->world->rank > 1) return true;
    bool ok = cuda_ok(kernel_ping(&p->args, p->last, ROUNDS, p->c->stream), "the flag's kernel");
    p->last += ROUNDS;
    return ok;
}

static bool time_flag(Case *c, double *flag_us) {
    Quantiles time;
    Ping p = {.c = c};
    const int rank = c->world->rank, peer = 1 - rank;
    if (rank < 2) {
        p.args.out = device_words(c, peer) + WORD_PING;
        p.args.in = device_words(c, rank) + WORD_PING;
        p.args.late = device_words(c, rank) + WORD_LATE;
        p.args.timeout_ns = (uint64_t)(world_deadline() * 1e9);
        p.args.peer = peer, p.args.begins = rank == 0;
    }
    if (!device_time_calls(c, c->options->iterations, ping, &p, 1, &time, NULL)) return false;
    *flag_us = time.median_us / (2 * ROUNDS);
    return true;
}

bool floor_measure_signals(Case *c, double *empty_node_us, double *flag_us) {
    Quantiles node;
    *empty_node_us = *flag_us = -1;
    if (!device_time_graphs(c, empty, c, 1, &node)) return false;
    *empty_node_us = node.median_us;
    return !c->device->flags || c->world->size == 1 || time_flag(c, flag_us);
}

#endif
