/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_baseline.h"

#include <mpi.h>
#include <stdlib.h>
#include <string.h>

#include "bench_data.h"
#include "bench_error.h"

/* Slots per peer and where they begin in the packed buffer. */
typedef struct Traffic {
    int *counts, *offsets; /* [R] */
    int64_t total;
} Traffic;

typedef struct Baseline {
    Case *c;
    MPI_Comm comm;
    MPI_Datatype row; /* contiguous, so that counts stay far from INT_MAX */
    MPI_Datatype scale;
    Traffic sent, received;
    int32_t *send_token, *send_expert; /* [sent] in packed order */
    int32_t *recv_expert, *recv_row;   /* [received] */
    int32_t *entry_at;                 /* [T, K] place in packed order, -1: none */
    int64_t *cursor;                   /* [max(R, L)] */
    int64_t recv_rows;
    int64_t *slab_end;   /* [L] end of the slots of each slab */
    int64_t *slab_limit; /* [L] the same with padding */
    char *send_rows, *recv_rows_buffer, *send_scales, *recv_scales;
    float *send_weights, *recv_weights;
} Baseline;

/* ---- prepare ------------------------------------------------------------------------------- */

static void finish_traffic(Traffic *traffic, int ranks) {
    traffic->total = 0;
    for (int r = 0; r < ranks; r++) {
        traffic->offsets[r] = (int)traffic->total;
        traffic->total += traffic->counts[r];
    }
}

static int32_t expert_at(const Baseline *b, int64_t entry) {
    const Case *c = b->c;
    return c->options->index_type == EP_TYPE_INT64
               ? (int32_t)((const int64_t *)c->buffers.index)[entry]
               : ((const int32_t *)c->buffers.index)[entry];
}

static void count_destinations(Baseline *b) {
    const Case *c = b->c;
    memset(b->sent.counts, 0, (size_t)c->world->size * sizeof(int));
    for (int64_t i = 0; i < c->tokens * c->routing.top_k; i++) {
        int32_t expert = expert_at(b, i);
        if (expert >= 0) b->sent.counts[routing_owner(&c->routing, expert)]++;
    }
}

/* A stable sort of the entries by destination. */
static void permute(Baseline *b) {
    const Case *c = b->c;
    for (int r = 0; r < c->world->size; r++)
        b->cursor[r] = b->sent.offsets[r];
    for (int64_t i = 0; i < c->tokens * c->routing.top_k; i++) {
        int32_t expert = expert_at(b, i);
        b->entry_at[i] = -1;
        if (expert < 0) continue;
        int64_t at = b->cursor[routing_owner(&c->routing, expert)]++;
        b->entry_at[i] = (int32_t)at;
        b->send_token[at] = (int32_t)(i / c->routing.top_k);
        b->send_expert[at] = expert;
    }
}

/* Slots arrive by source and, within one, by token and k: placed in this order, slabs are too. */
static void place_slots(Baseline *b) {
    const Slots *s = &b->c->slots;
    int64_t row = 0, alignment = b->c->options->alignment;
    memset(b->slab_end, 0, (size_t)s->num_local * sizeof(int64_t));
    for (int64_t i = 0; i < b->received.total; i++)
        b->slab_end[b->recv_expert[i] - s->first_expert]++;
    for (int l = 0; l < s->num_local; l++) {
        int64_t count = b->slab_end[l];
        b->cursor[l] = row;
        b->slab_end[l] = row + count;
        row += (count + alignment - 1) / alignment * alignment;
        b->slab_limit[l] = row;
    }
    for (int64_t i = 0; i < b->received.total; i++)
        b->recv_row[i] = (int32_t)b->cursor[b->recv_expert[i] - s->first_expert]++;
}

static bool prepare(Baseline *b) {
    int ranks = b->c->world->size;
    count_destinations(b);
    MPI_Alltoall(b->sent.counts, 1, MPI_INT, b->received.counts, 1, MPI_INT, b->comm);
    finish_traffic(&b->sent, ranks);
    finish_traffic(&b->received, ranks);
    permute(b);
    MPI_Alltoallv(b->send_expert, b->sent.counts, b->sent.offsets, MPI_INT32_T, b->recv_expert,
                  b->received.counts, b->received.offsets, MPI_INT32_T, b->comm);
    place_slots(b);
    return true;
}

/* ---- dispatch ------------------------------------------------------------------------------ */

static void exchange(Baseline *b, const void *in, void *out, MPI_Datatype type) {
    MPI_Alltoallv(in, b->sent.counts, b->sent.offsets, type, out, b->received.counts,
                  b->received.offsets, type, b->comm);
}

