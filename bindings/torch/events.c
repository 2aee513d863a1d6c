/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Events of streams for libep.deep_ep, without PyTorch's objects. An event is made once, and goes
 * back to its device's pool when Python drops it: a stream that waits for it has taken note
 * already.
 */
#include <stdlib.h>

#include "bindings/torch/call.h"
#include "bindings/torch/python.h"

#define NO_TIMING 2 /* cudaEventDisableTiming */
#define NAME "libep event"

typedef struct Event {
    void *event;
    struct Event **pool; /* of its device */
    struct Event *next;
} Event;

enum { MOST_DEVICES = 64, CUDA_NO_MEMORY = 2, CUDA_NO_DEVICE = 101 };
static Event *pools[MOST_DEVICES]; /* the interpreter's lock guards them */

static int make_event(const EpTorchEvents *e, int device, void **out) {
    int before = device, error = e->get_device(&before);
    if (!error && before != device) error = e->set_device(device);
    if (!error) error = e->create(out, NO_TIMING);
    if (before != device) (void)e->set_device(before);
    return error;
}

static int take(const EpTorchEvents *e, int64_t device, Event **out) {
    if (device < 0 || device >= MOST_DEVICES) return CUDA_NO_DEVICE;
    Event **pool = &pools[device];
    *out = *pool;
    if (*out) {
        *pool = (*out)->next;
        return 0;
    }
    Event *made = malloc(sizeof(*made));
    if (!made) return CUDA_NO_MEMORY;
    made->pool = pool;
    int error = make_event(e, (int)device, &made->event);
    if (error) free(made);
    *out = error ? NULL : made;
    return error;
}

static void give_back(Event *event) {
    event->next = *event->pool;
    *event->pool = event;
}

static void drop(void *capsule) {
    give_back(PyCapsule_GetPointer(capsule, NAME));
}

void *ep_torch_record_event(void *self, void *const *objects, ptrdiff_t count) {
    (void)self;
    const EpTorchEvents *e = count == 3 ? PyLong_AsVoidPtr(objects[0]) : NULL;
    Event *event = NULL;
    if (!e) return PyLong_FromLong(CUDA_NO_DEVICE);
    int error = take(e, PyLong_AsLongLong(objects[1]), &event);
    if (!error) error = e->record(event->event, PyLong_AsVoidPtr(objects[2]));
    if (error && event) give_back(event);
    return error ? PyLong_FromLong(error) : PyCapsule_New(event, NAME, drop);
}

void *ep_torch_wait_event(void *self, void *const *objects, ptrdiff_t count) {
    (void)self;
    const EpTorchEvents *e = count == 3 ? PyLong_AsVoidPtr(objects[0]) : NULL;
    Event *event = e ? PyCapsule_GetPointer(objects[2], NAME) : NULL;
    if (!event) return NULL; /* with Python's exception */
    int error = e->wait(PyLong_AsVoidPtr(objects[1]), event->event, 0);
    if (error) return PyLong_FromLong(error);
    Py_IncRef(&_Py_NoneStruct);
    return &_Py_NoneStruct;
}
