/* SPDX-License-Identifier: Apache-2.0 */

/**
 * Bytes that a phase cannot avoid to read from and write to the memory of this rank's GPU, from the
 * routing alone; see docs/benchmarking.md. Rows travel as with zero-copy: the sender's store is the
 * write of a row's first slot. Sums over a rank's slots travel; each token's rank reads them again.
 */

#include "tools/bench/measure.h"

static void count_own(const Case *c, int64_t token, Counts *out) {
    const int rank = c->world->rank, top_k = c->routing.top_k;
    const int64_t first = (c->routing.first[rank] + token) * top_k;
    bool sent = false;
    for (int k = 0; k < top_k; k++) {
        if (c->slots.row_of[first + k] < 0) continue;
        const int owner = routing_owner(&c->routing, c->routing.experts[first + k]);
        bool fresh = true;
        for (int i = 0; fresh && i < k; i++)
            fresh = c->slots.row_of[first + i] < 0 ||
                    routing_owner(&c->routing, c->routing.experts[first + i]) != owner;
        out->entries++, out->far_entries += owner != rank;
        *(owner == rank ? &out->near_pairs : &out->far_pairs) += fresh;
        sent = true;
    }
    out->tokens++, out->sent_tokens += sent;
}

/* A token of any rank with entries for this one. */
static void count_received(const Case *c, int source, int64_t token, Counts *out) {
    const int rank = c->world->rank, top_k = c->routing.top_k;
    const int64_t first = (c->routing.first[source] + token) * top_k;
    int entries = 0;
    for (int k = 0; k < top_k; k++)
        entries += c->slots.row_of[first + k] >= 0 &&
                   routing_owner(&c->routing, c->routing.experts[first + k]) == rank;
    out->slot_entries += entries;
    if (source == rank) return;
    out->rows_in += entries > 0;
    out->shared_in += entries > 1 && !slots_has_rows(c->slots.layout);
}

Counts count_all(const Case *c) {
    Counts counts = {.slots = c->slots.num_slots};
    for (int64_t t = 0; t < c->tokens; t++)
        count_own(c, t, &counts);
    for (int r = 0; r < c->world->size; r++)
        for (int64_t t = 0; t < c->routing.tokens[r]; t++)
            count_received(c, r, t, &counts);
    for (int64_t row = 0; row < c->slots.num_rows; row++)
        counts.padding += case_zeroes_row(c, row);
    return counts;
}

/* Rows of tokens are read once, slots and padding are written, and a row with several slots is read
 * from the first of them for the others. */
static int64_t dispatch_bytes(const Case *c, const Counts *n) {
    const Options *o = c->options;
    const int64_t number = (int64_t)sizeof(float), written = n->slots + n->padding;
    const int64_t recv = (int64_t)(c->recv_bytes + c->recv_scale_bytes);
    int64_t bytes = n->sent_tokens * ((int64_t)c->row_bytes + o->scale_bytes);
    bytes += (written + n->shared_in) * recv;
    if (o->weighted) bytes += (n->entries + written * c->weights_width) * number;
    if (slots_has_rows(c->slots.layout)) bytes += written * c->weights_width * number;
    if (c->latency) bytes += n->tokens * o->top_k * (int64_t)ep_type_bytes((EpType)o->index_type);
    return bytes;
}

/* Slots are read once, other ranks' sums, or rows and weights by entry, are written by them and
 * read here, tokens are written. */
static int64_t combine_bytes(const Case *c, const Counts *n, bool backward) {
    const int64_t number = (int64_t)sizeof(float);
    const int64_t rows = (n->slots + n->tokens) * (int64_t)c->row_bytes;
    const bool by_entry = c->options->sums == EP_SUMS_BY_ENTRY;
    const int64_t sums = 2 * (by_entry ? n->far_entries : n->far_pairs) * (int64_t)c->sum_bytes;
    int64_t numbers = n->slots + (by_entry ? 2 * n->far_entries : 0);
    if (backward) numbers = n->slot_entries + 2 * n->far_entries + n->tokens * c->options->top_k;
    return rows + sums + (c->options->weighted ? numbers * number : 0);
}

/* As dispatch. With weights a row that arrives is read before its first slot, too, is written, and
 * the dot products read every slot of expert_out. */
static int64_t combine_backward_bytes(const Case *c, const Counts *n) {
    const int64_t written = n->slots + n->padding;
    if (!c->options->weighted)
        return (n->sent_tokens + written + n->shared_in) * (int64_t)c->row_bytes;
    const int64_t rows = n->sent_tokens + 2 * n->rows_in + n->slots + written;
    return rows * (int64_t)c->row_bytes + (n->slots + written) * (int64_t)sizeof(float);
}

void memory_count(const Case *c, int64_t bytes[NUM_PHASES]) {
    const Counts counts = count_all(c);
    bytes[PHASE_PREPARE] = 0;
    bytes[PHASE_DISPATCH] = dispatch_bytes(c, &counts);
    bytes[PHASE_COMBINE] = combine_bytes(c, &counts, false);
    bytes[PHASE_COMBINE_BACKWARD] = combine_backward_bytes(c, &counts);
    bytes[PHASE_DISPATCH_BACKWARD] = combine_bytes(c, &counts, true);
}
