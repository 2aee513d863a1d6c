/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "tools/bench/check.h"
#include "tools/common/data.h"

/* ---- rows of slots ------------------------------------------------------------------------- */

/* Write into check->row what a slot's row must be. */
typedef void (*Expectation)(Check *check, const Row *what);

static void expect_token(Check *check, const Row *what) {
    const Case *c = check->c;
    data_row((EpType)c->options->type, case_token_id(c, what->rank, what->token), check->row,
             c->row_bytes);
}

/* The token as dispatch delivers it. If dispatch quantises, its scales go to check->scales. */
static void expect_delivered(Check *check, const Row *what) {
    const Case *c = check->c;
    expect_token(check, what);
    if (!quant_format(c->quant)->bits) return;
    data_to_float((EpType)c->options->type, check->row, check->term, c->options->hidden);
    quant_row(c->quant, check->term, c->options->hidden, check->row, check->scales);
}

/* w * grad_out[t], rounded once; unweighted: the row itself. */
static void expect_gradient(Check *check, const Row *what) {
    const Case *c = check->c;
    EpType type = (EpType)c->options->type;
    expect_token(check, what);
    if (!c->options->weighted) return;
    data_to_float(type, check->row, check->term, c->options->hidden);
    data_scale(check->term, case_slot_weight(c, what->rank, what->token, c->world->rank, what->k),
               c->options->hidden);
    data_from_float(type, check->term, check->row, c->options->hidden);
}

static void check_rows(Check *check, const char *what, Expectation expect, size_t row_bytes,
                       size_t unit) {
    const Case *c = check->c;
    for (int64_t row = 0; row < c->slots.num_rows; row++) {
        const Row *r = &c->slots.rows[row];
        const char *want = check->row;
        if (r->state == ROW_UNUSED) continue;
        if (r->state == ROW_SLOT)
            expect(check, r);
        else if (case_zeroes_row(c, row))
            memset(check->row, 0, row_bytes);
        else
            want = check->poison;
        check_bytes(check, what, row, c->buffers.slots_out + (size_t)row * row_bytes, want,
                    row_bytes, unit);
    }
}

/* ---- dispatch ------------------------------------------------------------------------------ */

static void expect_scales(Check *check, const Row *r) {
    const Case *c = check->c;
    if (!quant_format(c->quant)->bits)
        data_row(EP_TYPE_UINT8, case_scale_id(c, r->rank, r->token), check->scales,
                 c->recv_scale_bytes);
    else
        expect_delivered(check, r);
}

static void check_scales(Check *check) {
    const Case *c = check->c;
    size_t bytes = c->recv_scale_bytes;
    for (int64_t row = 0; bytes && row < c->slots.num_rows; row++) {
        const Row *r = &c->slots.rows[row];
        const char *want = check->scales;
        if (r->state == ROW_SLOT)
            expect_scales(check, r);
        else if (case_zeroes_row(c, row))
            memset(check->scales, 0, bytes);
        else
            want = check->poison;
        if (r->state != ROW_UNUSED)
            check_bytes(check, "recv_scales", row, c->buffers.recv_scales + (size_t)row * bytes,
                        want, bytes, 1);
    }
}

/* Local index of the expert of entry k; -1 if another rank owns it. */
static int32_t local_expert(const Case *c, const Row *r, int k) {
    int32_t expert = routing_row(&c->routing, r->rank, r->token)[k];
    bool here = expert >= 0 && routing_owner(&c->routing, expert) == c->world->rank;
    return here ? expert - c->slots.first_expert : -1;
}

static void check_flat_entry(Check *check, int64_t row, int k) {
    const Case *c = check->c;
    const Row *r = &c->slots.rows[row];
    int64_t at = row * c->weights_width + k;
    int32_t expert = local_expert(c, r, k);
    check_bytes(check, "recv_topk_idx", row, &c->buffers.recv_index[at], &expert, sizeof(expert),
                sizeof(expert));
    if (c->options->weighted)
        check_float(check, "recv_topk_weights", row, &c->buffers.recv_weights[at],
                    expert < 0 ? 0.0f : case_topk_weight(c, r->rank, r->token, k));
}

