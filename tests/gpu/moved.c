/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/moved.h"

#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "handles/handle.h"
#include "tests/gpu/arena.h"

/* ---- one call ------------------------------------------------------------------------------ */

static size_t tensor_bytes(const EpTensor *t) {
    size_t bytes = ep_type_bytes(t->type);
    if (t->struct_size != sizeof(*t) || t->ndim < 1 || t->ndim > EP_MAX_DIMS) return 0;
    for (int i = 0; i < t->ndim; i++)
        bytes *= t->shape[i] > 0 ? (size_t)t->shape[i] : 0;
    return bytes;
}

/* What is wrong on purpose is passed as it is. */
static const EpTensor *move(Moved *m, const EpTensor *t, int is_output) {
    size_t bytes = t ? tensor_bytes(t) : 0;
    if (!bytes || !t->data || gpu_owns(t->data) || (uintptr_t)t->data % 4) return t;
    void *data = gpu_allocate(64, bytes);
    if (!data) return t;
    EpTensor *moved = &m->tensor[m->count];
    *moved = *t;
    moved->data = memcpy(data, t->data, bytes);
    m->home[m->count] = t->data;
    m->is_output[m->count++] = is_output;
    return moved;
}

const EpTensor *moved_input(Moved *m, const EpTensor *t) {
    return move(m, t, 0);
}

const EpTensor *moved_output(Moved *m, const EpTensor *t) {
    return move(m, t, 1);
}

/* Inputs may be constants. */
void moved_home(const Moved *m) {
    for (int i = 0; i < m->count; i++)
        if (m->is_output[i]) memcpy(m->home[i], m->tensor[i].data, tensor_bytes(&m->tensor[i]));
}

void moved_release(Moved *m) {
    for (int i = 0; i < m->count; i++)
        gpu_release(m->tensor[i].data);
    m->count = 0;
}

/* ---- what handles have recorded ------------------------------------------------------------ */

typedef struct Record {
    struct Record *next;
    const EpHandle *handle;
    const EpGroup *group;
    Moved moved;
} Record;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Record *records;

/* A handle may be anything here, destroyed or NULL: it is compared and not looked at. */
static void forget(const EpHandle *handle, const EpGroup *group) {
    pthread_mutex_lock(&mutex);
    for (Record **at = &records; *at;) {
        Record *record = *at;
        if (record->handle != handle && record->group != group) {
            at = &record->next;
            continue;
        }
        *at = record->next;
        moved_release(&record->moved);
        gpu_release(record);
    }
    pthread_mutex_unlock(&mutex);
}

void moved_forget(const EpHandle *handle) {
    forget(handle, NULL);
}

void moved_forget_all(const EpGroup *group) {
    forget(NULL, group);
}

void moved_keep(const EpHandle *handle, const Moved *m) {
    moved_forget(handle);
    Record *record = m->count ? gpu_allocate(64, sizeof(*record)) : NULL;
    if (!record) return;
    pthread_mutex_lock(&mutex);
    *record = (Record){records, handle, handle->group, *m};
    records = record;
    pthread_mutex_unlock(&mutex);
}

/* One thread at a time calls into a group, so nobody takes the record away meanwhile. */
static Moved *recorded(const EpHandle *handle) {
    pthread_mutex_lock(&mutex);
    Record *record = records;
    while (record && record->handle != handle)
        record = record->next;
    pthread_mutex_unlock(&mutex);
    return record ? &record->moved : NULL;
}

void moved_refresh(const EpHandle *handle) {
    const Moved *m = recorded(handle);
    for (int i = 0; m && i < m->count; i++)
        memcpy(m->tensor[i].data, m->home[i], tensor_bytes(&m->tensor[i]));
}

void moved_deliver(const EpHandle *handle) {
    const Moved *m = recorded(handle);
    if (m) moved_home(m);
}
