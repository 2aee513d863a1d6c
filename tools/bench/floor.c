/* SPDX-License-Identifier: Apache-2.0 */

/** Lower bounds for the times of the phases: plain copies without libep. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "tools/bench/device.h"
#include "tools/bench/measure.h"
#include "tools/common/util.h"

/* ---- host: memcpy -------------------------------------------------------------------------- */

/* What a phase at least moves: indices; rows; rows, and the zeros of padding, by memset or past the
 * caches, whichever is faster. */
enum { COPY_INDEX, COPY_ROWS, COPY_AND_SET, COPY_AND_STREAM, NUM_COPIES };

typedef struct HostCopy {
    Case *c;
    void *index; /* destination of the indices */
} HostCopy;

/* Zero memory past the caches, if the CPU has such stores: they do not read what they replace. Both
 * are multiples of 16. */
static void stream_zeros(char *to, size_t bytes) {
#ifdef __SSE2__
    for (size_t at = 0; at < bytes; at += 16)
        _mm_stream_si128((__m128i *)(void *)(to + at), _mm_setzero_si128());
    _mm_sfence();
#else
    memset(to, 0, bytes);
#endif
}

/* The padding of each slab at once. */
static void zero_padding(Case *c, bool streams) {
    for (int64_t row = 0, begin = 0; row <= c->slots.num_rows; row++) {
        if (row < c->slots.num_rows && case_zeroes_row(c, row)) continue;
        char *to = c->buffers.slots_out + (size_t)begin * c->row_bytes;
        size_t bytes = (size_t)(row - begin) * c->row_bytes;
        if (bytes && streams)
            stream_zeros(to, bytes);
        else if (bytes)
            memset(to, 0, bytes);
        begin = row + 1;
    }
}

static bool copy(void *context, int which) {
    HostCopy *host = context;
    Case *c = host->c;
    if (which == COPY_INDEX) {
        size_t entries = (size_t)(c->tokens * c->options->top_k);
        memcpy(host->index, c->buffers.index,
               entries * ep_type_bytes((EpType)c->options->index_type));
        return true;
    }
    for (int64_t i = 0; i < c->slots.num_slots; i++)
        memcpy(c->buffers.slots_out + (size_t)i * c->row_bytes,
               c->buffers.slots_in + (size_t)i * c->row_bytes, c->row_bytes);
    if (which != COPY_ROWS) zero_padding(c, which == COPY_AND_STREAM);
    return true;
}

bool floor_measure_host(Case *c, Floor *out) {
    Quantiles copies[NUM_COPIES];
    HostCopy host = {
        c, bench_alloc((size_t)(c->tokens * c->options->top_k), sizeof(int64_t), "floor")};
    bool ok = world_all(c->world, host.index != NULL) &&
              time_calls(c->world, 1, c->options->run.iterations, copy, &host, NUM_COPIES, copies);
    if (ok) {
        double set = copies[COPY_AND_SET].median_us, stream = copies[COPY_AND_STREAM].median_us;
        out->mem_us[PHASE_PREPARE] = copies[COPY_INDEX].median_us;
        out->mem_us[PHASE_COMBINE] = copies[COPY_ROWS].median_us;
        out->mem_us[PHASE_DISPATCH_BACKWARD] = copies[COPY_ROWS].median_us;
        out->mem_us[PHASE_DISPATCH] = set < stream ? set : stream;
        out->mem_us[PHASE_COMBINE_BACKWARD] = set < stream ? set : stream;
    }
    free(host.index);
    return ok;
}

#if EP_WITH_CUDA

/* ---- GPUs: copy kernels -------------------------------------------------------------------- */

/*
 * The wire: a kernel that only copies pushes the remote bytes of a phase between the same GPUs, on
 * all ranks at once. In latency mode it uses plain stores and is in a graph. The memory: the same
 * kernels copy within each GPU, reading half of the memory's bytes of a phase and writing the other
 * half.
 */

/* Launch shapes to try; the best one depends on the number of GPUs and of bytes. blocks 0: one per
 * multiprocessor. */
