/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The calls of libep.deep_ep's Buffer in normal mode, whole, as those in hybrid.c. What is left to
 * Python, besides what is out of the ordinary: other streams than the current one, a number of rows
 * that is given, biases, and groups whose ranks own an expert more than the program has there.
 */
#include <string.h>

#include "bindings/torch/whole.h"

#define WORDS 4 /* rows that are summed have a multiple of so many words of 4 bytes */

/* The items of a handle, a tuple of Python. */
enum {
    LAYER,  /* address of the EpTorchHandle */
    PLAN,   /* Plan.bytes */
    KEPT,   /* what else Python knows of it: OBJECT and what follows */
    ROWS,   /* received */
    TOKENS, /* T */
    STREAM, /* on which the plan was made */
    ITEMS
};
enum { OBJECT, NUMBERS, IN_RANK, KEPT_ITEMS };

/* The arguments of both calls that come first. ONLY is the stream on which all operations have run,
 * or None; EVENT is returned. */
enum { KIND, HANDLE, ONLY, EVENT, ARGUMENTS };
enum { STEPS = ARGUMENTS, SMS, ALIGNMENT, X, IDX, WEIGHTS, PER_EXPERT, GIVEN_IN_RANK, DISPATCH };
enum { ROWS_OF_EXPERTS = ARGUMENTS, WEIGHTS_OF_ROWS, COMBINE };

enum { MADE_PLAN, MADE_ROWS, MADE_IDX, MADE_WEIGHTS };

/* Find the current stream. Returns whether all operations before ran on it. */
static int is_in_order(EpTorchWhole *c, void *only) {
    if (!ep_torch_find_stream(c->h, &c->stream)) return 0;
    if (c->h->device < 0) return 1;
    return only != &_Py_NoneStruct && PyLong_AsVoidPtr(only) == c->stream;
}

/* Returns whether the host cannot wait for the stream, since a graph is captured. */
static int is_captured(const EpTorchWhole *c) {
    int captured = 0;
    if (c->h->device < 0) return 0;
    return c->h->torch->is_capturing(c->stream, &captured) != 0 || captured != 0;
}

static int take_handle(EpTorchWhole *c, void *const *objects) {
    void *handle = objects[HANDLE];
    if (PyObject_IsInstance(handle, objects[KIND]) != 1) return 0;
    c->h = PyLong_AsVoidPtr(PyTuple_GetItem(handle, LAYER));
    c->num_rows = PyLong_AsLongLong(PyTuple_GetItem(handle, ROWS));
    return c->h->group->group && is_in_order(c, objects[ONLY]) &&
           ep_torch_is_on(c, PyTuple_GetItem(handle, STREAM)) &&
           ep_torch_take(c, PyTuple_GetItem(handle, PLAN), 0, 1, &c->given[4], &c->plan);
}

/* ---- dispatch ------------------------------------------------------------------------------ */

static EpStatus send(EpTorchWhole *c) {
    const EpTensor *weights = NULL, *idx = NULL;
    int64_t rows = c->num_rows, top_k = c->h->top_k;
    const EpTensor *recv = ep_torch_make(c, MADE_ROWS, c->rows->type, rows, c->rows->shape[1]);
    if (c->weights) weights = ep_torch_make(c, MADE_WEIGHTS, EP_TYPE_FP32, rows, top_k);
    if (c->idx) idx = ep_torch_make(c, MADE_IDX, c->idx->type, rows, top_k);
    if (c->is_short) return EP_OK;
    return ep_dispatch(c->h->handle, c->plan, NULL, c->rows, c->weights, NULL, c->stream, recv,
                       weights, NULL, idx);
}

/* Returns whether a rank has more tokens than the group has room for. */
static int has_too_many(const EpTorchWhole *c) {
    const int32_t *end = c->step->numbers + ep_torch_count_numbers(c->h);
    for (int32_t r = 1; r <= c->h->num_ranks; r++)
        if (end[-r] > c->step->bound) return 1;
    return 0;
}