static void pack_rows(const Baseline *b, const char *from, char *to, size_t bytes) {
    for (int64_t i = 0; i < b->sent.total; i++)
        memcpy(to + (size_t)i * bytes, from + (size_t)b->send_token[i] * bytes, bytes);
}

static void unpack_rows(const Baseline *b, const char *from, char *to, size_t bytes) {
    for (int64_t i = 0; i < b->received.total; i++)
        memcpy(to + (size_t)b->recv_row[i] * bytes, from + (size_t)i * bytes, bytes);
}

static void zero_padding(const Baseline *b, char *rows, size_t bytes) {
    for (int l = 0; l < b->c->slots.num_local; l++)
        memset(rows + (size_t)b->slab_end[l] * bytes, 0,
               (size_t)(b->slab_limit[l] - b->slab_end[l]) * bytes);
}

static void dispatch_weights(Baseline *b) {
    const Case *c = b->c;
    for (int64_t i = 0; i < c->tokens * c->routing.top_k; i++) {
        if (b->entry_at[i] >= 0) b->send_weights[b->entry_at[i]] = c->buffers.topk_weights[i];
    }
    exchange(b, b->send_weights, b->recv_weights, MPI_FLOAT);
    unpack_rows(b, (char *)b->recv_weights, (char *)c->buffers.recv_weights, sizeof(float));
    zero_padding(b, (char *)c->buffers.recv_weights, sizeof(float));
}

static bool dispatch(Baseline *b) {
    const Case *c = b->c;
    size_t scale_bytes = (size_t)c->options->scale_bytes;
    pack_rows(b, c->buffers.tokens_in, b->send_rows, c->row_bytes);
    exchange(b, b->send_rows, b->recv_rows_buffer, b->row);
    unpack_rows(b, b->recv_rows_buffer, c->buffers.slots_out, c->row_bytes);
    zero_padding(b, c->buffers.slots_out, c->row_bytes);
    if (c->options->weighted) dispatch_weights(b);
    if (scale_bytes) {
        pack_rows(b, c->buffers.scales, b->send_scales, scale_bytes);
        exchange(b, b->send_scales, b->recv_scales, b->scale);
        unpack_rows(b, b->recv_scales, c->buffers.recv_scales, scale_bytes);
        zero_padding(b, c->buffers.recv_scales, scale_bytes);
    }
    return true;
}

/* ---- combine ------------------------------------------------------------------------------- */

/* Columns summed at a time: the sums stay in the nearest cache. */
enum { BLOCK = 1024 };

static void sum_block(const Baseline *b, int64_t token, int64_t column, int64_t count) {
    const Case *c = b->c;
    EpType type = (EpType)c->options->type;
    size_t at = (size_t)column * ep_type_bytes(type);
    float total[BLOCK];
    memset(total, 0, sizeof(total));
    for (int64_t i = token * c->routing.top_k; i < (token + 1) * c->routing.top_k; i++) {
        float weight = c->options->weighted ? c->buffers.topk_weights[i] : 1.0f;
        if (b->entry_at[i] >= 0)
            data_fma_row(type, total, weight,
                         b->send_rows + (size_t)b->entry_at[i] * c->row_bytes + at, count);
    }
    data_from_float(type, total, c->buffers.tokens_out + (size_t)token * c->row_bytes + at, count);
}

static bool combine(Baseline *b) {
    const Case *c = b->c;
    for (int64_t i = 0; i < b->received.total; i++)
        memcpy(b->recv_rows_buffer + (size_t)i * c->row_bytes,
               c->buffers.slots_in + (size_t)b->recv_row[i] * c->row_bytes, c->row_bytes);
    MPI_Alltoallv(b->recv_rows_buffer, b->received.counts, b->received.offsets, b->row,
                  b->send_rows, b->sent.counts, b->sent.offsets, b->row, b->comm);
    for (int64_t t = 0; t < c->tokens; t++) {
        for (int64_t h = 0; h < c->options->hidden; h += BLOCK)
            sum_block(b, t, h, h + BLOCK < c->options->hidden ? BLOCK : c->options->hidden - h);
    }
    return true;
}

/* ---- memory -------------------------------------------------------------------------------- */

