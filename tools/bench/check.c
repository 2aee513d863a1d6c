/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/check.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tools/common/data.h"
#include "tools/common/util.h"

bool check_create(const Case *c, Check *out) {
    *out = (Check){.c = c};
    float **const sums[] = {&out->total, &out->of_node, &out->partial, &out->term, &out->other};
    char **const rows[] = {&out->row, &out->scales, &out->poison};
    for (int i = 0; i < 5; i++)
        *sums[i] = pool_alloc(&out->pool, (size_t)c->options->hidden, sizeof(float), "check");
    for (int i = 0; i < 3; i++)
        *rows[i] = pool_alloc(&out->pool, 1, EP_MAX_ROW_BYTES, "check");
    if (out->poison) memset(out->poison, POISON_BYTE, EP_MAX_ROW_BYTES);
    return !out->pool.failed;
}

void check_destroy(Check *check) {
    pool_free(&check->pool);
}

/* ---- comparing ----------------------------------------------------------------------------- */

/* At most the first 8 bytes of an element, in the machine's byte order. */
static unsigned long long raw(const char *element, size_t unit) {
    unsigned long long value = 0;
    memcpy(&value, element, unit < sizeof(value) ? unit : sizeof(value));
    return value;
}

/* Count one wrong element. */
static void check_mismatch(Check *check, const char *what, int64_t row, size_t column,
                           unsigned long long want, unsigned long long got) {
    if (check->wrong++ == 0)
        snprintf(check->first, sizeof(check->first),
                 "rank %d, %s: %s row %lld column %zu: expected 0x%llx, got 0x%llx",
                 check->c->world->rank, check->phase, what, (long long)row, column, want, got);
}

void check_bytes(Check *check, const char *what, int64_t row, const void *got, const void *want,
                 size_t bytes, size_t unit) {
    if (memcmp(got, want, bytes) == 0) return;
    for (size_t at = 0; at < bytes; at += unit) {
        const char *g = (const char *)got + at, *w = (const char *)want + at;
        if (memcmp(g, w, unit) != 0)
            check_mismatch(check, what, row, at / unit, raw(w, unit), raw(g, unit));
    }
}

void check_float(Check *check, const char *what, int64_t row, const float *got, float want) {
    check_bytes(check, what, row, got, &want, sizeof(want), sizeof(want));
}

size_t check_unit(const Check *check) {
    return ep_type_bytes((EpType)check->c->options->type);
}

/* ---- prepare ------------------------------------------------------------------------------- */

static void check_int(Check *check, const char *what, int64_t row, int64_t got, int64_t want) {
    check_bytes(check, what, row, &got, &want, sizeof(want), sizeof(want));
}

static void check_experts(Check *check, const EpHandleInfo *info) {
    const Slots *s = &check->c->slots;
    const int64_t *plan = check->c->buffers.plan;
    int64_t local = s->num_local;
    for (int64_t l = 0; l < local; l++) {
        check_int(check, "expert_counts", l, plan[l], s->counts[l]);
        check_int(check, "expert_padded", l, plan[local + l], s->padded[l]);
        check_int(check, "info.expert_counts", l, info->expert_counts[l], s->counts[l]);
        check_int(check, "info.expert_padded", l, info->expert_padded[l], s->padded[l]);
    }
    for (int64_t l = 0; l <= local; l++) {
        check_int(check, "expert_offsets", l, plan[2 * local + l], s->offsets[l]);
        check_int(check, "info.expert_offsets", l, info->expert_offsets[l], s->offsets[l]);
    }
}

static void check_prepare(Check *check) {
    const Case *c = check->c;
    const Slots *s = &c->slots;
    const int64_t *totals = c->buffers.plan + 3 * s->num_local + 1;
    check_int(check, "totals", 0, totals[0], s->recv_rows);
    check_int(check, "totals", 1, totals[1], s->needed_rows);
    check_int(check, "totals", 2, totals[2], s->dropped);
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    if (ep_handle_info(c->handle, &info) != EP_OK) {
        check_mismatch(check, "ep_handle_info", 0, 0, EP_OK, 1);
        return;
    }
    check_int(check, "info.num_tokens", 0, info.num_tokens, c->tokens);
    check_int(check, "info.top_k", 0, info.top_k, c->options->top_k);
    check_int(check, "info.recv_rows", 0, info.recv_rows, s->recv_rows);
    check_int(check, "info.needed_rows", 0, info.needed_rows, s->needed_rows);
    check_int(check, "info.dropped_slots", 0, info.dropped_slots, s->dropped);
    check_int(check, "info.num_local_experts", 0, info.num_local_experts, s->num_local);
    if (info.num_local_experts == s->num_local) check_experts(check, &info);
}

