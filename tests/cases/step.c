/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cases/step.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/oracle/expect.h"

static const RankWorld *mine(const Step *step) {
    return &step->world->rank[step->rank];
}

/* ---- tensors ---- */

EpTensor step_tokens(const Step *step) {
    const Case *c = &step->world->c;
    return ep_tensor_2d(mine(step)->token, c->row_type, mine(step)->rows, c->hidden);
}

EpTensor step_weights(const Step *step) {
    return ep_tensor_2d(mine(step)->weight, EP_TYPE_FP32, mine(step)->rows, step->world->c.top_k);
}

EpTensor step_scales(const Step *step) {
    const Case *c = &step->world->c;
    return ep_tensor_2d(mine(step)->scale, EP_TYPE_UINT8, mine(step)->rows, c->scale_bytes);
}

EpTensor step_rows(const Step *step, const void *data, EpType type, int64_t columns) {
    const RankWorld *me = mine(step);
    if (step->world->c.layout != EP_LAYOUT_BATCHED)
        return ep_tensor_2d(data, type, me->buffer_rows, columns);
    return ep_tensor_3d(data, type, me->num_experts, step->world->c.rows_per_expert, columns);
}

EpTensor step_recv_tokens(const Step *step, const void *data) {
    const Case *c = &step->world->c;
    return step_rows(step, data, case_recv_type(c), c->hidden);
}

EpTensor step_recv_scales(const Step *step, const void *data) {
    const Case *c = &step->world->c;
    EpTensor tensor = step_rows(step, data, case_scale_type(c), case_scales(c));
    int last = tensor.ndim - 1;
    if (c->scale_order == EP_SCALES_BY_ROW) return tensor;
    tensor.shape[last] = tensor.shape[last - 1];
    tensor.shape[last - 1] = case_scales(c);
    return tensor;
}

/* One float per slot: the shape of the rows without their columns. */
static EpTensor per_slot(const Step *step, const void *data) {
    EpTensor tensor = step_rows(step, data, EP_TYPE_FP32, 1);
    tensor.ndim--;
    return tensor;
}

/* The shape of recv_topk_weights and of its gradient. */
static EpTensor per_weight(const Step *step, const void *data) {
    if (step->world->c.layout != EP_LAYOUT_FLAT) return per_slot(step, data);
    return step_rows(step, data, EP_TYPE_FP32, step->world->c.top_k);
}

EpTensor step_expert_out(const Step *step) {
    const Case *c = &step->world->c;
    return step_rows(step, mine(step)->expert_out, c->sum_type, c->hidden);
}

EpTensor step_slot_weights(const Step *step) {
    return per_slot(step, mine(step)->slot_weight);
}

EpTensor step_grad_out(const Step *step) {
    const Case *c = &step->world->c;
    return ep_tensor_2d(mine(step)->grad_out, c->sum_type, mine(step)->rows, c->hidden);
}

/* ---- prepare ---- */

static size_t index_bytes(const Step *step) {
    return step->world->c.index_type == EP_TYPE_INT64 ? 8 : 4;
}

/* The indices as the caller's type. */
static Image index_image(const Step *step) {
    const Case *c = &step->world->c;
    size_t entries = (size_t)mine(step)->rows * (size_t)c->top_k;
    size_t bytes = c->index_type == EP_TYPE_INT64 ? 8 : 4;
    Image image = image_new(entries * bytes, bytes);
    for (size_t i = 0; i < entries; i++) {
        int32_t narrow = (int32_t)mine(step)->index[i];
        const void *from = bytes == 8 ? (const void *)&mine(step)->index[i] : (const void *)&narrow;
        memcpy(image.data + i * bytes, from, bytes);
    }
    return image;
}

/* An optional output of prepare: what came, what should have come. */
typedef struct PlanArray {
    Image got, expected;
    EpTensor tensor;
} PlanArray;