static const struct {
    int blocks, stages;
} shapes[] = {{8, 15}, {16, 15}, {32, 15}, {64, 8}, {64, 15}, {0, 15}};

/* The same for plain stores, which have no stages. */
static const int store_blocks[] = {8, 16, 32, 64, 0};

/* Within a GPU: bulk copies, and plain stores (stages 0), which are faster for few bytes. */
static const struct {
    int blocks, stages;
} local_shapes[] = {{32, 15}, {64, 15}, {0, 8}, {0, 15}, {32, 0}, {64, 0}, {0, 0}};

enum {
    NUM_SHAPES = sizeof(shapes) / sizeof(shapes[0]),
    NUM_STORES = sizeof(store_blocks) / sizeof(store_blocks[0]),
    NUM_LOCAL = sizeof(local_shapes) / sizeof(local_shapes[0]),
    MAX_TRIES = 8
};
_Static_assert((int)NUM_SHAPES <= MAX_TRIES && (int)NUM_STORES <= MAX_TRIES &&
                   (int)NUM_LOCAL <= MAX_TRIES,
               "tries are timed together");

typedef struct Copies {
    Case *c;
    PushArgs push;
    int multiprocessors;
} Copies;

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
    return phase_remote_bytes(c, phase, rows, entries);
}

/* Bytes that this rank sends to `peer`, rounded up to the kernel's unit of 16 bytes. */
static int64_t count_bytes(const Case *c, int peer, PhaseId phase) {
    int rank = c->world->rank;
    bool to_experts = phase == PHASE_DISPATCH || phase == PHASE_COMBINE_BACKWARD;
    int64_t bytes = 0;
    if (peer != rank)
        bytes =
            to_experts ? count_between(c, phase, rank, peer) : count_between(c, phase, peer, rank);
    return (bytes + 15) / 16 * 16;
}

/* The i-th peer of this rank. Each rank begins with the next rank. */
static int peer_at(const Case *c, int i) {
    return (c->world->rank + 1 + i) % c->world->size;
}

static void count_push(Copies *copies, PhaseId phase) {
    const Case *c = copies->c;
    int64_t chunks = c->slots.num_rows * (int64_t)c->row_bytes / PUSH_CHUNK;
    copies->push = (PushArgs){.count = c->world->size - 1};
    copies->push.source = c->device->buffers.slots_in;
    copies->push.source_chunks = chunks > 0 ? (int32_t)chunks : 1;
    for (int i = 0; i < copies->push.count; i++)
        copies->push.bytes[i] = count_bytes(c, peer_at(c, i), phase);
}

#define INBOX_ALIGNMENT 4096 /* memory writes partial lines more slowly */

/* Bytes of one source rank's part of an inbox, equal on all ranks. */
static bool inbox_part_bytes(const Copies *copies, int64_t *out) {
    *out = 0;
    for (int i = 0; i < copies->push.count; i++)
        *out = copies->push.bytes[i] > *out ? copies->push.bytes[i] : *out;
    *out = (*out + INBOX_ALIGNMENT - 1) / INBOX_ALIGNMENT * INBOX_ALIGNMENT;
    return world_max(copies->c->world, out, 1);
}

static bool push(void *context, int which) {
    const Copies *copies = context;
    int blocks = shapes[which].blocks ? shapes[which].blocks : copies->multiprocessors;
    return cuda_ok(kernel_push(&copies->push, blocks, shapes[which].stages, copies->c->stream),
                   "the push kernel");
}

static bool store(void *context, int which) {
    const Copies *copies = context;
    int blocks = store_blocks[which] ? store_blocks[which] : copies->multiprocessors;
    return cuda_ok(kernel_store(&copies->push, blocks, copies->c->stream), "the store kernel");
}

