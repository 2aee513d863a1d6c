/* SPDX-License-Identifier: Apache-2.0 */
#include "bindings/torch/call.h"

#include <string.h>

#include "bindings/torch/tensors.h"

#define MOST_TENSORS 11

#define COUNTERS 5 /* that may follow an operation's tensors */

/* A call's tensors, in the order of the operation's arguments; NULL where there is none. */
typedef struct Arguments {
    const EpTensor *at[MOST_TENSORS];
    EpTensor tensors[MOST_TENSORS], counters[COUNTERS];
    EpExtras extras;
    void *stream;
} Arguments;

/* ---- tensors ------------------------------------------------------------------------------- */

/* Returns whether an input needs no copy. */
static int is_ready(const EpTorchForm *form, ptrdiff_t argument, const EpTensor *t) {
    if (form->gradients >> argument & 1) return (uintptr_t)t->data % ROW_UNIT == 0;
    return !(form->weights >> argument & 1) || t->type == EP_TYPE_FP32;
}

static int convert_one(const EpTorchHandle *h, const EpTorchForm *form, ptrdiff_t i, void *object,
                       Arguments *a) {
    a->at[i] = NULL;
    if (object == &_Py_NoneStruct) return 1;
    if (!ep_torch_convert(h, object, 0, &a->tensors[i]) || !is_ready(form, i, &a->tensors[i]))
        return 0;
    a->at[i] = &a->tensors[i];
    return 1;
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
        if (!ep_torch_convert(h, object, 0, t)) return 0;
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
    return convert_counters(h, form, objects, a) && ep_torch_find_stream(h, &a->stream);
}

/* ---- operations ---------------------------------------------------------------------------- */

