/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The calls of libep.deep_ep's HybridEPBuffer, whole. Within a layer their code and data are not in
 * the caches, so that each function of Python and each object costs as much as an operation. Here
 * is all that a call does whose configuration has been used before, its method included.
 * hybrid_ep_buffer.py says what is wrong with arguments, and makes groups and handles.
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

/* The keywords of dispatch_with_permute that are read, in the order of its signature. The others
 * have no effect. */
enum {
    HIDDEN,
    GIVEN_IDX,
    WEIGHTS,
    EXPERTS = WEIGHTS + 2,
    MAP = EXPERTS + 2,
    PROBS,
    SCALES,
    NUM_ROWS,
    ALIGNMENT,
    HANDLE,
    IS_FIXED,
    OLD_COUNT = IS_FIXED + 2,
    READS_COUNTS,
    SEND_WORDS
};

/* Those of combine_with_unpermute. */
enum { SUMMED, SUMMED_PROBS, SUMMED_HANDLE, SUM_WORDS = SUMMED_HANDLE + 4 };

/* The arguments that functions for Python's slower way take first, before the keywords. STEPS and
 * what follows are a dispatch's. */
enum { SELF, IS_KEPT, SMS, STEPS, BOUND, SEND_ARGUMENTS, SUM_ARGUMENTS = STEPS };

/* What a call is given. Objects are borrowed. */
typedef struct Given {
    void *self, *const *words; /* the buffer, the values of keywords */
    const EpTorchStep *steps;
    int64_t bound, sms, alignment, num_rows;
    int is_kept; /* whether the plan's memory is kept for the current stream, too */
} Given;

EpTorchMethods ep_torch_methods;

/* Returns an object's type, the last word of what all objects begin with. A function of Python that
 * is called for it lies on a page of its own, as each of them does: that takes longer. */
static const void *type_of(const void *object) {
    return *(void **)((char *)object + ep_torch_methods.head - sizeof(void *));
}

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

/* Returns a new handle. `padded` is borrowed. */
static void *make_handle(EpTorchWhole *c, const Given *g, void *padded) {
    c->sent.num_rows = c->num_rows;
    void *items[ITEMS] = {
        [OWNER] = share(g->self),
        [STEP] = share(c->step->object),
        [SENT] = PyBytes_FromStringAndSize((const char *)&c->sent, sizeof(c->sent)),
        [MEMORY] = ep_torch_wrap(c, MADE_MEMORY),
        [NUMBERS] = wrap_numbers(c),
        [PADDED] = share(padded),
        [IDX] = c->map ? none() : share(g->words[GIVEN_IDX]),
    };
    for (int i = SPARE; i < ITEMS; i++)
        items[i] = none();
    return ep_torch_handle(ep_torch_methods.kind, items, ITEMS);
}

/* Returns what was made at a place, as the tensor that a tuple shares. */
static void *wrap_shared(const EpTorchWhole *c, int place) {
    return c->made[place] ? c->h->torch->wrap(c->made[place]) : &_Py_NoneStruct;
}

static void unshare(const EpTorchWhole *c, int place, void *tensor) {
    if (c->made[place]) Py_DecRef(tensor);
}

/* Returns what dispatch_with_permute does. */
static void *wrap_sent(const EpTorchWhole *c, void *padded, void *handle) {
    void *rows = wrap_shared(c, MADE_ROWS), *more = wrap_shared(c, MADE_MORE);
    void *scales = wrap_shared(c, MADE_SCALES);
    void *tuple = PyTuple_Pack(5, rows, more, scales, padded, handle);
    unshare(c, MADE_ROWS, rows), unshare(c, MADE_MORE, more), unshare(c, MADE_SCALES, scales);
    return tuple;
}

/* Likewise of combine_with_unpermute. */
static void *wrap_sums(const EpTorchWhole *c) {
    void *rows = wrap_shared(c, MADE_ROWS), *more = wrap_shared(c, MADE_MORE);
    void *tuple = PyTuple_Pack(2, rows, more);
    unshare(c, MADE_ROWS, rows), unshare(c, MADE_MORE, more);
    return tuple;
}

