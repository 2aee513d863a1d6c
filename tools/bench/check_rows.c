/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "tools/bench/check.h"
#include "tools/common/data.h"

/* ---- rows of slots ------------------------------------------------------------------------- */

/* Write into check->row what a slot's row must be. */
typedef void (*Expectation)(Check *check, const Row *what, int64_t row);

/* A buffer with `bytes` for each row: slots as expected, zeros in padding, the rest untouched. */
static void check_slots(Check *check, const char *what, const void *got, size_t bytes, size_t unit,
                        Expectation expect) {
    const Case *c = check->c;
    for (int64_t row = 0; row < c->slots.num_rows; row++) {
        const Row *r = &c->slots.rows[row];
        const char *want = check->row;
        if (r->state == ROW_UNUSED) continue;
        if (r->state == ROW_SLOT)
            expect(check, r, row);
        else if (case_zeroes_row(c, row))
            memset(check->row, 0, bytes);
        else
            want = check->poison;
        check_bytes(check, what, row, (const char *)got + (size_t)row * bytes, want, bytes, unit);
    }
}

/* The same, of `width` numbers for each row. */
static void check_numbers(Check *check, const char *what, const void *got, int width,
                          Expectation expect) {
    check_slots(check, what, got, (size_t)width * sizeof(float), sizeof(float), expect);
}

static void expect_token(Check *check, const Row *what, int64_t row) {
    const Case *c = check->c;
    (void)row;
    data_row((EpType)c->options->type, case_token_id(c, what->rank, what->token), check->row,
             c->row_bytes);
}

/* ---- dispatch ------------------------------------------------------------------------------ */

/* The token as dispatch delivers it. If dispatch quantises, its scales go to check->scales. */
static void expect_delivered(Check *check, const Row *what, int64_t row) {
    const Case *c = check->c;
    expect_token(check, what, row);
    if (!quant_format(c->quant)->bits) return;
    data_to_float((EpType)c->options->type, check->row, check->term, c->options->hidden);
    quant_row(c->quant, check->term, c->options->hidden, check->row, check->scales);
}

static void expect_scales(Check *check, const Row *r, int64_t row) {
    const Case *c = check->c;
    if (!quant_format(c->quant)->bits) {
        data_row(EP_TYPE_UINT8, case_scale_id(c, r->rank, r->token), check->row,
                 c->recv_scale_bytes);
        return;
    }
    expect_delivered(check, r, row);
    memcpy(check->row, check->scales, c->recv_scale_bytes);
}

/* Local index of the expert of entry k; -1 if another rank owns it. */
static int32_t local_expert(const Case *c, const Row *r, int k) {
    int32_t expert = routing_row(&c->routing, r->rank, r->token)[k];
    bool here = expert >= 0 && routing_owner(&c->routing, expert) == c->world->rank;
    return here ? expert - c->slots.first_expert : -1;
}

/* Where one row holds all of a token's entries. */
static void expect_experts(Check *check, const Row *r, int64_t row) {
    (void)row;
    for (int k = 0; k < check->c->weights_width; k++)
        ((int32_t *)(void *)check->row)[k] = local_expert(check->c, r, k);
}

static void expect_weights(Check *check, const Row *r, int64_t row) {
    const Case *c = check->c;
    (void)row;
    for (int i = 0; i < c->weights_width; i++) {
        const int k = r->k < 0 ? i : r->k;
        ((float *)(void *)check->row)[i] =
            local_expert(c, r, k) < 0 ? 0.0f : case_topk_weight(c, r->rank, r->token, k);
    }
}

void check_dispatch(Check *check) {
    const Case *c = check->c;
    const Buffers *b = &c->buffers;
    check_slots(check, "recv_tokens", b->slots_out, c->recv_bytes, ep_type_bytes(c->recv_type),
                expect_delivered);
    if (c->recv_scale_bytes)
        check_slots(check, "recv_scales", b->recv_scales, c->recv_scale_bytes, 1, expect_scales);
    if (slots_has_rows(c->slots.layout))
        check_numbers(check, "recv_topk_idx", b->recv_index, c->weights_width, expect_experts);
    if (c->options->weighted)
        check_numbers(check, "recv_topk_weights", b->recv_weights, c->weights_width,
                      expect_weights);
}

/* ---- combine_backward ---------------------------------------------------------------------- */

/* w * grad_out[t], rounded once; unweighted: the row itself. */
static void expect_gradient(Check *check, const Row *what, int64_t row) {
    const Case *c = check->c;
    EpType type = (EpType)c->options->type;
    expect_token(check, what, row);
    if (!c->options->weighted) return;
    data_to_float(type, check->row, check->term, c->options->hidden);
    data_scale(check->term, case_slot_weight(c, what->rank, what->token, c->world->rank, what->k),
               c->options->hidden);
    data_from_float(type, check->term, check->row, c->options->hidden);
}

/* The only result not defined to the bit: its tolerance is 1e-5 of the sum of magnitudes. What is
 * within it is as expected. */
static void expect_dot(Check *check, const Row *what, int64_t row) {
    const Case *c = check->c;
    EpType type = (EpType)c->options->type;
    float got = c->buffers.slot_grads_out[row];
    double sum = 0, magnitude = 0;
    expect_token(check, what, row);
    data_to_float(type, check->row, check->term, c->options->hidden);
    data_to_float(type, c->buffers.slots_in + (size_t)row * c->row_bytes, check->other,
                  c->options->hidden);
    for (int64_t i = 0; i < c->options->hidden; i++) {
        double product = (double)check->term[i] * (double)check->other[i];
        sum += product;
        magnitude += fabs(product);
    }
    if (!(fabs((double)got - sum) <= 1e-5 * magnitude)) got = (float)sum;
    memcpy(check->row, &got, sizeof(got));
}

void check_combine_backward(Check *check) {
    const Case *c = check->c;
    check_slots(check, "grad_expert_out", c->buffers.slots_out, c->row_bytes, check_unit(check),
                expect_gradient);
    if (c->options->weighted)
        check_numbers(check, "grad_slot_weights", c->buffers.slot_grads_out, 1, expect_dot);
}
