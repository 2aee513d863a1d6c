/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The calls of libep.deep_ep's HybridEPBuffer, whole. Within a layer their code and data are not in
 * the caches, so that each function of Python and each object costs as much as an operation. Here
 * is all that a call does whose configuration has been used before; hybrid_ep_buffer.py says what
 * is wrong with arguments, and makes groups and handles.
 *
 * Work that needs no result of the GPU is done after a launch, before the host waits.
 */
#include <string.h>

#include "bindings/torch/whole.h"

/* The items of a handle, a tuple of Python. Its type computes DeepEP's from them. */
enum {
    OWNER,     /* the HybridEPBuffer */
    STEP,      /* an object that keeps the EpTorchStep */
    SENT,      /* bytes: an EpTorchSent */
    MEMORY,    /* a tensor: EpTorchSent.memory */
    NUMBERS,   /* Plan.numbers: bytes, or a tensor whose padded rows are not written */
    PADDED,    /* rows of each expert, padding included */
    IDX,       /* the caller's [T, K], or None */
    SPARE,     /* nothing from here on */
    ITEMS = 11 /* as DeepEP's handle has */
};

/* The arguments of both calls that come first; and those behind them of a dispatch. */
enum { KIND, SELF, HANDLE, IS_KEPT, ARGUMENTS };
enum {
    STEPS,
    ALIGNMENT,
    NUM_ROWS,
    BOUND,
    SEND_SMS,
    HIDDEN,
    SCALES,
    MAP,
    PROBS,
    GIVEN_IDX,
    WEIGHTS,
    EXPERTS,
    MORE
};

/* PyTorch's tensors that a call makes. */
enum {
    MADE_MEMORY,
    MADE_NUMBERS,
    MADE_PADDED,
    MADE_IDX,
    MADE_WEIGHTS,
    MADE_ROWS,
    MADE_MORE,
    MADE_SCALES
};

/* ---- arguments ------------------------------------------------------------------------------ */

/* [T, S] of 4 bytes, at most one for 32 elements. */
static int are_scales(const EpTensor *t, int64_t count, int64_t width) {
    return !t || ((t->type == EP_TYPE_FP32 || t->type == EP_TYPE_INT32) && t->shape[0] == count &&
                  t->shape[1] > 0 && t->shape[1] <= (width + 31) / 32);
}

static EpBackend backend(const EpTorchWhole *c) {
    return c->h->device < 0 ? EP_BACKEND_HOST : EP_BACKEND_CUDA;
}

/* ---- dispatch ------------------------------------------------------------------------------ */

static int64_t round_up_to_line(int64_t bytes) {
    return (bytes + 63) / 64 * 64;
}

/* The tensor [T, K] at an offset of the plan's memory. `place`: among those of the call. */
static const EpTensor *find_behind(EpTorchWhole *c, int place, EpType type, int64_t at) {
    EpTensor *t = &c->outputs[place];
    *t = (EpTensor){.struct_size = sizeof(*t),
                    .data = (char *)c->sent.memory + at,
                    .type = type,
                    .ndim = 2,
                    .shape = {c->sent.num_tokens, c->h->top_k, 1}};
    return t;
}

static void find_plan(EpTorchWhole *c) {
    c->given[4] = (EpTensor){.struct_size = sizeof(EpTensor),
                             .data = c->sent.memory,
                             .type = EP_TYPE_UINT8,
                             .ndim = 1,
                             .shape = {c->step->send->plan_bytes, 1, 1}};
    c->plan = &c->given[4];
}

/* Allocate the plan, and behind it what is made of a routing map: at once, since each allocation
 * takes a fifth of a call. */
