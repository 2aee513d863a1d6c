/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_baseline_plan.h"

#include <stdlib.h>
#include <string.h>

#include "bench_error.h"

static void finish_traffic(Traffic *traffic, int ranks) {
    traffic->total = 0;
    for (int r = 0; r < ranks; r++) {
        traffic->offsets[r] = (int)traffic->total;
        traffic->total += traffic->counts[r];
    }
}

static int32_t expert_at(const BaselinePlan *p, int64_t entry) {
    const Case *c = p->c;
    return c->options->index_type == EP_TYPE_INT64
               ? (int32_t)((const int64_t *)c->buffers.index)[entry]
               : ((const int32_t *)c->buffers.index)[entry];
}

static void count_destinations(BaselinePlan *p) {
    const Case *c = p->c;
    memset(p->sent.counts, 0, (size_t)c->world->size * sizeof(int));
    for (int64_t i = 0; i < c->tokens * c->routing.top_k; i++) {
        int32_t expert = expert_at(p, i);
        if (expert >= 0) p->sent.counts[routing_owner(&c->routing, expert)]++;
    }
}

/* A stable sort of the entries by destination. */
static void permute(BaselinePlan *p) {
    const Case *c = p->c;
    for (int r = 0; r < c->world->size; r++)
        p->cursor[r] = p->sent.offsets[r];
    for (int64_t i = 0; i < c->tokens * c->routing.top_k; i++) {
        int32_t expert = expert_at(p, i);
        p->entry_at[i] = -1;
        if (expert < 0) continue;
        int64_t at = p->cursor[routing_owner(&c->routing, expert)]++;
        p->entry_at[i] = (int32_t)at;
        p->send_token[at] = (int32_t)(i / c->routing.top_k);
        p->send_expert[at] = expert;
    }
}

/* Slots arrive by source and, within one, by token and k: placed in this order, slabs are too. */
static void place_slots(BaselinePlan *p) {
    const Slots *s = &p->c->slots;
    int64_t row = 0, alignment = p->c->options->alignment;
    memset(p->slab_end, 0, (size_t)s->num_local * sizeof(int64_t));
    for (int64_t i = 0; i < p->received.total; i++)
        p->slab_end[p->recv_expert[i] - s->first_expert]++;
    for (int l = 0; l < s->num_local; l++) {
        int64_t count = p->slab_end[l];
        p->cursor[l] = row;
        p->slab_end[l] = row + count;
        row += (count + alignment - 1) / alignment * alignment;
        p->slab_limit[l] = row;
    }
    for (int64_t i = 0; i < p->received.total; i++)
        p->recv_row[i] = (int32_t)p->cursor[p->recv_expert[i] - s->first_expert]++;
}

void baseline_plan_make(BaselinePlan *p) {
    int ranks = p->c->world->size;
    count_destinations(p);
    MPI_Alltoall(p->sent.counts, 1, MPI_INT, p->received.counts, 1, MPI_INT, p->comm);
    finish_traffic(&p->sent, ranks);
    finish_traffic(&p->received, ranks);
    permute(p);
    MPI_Alltoallv(p->send_expert, p->sent.counts, p->sent.offsets, MPI_INT32_T, p->recv_expert,
                  p->received.counts, p->received.offsets, MPI_INT32_T, p->comm);
    place_slots(p);
}

bool baseline_plan_alloc(const Case *c, BaselinePlan *p) {
    *p = (BaselinePlan){.c = c};
    size_t entries = (size_t)(c->tokens * c->routing.top_k), slots = (size_t)c->slots.num_slots;
    size_t ranks = (size_t)c->world->size, local = (size_t)c->slots.num_local;
    p->sent.counts = bench_alloc(ranks, sizeof(int), "baseline");
    p->sent.offsets = bench_alloc(ranks, sizeof(int), "baseline");
    p->received.counts = bench_alloc(ranks, sizeof(int), "baseline");
    p->received.offsets = bench_alloc(ranks, sizeof(int), "baseline");
    p->send_token = bench_alloc(entries, sizeof(int32_t), "baseline");
    p->send_expert = bench_alloc(entries, sizeof(int32_t), "baseline");
    p->entry_at = bench_alloc(entries, sizeof(int32_t), "baseline");
    p->recv_expert = bench_alloc(slots, sizeof(int32_t), "baseline");
    p->recv_row = bench_alloc(slots, sizeof(int32_t), "baseline");
    p->cursor = bench_alloc(ranks + local, sizeof(int64_t), "baseline");
    p->slab_end = bench_alloc(local, sizeof(int64_t), "baseline");
    p->slab_limit = bench_alloc(local, sizeof(int64_t), "baseline");
    return p->sent.counts && p->sent.offsets && p->received.counts && p->received.offsets &&
           p->send_token && p->send_expert && p->entry_at && p->recv_expert && p->recv_row &&
           p->cursor && p->slab_end && p->slab_limit;
}

void baseline_plan_free(BaselinePlan *p) {
    void *all[] = {p->sent.counts, p->sent.offsets, p->received.counts, p->received.offsets,
                   p->send_token,  p->send_expert,  p->entry_at,        p->recv_expert,
                   p->recv_row,    p->cursor,       p->slab_end,        p->slab_limit};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        free(all[i]);
}