/* The routing of a new step. */
static int take_routing(EpTorchWhole *c, void *const *words) {
    int64_t experts = (int64_t)c->h->num_local_experts * c->h->num_ranks, tokens;
    if (words[MAP] == &_Py_NoneStruct) {
        if (!ep_torch_take(c, words[GIVEN_IDX], 0, 2, &c->given[1], &c->idx) || !c->idx ||
            !ep_torch_take(c, words[WEIGHTS], 0, 2, &c->given[2], &c->weights))
            return 0;
        tokens = c->idx->shape[0];
        return tokens == c->rows->shape[0] && c->idx->shape[1] == c->h->top_k &&
               (c->idx->type == EP_TYPE_INT32 || c->idx->type == EP_TYPE_INT64) &&
               PyLong_AsLongLong(words[EXPERTS]) == experts &&
               ep_torch_is_matrix(c->weights, EP_TYPE_FP32, tokens, c->h->top_k);
    }
    if (!ep_torch_take(c, words[MAP], 1, 2, &c->given[1], &c->map) ||
        !ep_torch_take(c, words[PROBS], 0, 2, &c->given[2], &c->probs))
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

/* Use a handle of a dispatch before. */
static int take_handle(EpTorchWhole *c, const Given *g, void *handle, int sums) {
    const EpTorchMethods *m = &ep_torch_methods;
    if (type_of(handle) != m->kind || PyTuple_GetItem(handle, OWNER) != g->self) return 0;
    memcpy(&c->sent, (char *)PyTuple_GetItem(handle, SENT) + m->bytes_at, sizeof(c->sent));
    c->step = c->sent.step;
    c->h = sums ? c->step->sum : c->step->send;
    if (!c->h || !c->h->group->group || !ep_torch_find_stream(c->h, &c->stream)) return 0;
    c->num_rows = c->sent.num_rows;
    find_plan(c);
    return g->is_kept || c->sent.stream == c->stream;
}

/* The ids of a handle: those of its map, or the caller's. */
static int take_ids(EpTorchWhole *c, void *handle) {
    if (!c->sent.ids_at)
        return ep_torch_take(c, PyTuple_GetItem(handle, IDX), 0, 2, &c->given[2], &c->idx);
    c->idx = find_behind(c, MADE_IDX, EP_TYPE_INT32, c->sent.ids_at);
    return 1;
}

static void *send_again(EpTorchWhole *c, const Given *g) {
    void *const *words = g->words, *handle = words[HANDLE];
    if (!take_handle(c, g, handle, 0) || !take_sent(c, words[HIDDEN], words[SCALES]) ||
        !ep_torch_take(c, words[WEIGHTS], 0, 2, &c->given[2], &c->weights) ||
        !ep_torch_is_matrix(c->weights, EP_TYPE_FP32, c->rows->shape[0], c->h->top_k))
        return ep_torch_leave();
    void *result = ep_torch_run(c, send);
    return result ? result : wrap_sent(c, PyTuple_GetItem(handle, PADDED), handle);
}

/* Returns whether a step is of the call's form. */
static int is_of_step(EpTorchWhole *c, const EpTorchStep *step, const Given *g) {
    memset(c, 0, sizeof(*c));
    c->step = step;
    c->h = step->send;
    if (!c->h->group->group || g->alignment != step->alignment || g->num_rows != step->rows ||
        g->bound != step->bound || g->sms != step->send_sms ||
        !take_sent(c, g->words[HIDDEN], g->words[SCALES]) || c->rows->shape[1] != step->width ||
        c->rows->shape[0] > step->bound || !take_routing(c, g->words))
        return 0;
    int64_t bytes = ep_torch_element_bytes(c->rows->type);
    return step->width * (bytes < 2 ? 2 : bytes) == step->row_bytes;
}

static void *send_anew(EpTorchWhole *c, const Given *g) {
    const EpTorchStep *step = g->steps;
    while (step && !is_of_step(c, step, g)) {
        if (PyErr_Occurred()) return ep_torch_leave();
        step = step->next;
    }
    if (!step || !ep_torch_find_stream(c->h, &c->stream)) return ep_torch_leave();
    void *result = ep_torch_run(c, route_and_send);
    if (result) return result;
    void *padded = ep_torch_wrap(c, MADE_PADDED), *handle = make_handle(c, g, padded);
    result = wrap_sent(c, padded, handle);
    Py_DecRef(padded);
    Py_DecRef(handle);
    return result;
}

/* Returns an int of Python, or `otherwise` for None and 0. An error is -1, which no step has. */
static int64_t read_number(void *object, int64_t otherwise) {
    int64_t number = object == &_Py_NoneStruct ? 0 : PyLong_AsLongLong(object);
    return number ? number : otherwise;
}

/* Returns whether a keyword is set to True. *is_plain becomes 0 if it is neither a bool nor None.
 */
static int is_true(void *object, int *is_plain) {
    if (object != &_Py_TrueStruct && object != &_Py_FalseStruct && object != &_Py_NoneStruct)
        *is_plain = 0;
    return object == &_Py_TrueStruct;
}

/* Read the numbers among the keywords of a dispatch, and run it. */
static void *dispatch(Given *g) {
    EpTorchWhole c = {0};
    void *const *words = g->words;
    int is_plain = words[OLD_COUNT] == &_Py_NoneStruct;
    int is_fixed = words[READS_COUNTS] == &_Py_NoneStruct
                       ? is_true(words[IS_FIXED], &is_plain)
                       : !is_true(words[READS_COUNTS], &is_plain);
    if (!is_plain) return ep_torch_leave();
    void *result;
    if (words[HANDLE] == &_Py_NoneStruct) {
        g->alignment = read_number(words[ALIGNMENT], 1);
        g->num_rows = is_fixed ? PyLong_AsLongLong(words[NUM_ROWS]) : 0;
        result = send_anew(&c, g);
    } else { /* weights are topk_weights alone */
        result = words[PROBS] == &_Py_NoneStruct ? send_again(&c, g) : ep_torch_leave();
    }
    if (c.h) ep_torch_drop(&c);
    return result;
}

/*
 * dispatch_with_permute with checked arguments. They are the buffer, whether the plan of a handle
 * is kept; multiprocessors, the address of the buffer's first step, most tokens of a rank; and the
 * values of all keywords.
 *
 * Returns a tuple; None: Python must look at the arguments; an EpStatus; or NO_MEMORY.
 */
void *ep_torch_hybrid_dispatch(void *self, void *const *objects, ptrdiff_t given) {
    (void)self;
    if (given != SEND_ARGUMENTS + SEND_WORDS) return ep_torch_leave();
    Given g = {.self = objects[SELF],
               .words = objects + SEND_ARGUMENTS,
               .is_kept = objects[IS_KEPT] == &_Py_TrueStruct,
               .sms = PyLong_AsLongLong(objects[SMS]),
               .steps = PyLong_AsVoidPtr(objects[STEPS]),
               .bound = PyLong_AsLongLong(objects[BOUND])};
    return PyErr_Occurred() ? ep_torch_leave() : dispatch(&g);
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

static int take_summed(EpTorchWhole *c, const Given *g) {
    void *const *words = g->words;
    return take_handle(c, g, words[SUMMED_HANDLE], 1) && g->sms == c->step->sum_sms &&
           ep_torch_take(c, words[SUMMED], 0, 2, &c->given[0], &c->rows) &&
           ep_torch_are_rows(c->rows, c->step->row_bytes) && c->rows->shape[0] >= c->num_rows &&
           ep_torch_are_summable(c->rows) &&
           ep_torch_take(c, words[SUMMED_PROBS], 0, 1, &c->given[1], &c->probs) &&
           (!c->probs ||
            (c->probs->type == EP_TYPE_FP32 && c->probs->shape[0] == c->rows->shape[0])) &&
           take_ids(c, words[SUMMED_HANDLE]);
}

static void *combine(const Given *g) {
    EpTorchWhole c = {0};
    if (!take_summed(&c, g)) return ep_torch_leave();
    void *result = ep_torch_run(&c, sum);
    if (!result) result = wrap_sums(&c);
    ep_torch_drop(&c);
    return result;
}

/*
 * combine_with_unpermute with checked arguments: the buffer, whether the handle's plan is kept,
 * multiprocessors, and the values of all keywords. Returns what the dispatch does.
 */
void *ep_torch_hybrid_combine(void *self, void *const *objects, ptrdiff_t given) {
    (void)self;
    if (given != SUM_ARGUMENTS + SUM_WORDS) return ep_torch_leave();
    Given g = {.self = objects[SELF],
               .words = objects + SUM_ARGUMENTS,
               .is_kept = objects[IS_KEPT] == &_Py_TrueStruct,
               .sms = PyLong_AsLongLong(objects[SMS])};
    return PyErr_Occurred() ? ep_torch_leave() : combine(&g);
}

/* ---- methods ------------------------------------------------------------------------------- */

/* Set the values of a call's keywords; those that are not given are None. Returns 0 if it has
 * others, which Python knows what to do with. Calls name keywords in the order of the signature,
 * mostly. */
static int read_words(const EpTorchMethod *m, void *const *objects, void *names, void **out) {
    ptrdiff_t given = names ? PyTuple_Size(names) : 0, at = 0;
    for (ptrdiff_t i = 0; i < m->count; i++)
        out[i] = &_Py_NoneStruct;
    for (ptrdiff_t i = 0; i < given; i++, at++) {
        void *name = PyTuple_GetItem(names, i);
        ptrdiff_t tried = 0;
        for (; at >= m->count || m->names[at] != name; at = at >= m->count ? 0 : at + 1)
            if (tried++ > m->count) return 0;
        out[at] = objects[i];
    }
    return 1;
}

/* Find the buffer and its facts. Returns 0 for one that is not made. */
static int find_buffer(void *self, int sums, Given *g) {
    const EpTorchMethods *m = &ep_torch_methods;
    const EpTorchBuffer *facts = *(EpTorchBuffer **)((char *)self + m->head);
    if (!facts) return 0;
    g->self = self, g->steps = facts->steps, g->bound = facts->bound;
    g->sms = sums ? facts->sum_sms : facts->send_sms;
    if (g->sms) return 1;
    void *sms = PyObject_GetAttr(m->buffer, m->num_sms); /* of all buffers that have none */
    if (sms) g->sms = PyLong_AsLongLong(sms), Py_DecRef(sms);
    if (!PyErr_Occurred()) return 1;
    PyErr_Clear();
    return 0;
}

/* Call the function of Python that a method has. */
static void *call_python(const EpTorchMethod *m, void *self, void *const *objects, ptrdiff_t given,
                         void *names) {
    void *tuple = PyTuple_New(given + 1), *words = PyDict_New();
    PyTuple_SetItem(tuple, 0, share(self));
    for (ptrdiff_t i = 0; i < given; i++)
        PyTuple_SetItem(tuple, i + 1, share(objects[i]));
    for (ptrdiff_t i = 0; names && i < PyTuple_Size(names); i++)
        PyDict_SetItem(words, PyTuple_GetItem(names, i), objects[given + i]);
    void *result = PyObject_Call(m->function, tuple, words);
    Py_DecRef(tuple);
    Py_DecRef(words);
    return result;
}

/* Returns a method's result. `made` is what C has made of the call, which Python looks at if it is
 * no tuple. */
static void *settle(void *made) {
    if (type_of(made) == &PyTuple_Type) return made;
    void *result = PyObject_CallFunctionObjArgs(ep_torch_methods.settle, made, NULL);
    Py_DecRef(made);
    return result;
}

/* dispatch_with_permute and combine_with_unpermute as methods, with vectors of arguments. */
static inline void *run_method(int sums, void *self, void *const *objects, ptrdiff_t given,
                               void *names) {
    const EpTorchMethod *m = sums ? &ep_torch_methods.sum : &ep_torch_methods.send;
    void *words[MOST_WORDS], *made = &_Py_NoneStruct;
    Given g = {.words = words};
    if (!given && read_words(m, objects, names, words) && find_buffer(self, sums, &g))
        made = sums ? combine(&g) : dispatch(&g);
    return made == &_Py_NoneStruct ? call_python(m, self, objects, given, names) : settle(made);
}

void *ep_torch_hybrid_send_method(void *self, void *const *objects, ptrdiff_t given, void *names) {
    return run_method(0, self, objects, given, names);
}

void *ep_torch_hybrid_sum_method(void *self, void *const *objects, ptrdiff_t given, void *names) {
    return run_method(1, self, objects, given, names);
}