static void check_flat_entries(Check *check) {
    const Case *c = check->c;
    size_t bytes = (size_t)c->weights_width * sizeof(float);
    for (int64_t row = 0; row < c->slots.num_rows; row++) {
        const Row *r = &c->slots.rows[row];
        for (int k = 0; r->state == ROW_SLOT && k < c->weights_width; k++)
            check_flat_entry(check, row, k);
        if (r->state != ROW_TAIL) continue;
        check_bytes(check, "recv_topk_idx", row, &c->buffers.recv_index[row * c->weights_width],
                    check->poison, bytes, sizeof(int32_t));
        check_bytes(check, "recv_topk_weights", row,
                    &c->buffers.recv_weights[row * c->weights_width], check->poison, bytes,
                    sizeof(float));
    }
}

static void check_weights(Check *check) {
    const Case *c = check->c;
    for (int64_t row = 0; c->options->weighted && row < c->slots.num_rows; row++) {
        const Row *r = &c->slots.rows[row];
        const float *got = &c->buffers.recv_weights[row];
        if (r->state == ROW_SLOT)
            check_float(check, "recv_topk_weights", row, got,
                        case_topk_weight(c, r->rank, r->token, r->k));
        else if (case_zeroes_row(c, row))
            check_float(check, "recv_topk_weights", row, got, 0.0f);
        else
            check_bytes(check, "recv_topk_weights", row, got, check->poison, sizeof(float),
                        sizeof(float));
    }
}

void check_dispatch(Check *check) {
    check_rows(check, "recv_tokens", expect_delivered, check->c->recv_bytes,
               ep_type_bytes(check->c->recv_type));
    check_scales(check);
    if (slots_has_rows(check->c->slots.layout))
        check_flat_entries(check);
    else
        check_weights(check);
}

/* ---- combine_backward ---------------------------------------------------------------------- */

typedef struct Dot {
    double sum, magnitude;
} Dot;

static Dot dot(const float *x, const float *y, int64_t count) {
    Dot d = {0, 0};
    for (int64_t i = 0; i < count; i++) {
        double product = (double)x[i] * (double)y[i];
        d.sum += product;
        d.magnitude += fabs(product);
    }
    return d;
}

/* The only result not defined to the bit: its tolerance is 1e-5 of the sum of magnitudes. */
static void check_dot(Check *check, int64_t row) {
    const Case *c = check->c;
    EpType type = (EpType)c->options->type;
    expect_token(check, &c->slots.rows[row]);
    data_to_float(type, check->row, check->term, c->options->hidden);
    data_to_float(type, c->buffers.slots_in + (size_t)row * c->row_bytes, check->other,
                  c->options->hidden);
    Dot want = dot(check->term, check->other, c->options->hidden);
    float got = c->buffers.slot_grads_out[row], near = (float)want.sum;
    if (!(fabs((double)got - want.sum) <= 1e-5 * want.magnitude))
        check_float(check, "grad_slot_weights", row, &got, near);
}

static void check_dots(Check *check) {
    const Case *c = check->c;
    for (int64_t row = 0; c->options->weighted && row < c->slots.num_rows; row++) {
        RowState state = c->slots.rows[row].state;
        const float *got = &c->buffers.slot_grads_out[row];
        if (state == ROW_SLOT)
            check_dot(check, row);
        else if (case_zeroes_row(c, row))
            check_float(check, "grad_slot_weights", row, got, 0.0f);
        else
            check_bytes(check, "grad_slot_weights", row, got, check->poison, sizeof(float),
                        sizeof(float));
    }
}

void check_combine_backward(Check *check) {
    check_rows(check, "grad_expert_out", expect_gradient, check->c->row_bytes, check_unit(check));
    check_dots(check);
}