/* ---- sums: combine and dispatch_backward --------------------------------------------------- */

/* Add the term of one slot to `sum`. */
static void add_term(Check *check, float *sum, int64_t token, int owner, int k, bool weighted) {
    const Case *c = check->c;
    int rank = c->world->rank, expert = routing_row(&c->routing, rank, token)[k];
    data_row((EpType)c->options->type, case_slot_id(c, rank, token, owner, expert, k), check->row,
             c->row_bytes);
    data_to_float((EpType)c->options->type, check->row, check->term, c->options->hidden);
    if (weighted)
        data_fma(sum, case_slot_weight(c, rank, token, owner, k), check->term, c->options->hidden);
    else
        data_add(sum, check->term, c->options->hidden);
}

/* Owner of the slot of entry k, or -1 if there is no slot. */
static int slot_owner(const Case *c, int64_t token, int k) {
    int rank = c->world->rank;
    int64_t entry = (c->routing.first[rank] + token) * c->routing.top_k + k;
    return c->slots.row_of[entry] < 0 ? -1 : routing_owner(&c->routing, c->routing.experts[entry]);
}

/* Sum one rank's terms in ascending k. In some layouts one row holds all of them. False if there
 * is no term. */
static bool sum_on_rank(Check *check, int64_t token, int owner, bool weighted) {
    const Case *c = check->c;
    bool any = false;
    for (int k = 0; k < c->routing.top_k; k++) {
        if (slot_owner(c, token, k) != owner || (any && slots_has_rows(c->slots.layout))) continue;
        if (!any) memset(check->partial, 0, (size_t)c->options->hidden * sizeof(float));
        add_term(check, check->partial, token, owner, k, weighted);
        any = true;
    }
    return any;
}

/* Round or quantise a sum, as it travels. */
static void round_sum(Check *check, float *sum) {
    const Options *o = check->c->options;
    EpType type = (EpType)o->type;
    if (quant_format(o->sum_quant)->bits) {
        quant_row((EpQuant)o->sum_quant, sum, o->hidden, check->row, check->scales);
        quant_to_float(check->row, check->scales, o->hidden, sum);
        return;
    }
    data_from_float(type, sum, check->row, check->c->options->hidden);
    data_to_float(type, check->row, sum, check->c->options->hidden);
}

/* Add one rank's partial sum, rounded if another rank sends it. */
static void add_rank(Check *check, float *sum, int64_t token, int owner, bool weighted) {
    if (!sum_on_rank(check, token, owner, weighted)) return;
    if (owner != check->c->world->rank) round_sum(check, check->partial);
    data_add(sum, check->partial, check->c->options->hidden);
}

/* Returns the lowest rank on the node of a rank. */
static int lowest_on_node(const Case *c, int rank) {
    int lowest = 0;
    while (c->nodes[lowest] != c->nodes[rank])
        lowest++;
    return lowest;
}

/* Add the sum of another node's ranks, rounded again. */
static void add_node(Check *check, int lowest, int64_t token, bool weighted) {
    const Case *c = check->c;
    memset(check->of_node, 0, (size_t)c->options->hidden * sizeof(float));
    for (int owner = lowest; owner < c->world->size; owner++)
        if (c->nodes[owner] == c->nodes[lowest])
            add_rank(check, check->of_node, token, owner, weighted);
    round_sum(check, check->of_node);
    data_add(check->total, check->of_node, c->options->hidden);
}

/* The sum that ep_combine defines: by entry in ascending k; or per rank; over the ranks of each
 * other node, which stands where its lowest rank does; then over this node's ranks and the other
 * nodes. */
static void expect_sum(Check *check, int64_t token, bool weighted) {
    const Case *c = check->c;
    bool by_entry = c->options->sums == EP_SUMS_BY_ENTRY;
    memset(check->total, 0, (size_t)c->options->hidden * sizeof(float));
    for (int k = 0; by_entry && k < c->routing.top_k; k++) {
        int owner = slot_owner(c, token, k);
        if (owner >= 0) add_term(check, check->total, token, owner, k, weighted);
    }
    for (int owner = 0; !by_entry && owner < c->world->size; owner++) {
        if (c->nodes[owner] == c->nodes[c->world->rank])
            add_rank(check, check->total, token, owner, weighted);
        else if (lowest_on_node(c, owner) == owner)
            add_node(check, owner, token, weighted);
    }
    data_from_float((EpType)c->options->type, check->total, check->row, c->options->hidden);
}

