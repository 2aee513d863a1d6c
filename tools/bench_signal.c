/* SPDX-License-Identifier: Apache-2.0 */

/**
 * What no call of latency mode can do without: a node in a graph, and a word that goes from one GPU
 * to another.
 */

#if EP_WITH_CUDA

#include "bench_cuda.h"
#include "bench_kernels.h"

enum { ROUNDS = 200 };

/* ---- a node of a graph --------------------------------------------------------------------- */

static bool empty(void *context, int which) {
    const Case *c = context;
    (void)which;
    return cuda_ok(kernel_empty(c->stream), "the empty kernel");
}

/* ---- a word's way -------------------------------------------------------------------------- */

typedef struct Ping {
    Case *c;
    PingArgs args;
    uint32_t last;
} Ping;

/* Ranks 0 and 1; the others look on. */
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

bool signal_measure(Case *c, double *empty_node_us, double *flag_us) {
    Quantiles node;
    *empty_node_us = *flag_us = -1;
    if (!device_time_chains(c, empty, c, 1, &node)) return false;
    *empty_node_us = node.median_us;
    return !c->device->flags || c->world->size == 1 || time_flag(c, flag_us);
}

#endif
