/* SPDX-License-Identifier: Apache-2.0 */
/* Dispatch, as one call and in phases. */
#include <stdlib.h>
#include <string.h>

#include "tests/cases/step_parts.h"
#include "tests/oracle/expect.h"
#include "tests/oracle/quant.h"

/* ---- got and expected side by side ---- */

/* The extras of a dispatch, with a tensor that they refer to. */
typedef struct Extras {
    EpTensor scale;
    EpExtras extras;
} Extras;

/* Returns the case's extras, or NULL where it has none. */
static const EpExtras *extras_of(const Step *step, Extras *x) {
    *x = (Extras){step_global_scale(step), EP_EXTRAS_INIT};
    x->extras.global_scale = &x->scale;
    return quant_form(step->world->c.quant)->is_global ? &x->extras : NULL;
}

static ExpectedRows rows_new(const Step *step) {
    const Case *c = &step->world->c;
    EpTensor scales = step_recv_scales(step, NULL);
    size_t rows = (size_t)step_mine(step)->buffer_rows, index = step_index_bytes(step);
    size_t entries = rows * (size_t)world_row_weights(c);
    return (ExpectedRows){image_new(rows * case_recv_bytes(c), 16), image_new(entries * 4, 4),
                          image_new(step_tensor_bytes(&scales), 4),
                          image_new(entries * index, index)};
}

static void rows_free(ExpectedRows *rows) {
    image_free(&rows->tokens);
    image_free(&rows->weights);
    image_free(&rows->scales);
    image_free(&rows->index);
}

static void rows_compare(const Step *step, const ExpectedRows *got, const ExpectedRows *expected) {
    const Case *c = &step->world->c;
    image_check_equal(&got->tokens, &expected->tokens, case_recv_bytes(c), "recv_tokens");
    if (c->weighted)
        image_check_equal(&got->weights, &expected->weights, 4, "recv_topk_weights");
    else
        image_check_untouched(&got->weights, "recv_topk_weights");
    if (case_scales(c))
        image_check_equal(&got->scales, &expected->scales, case_recv_scale_bytes(c), "recv_scales");
    if (!case_has_rows(c)) return;
    image_check_equal(&got->index, &expected->index, step_index_bytes(step), "recv_topk_idx");
}

/* The outputs of one dispatch, and their expected contents. */
typedef struct Delivery {
    ExpectedRows got, expected;
    EpTensor tokens, weights, scales, index;
} Delivery;

static Delivery delivery_new(const Step *step) {
    const Case *c = &step->world->c;
    Delivery d = {.got = rows_new(step), .expected = rows_new(step)};
    d.tokens = step_recv_tokens(step, d.got.tokens.data);
    d.weights = step_per_weight(step, d.got.weights.data);
    d.scales = step_recv_scales(step, d.got.scales.data);
    d.index = step_rows(step, d.got.index.data, c->index_type, c->top_k);
    return d;
}

static void delivery_check(const Step *step, Delivery *d) {
    expect_dispatch(step->world, step->rank, &d->expected);
    rows_compare(step, &d->got, &d->expected);
    rows_free(&d->got);
    rows_free(&d->expected);
    step_check_sources(step);
}

/* Every other pair of seeds asks for the plan's numbers again. */
static void dispatch_whole(const Step *step) {
    const Case *c = &step->world->c;
    int asks = c->seed / 2 % 2 && !step_is_latency(step);
    StepRouted numbers;
    EpPlanTensors out;
    EpPrepare prepare = EP_PREPARE_INIT;
    Delivery d = delivery_new(step);
    EpTensor tokens = step_tokens(step), weights = step_weights(step), scales = step_scales(step);
    if (asks) step_numbers_new(step, &numbers, &out), prepare.out = &out;
    Extras x;
    CHECK_OK(ep_dispatch_with(step->handle, step->plan, asks ? &prepare : NULL, &tokens,
                              c->weighted ? &weights : NULL, c->scale_bytes ? &scales : NULL, NULL,
                              &d.tokens, c->weighted ? &d.weights : NULL,
                              case_scales(c) ? &d.scales : NULL, case_has_rows(c) ? &d.index : NULL,
                              extras_of(step, &x)));
    delivery_check(step, &d);
    if (asks) step_numbers_check(step, &numbers);
}

static void send_rows(const Step *step) {
    const Case *c = &step->world->c;
    EpTensor tokens = step_tokens(step), weights = step_weights(step), scales = step_scales(step);
    Image images[] = {step_copy_input(&tokens), step_copy_input(&weights),
                      step_copy_input(&scales)};
    Extras x;
    CHECK_OK(ep_dispatch_send_with(step->handle, step->plan, NULL, &tokens,
                                   c->weighted ? &weights : NULL, c->scale_bytes ? &scales : NULL,
                                   NULL, extras_of(step, &x)));
    for (int i = 0; i < 3; i++)
        step_overwrite_input(&images[i]);
}

static void receive_rows(const Step *step) {
    const Case *c = &step->world->c;
    Delivery d = delivery_new(step);
    CHECK_OK(ep_dispatch_wait(step->handle, NULL, &d.tokens, c->weighted ? &d.weights : NULL,
                              case_scales(c) ? &d.scales : NULL,
                              case_has_rows(c) ? &d.index : NULL));
    delivery_check(step, &d);
}

static void dispatch_rows(const Step *step) {
    if (!step->world->c.phases) {
        dispatch_whole(step);
        return;
    }
    send_rows(step);
    receive_rows(step);
}

struct StepPending {
    StepRouted routed;
};

StepPending *step_dispatch_send(const Step *step) {
    StepPending *pending = calloc(1, sizeof(*pending));
    step_routed_new(step, &pending->routed);
    step_routed_prepare(step, &pending->routed);
    send_rows(step);
    return pending;
}

void step_dispatch_wait(const Step *step, StepPending *pending) {
    receive_rows(step);
    step_routed_check(step, &pending->routed);
    free(pending);
}

void step_dispatch_again(const Step *step) {
    dispatch_rows(step);
    step_check_info(step);
}

void step_dispatch(const Step *step) {
    StepRouted r;
    if (!step_is_latency(step)) {
        dispatch_rows(step);
        return;
    }
    step_routed_new(step, &r);
    step_routed_prepare(step, &r);
    dispatch_rows(step);
    step_routed_check(step, &r);
}