static PlanArray plan_array(EpType type, const int64_t *values, int64_t n) {
    size_t bytes = type == EP_TYPE_INT64 ? 8 : 4;
    PlanArray array = {
        image_new((size_t)n * bytes, bytes), image_new((size_t)n * bytes, bytes), {0}};
    for (int64_t i = 0; i < n; i++) {
        int32_t narrow = (int32_t)values[i];
        const void *from = bytes == 8 ? (const void *)&values[i] : (const void *)&narrow;
        memcpy(array.expected.data + (size_t)i * bytes, from, bytes);
    }
    array.tensor = ep_tensor_1d(array.got.data, type, n);
    return array;
}

static void plan_array_check(PlanArray *array, const char *what) {
    image_check_equal(&array->got, &array->expected, array->expected.bytes, what);
    image_free(&array->got);
    image_free(&array->expected);
}

static void check_info_arrays(const RankWorld *me, const EpHandleInfo *info) {
    for (int e = 0; e < me->num_experts; e++) {
        CHECK(info->expert_counts[e] == me->count[e], "expert %d: %d, not %lld", e,
              (int)info->expert_counts[e], (long long)me->count[e]);
        CHECK(info->expert_padded[e] == me->padded[e], "expert %d: %d, not %lld", e,
              (int)info->expert_padded[e], (long long)me->padded[e]);
    }
    for (int e = 0; e <= me->num_experts; e++)
        CHECK(info->expert_offsets[e] == me->offset[e], "expert %d: %d, not %lld", e,
              (int)info->expert_offsets[e], (long long)me->offset[e]);
}

/* (token, rank) rows from one rank to another. */
static int64_t rows_between(const World *world, int from, int to) {
    int64_t rows = 0;
    for (int t = 0; t < world->rank[from].tokens; t++) {
        int named = 0;
        for (int k = 0; k < world->c.top_k; k++) {
            int64_t expert = world->rank[from].index[(int64_t)t * world->c.top_k + k];
            named |= world_live(world, from, t, k) && world_owner(&world->c, expert) == to;
        }
        rows += named;
    }
    return rows;
}

static int nothing_dropped(const World *world) {
    for (int r = 0; r < world->c.ranks; r++)
        if (world->rank[r].dropped) return 0;
    return 1;
}

static void check_info_traffic(const Step *step, const EpHandleInfo *info) {
    int64_t sent = 0, received = 0;
    for (int peer = 0; peer < step->world->c.ranks; peer++) {
        if (peer == step->rank) continue;
        sent += rows_between(step->world, step->rank, peer);
        received += rows_between(step->world, peer, step->rank);
    }
    int64_t local = rows_between(step->world, step->rank, step->rank);
    CHECK(info->remote_rows_sent == sent, "%lld instead of %lld", (long long)info->remote_rows_sent,
          (long long)sent);
    CHECK(info->remote_rows_received == received, "%lld instead of %lld",
          (long long)info->remote_rows_received, (long long)received);
    CHECK(info->local_rows == local, "%lld instead of %lld", (long long)info->local_rows,
          (long long)local);
}

static void check_info(const Step *step) {
    const RankWorld *me = mine(step);
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    REQUIRE_OK(ep_handle_info(step->handle, &info));
    CHECK(info.num_tokens == me->tokens, "%lld instead of %d", (long long)info.num_tokens,
          me->tokens);
    CHECK(info.top_k == step->world->c.top_k, "%lld", (long long)info.top_k);
    CHECK(info.recv_rows == me->recv_rows, "%lld instead of %lld", (long long)info.recv_rows,
          (long long)me->recv_rows);
    CHECK(info.needed_rows == me->needed_rows, "%lld instead of %lld", (long long)info.needed_rows,
          (long long)me->needed_rows);
    CHECK(info.dropped_slots == me->dropped, "%lld instead of %lld", (long long)info.dropped_slots,
          (long long)me->dropped);
    REQUIRE(info.num_local_experts == me->num_experts, "%d", info.num_local_experts);
    check_info_arrays(me, &info);
    if (nothing_dropped(step->world)) check_info_traffic(step, &info);
}

/* All that one call of ep_prepare is given. */
typedef struct Routed {
    PlanArray counts, padded, offsets, totals, tokens, sources;
    Image index;
    EpTensor topk_idx;
} Routed;