static void check_sums(Check *check, const char *what, bool weighted) {
    const Case *c = check->c;
    for (int64_t t = 0; t < c->tokens; t++) {
        expect_sum(check, t, weighted);
        check_bytes(check, what, t, c->buffers.tokens_out + (size_t)t * c->row_bytes, check->row,
                    c->row_bytes, check_unit(check));
    }
}

static void check_combine(Check *check) {
    check_sums(check, "out", check->c->options->weighted);
}

static void check_dispatch_backward(Check *check) {
    const Case *c = check->c;
    int top_k = c->routing.top_k;
    check_sums(check, "grad_tokens", false);
    for (int64_t i = 0; c->options->weighted && i < c->tokens * top_k; i++) {
        int k = (int)(i % top_k);
        bool live = slot_owner(c, i / top_k, k) >= 0;
        check_float(check, "grad_topk_weights", i / top_k, &c->buffers.topk_grads[i],
                    live ? case_slot_grad(c, c->world->rank, i / top_k, k) : 0.0f);
    }
}

/* A unit in the last place of 1, halved. */
static float half_unit(EpType type) {
    return type == EP_TYPE_BF16 ? 0x1p-8f : type == EP_TYPE_FP16 ? 0x1p-11f : 0x1p-24f;
}

/* Set check->total to the exact sum of a token, and check->other to how far off one may be: R
 * roundings, here and there, of what is no larger than the sum of all ranks' magnitudes. */
static void bound_sum(Check *check, int64_t token) {
    const Case *c = check->c;
    const int64_t hidden = c->options->hidden;
    const float unit = half_unit((EpType)c->options->type) + 0x1p-24f;
    memset(check->total, 0, (size_t)hidden * sizeof(float));
    for (int64_t h = 0; h < hidden; h++)
        check->other[h] = 1e-6f; /* fp16 has no smaller numbers */
    for (int owner = 0; owner < c->world->size; owner++) {
        if (!sum_on_rank(check, token, owner, c->options->weighted)) continue;
        data_add(check->total, check->partial, hidden);
        for (int64_t h = 0; h < hidden; h++)
            check->other[h] += (float)c->world->size * unit * fabsf(check->partial[h]);
    }
}

void check_near_sums(Check *check, const char *phase, const char *got) {
    const Case *c = check->c;
    check->phase = phase;
    for (int64_t t = 0; t < c->tokens; t++) {
        bound_sum(check, t);
        data_to_float((EpType)c->options->type, got + (size_t)t * c->row_bytes, check->term,
                      c->options->hidden);
        for (int64_t h = 0; h < c->options->hidden; h++)
            if (!(fabsf(check->term[h] - check->total[h]) <= check->other[h]))
                check_float(check, "out", t, &check->term[h], check->total[h]);
    }
}

/* ---- phases -------------------------------------------------------------------------------- */

void check_phase(Check *check, PhaseId phase) {
    static void (*const checks[NUM_PHASES])(Check *) = {
        [PHASE_PREPARE] = check_prepare,
        [PHASE_DISPATCH] = check_dispatch,
        [PHASE_COMBINE] = check_combine,
        [PHASE_COMBINE_BACKWARD] = check_combine_backward,
        [PHASE_DISPATCH_BACKWARD] = check_dispatch_backward,
    };
    check->phase = phase_name(phase);
    checks[phase](check);
}

void check_baseline_dispatch(Check *check) {
    check->phase = "baseline dispatch";
    check_dispatch(check);
}

void check_baseline_combine(Check *check) {
    const Case *c = check->c;
    check->phase = "baseline combine";
    for (int64_t t = 0; t < c->tokens; t++) {
        memset(check->total, 0, (size_t)c->options->hidden * sizeof(float));
        for (int k = 0; k < c->routing.top_k; k++) {
            int owner = slot_owner(c, t, k);
            if (owner >= 0) add_term(check, check->total, t, owner, k, c->options->weighted);
        }
        data_from_float((EpType)c->options->type, check->total, check->row, c->options->hidden);
        check_bytes(check, "out", t, c->buffers.tokens_out + (size_t)t * c->row_bytes, check->row,
                    c->row_bytes, check_unit(check));
    }
}
