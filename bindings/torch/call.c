/* SPDX-License-Identifier: Apache-2.0 */
#include "bindings/torch/call.h"

#include <stddef.h>
#include <string.h>

/* Python's stable interface, as far as it is used: so no headers of a Python are needed, and one
 * library does for all. */
extern char _Py_NoneStruct;
void *PyTuple_GetItem(void *tuple, ptrdiff_t at); /* borrowed */
ptrdiff_t PyTuple_Size(void *tuple);
void *PyTuple_New(ptrdiff_t size);
int PyTuple_SetItem(void *tuple, ptrdiff_t at, void *item); /* takes the reference */
void *PyLong_AsVoidPtr(void *number);
long long PyLong_AsLongLong(void *number);
void *PyLong_FromLong(long number);
void *PyErr_Occurred(void);
void PyErr_Clear(void);
void Py_IncRef(void *object);
void Py_DecRef(void *object);
void *PyEval_SaveThread(void); /* lets other threads of Python run */
void PyEval_RestoreThread(void *state);

typedef void *Function(void *self, void *const *arguments, ptrdiff_t count);

typedef struct PyMethodDef {
    const char *name;
    Function *function;
    int flags;
    const char *words;
} PyMethodDef;

#define METH_FASTCALL 0x80
void *PyCFunction_NewEx(PyMethodDef *method, void *self, void *module);

#define MOST_TENSORS 11
#define ROW_UNIT 16 /* rows start on multiples of this many bytes */

#define COUNTERS 5 /* that may follow an operation's tensors */

