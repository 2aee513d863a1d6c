/* SPDX-License-Identifier: Apache-2.0 */
#include "bindings/torch/call.h"

#include <stddef.h>
#include <string.h>

/* Python's stable interface, as far as it is used: so no headers of a Python are needed, and one
 * library does for all. */
extern char _Py_NoneStruct;
void *PyTuple_GetItem(void *tuple, ptrdiff_t at); /* borrowed */
ptrdiff_t PyTuple_Size(void *tuple);
void PyErr_Clear(void);
void *PyEval_SaveThread(void); /* lets other threads of Python run */
void PyEval_RestoreThread(void *state);

#define MOST_TENSORS 11
#define ROW_UNIT 16 /* rows start on multiples of this many bytes */

/* A call's tensors, in the order of the operation's arguments; NULL where there is none. */
typedef struct Arguments {
    const EpTensor *at[MOST_TENSORS];
    EpTensor tensors[MOST_TENSORS];
    void *stream;
} Arguments;

/* ---- tensors ------------------------------------------------------------------------------- */

static int find_type(const DlTensor *t, EpType *out) {
    static const struct {
        uint8_t kind, bits;
        EpType type;
    } known[] = {{DL_BFLOAT, 16, EP_TYPE_BF16},
                 {DL_FLOAT, 32, EP_TYPE_FP32},
                 {DL_FLOAT, 16, EP_TYPE_FP16},
                 {DL_INT, 64, EP_TYPE_INT64},
                 {DL_INT, 32, EP_TYPE_INT32},
                 {DL_UINT, 8, EP_TYPE_UINT8},
                 {DL_FLOAT8_E4M3FN, 8, EP_TYPE_FP8_E4M3},
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

static int convert(const EpTorchHandle *h, void *object, EpTensor *out) {
    DlTensor t;
    if (h->exchange->tensor_from_object(object, &t) != 0) {
        PyErr_Clear();
        return 0;
    }
    int is_here =
        h->device < 0 ? t.device_kind == DL_CPU : t.device_kind == DL_CUDA && t.device == h->device;
    EpType type;
    if (!is_here || t.ndim < 1 || t.ndim > EP_MAX_DIMS || !find_type(&t, &type) ||
        !is_contiguous(&t))
        return 0;
    *out = (EpTensor){.struct_size = sizeof(*out),
                      .data = (char *)t.data + t.byte_offset,
                      .type = type,
                      .ndim = t.ndim,
                      .shape = {1, 1, 1}};
    memcpy(out->shape, t.shape, (size_t)t.ndim * sizeof(int64_t));
    return 1;
}

/* Returns whether an input needs no copy. */
static int is_ready(const EpTorchForm *form, ptrdiff_t argument, const EpTensor *t) {
    if (form->gradients >> argument & 1) return (uintptr_t)t->data % ROW_UNIT == 0;
    return !(form->weights >> argument & 1) || t->type == EP_TYPE_FP32;
}

static int convert_all(const EpTorchHandle *h, const EpTorchForm *form, void *objects,
                       Arguments *a) {
    for (ptrdiff_t i = 0; i < form->count; i++) {
        void *object = PyTuple_GetItem(objects, i);
        a->at[i] = NULL;
        if (object == &_Py_NoneStruct) continue;
        if (!convert(h, object, &a->tensors[i]) || !is_ready(form, i, &a->tensors[i])) return 0;
        a->at[i] = &a->tensors[i];
    }
    a->stream = NULL;
    if (h->device < 0 || h->exchange->current_stream(DL_CUDA, h->device, &a->stream) == 0) return 1;
    PyErr_Clear();
    return 0;
}

/* ---- the numbers of a plan ----------------------------------------------------------------- */

/* The outputs of prepare that make up Plan.numbers. */
typedef struct Numbers {
    EpTensor parts[5];
    EpPlanTensors outputs;
} Numbers;

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

/* Divides `numbers`, which may be NULL. Returns 0 if it is not as large as the parts. */
static int divide(const EpTorchHandle *h, const EpTensor *numbers, Numbers *out) {
    int64_t local = h->num_local_experts, used = 0;
    if (!numbers) return 1;
    if (numbers->type != EP_TYPE_INT32 || numbers->ndim != 1 ||
        numbers->shape[0] != 3 * local + 4 + h->num_ranks)
        return 0;
    out->outputs = (EpPlanTensors)EP_PLAN_TENSORS_INIT;
    out->outputs.expert_counts = take(&out->parts[0], numbers, &used, local);
    out->outputs.expert_padded = take(&out->parts[1], numbers, &used, local);
    out->outputs.expert_offsets = take(&out->parts[2], numbers, &used, local + 1);
    out->outputs.totals = take(&out->parts[3], numbers, &used, 3);
    out->outputs.source_rows = take(&out->parts[4], numbers, &used, h->num_ranks);
    return 1;
}

/* ---- operations ---------------------------------------------------------------------------- */

static EpStatus run(const EpTorchHandle *h, int32_t number, const Arguments *a, const Numbers *n) {
    const EpTensor *const *t = a->at;
    EpPrepare routing = EP_PREPARE_INIT;
    switch (number) {
    case TORCH_PREPARE:
        return ep_prepare(h->handle, t[2], t[0], t[1], a->stream, t[3] ? &n->outputs : NULL);
    case TORCH_DISPATCH:
        return ep_dispatch(h->handle, t[0], NULL, t[1], t[2], t[3], a->stream, t[4], t[5], t[6],
                           t[7]);
    case TORCH_DISPATCH_ROUTED:
        routing.topk_idx = t[0], routing.num_tokens = t[1];
        routing.out = t[6] ? &n->outputs : NULL;
        return ep_dispatch(h->handle, t[5], &routing, t[2], t[3], t[4], a->stream, t[7], t[8], t[9],
                           t[10]);
    case TORCH_COMBINE:
        return ep_combine(h->handle, t[0], t[1], t[2], t[3], a->stream, t[4]);
    case TORCH_COMBINE_BACKWARD:
        return ep_combine_backward(h->handle, t[0], t[1], t[2], t[3], a->stream, t[4], t[5]);
    default:
        return ep_dispatch_backward(h->handle, t[0], t[1], t[2], a->stream, t[3], t[4]);
    }
}

int32_t ep_torch_call(const EpTorchHandle *h, const EpTorchForm *form, void *objects) {
    Arguments a;
    Numbers n;
    if (PyTuple_Size(objects) != form->count || !convert_all(h, form, objects, &a))
        return EP_TORCH_LEFT;
    if (form->numbers >= 0 && !divide(h, a.at[form->numbers], &n)) return EP_TORCH_LEFT;
    void *others = PyEval_SaveThread();
    EpStatus status = run(h, form->number, &a, &n);
    PyEval_RestoreThread(others);
    return status;
}