static void make_memory(EpTorchWhole *c) {
    int64_t bytes = c->h->plan_bytes, tokens = c->rows->shape[0];
    int64_t entries = round_up_to_line(tokens * c->h->top_k * 4); /* ids or weights */
    c->sent = (EpTorchSent){.step = c->step, .stream = c->stream, .num_tokens = tokens};
    if (c->map) c->sent.ids_at = round_up_to_line(bytes), bytes = c->sent.ids_at + entries;
    if (c->probs) c->sent.weights_at = bytes, bytes += entries;
    c->sent.memory = ep_torch_make(c, MADE_MEMORY, EP_TYPE_UINT8, bytes, 0)->data;
    find_plan(c);
}

/* Make ids and weights of a routing map. */
static EpStatus read_map(EpTorchWhole *c) {
    c->idx = find_behind(c, MADE_IDX, EP_TYPE_INT32, c->sent.ids_at);
    if (c->probs) c->weights = find_behind(c, MADE_WEIGHTS, EP_TYPE_FP32, c->sent.weights_at);
    return ep_read_routing_map(backend(c), c->map, c->probs, c->stream, c->idx, c->weights);
}

/* Make the plan of a step whose rows are given. Its numbers stay on the device. */
static EpStatus prepare_fixed(EpTorchWhole *c) {
    EpTorchNumbers parts;
    const EpTensor *numbers =
        ep_torch_make(c, MADE_NUMBERS, EP_TYPE_INT32, ep_torch_count_numbers(c->h), 0);
    const EpTensor *padded =
        ep_torch_make(c, MADE_PADDED, EP_TYPE_INT32, c->h->num_local_experts, 0);
    if (c->is_short) return EP_OK;
    ep_torch_divide(c->h, numbers, &parts);
    parts.outputs.expert_padded = padded;
    c->num_rows = c->step->rows;
    return ep_prepare_with(c->h->handle, c->plan, c->idx, NULL, c->stream, &parts.outputs, NULL);
}

static EpStatus refuse_plan(const EpTorchWhole *c) {
    EpStatus status = ep_group_status(c->h->group->group, NULL);
    if (status != EP_OK) return status;
    return ep_set_last_error(EP_ERR_NOT_PREPARED,
                             "dispatch: expected a plan, got one without numbers");
}

/* Make the plan of a step of as many rows as come. */
static EpStatus prepare_exact(EpTorchWhole *c) {
    int64_t local = c->h->num_local_experts;
    EpStatus status = ep_torch_prepare(c->h, c->plan, c->idx, c->stream, c->step->numbers);
    if (status != EP_OK) return status;
    const EpTensor *padded =
        ep_torch_make_on(c, -1, MADE_PADDED, EP_TYPE_INT64, local, 0); /* while the GPU counts */
    status = ep_torch_wait(c->h, c->stream);
    if (status != EP_OK) return status;
    c->num_rows = c->step->numbers[3 * local + 1];
    if (c->num_rows < 0) return refuse_plan(c);
    for (int64_t i = 0; i < local && !c->is_short; i++)
        ((int64_t *)padded->data)[i] = c->step->numbers[local + i];
    return EP_OK;
}

static EpStatus send(EpTorchWhole *c) {
    const EpTensor *weights = NULL, *scales = NULL;
    const EpTensor *rows =
        ep_torch_make(c, MADE_ROWS, c->rows->type, c->num_rows, c->rows->shape[1]);
    if (c->weights) weights = ep_torch_make(c, MADE_MORE, EP_TYPE_FP32, c->num_rows, 0);
    if (c->scales)
        scales = ep_torch_make(c, MADE_SCALES, c->scales->type, c->num_rows, c->scales->shape[1]);
    if (c->is_short) return EP_OK;
    return ep_dispatch(c->h->handle, c->plan, NULL, c->rows, c->weights, c->scales, c->stream, rows,
                       weights, scales, NULL);
}

static EpStatus route_and_send(EpTorchWhole *c) {
    make_memory(c);
    if (c->is_short) return EP_OK;
    EpStatus status = c->map ? read_map(c) : EP_OK;
    if (status != EP_OK) return status;
    status = c->step->numbers ? prepare_exact(c) : prepare_fixed(c);
    if (status == EP_OK) status = send(c);
    if (status == EP_OK && c->step->numbers) /* the host has waited for the plan already */
        status = ep_group_status(c->h->group->group, NULL);
    return status;
}