/* A call's tensors, in the order of the operation's arguments; NULL where there is none. */
typedef struct Arguments {
    const EpTensor *at[MOST_TENSORS];
    EpTensor tensors[MOST_TENSORS], counters[COUNTERS];
    EpExtras extras;
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
    if (h->torch->exchange->tensor_from_object(object, &t) != 0) {
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

static int convert_one(const EpTorchHandle *h, const EpTorchForm *form, ptrdiff_t i, void *object,
                       Arguments *a) {
    a->at[i] = NULL;
    if (object == &_Py_NoneStruct) return 1;
    if (!convert(h, object, &a->tensors[i]) || !is_ready(form, i, &a->tensors[i])) return 0;
    a->at[i] = &a->tensors[i];
    return 1;
}

static int find_stream(const EpTorchHandle *h, Arguments *a) {
    a->stream = NULL;
    if (h->device < 0 || h->torch->exchange->current_stream(DL_CUDA, h->device, &a->stream) == 0)
        return 1;
    PyErr_Clear();
    return 0;
}

/* Convert the counters behind an operation's tensors, all of them or none. */
static int convert_counters(const EpTorchHandle *h, const EpTorchForm *form, void *objects,
                            Arguments *a) {
    const EpTensor **members[COUNTERS] = {&a->extras.expert_tokens, &a->extras.peer_rows,
                                          &a->extras.peer_bytes, &a->extras.peer_wait_ns,
                                          &a->extras.peer_longest_wait_ns};
    for (ptrdiff_t i = form->count; i < PyTuple_Size(objects); i++) {
        void *object = PyTuple_GetItem(objects, i);
        EpTensor *t = &a->counters[i - form->count];
        if (object == &_Py_NoneStruct) continue;
        if (!convert(h, object, t)) return 0;
        *members[i - form->count] = t;
    }
    return 1;
}

static int convert_all(const EpTorchHandle *h, const EpTorchForm *form, void *objects,
                       Arguments *a) {
    ptrdiff_t more = PyTuple_Size(objects) - form->count;
    if (more != 0 && more != COUNTERS) return 0;
    a->extras = (EpExtras)EP_EXTRAS_INIT;
    for (ptrdiff_t i = 0; i < form->count; i++)
        if (!convert_one(h, form, i, PyTuple_GetItem(objects, i), a)) return 0;
    return convert_counters(h, form, objects, a) && find_stream(h, a);
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
    EpExtras extras = a->extras;
    switch (number) {
    case TORCH_PREPARE:
        return ep_prepare_with(h->handle, t[2], t[0], t[1], a->stream, t[3] ? &n->outputs : NULL,
                               &a->extras);
    case TORCH_DISPATCH:
        return ep_dispatch_with(h->handle, t[0], NULL, t[1], t[2], t[3], a->stream, t[4], t[5],
                                t[6], t[7], &a->extras);
    case TORCH_DISPATCH_ROUTED:
        routing.topk_idx = t[0], routing.num_tokens = t[1];
        routing.out = t[6] ? &n->outputs : NULL;
        return ep_dispatch_with(h->handle, t[5], &routing, t[2], t[3], t[4], a->stream, t[7], t[8],
                                t[9], t[10], &a->extras);
    case TORCH_COMBINE:
        extras.bias0 = t[4], extras.bias1 = t[5];
        return ep_combine_with(h->handle, t[0], t[1], t[2], t[3], a->stream, t[6], &extras);
    case TORCH_COMBINE_BACKWARD:
        return ep_combine_backward_with(h->handle, t[0], t[1], t[2], t[3], a->stream, t[4], t[5],
                                        &a->extras);
    default:
        return ep_dispatch_backward_with(h->handle, t[0], t[1], t[2], a->stream, t[3], t[4],
                                         &a->extras);
    }
}

int32_t ep_torch_call(const EpTorchHandle *h, const EpTorchForm *form, void *objects) {
    Arguments a;
    Numbers n;
    if (!convert_all(h, form, objects, &a)) return EP_TORCH_LEFT;
    if (form->numbers >= 0 && !divide(h, a.at[form->numbers], &n)) return EP_TORCH_LEFT;
    void *others = PyEval_SaveThread();
    EpStatus status = run(h, form->number, &a, &n);
    PyEval_RestoreThread(others);
    return status;
}

/* ---- new outputs --------------------------------------------------------------------------- */

/* Outputs under way: PyTorch's tensors of a call, by argument. NULL: none. */
typedef struct Made {
    const EpTorchHandle *handle;
    Arguments *arguments;
    void *tensors[MOST_TENSORS];
    int is_short; /* whether PyTorch has refused one */
} Made;

static int32_t torch_type(EpType type) {
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

/* Allocate an argument's tensor. Without the interpreter's lock: memory of a GPU may wait for work
 * that other threads start. */
static void allocate(Made *made, int argument, EpType type, int ndim, const int64_t *shape) {
    const EpTorchHandle *h = made->handle;
    int64_t strides[EP_MAX_DIMS], step = 1;
    EpTensor *t = &made->arguments->tensors[argument];
    *t = (EpTensor){.struct_size = sizeof(*t), .type = type, .ndim = ndim, .shape = {1, 1, 1}};
    for (int d = ndim - 1; d >= 0; d--) {
        t->shape[d] = shape[d], strides[d] = step;
        step *= shape[d] > 1 ? shape[d] : 1;
    }
    int is_cpu = h->device < 0;
    if (made->is_short ||
        h->torch->empty(ndim, t->shape, strides, torch_type(type), !is_cpu, is_cpu ? 0 : h->device,
                        &made->tensors[argument]) != 0 ||
        h->torch->data_of(made->tensors[argument], &t->data) != 0)
        made->is_short = 1;
    made->arguments->at[argument] = t;
}

static void allocate_vector(Made *made, int argument, EpType type, int64_t length) {
    allocate(made, argument, type, 1, &length);
}

static void allocate_matrix(Made *made, int argument, EpType type, int64_t rows, int64_t columns) {
    allocate(made, argument, type, 2, (int64_t[]){rows, columns});
}

/* Allocate receive rows: `columns` of each row; 0: one element that is no dimension. */
static void allocate_rows(Made *made, int argument, EpType type, int64_t rows, int64_t columns) {
    const EpTorchHandle *h = made->handle;
    int64_t shape[EP_MAX_DIMS] = {rows, 1, 1};
    int ndim = h->has_blocks ? 2 : 1;
    if (h->has_blocks) shape[0] = h->blocks, shape[1] = h->rows_per_block;
    if (columns) shape[ndim++] = columns;
    allocate(made, argument, type, ndim, shape);
}

static int64_t width(const EpTensor *t) {
    return t->shape[t->ndim - 1];
}

/* Allocate what an operation writes. `number` is its rows or tokens. */
static void allocate_outputs(Made *made, int32_t operation, int64_t number, EpType indices) {
    const EpTorchHandle *h = made->handle;
    const EpTensor *const *t = made->arguments->at;
    int64_t local = h->num_local_experts;
    switch (operation) {
    case TORCH_PREPARE:
        allocate_vector(made, 2, EP_TYPE_UINT8, h->plan_bytes);
        allocate_vector(made, 3, EP_TYPE_INT32, 3 * local + 4 + h->num_ranks);
        break;
    case TORCH_DISPATCH:
        allocate_rows(made, 4, t[1]->type, number, width(t[1]));
        if (t[2]) allocate_rows(made, 5, EP_TYPE_FP32, number, h->is_per_token ? h->top_k : 0);
        if (t[3]) allocate_rows(made, 6, t[3]->type, number, width(t[3]));
        if (h->is_per_token) allocate_rows(made, 7, indices, number, h->top_k);
        break;
    case TORCH_COMBINE:
        allocate_matrix(made, 6, t[1]->type, number, width(t[1]));
        break;
    case TORCH_COMBINE_BACKWARD:
        allocate_rows(made, 4, t[1]->type, number, width(t[1]));
        if (t[3]) allocate(made, 5, EP_TYPE_FP32, t[2]->ndim, t[2]->shape);
        break;
    default:
        allocate_matrix(made, 3, t[1]->type, number, width(t[1]));
        if (t[2]) allocate_matrix(made, 4, EP_TYPE_FP32, number, h->top_k);
    }
}

/* Returns whether the inputs are those from which outputs can be allocated. */
static int has_inputs(const EpTorchHandle *h, int32_t operation, const Arguments *a) {
    const EpTensor *const *t = a->at;
    if (operation == TORCH_PREPARE) return t[0] != NULL;
    if (!t[0] || !t[1] || t[1]->ndim != (operation == TORCH_DISPATCH ? 2 : t[1]->ndim)) return 0;
    if (operation == TORCH_COMBINE_BACKWARD) return !t[3] || t[2];
    return t[1]->ndim >= 2 && (operation != TORCH_DISPATCH || !t[3] || !h->by_column);
}

/* Returns a tuple of the outputs, with None for those that there are not. */
static void *wrap_outputs(Made *made, const EpTorchForm *form) {
    void *outputs = PyTuple_New(form->count - form->inputs);
    for (int32_t i = form->inputs; outputs && i < form->count; i++) {
        void *object = &_Py_NoneStruct;
        if (made->tensors[i])
            object = made->handle->torch->wrap(made->tensors[i]);
        else
            Py_IncRef(object);
        if (!object || PyTuple_SetItem(outputs, i - form->inputs, object) != 0) {
            Py_DecRef(outputs);
            outputs = NULL;
        }
    }
    return outputs;
}

static void *leave(void) {
    if (PyErr_Occurred()) PyErr_Clear();
    Py_IncRef(&_Py_NoneStruct);
    return &_Py_NoneStruct;
}

/* The function of ep_torch_function: see call.h. */
static void *make(void *self, void *const *objects, ptrdiff_t count) {
    (void)self;
    if (count < 2) return leave();
    const EpTorchHandle *h = PyLong_AsVoidPtr(objects[0]);
    const EpTorchForm *form = PyLong_AsVoidPtr(objects[1]);
    Arguments a;
    Numbers n;
    Made made = {.handle = h, .arguments = &a};
    a.extras = (EpExtras)EP_EXTRAS_INIT;
    if (!h || !form || count != form->inputs + 4) return leave();
    for (int32_t i = form->inputs; i < form->count; i++)
        a.at[i] = NULL;
    for (int32_t i = 0; i < form->inputs; i++)
        if (!convert_one(h, form, i, objects[2 + i], &a)) return leave();
    int64_t number = PyLong_AsLongLong(objects[count - 2]);
    int64_t has_small = PyLong_AsLongLong(objects[count - 1]);
    if (number < 0 || has_small < 0 || !has_inputs(h, form->number, &a) || !find_stream(h, &a))
        return leave();
    void *others = PyEval_SaveThread();
    allocate_outputs(&made, form->number, number, has_small ? EP_TYPE_INT32 : EP_TYPE_INT64);
    EpStatus status = EP_OK;
    if (!made.is_short && form->numbers >= 0) divide(h, a.at[form->numbers], &n);
    if (!made.is_short) status = run(h, form->number, &a, &n);
    PyEval_RestoreThread(others);
    void *result = made.is_short     ? leave()
                   : status != EP_OK ? PyLong_FromLong(status)
                                     : wrap_outputs(&made, form);
    for (int32_t i = form->inputs; i < form->count; i++)
        if (made.tensors[i]) h->torch->drop(made.tensors[i]);
    return result;
}

void *ep_torch_function(void) {
    static PyMethodDef method = {"call of libep.torch", make, METH_FASTCALL, NULL};
    return PyCFunction_NewEx(&method, NULL, NULL);
}