static bool alloc_plan(Baseline *b) {
    const Case *c = b->c;
    size_t entries = (size_t)(c->tokens * c->routing.top_k), slots = (size_t)c->slots.num_slots;
    size_t ranks = (size_t)c->world->size, local = (size_t)c->slots.num_local;
    b->sent.counts = bench_alloc(ranks, sizeof(int), "baseline");
    b->sent.offsets = bench_alloc(ranks, sizeof(int), "baseline");
    b->received.counts = bench_alloc(ranks, sizeof(int), "baseline");
    b->received.offsets = bench_alloc(ranks, sizeof(int), "baseline");
    b->send_token = bench_alloc(entries, sizeof(int32_t), "baseline");
    b->send_expert = bench_alloc(entries, sizeof(int32_t), "baseline");
    b->entry_at = bench_alloc(entries, sizeof(int32_t), "baseline");
    b->recv_expert = bench_alloc(slots, sizeof(int32_t), "baseline");
    b->recv_row = bench_alloc(slots, sizeof(int32_t), "baseline");
    b->cursor = bench_alloc(ranks + local, sizeof(int64_t), "baseline");
    b->slab_end = bench_alloc(local, sizeof(int64_t), "baseline");
    b->slab_limit = bench_alloc(local, sizeof(int64_t), "baseline");
    return b->sent.counts && b->sent.offsets && b->received.counts && b->received.offsets &&
           b->send_token && b->send_expert && b->entry_at && b->recv_expert && b->recv_row &&
           b->cursor && b->slab_end && b->slab_limit;
}

static bool alloc_rows(Baseline *b) {
    const Case *c = b->c;
    size_t entries = (size_t)(c->tokens * c->routing.top_k), slots = (size_t)c->slots.num_slots;
    size_t scale_bytes = (size_t)c->options->scale_bytes;
    b->send_rows = bench_alloc(entries, c->row_bytes, "baseline");
    b->recv_rows_buffer = bench_alloc(slots, c->row_bytes, "baseline");
    b->send_scales = bench_alloc(entries, scale_bytes, "baseline");
    b->recv_scales = bench_alloc(slots, scale_bytes, "baseline");
    b->send_weights = bench_alloc(entries, sizeof(float), "baseline");
    b->recv_weights = bench_alloc(slots, sizeof(float), "baseline");
    return b->send_rows && b->recv_rows_buffer && b->send_scales && b->recv_scales &&
           b->send_weights && b->recv_weights;
}

static void free_all(Baseline *b) {
    void *all[] = {b->sent.counts,  b->sent.offsets,     b->received.counts, b->received.offsets,
                   b->send_token,   b->send_expert,      b->entry_at,        b->recv_expert,
                   b->recv_row,     b->cursor,           b->slab_end,        b->slab_limit,
                   b->send_rows,    b->recv_rows_buffer, b->send_scales,     b->recv_scales,
                   b->send_weights, b->recv_weights};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        free(all[i]);
}

/* ---- the measurement ----------------------------------------------------------------------- */

static bool run(void *context, int which) {
    static bool (*const phases[NUM_BASELINE_PHASES])(Baseline *) = {prepare, dispatch, combine};
    return phases[which](context);
}

const char *baseline_phase_name(BaselinePhase phase) {
    static const char *const names[] = {"baseline_prepare", "baseline_dispatch",
                                        "baseline_combine"};
    return names[phase];
}

/* Once more on poisoned buffers. Runs the phases whatever fails: the peers are inside MPI. */
static bool check_results(Baseline *b, Check *check, BaselineResult *out) {
    phase_poison(b->c, PHASE_DISPATCH);
    phase_poison(b->c, PHASE_COMBINE);
    bool ok = true;
    int64_t before = check->wrong;
    for (int which = 0; which < NUM_BASELINE_PHASES; which++)
        ok = run(b, which) && ok;
    check_baseline_dispatch(check);
    out->wrong[BASELINE_DISPATCH] = check->wrong - before;
    check_baseline_combine(check);
    out->wrong[BASELINE_COMBINE] = check->wrong - before - out->wrong[BASELINE_DISPATCH];
    return ok;
}

static bool measure(Baseline *b, Check *check, BaselineResult *out) {
    const Options *o = b->c->options;
    World *world = b->c->world;
    if (!time_calls(world, o->warmup, o->iterations, run, b, NUM_BASELINE_PHASES, out->times))
        return false;
    return world_all(world, !o->check || check_results(b, check, out)) &&
           world_sum(world, out->wrong, NUM_BASELINE_PHASES);
}

bool baseline_measure(Case *c, Check *check, BaselineResult *out) {
    Baseline b = {.c = c};
    *out = (BaselineResult){0};
    bool ok = alloc_plan(&b) && alloc_rows(&b);
    if (world_all(c->world, ok)) {
        MPI_Comm_dup(MPI_COMM_WORLD, &b.comm);
        MPI_Type_contiguous((int)c->row_bytes, MPI_BYTE, &b.row);
        MPI_Type_contiguous((int)c->options->scale_bytes, MPI_BYTE, &b.scale);
        MPI_Type_commit(&b.row);
        MPI_Type_commit(&b.scale);
        ok = measure(&b, check, out);
        MPI_Type_free(&b.row);
        MPI_Type_free(&b.scale);
        MPI_Comm_free(&b.comm);
    } else {
        ok = false;
    }
    free_all(&b);
    return ok;
}