static void *wrap_numbers(const EpTorchWhole *c) {
    return c->step->numbers ? ep_torch_copy_numbers(c) : ep_torch_wrap(c, MADE_NUMBERS);
}

/* Returns a new handle. `padded` is borrowed, and so is `idx`, the caller's. */
static void *make_handle(EpTorchWhole *c, void *const *objects, void *idx, void *padded) {
    c->sent.num_rows = c->num_rows;
    void *items[ITEMS] = {
        [OWNER] = share(objects[SELF]),
        [STEP] = share(c->step->object),
        [SENT] = PyBytes_FromStringAndSize((const char *)&c->sent, sizeof(c->sent)),
        [MEMORY] = ep_torch_wrap(c, MADE_MEMORY),
        [NUMBERS] = wrap_numbers(c),
        [PADDED] = share(padded),
        [IDX] = c->map ? none() : share(idx),
    };
    for (int i = SPARE; i < ITEMS; i++)
        items[i] = none();
    void *tuple = ep_torch_tuple(items, ITEMS);
    void *handle = PyObject_CallFunctionObjArgs(objects[KIND], tuple, NULL);
    Py_DecRef(tuple);
    return handle;
}

/* Returns what dispatch_with_permute does. Takes the reference to the handle. */
static void *wrap_sent(const EpTorchWhole *c, void *padded, void *handle) {
    void *items[] = {ep_torch_wrap(c, MADE_ROWS), ep_torch_wrap(c, MADE_MORE),
                     ep_torch_wrap(c, MADE_SCALES), share(padded), handle};
    return ep_torch_tuple(items, sizeof(items) / sizeof(items[0]));
}

/* The routing of a new step. */
static int take_routing(EpTorchWhole *c, void *const *more) {
    int64_t experts = (int64_t)c->h->num_local_experts * c->h->num_ranks, tokens;
    if (more[MAP] == &_Py_NoneStruct) {
        if (!ep_torch_take(c, more[GIVEN_IDX], 0, 2, &c->given[1], &c->idx) || !c->idx ||
            !ep_torch_take(c, more[WEIGHTS], 0, 2, &c->given[2], &c->weights))
            return 0;
        tokens = c->idx->shape[0];
        return tokens == c->rows->shape[0] && c->idx->shape[1] == c->h->top_k &&
               (c->idx->type == EP_TYPE_INT32 || c->idx->type == EP_TYPE_INT64) &&
               PyLong_AsLongLong(more[EXPERTS]) == experts &&
               ep_torch_is_matrix(c->weights, EP_TYPE_FP32, tokens, c->h->top_k);
    }
    if (!ep_torch_take(c, more[MAP], 1, 2, &c->given[1], &c->map) ||
        !ep_torch_take(c, more[PROBS], 0, 2, &c->given[2], &c->probs))
        return 0;
    tokens = c->rows->shape[0];
    return ep_torch_is_matrix(c->map, EP_TYPE_UINT8, tokens, experts) &&
           c->h->top_k == (experts < EP_MAX_TOP_K ? experts : EP_MAX_TOP_K) &&
           ep_torch_is_matrix(c->probs, EP_TYPE_FP32, tokens, experts);
}

/* Rows and scales of a dispatch. */
static int take_sent(EpTorchWhole *c, void *rows, void *scales) {
    return ep_torch_take(c, rows, 0, 2, &c->given[0], &c->rows) &&
           ep_torch_are_rows(c->rows, c->step->row_bytes) &&
           ep_torch_take(c, scales, 0, 2, &c->given[3], &c->scales) &&
           are_scales(c->scales, c->rows->shape[0], c->rows->shape[1]);
}

