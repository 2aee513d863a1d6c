/* SPDX-License-Identifier: Apache-2.0 */
#include "bindings/torch/whole.h"

#include <pthread.h>
#include <time.h>

/* ---- one thread at a time ------------------------------------------------------------------ */

/* As libep.Group.run does. Returns whether this thread has the group. */
static int enter(EpTorchGroup *g) {
    struct timespec now;
    if (__atomic_exchange_n(&g->is_in, 1, __ATOMIC_ACQUIRE)) return 0;
    clock_gettime(CLOCK_REALTIME, &now);
    g->began = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    g->caller = (uint64_t)pthread_self(); /* as Python numbers threads */
    return 1;
}

static void leave(EpTorchGroup *g) {
    g->caller = 0;
    __atomic_store_n(&g->is_in, 0, __ATOMIC_RELEASE);
}

void *ep_torch_enter(void *self, void *const *objects, ptrdiff_t count) {
    (void)self;
    EpTorchGroup *g = count == 1 ? PyLong_AsVoidPtr(objects[0]) : NULL;
    return share(g && enter(g) ? &_Py_TrueStruct : &_Py_FalseStruct);
}

void *ep_torch_leave_group(void *self, void *const *objects, ptrdiff_t count) {
    (void)self;
    EpTorchGroup *g = count == 1 ? PyLong_AsVoidPtr(objects[0]) : NULL;
    if (g) leave(g);
    return none();
}

/* ---- arguments ----------------------------------------------------------------------------- */

int64_t ep_torch_element_bytes(EpType type) {
    switch (type) {
    case EP_TYPE_INT64:
        return 8;
    case EP_TYPE_FP32:
    case EP_TYPE_INT32:
        return 4;
    case EP_TYPE_BF16:
    case EP_TYPE_FP16:
        return 2;
    default:
        return 1;
    }
}

int ep_torch_take(const EpTorchWhole *c, void *object, int is_bool, int ndim, EpTensor *t,
                  const EpTensor **out) {
    *out = NULL;
    if (object == &_Py_NoneStruct) return 1;
    *out = t;
    return ep_torch_convert(c->h, object, is_bool, t) && t->ndim == ndim;
}

int ep_torch_is_matrix(const EpTensor *t, EpType type, int64_t rows, int64_t columns) {
    return !t || (t->type == type && t->shape[0] == rows && t->shape[1] == columns);
}

int ep_torch_are_summable(const EpTensor *t) {
    return t->type == EP_TYPE_BF16 || t->type == EP_TYPE_FP16 || t->type == EP_TYPE_FP32;
}

int ep_torch_are_rows(const EpTensor *t, int64_t most) {
    int64_t bytes = t ? t->shape[1] * ep_torch_element_bytes(t->type) : 0;
    return t && bytes > 0 && bytes % ROW_UNIT == 0 && bytes <= most &&
           (uintptr_t)t->data % ROW_UNIT == 0;
}

int ep_torch_is_on(EpTorchWhole *c, void *stream) {
    return ep_torch_find_stream(c->h, &c->stream) && PyLong_AsVoidPtr(stream) == c->stream;
}

/* ---- new tensors --------------------------------------------------------------------------- */

const EpTensor *ep_torch_make_on(EpTorchWhole *c, int32_t device, int place, EpType type,
                                 int64_t rows, int64_t columns) {
    EpTensor *t = &c->outputs[place];
    *t = (EpTensor){.struct_size = sizeof(*t),
                    .type = type,
                    .ndim = columns ? 2 : 1,
                    .shape = {rows, columns ? columns : 1, 1}};
    if (c->is_short ||
        !ep_torch_allocate(c->h->torch, device, ep_torch_type(type), t, &c->made[place]))
        c->is_short = 1;
    return t;
}

const EpTensor *ep_torch_make(EpTorchWhole *c, int place, EpType type, int64_t rows,
                              int64_t columns) {
    return ep_torch_make_on(c, c->h->device, place, type, rows, columns);
}

void *ep_torch_wrap(const EpTorchWhole *c, int place) {
    return c->made[place] ? c->h->torch->wrap(c->made[place]) : none();
}

void *ep_torch_copy_numbers(const EpTorchWhole *c) {
    ptrdiff_t bytes = (ptrdiff_t)sizeof(int32_t) * ep_torch_count_numbers(c->h);
    return PyBytes_FromStringAndSize((const char *)c->step->numbers, bytes);
}

void *ep_torch_tuple(void *const *items, ptrdiff_t count) {
    void *tuple = PyTuple_New(count);
    for (ptrdiff_t i = 0; i < count; i++)
        PyTuple_SetItem(tuple, i, items[i]);
    return tuple;
}

void *ep_torch_handle(void *type, void *const *items, ptrdiff_t count) {
    void *tuple = PyType_GenericAlloc(type, count);
    for (ptrdiff_t i = 0; i < count; i++)
        PyTuple_SetItem(tuple, i, items[i]);
    return tuple;
}

void ep_torch_drop(EpTorchWhole *c) {
    for (int i = 0; i < MOST_MADE; i++)
        if (c->made[i]) c->h->torch->drop(c->made[i]);
}

void *ep_torch_run(EpTorchWhole *c, EpStatus (*part)(EpTorchWhole *c)) {
    if ((c->h->device >= 0 && !c->h->torch->wait_stream) || !enter(c->h->group))
        return ep_torch_leave();
    if (!c->h->group->group) { /* closed */
        leave(c->h->group);
        return ep_torch_leave();
    }
    void *others = PyEval_SaveThread();
    EpStatus status = part(c);
    PyEval_RestoreThread(others);
    leave(c->h->group);
    if (status != EP_OK) return PyLong_FromLong(status);
    return c->is_short ? PyLong_FromLong(NO_MEMORY) : NULL;
}
