/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/counters.h"

/* Vectors of the buffer behind the local experts', one number for each rank. */
enum { ROWS, BYTES, WAITS, LONGEST, RANK_VECTORS };

size_t counters_size(const Case *c) {
    size_t ranks = (size_t)c->world->size;
    return c->options->stats ? (size_t)c->slots.num_local + RANK_VECTORS * ranks : 0;
}

void counters_describe(Case *c, const Buffers *b) {
    Tensors *t = &c->tensors;
    int64_t local = c->slots.num_local, ranks = c->world->size;
    t->expert_tokens = ep_tensor_1d(b->counters, EP_TYPE_INT64, local);
    for (int i = 0; i < RANK_VECTORS; i++)
        t->by_rank[i] = ep_tensor_1d(b->counters + local + i * ranks, EP_TYPE_INT64, ranks);
}

/* Which counters a call takes. */
static const EpExtras *choose(Case *c, bool experts, bool rows, bool waits) {
    Tensors *t = &c->tensors;
    if (!c->options->stats) return NULL;
    c->extras = (EpExtras)EP_EXTRAS_INIT;
    if (experts) c->extras.expert_tokens = &t->expert_tokens;
    if (rows) c->extras.peer_rows = &t->by_rank[ROWS], c->extras.peer_bytes = &t->by_rank[BYTES];
    if (waits) c->extras.peer_wait_ns = &t->by_rank[WAITS];
    if (waits) c->extras.peer_longest_wait_ns = &t->by_rank[LONGEST];
    return &c->extras;
}

const EpExtras *counters_of(Case *c, PhaseId phase) {
    return choose(c, phase == PHASE_DISPATCH, phase != PHASE_PREPARE,
                  phase != PHASE_PREPARE || !c->latency);
}

const EpExtras *counters_of_split(Case *c, SplitPhaseId phase) {
    bool sends = phase == SPLIT_DISPATCH_SEND || phase == SPLIT_COMBINE_SEND;
    return choose(c, phase == SPLIT_DISPATCH_WAIT, sends, true);
}

bool counters_read(Case *c, CountersResult *out) {
    int64_t local = c->slots.num_local, ranks = c->world->size, most[2] = {0, 0};
    int64_t sums[4] = {0, 0, 0, 0};
    *out = (CountersResult){0};
    if (!c->options->stats) return true;
    if (!world_all(c->world, phase_fetch(c, (PhaseId)COUNTED))) return false;
    const int64_t *experts = c->buffers.counters, *by_rank = experts + local;
    for (int64_t e = 0; e < local; e++) {
        sums[0] += experts[e];
        if (experts[e] > most[0]) most[0] = experts[e];
    }
    for (int64_t r = 0; r < ranks; r++) {
        if (r == c->world->rank) continue;
        sums[1] += by_rank[ROWS * ranks + r], sums[2] += by_rank[BYTES * ranks + r];
        sums[3] += by_rank[WAITS * ranks + r];
        if (by_rank[LONGEST * ranks + r] > most[1]) most[1] = by_rank[LONGEST * ranks + r];
    }
    if (!world_sum(c->world, sums, 4) || !world_max(c->world, most, 2)) return false;
    *out = (CountersResult){.slots = sums[0],
                            .most_slots = most[0],
                            .rows = sums[1],
                            .bytes = sums[2],
                            .waited_us = (double)sums[3] * 1e-3,
                            .longest_us = (double)most[1] * 1e-3};
    return true;
}