/* Use a handle of a dispatch before. IS_KEPT tells that the plan's memory is kept for the current
 * stream, too. */
static int take_handle(EpTorchWhole *c, void *const *objects, int sums) {
    void *handle = objects[HANDLE];
    if (PyObject_IsInstance(handle, objects[KIND]) != 1 ||
        PyTuple_GetItem(handle, OWNER) != objects[SELF])
        return 0;
    memcpy(&c->sent, PyBytes_AsString(PyTuple_GetItem(handle, SENT)), sizeof(c->sent));
    c->step = c->sent.step;
    c->h = sums ? c->step->sum : c->step->send;
    if (!c->h || !c->h->group->group || !ep_torch_find_stream(c->h, &c->stream)) return 0;
    c->num_rows = c->sent.num_rows;
    find_plan(c);
    return objects[IS_KEPT] == &_Py_TrueStruct || c->sent.stream == c->stream;
}

/* The ids of a handle: those of its map, or the caller's. */
static int take_ids(EpTorchWhole *c, void *handle) {
    if (!c->sent.ids_at)
        return ep_torch_take(c, PyTuple_GetItem(handle, IDX), 0, 2, &c->given[2], &c->idx);
    c->idx = find_behind(c, MADE_IDX, EP_TYPE_INT32, c->sent.ids_at);
    return 1;
}

static void *send_again(EpTorchWhole *c, void *const *objects, void *const *more) {
    if (!take_handle(c, objects, 0) || !take_sent(c, more[HIDDEN], more[SCALES]) ||
        !ep_torch_take(c, more[WEIGHTS], 0, 2, &c->given[2], &c->weights) ||
        !ep_torch_is_matrix(c->weights, EP_TYPE_FP32, c->rows->shape[0], c->h->top_k))
        return ep_torch_leave();
    void *result = ep_torch_run(c, send);
    if (!result)
        result = wrap_sent(c, PyTuple_GetItem(objects[HANDLE], PADDED), share(objects[HANDLE]));
    return result;
}

/* Returns whether a step is of the call's form. */
static int is_of_step(EpTorchWhole *c, const EpTorchStep *step, void *const *more) {
    memset(c, 0, sizeof(*c));
    c->step = step;
    c->h = step->send;
    if (!c->h->group->group || PyLong_AsLongLong(more[ALIGNMENT]) != step->alignment ||
        PyLong_AsLongLong(more[NUM_ROWS]) != step->rows ||
        PyLong_AsLongLong(more[BOUND]) != step->bound ||
        PyLong_AsLongLong(more[SEND_SMS]) != step->send_sms ||
        !take_sent(c, more[HIDDEN], more[SCALES]) || c->rows->shape[1] != step->width ||
        c->rows->shape[0] > step->bound || !take_routing(c, more))
        return 0;
    int64_t bytes = ep_torch_element_bytes(c->rows->type);
    return step->width * (bytes < 2 ? 2 : bytes) == step->row_bytes && !PyErr_Occurred();
}

static void *send_anew(EpTorchWhole *c, void *const *objects, void *const *more) {
    const EpTorchStep *step = PyLong_AsVoidPtr(more[STEPS]);
    while (step && !is_of_step(c, step, more)) {
        if (PyErr_Occurred()) return ep_torch_leave();
        step = step->next;
    }
    if (!step || !ep_torch_find_stream(c->h, &c->stream)) return ep_torch_leave();
    void *result = ep_torch_run(c, route_and_send);
    if (result) return result;
    void *padded = ep_torch_wrap(c, MADE_PADDED);
    result = wrap_sent(c, padded, make_handle(c, objects, more[GIVEN_IDX], padded));
    Py_DecRef(padded);
    return result;
}