static void routed_new(const Step *step, Routed *r) {
    const Case *c = &step->world->c;
    const RankWorld *me = mine(step);
    int64_t totals[] = {me->recv_rows, me->needed_rows, me->dropped}, count = me->tokens;
    EpType type = c->index_type, other = type == EP_TYPE_INT32 ? EP_TYPE_INT64 : EP_TYPE_INT32;
    r->counts = plan_array(type, me->count, me->num_experts);
    r->padded = plan_array(other, me->padded, me->num_experts);
    r->offsets = plan_array(type, me->offset, me->num_experts + 1);
    r->totals = plan_array(other, totals, 3);
    r->sources = plan_array(other, me->from, (int64_t)me->num_experts * c->ranks);
    r->sources.tensor = ep_tensor_2d(r->sources.got.data, other, me->num_experts, c->ranks);
    r->tokens = plan_array(type, &count, 1);
    r->tokens.tensor.data = r->tokens.expected.data;
    r->index = index_image(step);
    r->topk_idx = ep_tensor_2d(me->rows ? r->index.data : NULL, type, me->rows, c->top_k);
}

/* The tensors are copies that are gone afterwards: only data may be kept. */
static void routed_prepare(const Step *step, Routed *r) {
    EpTensor counts = r->counts.tensor, padded = r->padded.tensor, offsets = r->offsets.tensor,
             totals = r->totals.tensor, sources = r->sources.tensor, tokens = r->tokens.tensor,
             topk_idx = r->topk_idx;
    EpPlanTensors out = EP_PLAN_TENSORS_INIT;
    out.expert_counts = &counts, out.expert_padded = &padded;
    out.expert_offsets = &offsets, out.totals = &totals;
    if (TESTS_HAVE_SOURCE_COUNTS) out.source_counts = &sources;
    CHECK_OK(
        ep_prepare(step->handle, &topk_idx, step->world->c.counted ? &tokens : NULL, NULL, &out));
    memset(&out, 0x77, sizeof(out));
    counts = padded = offsets = totals = sources = tokens = topk_idx = (EpTensor){0};
}

/* What the plan has to say, once it is made; it may not depend on the caller's indices any more. */
static void routed_check(const Step *step, Routed *r) {
    memset(r->index.data, 0x77, r->index.bytes);
    plan_array_check(&r->counts, "expert_counts");
    plan_array_check(&r->padded, "expert_padded");
    plan_array_check(&r->offsets, "expert_offsets");
    plan_array_check(&r->totals, "totals");
    if (TESTS_HAVE_SOURCE_COUNTS) {
        plan_array_check(&r->sources, "source_counts");
    } else {
        image_free(&r->sources.got);
        image_free(&r->sources.expected);
    }
    image_free(&r->tokens.got);
    image_free(&r->tokens.expected);
    image_free(&r->index);
    check_info(step);
}

static int is_latency(const Step *step) {
    return step->world->c.mode == EP_MODE_LATENCY;
}

void step_prepare(const Step *step) {
    Routed r;
    if (is_latency(step)) return;
    routed_new(step, &r);
    routed_prepare(step, &r);
    routed_check(step, &r);
}

/* ---- rows: got and expected side by side ---- */

static ExpectedRows rows_new(const Step *step) {
    const Case *c = &step->world->c;
    size_t rows = (size_t)mine(step)->buffer_rows, index = index_bytes(step);
    size_t entries = rows * (size_t)world_row_weights(c);
    return (ExpectedRows){image_new(rows * case_recv_bytes(c), 16), image_new(entries * 4, 4),
                          image_new(rows * case_recv_scale_bytes(c), 4),
                          image_new(entries * index, index)};
}

static void rows_free(ExpectedRows *rows) {
    image_free(&rows->tokens);
    image_free(&rows->weights);
    image_free(&rows->scales);
    image_free(&rows->index);
}

/* What the tail of the indices holds with zero_tail is nobody's business: -1, 0 or untouched. */
static void forgive_index_tail(const Step *step, ExpectedRows *expected, const ExpectedRows *got) {
    const RankWorld *me = mine(step);
    size_t bytes = (size_t)step->world->c.top_k * index_bytes(step);
    for (int64_t row = me->recv_rows; row < me->buffer_rows; row++)
        memcpy(expected->index.data + (size_t)row * bytes, got->index.data + (size_t)row * bytes,
               bytes);
}

