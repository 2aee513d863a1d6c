/* SPDX-License-Identifier: Apache-2.0 */
/* Combine, as one call and in phases, and the backward calls. */
#include <math.h>
#include <string.h>

#include "tests/cases/step_parts.h"
#include "tests/oracle/expect.h"

/* ---- combine ---- */

static size_t sums_bytes(const Step *step) {
    return (size_t)step_mine(step)->rows * case_sum_bytes(&step->world->c);
}

/* The output of one combine, and its expected contents. */
typedef struct Summed {
    Image got, expected;
    EpTensor out;
} Summed;

static Summed summed_new(const Step *step) {
    const Case *c = &step->world->c;
    Summed s = {image_new(sums_bytes(step), 16), image_new(sums_bytes(step), 16), {0}};
    s.out = ep_tensor_2d(s.got.data, c->sum_type, step_mine(step)->rows, c->hidden);
    return s;
}

static void summed_check(const Step *step, Summed *s) {
    expect_combine(step->world, step->rank, &s->expected);
    image_check_equal(&s->got, &s->expected, case_sum_bytes(&step->world->c), "out");
    image_free(&s->got);
    image_free(&s->expected);
}

static void combine_whole(const Step *step) {
    const Case *c = &step->world->c;
    Summed s = summed_new(step);
    EpTensor expert_out = step_expert_out(step), slots = step_slot_weights(step);
    EpTensor weights = step_weights(step);
    const EpTensor *by_slot = c->weighted ? &slots : NULL;
    const EpTensor *by_entry = c->weights_at_combine ? &weights : NULL;
    StepExtras n;
    step_extras_new(step, COUNT_ROWS | COUNT_WAITS, 1, &n);
    CHECK_OK(ep_combine_with(step->handle, step->plan, &expert_out, by_slot, by_entry, NULL, &s.out,
                             n.given));
    step_extras_check(step, &n, COUNTED_COMBINE);
    summed_check(step, &s);
}

void step_combine_send(const Step *step) {
    const Case *c = &step->world->c;
    EpTensor expert_out = step_expert_out(step), slots = step_slot_weights(step);
    EpTensor weights = step_weights(step);
    Image images[] = {step_copy_input(&expert_out), step_copy_input(&slots),
                      step_copy_input(&weights)};
    StepExtras n;
    step_extras_new(step, COUNT_ROWS | COUNT_WAITS, 0, &n);
    CHECK_OK(ep_combine_send_with(step->handle, step->plan, &expert_out,
                                  c->weighted ? &slots : NULL,
                                  c->weights_at_combine ? &weights : NULL, NULL, n.given));
    step_extras_check(step, &n, COUNTED_COMBINE);
    for (int i = 0; i < 3; i++)
        step_overwrite_input(&images[i]);
}

void step_combine_wait(const Step *step) {
    Summed s = summed_new(step);
    StepExtras n;
    step_extras_new(step, COUNT_WAITS, 1, &n);
    CHECK_OK(ep_combine_wait_with(step->handle, NULL, &s.out, n.given));
    step_extras_check(step, &n, COUNTED_COMBINE);
    summed_check(step, &s);
}

void step_combine(const Step *step) {
    if (!step->world->c.phases) {
        combine_whole(step);
        return;
    }
    step_combine_send(step);
    step_combine_wait(step);
}

/* ---- backward ---- */

void step_dispatch_backward(const Step *step) {
    const Case *c = &step->world->c;
    const RankWorld *me = step_mine(step);
    size_t entries = (size_t)me->rows * (size_t)c->top_k;
    Image got = image_new(sums_bytes(step), 16), expected = image_new(sums_bytes(step), 16);
    Image got_weights = image_new(entries * 4, 4), expected_weights = image_new(entries * 4, 4);
    EpTensor rows = step_expert_out(step), slots = step_per_weight(step, me->grad_slot_weight);
    EpTensor tokens = ep_tensor_2d(got.data, c->sum_type, me->rows, c->hidden);
    EpTensor weights = ep_tensor_2d(got_weights.data, EP_TYPE_FP32, me->rows, c->top_k);
    const EpTensor *values = c->weighted ? &slots : NULL, *back = c->weighted ? &weights : NULL;
    StepExtras n;
    step_extras_new(step, COUNT_ROWS | COUNT_WAITS, 1, &n);
    CHECK_OK(ep_dispatch_backward_with(step->handle, step->plan, &rows, values, NULL, &tokens, back,
                                       n.given));
    step_extras_check(step, &n, COUNTED_DISPATCH_BACKWARD);
    expect_dispatch_backward(step->world, step->rank, &expected, &expected_weights);
    image_check_equal(&got, &expected, case_sum_bytes(c), "grad_tokens");
    if (c->weighted)
        image_check_equal(&got_weights, &expected_weights, 4 * (size_t)c->top_k,
                          "grad_topk_weights");
    else
        image_check_untouched(&got_weights, "grad_topk_weights");
    image_free(&got);
    image_free(&expected);
    image_free(&got_weights);
    image_free(&expected_weights);
}

/* Dot products must be right within 1e-5 of their terms' magnitudes; all other bytes exactly. */
static void check_slot_gradients(const Step *step, const Image *got) {
    const RankWorld *me = step_mine(step);
    Image frame = image_new(got->bytes, 4);
    for (int64_t row = 0; row < me->buffer_rows; row++) {
        float value;
        memcpy(&value, got->data + row * 4, 4);
        if (!world_writes(step->world, &me->row[row])) continue;
        double magnitude, exact = expect_slot_gradient(step->world, step->rank, row, &magnitude);
        CHECK(fabs(value - exact) <= 1e-5 * magnitude, "row %lld: %.9g instead of %.9g",
              (long long)row, (double)value, exact);
        memcpy(frame.data + row * 4, &value, 4);
    }
    image_check_equal(got, &frame, 4, "grad_slot_weights, tail and guards");
    image_free(&frame);
}

void step_combine_backward(const Step *step) {
    const Case *c = &step->world->c;
    size_t rows = (size_t)step_mine(step)->buffer_rows;
    Image got = image_new(rows * case_sum_bytes(c), 16);
    Image expected = image_new(rows * case_sum_bytes(c), 16), slots = image_new(rows * 4, 4);
    EpTensor grad_out = step_grad_out(step), weights = step_slot_weights(step);
    EpTensor expert_out = step_expert_out(step), grad_slots = step_per_slot(step, slots.data);
    EpTensor grad_rows = step_rows(step, got.data, c->sum_type, c->hidden);
    StepExtras n;
    step_extras_new(step, COUNT_ROWS | COUNT_WAITS, 0, &n);
    CHECK_OK(ep_combine_backward_with(
        step->handle, step->plan, &grad_out, c->weighted ? &weights : NULL,
        c->weighted ? &expert_out : NULL, NULL, &grad_rows, c->weighted ? &grad_slots : NULL,
        n.given));
    step_extras_check(step, &n, COUNTED_COMBINE_BACKWARD);
    expect_combine_backward(step->world, step->rank, &expected);
    image_check_equal(&got, &expected, case_sum_bytes(c), "grad_expert_out");
    if (c->weighted)
        check_slot_gradients(step, &slots);
    else
        image_check_untouched(&slots, "grad_slot_weights");
    image_free(&got);
    image_free(&expected);
    image_free(&slots);
}
