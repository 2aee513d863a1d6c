/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "bench_check.h"
#include "bench_data.h"

/* Adds the term of one slot to `sum`. */
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

/* Owner of the slot of entry k, or -1 where there is none. */
static int slot_owner(const Case *c, int64_t token, int k) {
    int rank = c->world->rank;
    int64_t entry = (c->routing.first[rank] + token) * c->routing.top_k + k;
    return c->slots.row_of[entry] < 0 ? -1 : routing_owner(&c->routing, c->routing.experts[entry]);
}

/* One rank's terms in ascending k; in the flat layout one row stands for all of them. */
static bool sum_on_rank(Check *check, int64_t token, int owner, bool weighted) {
    const Case *c = check->c;
    bool any = false;
    for (int k = 0; k < c->routing.top_k; k++) {
        if (slot_owner(c, token, k) != owner || (any && c->slots.layout == EP_LAYOUT_FLAT))
            continue;
        if (!any) memset(check->partial, 0, (size_t)c->options->hidden * sizeof(float));
        add_term(check, check->partial, token, owner, k, weighted);
        any = true;
    }
    return any;
}

/* The sum that ep_combine defines: per rank, then over ranks; what travels is rounded once. */
static void expect_sum(Check *check, int64_t token, bool weighted) {
    const Case *c = check->c;
    EpType type = (EpType)c->options->type;
    int64_t hidden = c->options->hidden;
    memset(check->total, 0, (size_t)hidden * sizeof(float));
    for (int owner = 0; owner < c->world->size; owner++) {
        if (!sum_on_rank(check, token, owner, weighted)) continue;
        if (owner != c->world->rank) {
            data_from_float(type, check->partial, check->row, hidden);
            data_to_float(type, check->row, check->partial, hidden);
        }
        data_add(check->total, check->partial, hidden);
    }
    data_from_float(type, check->total, check->row, hidden);
}

static void check_sums(Check *check, const char *what, bool weighted) {
    const Case *c = check->c;
    for (int64_t t = 0; t < c->tokens; t++) {
        expect_sum(check, t, weighted);
        check_bytes(check, what, t, c->buffers.tokens_out + (size_t)t * c->row_bytes, check->row,
                    c->row_bytes, check_unit(check));
    }
}

void check_combine(Check *check) {
    check_sums(check, "out", check->c->options->weighted);
}

void check_dispatch_backward(Check *check) {
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
