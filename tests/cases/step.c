/* SPDX-License-Identifier: Apache-2.0 */
/* The tensors of a step, and the whole step. */
#include <string.h>

#include "tests/cases/step_parts.h"

/* ---- tensors ---- */

EpTensor step_tokens(const Step *step) {
    const Case *c = &step->world->c;
    return ep_tensor_2d(step_mine(step)->token, c->row_type, step_mine(step)->rows, c->hidden);
}

EpTensor step_weights(const Step *step) {
    return ep_tensor_2d(step_mine(step)->weight, EP_TYPE_FP32, step_mine(step)->rows,
                        step->world->c.top_k);
}

EpTensor step_scales(const Step *step) {
    const Case *c = &step->world->c;
    return ep_tensor_2d(step_mine(step)->scale, EP_TYPE_UINT8, step_mine(step)->rows,
                        c->scale_bytes);
}

EpTensor step_global_scale(const Step *step) {
    return ep_tensor_1d(&step_mine(step)->global_scale, EP_TYPE_FP32, 1);
}

EpTensor step_rows(const Step *step, const void *data, EpType type, int64_t columns) {
    const RankWorld *me = step_mine(step);
    const Case *c = &step->world->c;
    int64_t block = case_block_rows(c), blocks = case_has_rows(c) ? c->ranks : me->num_experts;
    if (block) return ep_tensor_3d(data, type, blocks, block, columns);
    return ep_tensor_2d(data, type, me->buffer_rows, columns);
}

EpTensor step_recv_tokens(const Step *step, const void *data) {
    const Case *c = &step->world->c;
    return step_rows(step, data, case_recv_type(c), case_recv_width(c));
}

EpTensor step_recv_scales(const Step *step, const void *data) {
    const Case *c = &step->world->c;
    EpTensor tensor = step_rows(step, data, case_scale_type(c), case_scales(c));
    int last = tensor.ndim - 1;
    if (c->scale_order == EP_SCALES_BY_ROW) return tensor;
    if (c->scale_order == EP_SCALES_SWIZZLED) {
        tensor.shape[last] = (tensor.shape[last] + 3) / 4 * 4;
        tensor.shape[last - 1] = (tensor.shape[last - 1] + 127) / 128 * 128;
        return tensor;
    }
    tensor.shape[last] = tensor.shape[last - 1];
    tensor.shape[last - 1] = case_scales(c);
    return tensor;
}

EpTensor step_per_slot(const Step *step, const void *data) {
    EpTensor tensor = step_rows(step, data, EP_TYPE_FP32, 1);
    tensor.ndim--;
    return tensor;
}

EpTensor step_per_weight(const Step *step, const void *data) {
    if (!case_has_rows(&step->world->c)) return step_per_slot(step, data);
    return step_rows(step, data, EP_TYPE_FP32, step->world->c.top_k);
}

EpTensor step_expert_out(const Step *step) {
    const Case *c = &step->world->c;
    return step_rows(step, step_mine(step)->expert_out, c->sum_type, c->hidden);
}

EpTensor step_slot_weights(const Step *step) {
    return step_per_slot(step, step_mine(step)->slot_weight);
}

EpTensor step_grad_out(const Step *step) {
    const Case *c = &step->world->c;
    return ep_tensor_2d(step_mine(step)->grad_out, c->sum_type, step_mine(step)->rows, c->hidden);
}

EpTensor step_bias(const Step *step, int i) {
    const Case *c = &step->world->c;
    return ep_tensor_2d(step_mine(step)->bias[i], c->sum_type, step_mine(step)->rows, c->hidden);
}

/* ---- copies of inputs ---- */

size_t step_tensor_bytes(const EpTensor *tensor) {
    size_t bytes = ep_type_bytes(tensor->type);
    for (int i = 0; i < tensor->ndim; i++)
        bytes *= (size_t)tensor->shape[i];
    return bytes;
}

Image step_copy_input(EpTensor *tensor) {
    size_t bytes = step_tensor_bytes(tensor);
    Image image = image_new(bytes, 16);
    if (bytes) memcpy(image.data, tensor->data, bytes);
    tensor->data = image.data;
    return image;
}

void step_overwrite_input(Image *image) {
    memset(image->data, 0x77, image->bytes);
    image_free(image);
}

/* ---- a whole step ---- */

static int64_t count_invalid(const Step *step, int64_t *first) {
    const RankWorld *me = step_mine(step);
    int64_t count = 0;
    for (int64_t i = 0; i < (int64_t)me->tokens * step->world->c.top_k; i++) {
        if (me->index[i] < step->world->c.experts) continue;
        if (count++ == 0) *first = i;
    }
    return count;
}

static void check_routing_finding(const Step *step, const EpFinding *found) {
    int64_t first = 0, k = step->world->c.top_k;
    int64_t count = count_invalid(step, &first), seen = step_mine(step)->index[first];
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
    const RankWorld *me = step_mine(step);
    int64_t capacity = case_block_rows(c) ? case_block_rows(c) : c->capacity;
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
    expected += step_mine(step)->dropped > 0 && step->world->c.overflow == EP_OVERFLOW_ERROR;
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
    if (step_is_latency(step)) return;
    step_combine_backward(step);
    step_dispatch_backward(step);
}

void step_all(const Step *step) {
    step_prepare(step);
    step_move(step);
    step_check_status(step);
}