/*
 * dispatch_with_permute. Arguments: the type of handles, the buffer, a handle or None, whether its
 * plan is kept; the address of the buffer's first step; pad_multiple, rows of the outputs (0: as
 * many as come), most tokens of a rank, multiprocessors; hidden, scaling_factor, routing_map,
 * probs, topk_idx, topk_weights, num_of_experts. With a handle, weights are topk_weights alone.
 *
 * Returns a tuple; None: Python must look at the arguments; an EpStatus; or NO_MEMORY.
 */
void *ep_torch_hybrid_dispatch(void *self, void *const *objects, ptrdiff_t given) {
    (void)self;
    if (given != ARGUMENTS + MORE) return ep_torch_leave();
    EpTorchWhole c;
    memset(&c, 0, sizeof(c));
    void *const *more = objects + ARGUMENTS;
    void *result = objects[HANDLE] == &_Py_NoneStruct ? send_anew(&c, objects, more)
                                                      : send_again(&c, objects, more);
    if (c.h) ep_torch_drop(&c);
    return result;
}

/* ---- combine ------------------------------------------------------------------------------- */

/* Sum rows. Probabilities return to their experts' places of a map. */
static EpStatus sum(EpTorchWhole *c) {
    int64_t tokens = c->idx->shape[0], top_k = c->h->top_k;
    int64_t experts = (int64_t)c->h->num_local_experts * c->h->num_ranks;
    const EpTensor *out = ep_torch_make(c, MADE_ROWS, c->rows->type, tokens, c->rows->shape[1]);
    if (!c->probs) {
        if (c->is_short) return EP_OK;
        return ep_combine(c->h->handle, c->plan, c->rows, NULL, NULL, c->stream, out);
    }
    const EpTensor *weights = c->sent.weights_at && c->sent.stream == c->stream
                                  ? find_behind(c, MADE_WEIGHTS, EP_TYPE_FP32, c->sent.weights_at)
                                  : ep_torch_make(c, MADE_WEIGHTS, EP_TYPE_FP32, tokens, top_k);
    const EpTensor *probs = ep_torch_make(c, MADE_MORE, EP_TYPE_FP32, tokens, experts);
    if (c->is_short) return EP_OK;
    EpStatus status =
        ep_dispatch_backward(c->h->handle, c->plan, c->rows, c->probs, c->stream, out, weights);
    if (status != EP_OK) return status;
    return ep_write_routing_map(backend(c), c->idx, weights, c->stream, NULL, probs);
}

/*
 * combine_with_unpermute. Arguments: the type of handles, the buffer, the handle, whether its plan
 * is kept; multiprocessors, hidden, probs. Returns what the dispatch does.
 */
void *ep_torch_hybrid_combine(void *self, void *const *objects, ptrdiff_t given) {
    (void)self;
    enum { SMS = ARGUMENTS, ROWS_OF_EXPERTS, WEIGHTS_OF_ROWS, COUNT };
    EpTorchWhole c;
    memset(&c, 0, sizeof(c));
    if (given != COUNT || !take_handle(&c, objects, 1) ||
        PyLong_AsLongLong(objects[SMS]) != c.step->sum_sms ||
        !ep_torch_take(&c, objects[ROWS_OF_EXPERTS], 0, 2, &c.given[0], &c.rows) ||
        !ep_torch_are_rows(c.rows, c.step->row_bytes) || c.rows->shape[0] < c.num_rows ||
        !ep_torch_are_summable(c.rows) ||
        !ep_torch_take(&c, objects[WEIGHTS_OF_ROWS], 0, 1, &c.given[1], &c.probs) ||
        (c.probs && (c.probs->type != EP_TYPE_FP32 || c.probs->shape[0] != c.rows->shape[0])) ||
        !take_ids(&c, objects[HANDLE]) || PyErr_Occurred())
        return ep_torch_leave();
    void *result = ep_torch_run(&c, sum);
    if (!result) {
        void *items[] = {ep_torch_wrap(&c, MADE_ROWS), ep_torch_wrap(&c, MADE_MORE)};
        result = ep_torch_tuple(items, 2);
    }
    ep_torch_drop(&c);
    return result;
}
