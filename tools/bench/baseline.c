/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/baseline.h"

#include <string.h>

#include "tools/common/data.h"
#include "tools/common/util.h"

/* ---- the plan: also of the baseline on GPUs ------------------------------------------------ */

void baseline_finish_traffic(Traffic *traffic, int ranks) {
    traffic->total = 0;
    for (int r = 0; r < ranks; r++) {
        traffic->offsets[r] = (int)traffic->total;
        traffic->total += traffic->counts[r];
    }
}

int32_t baseline_expert_at(const BaselinePlan *p, int64_t entry) {
    const Case *c = p->c;
    return c->options->index_type == EP_TYPE_INT64
               ? (int32_t)((const int64_t *)c->buffers.index)[entry]
               : ((const int32_t *)c->buffers.index)[entry];
}

static void count_destinations(BaselinePlan *p) {
    const Case *c = p->c;
    memset(p->sent.counts, 0, (size_t)c->world->size * sizeof(int));
    for (int64_t i = 0; i < c->tokens * c->routing.top_k; i++) {
        int32_t expert = baseline_expert_at(p, i);
        if (expert >= 0) p->sent.counts[routing_owner(&c->routing, expert)]++;
    }
}

/* Sort the entries by destination, stably. */
static void permute(BaselinePlan *p) {
    const Case *c = p->c;
    for (int r = 0; r < c->world->size; r++)
        p->cursor[r] = p->sent.offsets[r];
    for (int64_t i = 0; i < c->tokens * c->routing.top_k; i++) {
        int32_t expert = baseline_expert_at(p, i);
        p->entry_at[i] = -1;
        if (expert < 0) continue;
        int64_t at = p->cursor[routing_owner(&c->routing, expert)]++;
        p->entry_at[i] = (int32_t)at;
        p->send_token[at] = (int32_t)(i / c->routing.top_k);
        p->send_expert[at] = expert;
    }
}

/* Slots arrive in the order of source, token, k. Slabs need that order too, so each slot takes the
 * next row of its slab. */
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
    baseline_finish_traffic(&p->sent, ranks);
    baseline_finish_traffic(&p->received, ranks);
    permute(p);
    MPI_Alltoallv(p->send_expert, p->sent.counts, p->sent.offsets, MPI_INT32_T, p->recv_expert,
                  p->received.counts, p->received.offsets, MPI_INT32_T, p->comm);
    place_slots(p);
}

bool baseline_plan_alloc(const Case *c, Pool *pool, BaselinePlan *p) {
    *p = (BaselinePlan){.c = c};
    const size_t entries = (size_t)(c->tokens * c->routing.top_k);
    const size_t slots = (size_t)c->slots.num_slots, ranks = (size_t)c->world->size;
    const size_t local = (size_t)c->slots.num_local;
    int **const traffic[] = {&p->sent.counts, &p->sent.offsets, &p->received.counts,
                             &p->received.offsets};
    for (int i = 0; i < 4; i++)
        *traffic[i] = pool_alloc(pool, ranks, sizeof(int), "baseline");
    p->send_token = pool_alloc(pool, entries, sizeof(int32_t), "baseline");
    p->send_expert = pool_alloc(pool, entries, sizeof(int32_t), "baseline");
    p->entry_at = pool_alloc(pool, entries, sizeof(int32_t), "baseline");
    p->recv_expert = pool_alloc(pool, slots, sizeof(int32_t), "baseline");
    p->recv_row = pool_alloc(pool, slots, sizeof(int32_t), "baseline");
    p->cursor = pool_alloc(pool, ranks + local, sizeof(int64_t), "baseline");
    p->slab_end = pool_alloc(pool, local, sizeof(int64_t), "baseline");
    p->slab_limit = pool_alloc(pool, local, sizeof(int64_t), "baseline");
    return !pool->failed;
}

/* ---- dispatch ------------------------------------------------------------------------------ */

typedef struct Baseline {
    Case *c;
    Pool pool;
    BaselinePlan plan;
    MPI_Datatype row; /* contiguous bytes: counts are rows and stay far below INT_MAX */
    MPI_Datatype scale;
    char *send_rows, *recv_rows, *send_scales, *recv_scales;
    float *send_weights, *recv_weights;
} Baseline;

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

/* Columns summed at a time, so that the sums stay in the L1 cache. */
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
    const size_t entries = (size_t)(c->tokens * c->routing.top_k);
    const size_t slots = (size_t)c->slots.num_slots, scale_bytes = (size_t)c->options->scale_bytes;
    b->send_rows = pool_alloc(&b->pool, entries, c->row_bytes, "baseline");
    b->recv_rows = pool_alloc(&b->pool, slots, c->row_bytes, "baseline");
    b->send_scales = pool_alloc(&b->pool, entries, scale_bytes, "baseline");
    b->recv_scales = pool_alloc(&b->pool, slots, scale_bytes, "baseline");
    b->send_weights = pool_alloc(&b->pool, entries, sizeof(float), "baseline");
    b->recv_weights = pool_alloc(&b->pool, slots, sizeof(float), "baseline");
    return !b->pool.failed;
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

/* After a failure the phases still run: the peers are in MPI. */
bool baseline_check(Case *c, Check *check, TimedCall call, void *context, BaselineResult *out) {
    bool ok = phase_poison(c, PHASE_DISPATCH) && phase_poison(c, PHASE_COMBINE);
    int64_t before = check->wrong;
    for (int which = 0; which < NUM_BASELINE_PHASES; which++)
        ok = call(context, which) && ok;
    ok = phase_fetch(c, PHASE_DISPATCH) && phase_fetch(c, PHASE_COMBINE) && ok;
    if (!ok) return false;
    check_baseline_dispatch(check);
    out->wrong[BASELINE_DISPATCH] = check->wrong - before;
    check_baseline_combine(check);
    out->wrong[BASELINE_COMBINE] = check->wrong - before - out->wrong[BASELINE_DISPATCH];
    return true;
}

static bool measure(Baseline *b, Check *check, BaselineResult *out) {
    const Options *o = b->c->options;
    World *world = b->c->world;
    if (!time_calls(world, o->run.warmup, o->run.iterations, run, b, NUM_BASELINE_PHASES,
                    out->times))
        return false;
    return world_all(world, !o->run.check || baseline_check(b->c, check, run, b, out)) &&
           world_sum(world, out->wrong, NUM_BASELINE_PHASES);
}

static bool host_measure(Case *c, Check *check, BaselineResult *out) {
    Baseline b = {.c = c};
    bool ok = baseline_plan_alloc(c, &b.pool, &b.plan) && alloc_rows(&b);
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
    pool_free(&b.pool);
    return ok;
}

bool baseline_measure(Case *c, Check *check, BaselineResult *out) {
    *out = (BaselineResult){0};
    return c->device ? baseline_measure_nccl(c, check, out) : host_measure(c, check, out);
}
