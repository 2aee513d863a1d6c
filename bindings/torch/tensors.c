/* SPDX-License-Identifier: Apache-2.0 */
#include "bindings/torch/tensors.h"

#include <string.h>
#include <time.h>

/* ---- tensors ------------------------------------------------------------------------------- */

static int find_type(const DlTensor *t, EpType *out) {
    static const struct {
        uint8_t kind, bits;
        EpType type;
    } known[] = {{DL_BFLOAT, 16, EP_TYPE_BF16},        {DL_FLOAT, 32, EP_TYPE_FP32},
                 {DL_FLOAT, 16, EP_TYPE_FP16},         {DL_INT, 64, EP_TYPE_INT64},
                 {DL_INT, 32, EP_TYPE_INT32},          {DL_UINT, 8, EP_TYPE_UINT8},
                 {DL_BOOL, 8, EP_TYPE_UINT8},          {DL_FLOAT8_E4M3FN, 8, EP_TYPE_FP8_E4M3},
                 {DL_FLOAT8_E5M2, 8, EP_TYPE_FP8_E5M2}};
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (t->kind == known[i].kind && t->bits == known[i].bits && t->lanes == 1) {
            *out = known[i].type;
            return 1;
        }
    return 0;
}

static int is_contiguous(const DlTensor *t) {
    int64_t step = 1;
    int contiguous = 1;
    for (int d = t->ndim - 1; d >= 0; d--) {
        if (t->shape[d] == 0) return 1;
        if (t->shape[d] != 1 && t->strides && t->strides[d] != step) contiguous = 0;
        step *= t->shape[d];
    }
    return contiguous;
}

int ep_torch_convert(const EpTorchHandle *h, void *object, int is_bool, EpTensor *out) {
    DlTensor t;
    if (h->torch->exchange->tensor_from_object(object, &t) != 0) {
        PyErr_Clear();
        return 0;
    }
    int is_here =
        h->device < 0 ? t.device_kind == DL_CPU : t.device_kind == DL_CUDA && t.device == h->device;
    EpType type;
    if (!is_here || t.ndim < 1 || t.ndim > EP_MAX_DIMS || !find_type(&t, &type) ||
        (t.kind == DL_BOOL) != is_bool || !is_contiguous(&t))
        return 0;
    *out = (EpTensor){.struct_size = sizeof(*out),
                      .data = (char *)t.data + t.byte_offset,
                      .type = type,
                      .ndim = t.ndim,
                      .shape = {1, 1, 1}};
    memcpy(out->shape, t.shape, (size_t)t.ndim * sizeof(int64_t));
    return 1;
}

int ep_torch_find_stream(const EpTorchHandle *h, void **out) {
    *out = NULL;
    if (h->device < 0 || h->torch->exchange->current_stream(DL_CUDA, h->device, out) == 0) return 1;
    PyErr_Clear();
    return 0;
}

int32_t ep_torch_type(EpType type) {
    switch (type) {
    case EP_TYPE_BF16:
        return 15;
    case EP_TYPE_FP16:
        return 5;
    case EP_TYPE_FP32:
        return 6;
    case EP_TYPE_INT32:
        return 3;
    case EP_TYPE_INT64:
        return 4;
    case EP_TYPE_FP8_E4M3:
        return 24;
    case EP_TYPE_FP8_E5M2:
        return 23;
    default:
        return 0; /* uint8 */
    }
}

int ep_torch_allocate(const EpTorchFunctions *torch, int32_t device, int32_t type, EpTensor *t,
                      void **out) {
    int64_t strides[EP_MAX_DIMS], step = 1;
    for (int d = t->ndim - 1; d >= 0; d--) {
        strides[d] = step;
        step *= t->shape[d] > 1 ? t->shape[d] : 1;
    }
    int is_cpu = device < 0;
    return torch->empty(t->ndim, t->shape, strides, type, !is_cpu, is_cpu ? 0 : device, out) == 0 &&
           torch->data_of(*out, &t->data) == 0;
}

/* ---- the numbers of a plan ----------------------------------------------------------------- */

static const EpTensor *take(EpTensor *part, const EpTensor *numbers, int64_t *used,
                            int64_t length) {
    *part = (EpTensor){.struct_size = sizeof(*part),
                       .data = (int32_t *)numbers->data + *used,
                       .type = EP_TYPE_INT32,
                       .ndim = 1,
                       .shape = {length, 1, 1}};
    *used += length;
    return part;
}

int64_t ep_torch_count_numbers(const EpTorchHandle *h) {
    return 3 * (int64_t)h->num_local_experts + 4 + h->num_ranks;
}

int ep_torch_divide(const EpTorchHandle *h, const EpTensor *numbers, EpTorchNumbers *out) {
    int64_t local = h->num_local_experts, used = 0;
    if (!numbers) return 1;
    if (numbers->type != EP_TYPE_INT32 || numbers->ndim != 1 ||
        numbers->shape[0] != ep_torch_count_numbers(h))
        return 0;
    out->outputs = (EpPlanTensors)EP_PLAN_TENSORS_INIT;
    out->outputs.expert_counts = take(&out->parts[0], numbers, &used, local);
    out->outputs.expert_padded = take(&out->parts[1], numbers, &used, local);
    out->outputs.expert_offsets = take(&out->parts[2], numbers, &used, local + 1);
    out->outputs.totals = take(&out->parts[3], numbers, &used, 3);
    out->outputs.source_rows = take(&out->parts[4], numbers, &used, h->num_ranks);
    return 1;
}

EpStatus ep_torch_prepare(const EpTorchHandle *h, const EpTensor *plan, const EpTensor *topk_idx,
                          void *stream, int32_t *numbers) {
    EpTorchNumbers parts;
    EpTensor all = {.struct_size = sizeof(all),
                    .data = numbers,
                    .type = EP_TYPE_INT32,
                    .ndim = 1,
                    .shape = {ep_torch_count_numbers(h), 1, 1}};
    ep_torch_divide(h, &all, &parts);
    memset(numbers, 0xff, (size_t)all.shape[0] * sizeof(int32_t)); /* a failure writes none */
    return ep_prepare_with(h->handle, plan, topk_idx, NULL, stream, &parts.outputs, NULL);
}

EpTorchWaits ep_torch_waits;

EpStatus ep_torch_wait(const EpTorchHandle *h, void *stream) {
    struct timespec begin, end;
    if (h->device < 0) return EP_OK;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    int error = h->torch->wait_stream(stream);
    clock_gettime(CLOCK_MONOTONIC, &end);
    ep_torch_waits.count++;
    ep_torch_waits.ns +=
        (end.tv_sec - begin.tv_sec) * INT64_C(1000000000) + end.tv_nsec - begin.tv_nsec;
    return error ? ep_set_last_error(EP_ERR_SYSTEM, "dispatch: waiting for counts failed in CUDA")
                 : EP_OK;
}

void *ep_torch_leave(void) {
    if (PyErr_Occurred()) PyErr_Clear();
    return none();
}