static void rows_compare(const Step *step, const ExpectedRows *got, ExpectedRows *expected) {
    const Case *c = &step->world->c;
    image_check_equal(&got->tokens, &expected->tokens, case_recv_bytes(c), "recv_tokens");
    if (c->weighted)
        image_check_equal(&got->weights, &expected->weights, 4, "recv_topk_weights");
    else
        image_check_untouched(&got->weights, "recv_topk_weights");
    if (case_scales(c))
        image_check_equal(&got->scales, &expected->scales, case_recv_scale_bytes(c), "recv_scales");
    if (c->layout != EP_LAYOUT_FLAT) return;
    if (c->zero_tail) forgive_index_tail(step, expected, got);
    image_check_equal(&got->index, &expected->index, index_bytes(step), "recv_topk_idx");
}

/* Where one dispatch puts things, and what should be there. */
typedef struct Delivery {
    ExpectedRows got, expected;
    EpTensor tokens, weights, scales, index;
} Delivery;

static Delivery delivery_new(const Step *step) {
    const Case *c = &step->world->c;
    Delivery d = {.got = rows_new(step), .expected = rows_new(step)};
    d.tokens = step_recv_tokens(step, d.got.tokens.data);
    d.weights = per_weight(step, d.got.weights.data);
    d.scales = step_recv_scales(step, d.got.scales.data);
    d.index = step_rows(step, d.got.index.data, c->index_type, c->top_k);
    return d;
}

static void delivery_check(const Step *step, Delivery *d) {
    expect_dispatch(step->world, step->rank, &d->expected);
    rows_compare(step, &d->got, &d->expected);
    rows_free(&d->got);
    rows_free(&d->expected);
}

static void dispatch_whole(const Step *step) {
    const Case *c = &step->world->c;
    Delivery d = delivery_new(step);
    EpTensor tokens = step_tokens(step), weights = step_weights(step), scales = step_scales(step);
    CHECK_OK(ep_dispatch(step->handle, &tokens, c->weighted ? &weights : NULL,
                         c->scale_bytes ? &scales : NULL, NULL, &d.tokens,
                         c->weighted ? &d.weights : NULL, case_scales(c) ? &d.scales : NULL,
                         c->layout == EP_LAYOUT_FLAT ? &d.index : NULL));
    delivery_check(step, &d);
}

/* A copy of an input, which is overwritten and given back once it was sent. */
static Image borrow(EpTensor *tensor) {
    size_t bytes = ep_type_bytes(tensor->type);
    for (int i = 0; i < tensor->ndim; i++)
        bytes *= (size_t)tensor->shape[i];
    Image image = image_new(bytes, 16);
    if (bytes) memcpy(image.data, tensor->data, bytes);
    tensor->data = image.data;
    return image;
}

static void spoil(Image *image) {
    memset(image->data, 0x77, image->bytes);
    image_free(image);
}

static void send_rows(const Step *step) {
    const Case *c = &step->world->c;
    EpTensor tokens = step_tokens(step), weights = step_weights(step), scales = step_scales(step);
    Image images[] = {borrow(&tokens), borrow(&weights), borrow(&scales)};
    CHECK_OK(ep_dispatch_send(step->handle, &tokens, c->weighted ? &weights : NULL,
                              c->scale_bytes ? &scales : NULL, NULL));
    for (int i = 0; i < 3; i++)
        spoil(&images[i]);
}

static void receive_rows(const Step *step) {
    const Case *c = &step->world->c;
    Delivery d = delivery_new(step);
    CHECK_OK(ep_dispatch_wait(step->handle, NULL, &d.tokens, c->weighted ? &d.weights : NULL,
                              case_scales(c) ? &d.scales : NULL,
                              c->layout == EP_LAYOUT_FLAT ? &d.index : NULL));
    delivery_check(step, &d);
}

static void dispatch_rows(const Step *step) {
    if (!step->world->c.halves) {
        dispatch_whole(step);
        return;
    }
    send_rows(step);
    receive_rows(step);
}

struct StepFlight {
    Routed routed;
};