static bool copy_locally(void *context, int which) {
    const Copies *copies = context;
    const int stages = local_shapes[which].stages;
    int blocks = local_shapes[which].blocks;
    if (!blocks) blocks = copies->multiprocessors;
    return cuda_ok(stages ? kernel_push(&copies->push, blocks, stages, copies->c->stream)
                          : kernel_store(&copies->push, blocks, copies->c->stream),
                   "the local copy kernel");
}

/* The fastest of calls 0 .. tries - 1. In latency mode they are in graphs, as the phases may be. */
static bool time_fastest(Copies *copies, TimedCall call, int tries, double *best_us) {
    Case *c = copies->c;
    Quantiles times[MAX_TRIES];
    bool graphs = c->options->mode == EP_MODE_LATENCY;
    if (!(graphs
              ? device_time_graphs(c, call, copies, tries, times)
              : device_time_calls(c, c->options->run.iterations, call, copies, tries, times, NULL)))
        return false;
    *best_us = times[0].median_us;
    for (int i = 1; i < tries; i++)
        *best_us = times[i].median_us < *best_us ? times[i].median_us : *best_us;
    return true;
}

/* There is no memory for the floor: the run goes on without it. */
static bool skip(Case *c) {
    snprintf(c->device->reason, sizeof(c->device->reason), "%s", bench_error_message());
    return !c->world->broken;
}

/* *us stays unchanged if no bytes travel or if there is no memory for them. */
static bool measure_wire(Copies *copies, PhaseId phase, double *us) {
    Case *c = copies->c;
    const bool stores = c->options->mode == EP_MODE_LATENCY;
    int64_t part;
    count_push(copies, phase);
    if (!inbox_part_bytes(copies, &part)) return false;
    if (part == 0) return true;
    Peers *inbox = peers_open(c->world, (size_t)(part * c->world->size));
    if (!inbox) return skip(c);
    for (int i = 0; i < copies->push.count; i++)
        copies->push.to[i] = (char *)inbox->at[peer_at(c, i)] + part * c->world->rank;
    bool ok = time_fastest(copies, stores ? store : push, stores ? NUM_STORES : NUM_SHAPES, us);
    peers_close(inbox);
    return ok;
}

/* Copy half of `bytes` from one half of an allocation to the other. */
static bool measure_memory(Copies *copies, int64_t bytes, double *us) {
    Case *c = copies->c;
    const int64_t half = (bytes / 2 + 15) / 16 * 16, chunks = half / PUSH_CHUNK + 1;
    char *memory = NULL;
    cudaError_t status = cudaMalloc((void **)&memory, (size_t)(2 * chunks * PUSH_CHUNK));
    if (!world_all(c->world, cuda_ok(status, "the floor's memory: cudaMalloc"))) {
        cudaGetLastError();
        cudaFree(memory);
        return skip(c);
    }
    copies->push = (PushArgs){.count = 1, .source = memory, .source_chunks = (int32_t)chunks};
    copies->push.to[0] = memory + chunks * PUSH_CHUNK;
    copies->push.bytes[0] = half;
    bool ok = cuda_ok(cudaMemsetAsync(memory, 0, (size_t)(2 * chunks * PUSH_CHUNK), c->stream),
                      "cudaMemsetAsync");
    ok = world_all(c->world, ok) && time_fastest(copies, copy_locally, NUM_LOCAL, us);
    cudaFree(memory);
    return ok;
}

bool floor_measure_device(Case *c, Floor *out) {
    Copies copies = {.c = c};
    int64_t bytes[NUM_PHASES];
    if (!c->device->flags) return true;
    if (!world_all(c->world, gpu_multiprocessors(&copies.multiprocessors))) return false;
    memory_count(c, bytes);
    for (int p = PHASE_PREPARE + 1; p < NUM_PHASES; p++) {
        if (!phase_exists(c, (PhaseId)p)) continue;
        if (!measure_wire(&copies, (PhaseId)p, &out->wire_us[p]) ||
            !measure_memory(&copies, bytes[p], &out->mem_us[p]))
            return false;
    }
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
    if (!device_time_calls(c, c->options->run.iterations, ping, &p, 1, &time, NULL)) return false;
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
