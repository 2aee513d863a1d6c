/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/moved.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "handles/handle.h"
#include "tests/gpu/devices.h"

/* ---- one call ------------------------------------------------------------------------------ */

static size_t tensor_bytes(const EpTensor *t) {
    size_t bytes = ep_type_bytes(t->type);
    if (t->struct_size != sizeof(*t) || t->ndim < 1 || t->ndim > EP_MAX_DIMS) return 0;
    for (int i = 0; i < t->ndim; i++)
        bytes *= t->shape[i] > 0 ? (size_t)t->shape[i] : 0;
    return bytes;
}

/* A handle's own plan is in device memory already. */
static int is_on_device(const void *data) {
    struct cudaPointerAttributes attributes;
    if (cudaPointerGetAttributes(&attributes, data) == cudaSuccess)
        return attributes.type == cudaMemoryTypeDevice;
    (void)cudaGetLastError();
    return 0;
}

/* Tensors that are wrong on purpose are passed unchanged. */
static const EpTensor *move(Moved *m, const EpTensor *t, int is_output) {
    size_t bytes = t ? tensor_bytes(t) : 0;
    if (!bytes || !t->data || gpu_owns(t->data) || (uintptr_t)t->data % 4) return t;
    if (is_on_device(t->data)) return t;
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

/* Inputs are not copied back, since they may be constants. */
void moved_home(const Moved *m) {
    for (int i = 0; i < m->count; i++)
        if (m->is_output[i]) memcpy(m->home[i], m->tensor[i].data, tensor_bytes(&m->tensor[i]));
}

void moved_release(Moved *m) {
    for (int i = 0; i < m->count; i++)
        gpu_release(m->tensor[i].data);
    m->count = 0;
}

/* ---- deferred routing ---------------------------------------------------------------------- */

typedef struct Deferred {
    struct Deferred *next;
    const EpHandle *handle;
    const EpGroup *group;
    Moved moved;
} Deferred;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Deferred *all_deferred;

/* Drop what is kept for the handle or the group. The handle may be destroyed or NULL: it is
 * compared, not dereferenced. */
static void forget(const EpHandle *handle, const EpGroup *group) {
    pthread_mutex_lock(&mutex);
    for (Deferred **at = &all_deferred; *at;) {
        Deferred *deferred = *at;
        if (deferred->handle != handle && deferred->group != group) {
            at = &deferred->next;
            continue;
        }
        *at = deferred->next;
        moved_release(&deferred->moved);
        gpu_release(deferred);
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
    Deferred *deferred = m->count ? gpu_allocate(64, sizeof(*deferred)) : NULL;
    if (!deferred) return;
    pthread_mutex_lock(&mutex);
    *deferred = (Deferred){all_deferred, handle, handle->group, *m};
    all_deferred = deferred;
    pthread_mutex_unlock(&mutex);
}

/* Returns the kept tensors of a handle, or NULL. They stay valid: only one thread at a time calls
 * into a group. */
static Moved *find_deferred(const EpHandle *handle) {
    pthread_mutex_lock(&mutex);
    Deferred *deferred = all_deferred;
    while (deferred && deferred->handle != handle)
        deferred = deferred->next;
    pthread_mutex_unlock(&mutex);
    return deferred ? &deferred->moved : NULL;
}

void moved_refresh(const EpHandle *handle) {
    const Moved *m = find_deferred(handle);
    for (int i = 0; m && i < m->count; i++)
        memcpy(m->tensor[i].data, m->home[i], tensor_bytes(&m->tensor[i]));
}

void moved_deliver(const EpHandle *handle) {
    const Moved *m = find_deferred(handle);
    if (m) moved_home(m);
}