StepFlight *step_dispatch_send(const Step *step) {
    StepFlight *flight = calloc(1, sizeof(*flight));
    routed_new(step, &flight->routed);
    routed_prepare(step, &flight->routed);
    send_rows(step);
    return flight;
}

void step_dispatch_wait(const Step *step, StepFlight *flight) {
    receive_rows(step);
    routed_check(step, &flight->routed);
    free(flight);
}

void step_dispatch_again(const Step *step) {
    dispatch_rows(step);
    check_info(step);
}

void step_dispatch(const Step *step) {
    Routed r;
    if (!is_latency(step)) {
        dispatch_rows(step);
        return;
    }
    routed_new(step, &r);
    routed_prepare(step, &r);
    dispatch_rows(step);
    routed_check(step, &r);
}

/* ---- sums ---- */

static size_t sums_bytes(const Step *step) {
    return (size_t)mine(step)->rows * case_sum_bytes(&step->world->c);
}

/* Check one combine that was or is to be called with `out`. */
typedef struct Summed {
    Image got, expected;
    EpTensor out;
} Summed;

static Summed summed_new(const Step *step) {
    const Case *c = &step->world->c;
    Summed s = {image_new(sums_bytes(step), 16), image_new(sums_bytes(step), 16), {0}};
    s.out = ep_tensor_2d(s.got.data, c->sum_type, mine(step)->rows, c->hidden);
    return s;
}

static void summed_check(const Step *step, Summed *s) {
    expect_combine(step->world, step->rank, &s->expected);
    image_check_equal(&s->got, &s->expected, case_sum_bytes(&step->world->c), "out");
    image_free(&s->got);
    image_free(&s->expected);
}

static void combine_whole(const Step *step) {
    Summed s = summed_new(step);
    EpTensor expert_out = step_expert_out(step), weights = step_slot_weights(step);
    CHECK_OK(ep_combine(step->handle, &expert_out, step->world->c.weighted ? &weights : NULL, NULL,
                        &s.out));
    summed_check(step, &s);
}

void step_combine_send(const Step *step) {
    EpTensor expert_out = step_expert_out(step), weights = step_slot_weights(step);
    Image images[] = {borrow(&expert_out), borrow(&weights)};
    CHECK_OK(ep_combine_send(step->handle, &expert_out, step->world->c.weighted ? &weights : NULL,
                             NULL));
    spoil(&images[0]);
    spoil(&images[1]);
}

void step_combine_wait(const Step *step) {
    Summed s = summed_new(step);
    CHECK_OK(ep_combine_wait(step->handle, NULL, &s.out));
    summed_check(step, &s);
}

void step_combine(const Step *step) {
    if (!step->world->c.halves) {
        combine_whole(step);
        return;
    }
    step_combine_send(step);
    step_combine_wait(step);
}