static EpStatus route_and_send(EpTorchWhole *c) {
    c->plan = ep_torch_make(c, MADE_PLAN, EP_TYPE_UINT8, c->h->plan_bytes, 0);
    if (c->is_short) return EP_OK;
    EpStatus status = ep_torch_prepare(c->h, c->plan, c->idx, c->stream, c->step->numbers);
    if (status == EP_OK) status = ep_torch_wait(c->h, c->stream);
    if (status != EP_OK) return status;
    c->num_rows = c->step->numbers[3 * (int64_t)c->h->num_local_experts + 1];
    if (c->num_rows < 0) {
        status = ep_group_status(c->h->group->group, NULL);
        return status != EP_OK ? status
                               : ep_set_last_error(EP_ERR_NOT_PREPARED,
                                                   "dispatch: expected a plan that prepare has "
                                                   "written, got one that it has not");
    }
    c->is_asked = has_too_many(c);
    if (c->is_asked) return EP_OK;
    status = send(c);
    return status == EP_OK ? ep_group_status(c->h->group->group, NULL) : status;
}

static void *list_counts(const EpTorchWhole *c) {
    int64_t unit = c->step->alignment;
    void *list = PyList_New(c->h->num_local_experts);
    for (int32_t i = 0; i < c->h->num_local_experts; i++)
        PyList_SetItem(list, i,
                       PyLong_FromLongLong((c->step->numbers[i] + unit - 1) / unit * unit));
    return list;
}

static void *make_handle(const EpTorchWhole *c, void *const *objects) {
    void *kept[KEPT_ITEMS] = {
        [OBJECT] = share(c->step->object),
        [NUMBERS] = ep_torch_copy_numbers(c),
        [IN_RANK] = share(objects[GIVEN_IN_RANK]),
    };
    void *items[ITEMS] = {
        [LAYER] = PyLong_FromVoidPtr((void *)(uintptr_t)c->h),
        [PLAN] = ep_torch_wrap(c, MADE_PLAN),
        [KEPT] = ep_torch_tuple(kept, KEPT_ITEMS),
        [ROWS] = PyLong_FromLongLong(c->num_rows),
        [TOKENS] = PyLong_FromLongLong(c->rows->shape[0]),
        [STREAM] = PyLong_FromVoidPtr(c->stream),
    };
    return ep_torch_handle(objects[KIND], items, ITEMS);
}

/* Returns whether a step is of the call's form. */
static int is_of_step(EpTorchWhole *c, const EpTorchStep *step, void *const *objects) {
    const EpTensor *counts;
    memset(c, 0, sizeof(*c));
    c->step = step;
    c->h = step->send;
    if (!c->h->group->group || PyLong_AsLongLong(objects[SMS]) != step->send_sms ||
        PyLong_AsLongLong(objects[ALIGNMENT]) != step->alignment ||
        !ep_torch_take(c, objects[X], 0, 2, &c->given[0], &c->rows) ||
        !ep_torch_are_rows(c->rows, step->row_bytes) || c->rows->shape[1] != step->width ||
        c->rows->shape[0] > step->bound ||
        !ep_torch_take(c, objects[IDX], 0, 2, &c->given[1], &c->idx) || !c->idx ||
        (c->idx->type != EP_TYPE_INT32 && c->idx->type != EP_TYPE_INT64) ||
        !ep_torch_is_matrix(c->idx, c->idx->type, c->rows->shape[0], c->h->top_k) ||
        !ep_torch_take(c, objects[WEIGHTS], 0, 2, &c->given[2], &c->weights) ||
        !ep_torch_is_matrix(c->weights, EP_TYPE_FP32, c->rows->shape[0], c->h->top_k) ||
        !ep_torch_take(c, objects[PER_EXPERT], 0, 1, &c->given[3], &counts) || !counts ||
        (counts->type != EP_TYPE_INT32 && counts->type != EP_TYPE_INT64) ||
        counts->shape[0] != (int64_t)c->h->num_local_experts * c->h->num_ranks)
        return 0;
    int64_t bytes = ep_torch_element_bytes(c->rows->type);
    return step->width * (bytes < 2 ? 2 : bytes) == step->row_bytes && !PyErr_Occurred();
}

static void *send_anew(EpTorchWhole *c, void *const *objects) {
    const EpTorchStep *step = PyLong_AsVoidPtr(objects[STEPS]);
    while (step && !is_of_step(c, step, objects)) {
        if (PyErr_Occurred()) return ep_torch_leave();
        step = step->next;
    }
    if (!step || !is_in_order(c, objects[ONLY]) || is_captured(c)) return ep_torch_leave();
    void *result = ep_torch_run(c, route_and_send);
    if (result || c->is_asked) return result ? result : share(&_Py_TrueStruct);
    void *items[] = {ep_torch_wrap(c, MADE_ROWS),    ep_torch_wrap(c, MADE_IDX),
                     ep_torch_wrap(c, MADE_WEIGHTS), list_counts(c),
                     make_handle(c, objects),        share(objects[EVENT])};
    return ep_torch_tuple(items, sizeof(items) / sizeof(items[0]));
}