static EpStatus run(const EpTorchHandle *h, int32_t number, const Arguments *a,
                    const EpTorchNumbers *n) {
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
    EpTorchNumbers n;
    if (!convert_all(h, form, objects, &a)) return EP_TORCH_LEFT;
    if (form->numbers >= 0 && !ep_torch_divide(h, a.at[form->numbers], &n)) return EP_TORCH_LEFT;
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

/* Allocate an argument's tensor. `kind`: PyTorch's number of its type. */
static void allocate_as(Made *made, int argument, EpType type, int32_t kind, int ndim,
                        const int64_t *shape) {
    const EpTorchHandle *h = made->handle;
    EpTensor *t = &made->arguments->tensors[argument];
    *t = (EpTensor){.struct_size = sizeof(*t), .type = type, .ndim = ndim, .shape = {1, 1, 1}};
    memcpy(t->shape, shape, (size_t)ndim * sizeof(*shape));
    if (made->is_short ||
        !ep_torch_allocate(h->torch, h->device, kind, t, &made->tensors[argument]))
        made->is_short = 1;
    made->arguments->at[argument] = t;
}

static void allocate(Made *made, int argument, EpType type, int ndim, const int64_t *shape) {
    allocate_as(made, argument, type, ep_torch_type(type), ndim, shape);
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
    switch (operation) {
    case TORCH_PREPARE:
        allocate_vector(made, 2, EP_TYPE_UINT8, h->plan_bytes);
        allocate_vector(made, 3, EP_TYPE_INT32, ep_torch_count_numbers(h));
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

/* Returns a tuple of the outputs from `first` to before `end`, with None for those that there are
 * not. */
static void *wrap_outputs(Made *made, int32_t first, int32_t end) {
    void *outputs = PyTuple_New(end - first);
    for (int32_t i = first; outputs && i < end; i++) {
        void *object = &_Py_NoneStruct;
        if (made->tensors[i])
            object = made->handle->torch->wrap(made->tensors[i]);
        else
            Py_IncRef(object);
        if (!object || PyTuple_SetItem(outputs, i - first, object) != 0) {
            Py_DecRef(outputs);
            outputs = NULL;
        }
    }
    return outputs;
}

/* Returns what a call returns to Python, and drops the outputs from `first` to before `end`. */
static void *finish(Made *made, EpStatus status, int32_t first, int32_t end) {
    void *result = made->is_short    ? ep_torch_leave()
                   : status != EP_OK ? PyLong_FromLong(status)
                                     : wrap_outputs(made, first, end);
    for (int32_t i = first; i < end; i++)
        if (made->tensors[i]) made->handle->torch->drop(made->tensors[i]);
    return result;
}

/* See ep_torch_functions. */
static void *make(void *self, void *const *objects, ptrdiff_t count) {
    (void)self;
    if (count < 2) return ep_torch_leave();
    const EpTorchHandle *h = PyLong_AsVoidPtr(objects[0]);
    const EpTorchForm *form = PyLong_AsVoidPtr(objects[1]);
    Arguments a;
    EpTorchNumbers n;
    Made made = {.handle = h, .arguments = &a};
    a.extras = (EpExtras)EP_EXTRAS_INIT;
    if (!h || !form || count != form->inputs + 4) return ep_torch_leave();
    for (int32_t i = form->inputs; i < form->count; i++)
        a.at[i] = NULL;
    for (int32_t i = 0; i < form->inputs; i++)
        if (!convert_one(h, form, i, objects[2 + i], &a)) return ep_torch_leave();
    int64_t number = PyLong_AsLongLong(objects[count - 2]);
    int64_t has_small = PyLong_AsLongLong(objects[count - 1]);
    if (number < 0 || has_small < 0 || !has_inputs(h, form->number, &a) ||
        !ep_torch_find_stream(h, &a.stream))
        return ep_torch_leave();
    void *others = PyEval_SaveThread();
    allocate_outputs(&made, form->number, number, has_small ? EP_TYPE_INT32 : EP_TYPE_INT64);
    EpStatus status = EP_OK;
    if (!made.is_short && form->numbers >= 0) ep_torch_divide(h, a.at[form->numbers], &n);
    if (!made.is_short) status = run(h, form->number, &a, &n);
    PyEval_RestoreThread(others);
    return finish(&made, status, form->inputs, form->count);
}

/* ---- a dispatch by a new routing ----------------------------------------------------------- */

/* Prepare and dispatch in one call. */
typedef struct Send {
    const EpTorchHandle *handle;
    Made made; /* argument 0: the plan; the others are dispatch's */
    EpTensor topk_idx;
    int32_t *numbers;    /* Plan.numbers in memory of the host, which GPUs reach */
    int64_t num_numbers; /* of them */
    int64_t capacity;    /* the most rows of a rank; -1: `spare` says whether one has more */
    int64_t spare;       /* the place of an expert that has rows only then */
    int64_t rows;        /* received; -1: not known */
    int has_sent;
} Send;

/* Make the plan, and learn the number of rows. */
static EpStatus prepare_to_send(Send *s) {
    const EpTorchHandle *h = s->handle;
    void *stream = s->made.arguments->stream;
    EpStatus status =
        ep_torch_prepare(h, s->made.arguments->at[0], &s->topk_idx, stream, s->numbers);
    if (status == EP_OK) status = ep_torch_wait(h, stream);
    if (status == EP_OK) s->rows = s->numbers[3 * h->num_local_experts + 1];
    return status;
}

/* Returns whether a rank has more tokens than the group has room for. */
static int has_too_many(const Send *s) {
    if (s->capacity < 0) return s->numbers[s->spare] != 0;
    for (int32_t r = 1; r <= s->handle->num_ranks; r++)
        if (s->numbers[s->num_numbers - r] > s->capacity) return 1;
    return 0;
}

static EpStatus run_send(Send *s, EpType indices) {
    allocate_vector(&s->made, 0, EP_TYPE_UINT8, s->handle->plan_bytes);
    if (s->made.is_short) return EP_OK;
    EpStatus status = prepare_to_send(s);
    if (status != EP_OK || s->rows < 0 || has_too_many(s)) return status;
    allocate_outputs(&s->made, TORCH_DISPATCH, s->rows, indices);
    if (s->made.is_short) return EP_OK;
    s->has_sent = 1;
    return run(s->handle, TORCH_DISPATCH, s->made.arguments, NULL);
}

/* Append the numbers from `first` to before `end` to a new list. */
static void *list_numbers(const int32_t *numbers, int64_t first, int64_t end) {
    void *list = PyList_New(end - first);
    for (int64_t i = first; list && i < end; i++)
        PyList_SetItem(list, i - first, PyLong_FromLong(numbers[i]));
    return list;
}

/* Returns the outputs of dispatch, and behind them plan, rows, counts and rows of each source. */
static void *wrap_sent(Send *s) {
    enum { OUTPUTS = 4 };
    void *sent = PyTuple_New(OUTPUTS + 4);
    for (int i = 0; i < OUTPUTS; i++) {
        void *tensor = s->made.tensors[4 + i], *object = &_Py_NoneStruct;
        if (tensor && s->has_sent)
            object = s->handle->torch->wrap(tensor);
        else
            Py_IncRef(object);
        PyTuple_SetItem(sent, i, object);
    }
    PyTuple_SetItem(sent, OUTPUTS, s->handle->torch->wrap(s->made.tensors[0]));
    PyTuple_SetItem(sent, OUTPUTS + 1, PyLong_FromLong(s->rows));
    PyTuple_SetItem(sent, OUTPUTS + 2, list_numbers(s->numbers, 0, s->handle->num_local_experts));
    PyTuple_SetItem(
        sent, OUTPUTS + 3,
        list_numbers(s->numbers, s->num_numbers - s->handle->num_ranks, s->num_numbers));
    return sent;
}

/* See ep_torch_functions. */
static void *send(void *self, void *const *objects, ptrdiff_t given) {
    (void)self;
    enum { GIVEN = 10, INPUTS = 6 };
    Arguments a = {.extras = EP_EXTRAS_INIT};
    Send s = {.made = {.arguments = &a}, .rows = -1};
    if (given != GIVEN) return ep_torch_leave();
    const EpTorchHandle *h = s.made.handle = s.handle = PyLong_AsVoidPtr(objects[0]);
    const EpTorchForm *form = PyLong_AsVoidPtr(objects[1]); /* of dispatch */
    s.numbers = PyLong_AsVoidPtr(objects[2]);
    s.capacity = PyLong_AsLongLong(objects[3]);
    s.spare = PyLong_AsLongLong(objects[4]);
    int64_t has_small = PyLong_AsLongLong(objects[5]);
    if (PyErr_Occurred() || !h || !form || !s.numbers || has_small < 0) return ep_torch_leave();
    s.num_numbers = ep_torch_count_numbers(h);
    for (int32_t i = 1; i <= 3; i++)
        if (!convert_one(h, form, i, objects[INPUTS + i], &a)) return ep_torch_leave();
    if (!ep_torch_convert(h, objects[INPUTS], 0, &s.topk_idx) || !a.at[1] || a.at[1]->ndim != 2 ||
        !ep_torch_find_stream(h, &a.stream) || (h->device >= 0 && !h->torch->wait_stream))
        return ep_torch_leave();
    void *others = PyEval_SaveThread();
    EpStatus status = run_send(&s, has_small ? EP_TYPE_INT32 : EP_TYPE_INT64);
    PyEval_RestoreThread(others);
    void *result = !s.made.tensors[0] ? ep_torch_leave()
                   : status != EP_OK  ? PyLong_FromLong(status)
                                      : wrap_sent(&s);
    for (int32_t i = 0; i < MOST_TENSORS; i++)
        if (s.made.tensors[i]) h->torch->drop(s.made.tensors[i]);
    return result;
}

/* ---- counts of a routing ------------------------------------------------------------------- */

/* See ep_torch_functions. */
static void *count(void *self, void *const *objects, ptrdiff_t given) {
    (void)self;
    if (given != 5) return ep_torch_leave();
    EpTorchHandle h = {.torch = PyLong_AsVoidPtr(objects[0]),
                       .device = (int32_t)PyLong_AsLongLong(objects[1])};
    int64_t ranks = PyLong_AsLongLong(objects[3]), experts = PyLong_AsLongLong(objects[4]);
    Arguments a;
    Made made = {.handle = &h, .arguments = &a};
    if (!h.torch || ranks < 1 || experts < 1 || PyErr_Occurred()) return ep_torch_leave();
    if (!ep_torch_convert(&h, objects[2], 0, &a.tensors[0]) || a.tensors[0].ndim != 2 ||
        a.tensors[0].shape[1] < 1 || a.tensors[0].shape[1] > EP_MAX_TOP_K ||
        !ep_torch_find_stream(&h, &a.stream))
        return ep_torch_leave();
    void *others = PyEval_SaveThread();
    allocate_vector(&made, 1, EP_TYPE_INT32, ranks);
    allocate_vector(&made, 2, EP_TYPE_INT32, experts);
    allocate_as(&made, 3, EP_TYPE_UINT8, TORCH_BOOL, 2, (int64_t[]){a.tensors[0].shape[0], ranks});
    EpStatus status = EP_OK;
    if (!made.is_short)
        status = ep_count_routing(h.device < 0 ? EP_BACKEND_HOST : EP_BACKEND_CUDA, &a.tensors[0],
                                  a.stream, a.at[1], a.at[2], a.at[3]);
    PyEval_RestoreThread(others);
    return finish(&made, status, 1, 4);
}

/* ---- Python's functions -------------------------------------------------------------------- */

void *ep_torch_functions(void) {
    static PyMethodDef methods[] = {
        {"call of libep.torch", make, METH_FASTCALL, NULL},
        {"ep_count_routing", count, METH_FASTCALL, NULL},
        {"send of libep.torch", send, METH_FASTCALL, NULL},
        {"send of libep.torch", ep_torch_hybrid_dispatch, METH_FASTCALL, NULL},
        {"call of libep.torch", ep_torch_hybrid_combine, METH_FASTCALL, NULL},
        {"send of libep.torch", ep_torch_normal_dispatch, METH_FASTCALL, NULL},
        {"call of libep.torch", ep_torch_normal_combine, METH_FASTCALL, NULL},
        {"record", ep_torch_record_event, METH_FASTCALL, NULL},
        {"wait", ep_torch_wait_event, METH_FASTCALL, NULL},
        {"enter", ep_torch_enter, METH_FASTCALL, NULL},
        {"leave", ep_torch_leave_group, METH_FASTCALL, NULL}};
    enum { COUNT = sizeof(methods) / sizeof(methods[0]) };
    void *functions = PyTuple_New(COUNT);
    for (int i = 0; functions && i < COUNT; i++)
        PyTuple_SetItem(functions, i, PyCFunction_NewEx(&methods[i], NULL, NULL));
    return functions;
}