void step_dispatch_backward(const Step *step) {
    const Case *c = &step->world->c;
    const RankWorld *me = mine(step);
    size_t entries = (size_t)me->rows * (size_t)c->top_k;
    Image got = image_new(sums_bytes(step), 16), expected = image_new(sums_bytes(step), 16);
    Image got_weights = image_new(entries * 4, 4), expected_weights = image_new(entries * 4, 4);
    EpTensor rows = step_expert_out(step), slots = per_weight(step, me->grad_slot_weight);
    EpTensor tokens = ep_tensor_2d(got.data, c->sum_type, me->rows, c->hidden);
    EpTensor weights = ep_tensor_2d(got_weights.data, EP_TYPE_FP32, me->rows, c->top_k);
    CHECK_OK(ep_dispatch_backward(step->handle, &rows, c->weighted ? &slots : NULL, NULL, &tokens,
                                  c->weighted ? &weights : NULL));
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

/* Dot products are right within 1e-5 of their terms' magnitudes; all else is exact. */
static void check_slot_gradients(const Step *step, const Image *got) {
    const RankWorld *me = mine(step);
    Image frame = image_new(got->bytes, 4);
    for (int64_t row = 0; row < me->buffer_rows; row++) {
        float value;
        memcpy(&value, got->data + row * 4, 4);
        if (me->row[row].kind == ROW_TAIL && !step->world->c.zero_tail) continue;
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
    size_t rows = (size_t)mine(step)->buffer_rows;
    Image got = image_new(rows * case_sum_bytes(c), 16);
    Image expected = image_new(rows * case_sum_bytes(c), 16), slots = image_new(rows * 4, 4);
    EpTensor grad_out = step_grad_out(step), weights = step_slot_weights(step);
    EpTensor expert_out = step_expert_out(step), grad_slots = per_slot(step, slots.data);
    EpTensor grad_rows = step_rows(step, got.data, c->sum_type, c->hidden);
    CHECK_OK(ep_combine_backward(step->handle, &grad_out, c->weighted ? &weights : NULL,
                                 c->weighted ? &expert_out : NULL, NULL, &grad_rows,
                                 c->weighted ? &grad_slots : NULL));
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

/* ---- a whole step ---- */

static int64_t count_invalid(const Step *step, int64_t *first) {
    const RankWorld *me = mine(step);
    int64_t count = 0;
    for (int64_t i = 0; i < (int64_t)me->tokens * step->world->c.top_k; i++) {
        if (me->index[i] < step->world->c.experts) continue;
        if (count++ == 0) *first = i;
    }
    return count;
}

static void check_routing_finding(const Step *step, const EpFinding *found) {
    int64_t first = 0, k = step->world->c.top_k;
    int64_t count = count_invalid(step, &first), seen = mine(step)->index[first];
    CHECK(count > 0, "no index is out of range, yet: %s", ep_last_error());
    CHECK(found->rank == step->rank, "rank %d", (int)found->rank);
    CHECK(found->token == first / k && found->k == first % k, "token %lld, k %lld, not %lld, %lld",
          (long long)found->token, (long long)found->k, (long long)(first / k),
          (long long)(first % k));
    CHECK(found->expected == step->world->c.experts, "%lld", (long long)found->expected);
    CHECK(found->seen == seen, "%lld instead of %lld", (long long)found->seen, (long long)seen);
    CHECK(found->count == count, "%lld instead of %lld", (long long)found->count, (long long)count);
    CHECK(strcmp(found->phase, "prepare") == 0, "%s", found->phase);
}

static void check_overflow_finding(const Step *step, const EpFinding *found) {
    const Case *c = &step->world->c;
    const RankWorld *me = mine(step);
    int64_t capacity = c->layout == EP_LAYOUT_BATCHED ? c->rows_per_expert : c->capacity;
    CHECK(me->dropped > 0 && c->overflow == EP_OVERFLOW_ERROR, "unasked: %s", ep_last_error());
    CHECK(found->rank == step->rank, "rank %d", (int)found->rank);
    CHECK(found->expected == capacity, "%lld instead of %lld", (long long)found->expected,
          (long long)capacity);
    CHECK(found->seen == me->needed_rows, "%lld instead of %lld", (long long)found->seen,
          (long long)me->needed_rows);
    CHECK(found->count == me->dropped, "%lld instead of %lld", (long long)found->count,
          (long long)me->dropped);
}

void step_check_status(const Step *step) {
    int64_t first = 0;
    int expected = count_invalid(step, &first) > 0;
    expected += mine(step)->dropped > 0 && step->world->c.overflow == EP_OVERFLOW_ERROR;
    for (int i = 0; i < expected; i++) {
        EpFinding found = EP_FINDING_INIT;
        EpStatus status = ep_group_status(step->group, &found);
        CHECK(found.status == status, "%d, returned %d", (int)found.status, (int)status);
        CHECK(status == EP_ERR_ROUTING || status == EP_ERR_OVERFLOW, "%d: %s", (int)status,
              ep_last_error());
        if (status == EP_ERR_ROUTING) check_routing_finding(step, &found);
        if (status == EP_ERR_OVERFLOW) check_overflow_finding(step, &found);
    }
    CHECK_OK(ep_group_status(step->group, NULL));
}

void step_move(const Step *step) {
    step_dispatch(step);
    step_combine(step);
    if (is_latency(step)) return;
    step_combine_backward(step);
    step_dispatch_backward(step);
}

void step_all(const Step *step) {
    step_prepare(step);
    step_move(step);
    step_check_status(step);
}
