/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_baseline.h"

#include <stdlib.h>
#include <string.h>

#include "bench_baseline_plan.h"
#include "bench_data.h"
#include "bench_device.h"
#include "bench_error.h"

typedef struct Baseline {
    Case *c;
    BaselinePlan plan;
    MPI_Datatype row; /* contiguous, so that counts stay far from INT_MAX */
    MPI_Datatype scale;
    char *send_rows, *recv_rows, *send_scales, *recv_scales;
    float *send_weights, *recv_weights;
} Baseline;

/* ---- dispatch ------------------------------------------------------------------------------ */

static void exchange(Baseline *b, const void *in, void *out, MPI_Datatype type) {
    MPI_Alltoallv(in, b->plan.sent.counts, b->plan.sent.offsets, type, out, b->plan.received.counts,
                  b->plan.received.offsets, type, b->plan.comm);
}

static void pack_rows(const Baseline *b, const char *from, char *to, size_t bytes) {
    for (int64_t i = 0; i < b->plan.sent.total; i++)
        memcpy(to + (size_t)i * bytes, from + (size_t)b->plan.send_token[i] * bytes, bytes);
}

static void unpack_rows(const Baseline *b, const char *from, char *to, size_t bytes) {
    for (int64_t i = 0; i < b->plan.received.total; i++)
        memcpy(to + (size_t)b->plan.recv_row[i] * bytes, from + (size_t)i * bytes, bytes);
}

static void zero_padding(const Baseline *b, char *rows, size_t bytes) {
    for (int l = 0; l < b->c->slots.num_local; l++)
        memset(rows + (size_t)b->plan.slab_end[l] * bytes, 0,
               (size_t)(b->plan.slab_limit[l] - b->plan.slab_end[l]) * bytes);
}

static void dispatch_weights(Baseline *b) {
    const Case *c = b->c;
    for (int64_t i = 0; i < c->tokens * c->routing.top_k; i++) {
        if (b->plan.entry_at[i] >= 0)
            b->send_weights[b->plan.entry_at[i]] = c->buffers.topk_weights[i];
    }
    exchange(b, b->send_weights, b->recv_weights, MPI_FLOAT);
    unpack_rows(b, (char *)b->recv_weights, (char *)c->buffers.recv_weights, sizeof(float));
    zero_padding(b, (char *)c->buffers.recv_weights, sizeof(float));
}

static bool dispatch(Baseline *b) {
    const Case *c = b->c;
    size_t scale_bytes = (size_t)c->options->scale_bytes;
    pack_rows(b, c->buffers.tokens_in, b->send_rows, c->row_bytes);
    exchange(b, b->send_rows, b->recv_rows, b->row);
    unpack_rows(b, b->recv_rows, c->buffers.slots_out, c->row_bytes);
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
        if (b->plan.entry_at[i] >= 0)
            data_fma_row(type, total, weight,
                         b->send_rows + (size_t)b->plan.entry_at[i] * c->row_bytes + at, count);
    }
    data_from_float(type, total, c->buffers.tokens_out + (size_t)token * c->row_bytes + at, count);
}

static bool combine(Baseline *b) {
    const Case *c = b->c;
    for (int64_t i = 0; i < b->plan.received.total; i++)
        memcpy(b->recv_rows + (size_t)i * c->row_bytes,
               c->buffers.slots_in + (size_t)b->plan.recv_row[i] * c->row_bytes, c->row_bytes);
    MPI_Alltoallv(b->recv_rows, b->plan.received.counts, b->plan.received.offsets, b->row,
                  b->send_rows, b->plan.sent.counts, b->plan.sent.offsets, b->row, b->plan.comm);
    for (int64_t t = 0; t < c->tokens; t++) {
        for (int64_t h = 0; h < c->options->hidden; h += BLOCK)
            sum_block(b, t, h, h + BLOCK < c->options->hidden ? BLOCK : c->options->hidden - h);
    }
    return true;
}

/* ---- memory -------------------------------------------------------------------------------- */

static bool alloc_rows(Baseline *b) {
    const Case *c = b->c;
    size_t entries = (size_t)(c->tokens * c->routing.top_k), slots = (size_t)c->slots.num_slots;
    size_t scale_bytes = (size_t)c->options->scale_bytes;
    b->send_rows = bench_alloc(entries, c->row_bytes, "baseline");
    b->recv_rows = bench_alloc(slots, c->row_bytes, "baseline");
    b->send_scales = bench_alloc(entries, scale_bytes, "baseline");
    b->recv_scales = bench_alloc(slots, scale_bytes, "baseline");
    b->send_weights = bench_alloc(entries, sizeof(float), "baseline");
    b->recv_weights = bench_alloc(slots, sizeof(float), "baseline");
    return b->send_rows && b->recv_rows && b->send_scales && b->recv_scales && b->send_weights &&
           b->recv_weights;
}

static void free_all(Baseline *b) {
    void *all[] = {b->send_rows,   b->recv_rows,    b->send_scales,
                   b->recv_scales, b->send_weights, b->recv_weights};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        free(all[i]);
    baseline_plan_free(&b->plan);
}

/* ---- the measurement ----------------------------------------------------------------------- */

static bool prepare(Baseline *b) {
    baseline_plan_make(&b->plan);
    return true;
}

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
    bool ok = phase_poison(b->c, PHASE_DISPATCH) && phase_poison(b->c, PHASE_COMBINE);
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

static bool host_measure(Case *c, Check *check, BaselineResult *out) {
    Baseline b = {.c = c};
    bool ok = baseline_plan_alloc(c, &b.plan) && alloc_rows(&b);
    if (world_all(c->world, ok)) {
        MPI_Comm_dup(MPI_COMM_WORLD, &b.plan.comm);
        MPI_Type_contiguous((int)c->row_bytes, MPI_BYTE, &b.row);
        MPI_Type_contiguous((int)c->options->scale_bytes, MPI_BYTE, &b.scale);
        MPI_Type_commit(&b.row);
        MPI_Type_commit(&b.scale);
        ok = measure(&b, check, out);
        MPI_Type_free(&b.row);
        MPI_Type_free(&b.scale);
        MPI_Comm_free(&b.plan.comm);
    } else {
        ok = false;
    }
    free_all(&b);
    return ok;
}

bool baseline_measure(Case *c, Check *check, BaselineResult *out) {
    *out = (BaselineResult){0};
    return c->device ? nccl_measure(c, check, out) : host_measure(c, check, out);
}