static void *send_again(EpTorchWhole *c, void *const *objects) {
    if (objects[IDX] != &_Py_NoneStruct || objects[WEIGHTS] != &_Py_NoneStruct ||
        !take_handle(c, objects) || !ep_torch_take(c, objects[X], 0, 2, &c->given[0], &c->rows) ||
        !ep_torch_are_rows(c->rows, c->h->max_row_bytes) ||
        c->rows->shape[0] != PyLong_AsLongLong(PyTuple_GetItem(objects[HANDLE], TOKENS)) ||
        PyErr_Occurred())
        return ep_torch_leave();
    void *result = ep_torch_run(c, send);
    if (result) return result;
    void *items[] = {ep_torch_wrap(c, MADE_ROWS), none(), none(), none(), none(),
                     share(objects[EVENT])};
    return ep_torch_tuple(items, sizeof(items) / sizeof(items[0]));
}

/*
 * dispatch of x without scales. Arguments: the type of handles, a handle or None, ONLY, the event
 * to return; the address of the first step, multiprocessors, expert_alignment; x, topk_idx,
 * topk_weights, num_tokens_per_expert, is_token_in_rank.
 *
 * Returns a tuple; None: Python must look at the arguments; an EpStatus; NO_MEMORY; or True: a rank
 * asks for a larger group, and nothing was sent.
 */
void *ep_torch_normal_dispatch(void *self, void *const *objects, ptrdiff_t given) {
    (void)self;
    if (given != DISPATCH) return ep_torch_leave();
    EpTorchWhole c;
    memset(&c, 0, sizeof(c));
    void *result =
        objects[HANDLE] == &_Py_NoneStruct ? send_anew(&c, objects) : send_again(&c, objects);
    ep_torch_drop(&c);
    return result;
}

/* ---- combine ------------------------------------------------------------------------------- */

/* Sum rows, and weights as rows of their own. */
static EpStatus sum(EpTorchWhole *c) {
    int64_t tokens = c->num_tokens;
    const EpTensor *out = ep_torch_make(c, MADE_ROWS, c->rows->type, tokens, c->rows->shape[1]);
    const EpTensor *weights = NULL;
    if (c->weights)
        weights = ep_torch_make(c, MADE_WEIGHTS, EP_TYPE_FP32, tokens, c->weights->shape[1]);
    if (c->is_short) return EP_OK;
    EpStatus status = ep_combine(c->h->handle, c->plan, c->rows, NULL, NULL, c->stream, out);
    if (status != EP_OK || !weights) return status;
    return ep_combine(c->h->handle, c->plan, c->weights, NULL, NULL, c->stream, weights);
}

/*
 * combine without bias. Arguments: the type of handles, the handle, ONLY, the event to return; x,
 * topk_weights. Returns what dispatch does.
 */
void *ep_torch_normal_combine(void *self, void *const *objects, ptrdiff_t given) {
    (void)self;
    EpTorchWhole c;
    memset(&c, 0, sizeof(c));
    if (given != COMBINE || !take_handle(&c, objects) ||
        !ep_torch_take(&c, objects[ROWS_OF_EXPERTS], 0, 2, &c.given[0], &c.rows) ||
        !ep_torch_are_rows(c.rows, c.h->max_row_bytes) || !ep_torch_are_summable(c.rows) ||
        c.rows->shape[0] != c.num_rows ||
        !ep_torch_take(&c, objects[WEIGHTS_OF_ROWS], 0, 2, &c.given[2], &c.weights) ||
        !ep_torch_is_matrix(c.weights, EP_TYPE_FP32, c.num_rows, c.h->top_k) ||
        (c.weights && (c.h->top_k % WORDS || (uintptr_t)c.weights->data % ROW_UNIT)))
        return ep_torch_leave();
    c.num_tokens = PyLong_AsLongLong(PyTuple_GetItem(objects[HANDLE], TOKENS));
    void *result = ep_torch_run(&c, sum);
    if (!result) {
        void *items[] = {ep_torch_wrap(&c, MADE_ROWS), ep_torch_wrap(&c, MADE_WEIGHTS),
                         share(objects[EVENT])};
        result = ep_torch_tuple(items, sizeof(items) / sizeof(items[0]));
    }
    ep_torch_drop(&c);
    return result;
}
