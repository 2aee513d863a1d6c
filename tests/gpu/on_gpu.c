/* SPDX-License-Identifier: Apache-2.0 */
#define GPU_CALLS_UNCHANGED
#include "tests/gpu/on_gpu.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdint.h>

#include "handles/handle.h"

/* Between nodes of GPUs there is none. */
int gpu_has_latency(void) {
    return !getenv("LIBEP_TEST_NODES");
}

/* ---- the tensors of one call --------------------------------------------------------------- */

/* Those that GPUs cannot reach have copies in the pinned buffer. */
typedef struct Moved {
    EpTensor tensor[32];
    void *home[32];
    int count;
} Moved;

/** A call of this thread, and copies of its structs of tensors. */
typedef struct Call {
    int routing;
    const EpHandle *handle;
    Moved moved;
    EpPlanTensors numbers;
    EpPrepare prepare;
    EpExtras extras;
} Call;

static _Thread_local Call now;
static _Thread_local int only_enqueues, leaves_tensors;

void gpu_only_enqueue(int only) {
    only_enqueues = only;
}

void gpu_copy_tensors(int copies) {
    leaves_tensors = !copies;
}

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
const EpTensor *gpu_tensor(const void *tensor) {
    const EpTensor *t = tensor;
    size_t bytes = t ? tensor_bytes(t) : 0;
    if (only_enqueues || leaves_tensors || !bytes || !t->data || gpu_owns(t->data) ||
        (uintptr_t)t->data % 4 || is_on_device(t->data))
        return t;
    void *data = gpu_allocate(64, bytes);
    if (!data) return t;
    EpTensor *moved = &now.moved.tensor[now.moved.count];
    *moved = *t;
    moved->data = memcpy(data, t->data, bytes);
    now.moved.home[now.moved.count++] = t->data;
    return moved;
}

const EpPlanTensors *gpu_numbers(const void *numbers) {
    const EpPlanTensors *given = numbers;
    if (!given || given->struct_size != sizeof(*given)) return given;
    EpPlanTensors *n = &now.numbers;
    *n = *given;
    const EpTensor **vectors[] = {&n->expert_counts, &n->expert_padded, &n->expert_offsets,
                                  &n->totals,        &n->source_counts, &n->recv_rows,
                                  &n->needed_rows,   &n->dropped_slots, &n->source_rows};
    for (size_t i = 0; i < sizeof(vectors) / sizeof(*vectors); i++)
        *vectors[i] = gpu_tensor(*vectors[i]);
    return n;
}

const EpPrepare *gpu_routing(const void *prepare) {
    const EpPrepare *given = prepare;
    if (!given || given->struct_size != sizeof(*given) || given->topk_idx) return given;
    now.prepare = *given, now.prepare.out = gpu_numbers(given->out);
    return &now.prepare;
}

const EpExtras *gpu_extras(const void *extras) {
    const EpExtras *given = extras;
    if (!given || given->struct_size != sizeof(*given)) return given;
    EpExtras *x = &now.extras;
    *x = *given;
    const EpTensor **tensors[] = {
        &x->bias0,      &x->bias1,        &x->expert_tokens,        &x->peer_rows,
        &x->peer_bytes, &x->peer_wait_ns, &x->peer_longest_wait_ns, &x->global_scale,
        &x->ready,      &x->done,         &x->grad_scales};
    for (size_t i = 0; i < sizeof(tensors) / sizeof(*tensors); i++)
        *tensors[i] = gpu_tensor(*tensors[i]);
    return x;
}

/* Copy back what the call has written. Inputs may be constants. */
static void bring_home(const Moved *m) {
    for (int i = 0; i < m->count; i++) {
        size_t bytes = tensor_bytes(&m->tensor[i]);
        if (memcmp(m->home[i], m->tensor[i].data, bytes))
            memcpy(m->home[i], m->tensor[i].data, bytes);
    }
}

static void release(Moved *m) {
    for (int i = 0; i < m->count; i++)
        gpu_release(m->tensor[i].data);
    m->count = 0;
}

/* ---- deferred routing ---------------------------------------------------------------------- */

/* In latency mode ep_prepare defers routing: dispatches read and write its tensors later. So the
 * copies of its tensors are kept with the handle. They are refreshed before each dispatch, and
 * outputs are copied back after it. */
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
        release(&deferred->moved);
        gpu_release(deferred);
    }
    pthread_mutex_unlock(&mutex);
}

static void keep(Moved *m) {
    forget(now.handle, NULL);
    Deferred *deferred = m->count ? gpu_allocate(64, sizeof(*deferred)) : NULL;
    if (!deferred) return;
    pthread_mutex_lock(&mutex);
    *deferred = (Deferred){all_deferred, now.handle, now.handle->group, *m};
    all_deferred = deferred;
    pthread_mutex_unlock(&mutex);
}

/* Returns the kept tensors of a handle, or NULL. They stay valid: only one thread at a time calls
 * into a group. */
static const Moved *find_deferred(const EpHandle *handle) {
    pthread_mutex_lock(&mutex);
    Deferred *deferred = all_deferred;
    while (deferred && deferred->handle != handle)
        deferred = deferred->next;
    pthread_mutex_unlock(&mutex);
    return deferred ? &deferred->moved : NULL;
}

/* Copy the kept tensors from the caller's memory again: their content may have changed. */
static void refresh(const EpHandle *handle) {
    const Moved *m = find_deferred(handle);
    for (int i = 0; m && i < m->count; i++)
        memcpy(m->tensor[i].data, m->home[i], tensor_bytes(&m->tensor[i]));
}

void gpu_handle_destroy(EpHandle *handle) {
    forget(handle, NULL);
    ep_handle_destroy(handle);
}

void gpu_group_destroy(EpGroup *group) {
    forget(NULL, group);
    ep_group_destroy(group);
}

/* ---- a call -------------------------------------------------------------------------------- */

void gpu_begin(int routing) {
    now.routing = routing, now.handle = NULL, now.moved.count = 0;
}

EpHandle *gpu_handle(const void *handle) {
    now.handle = handle;
    if (now.routing & GPU_READS) refresh(handle);
    return (EpHandle *)(uintptr_t)handle;
}

/* Wait for a call, and end it. One that only enqueues passes unchanged: its test waits. */
EpStatus gpu_end(EpStatus status) {
    if (only_enqueues) return status;
    if (status == EP_OK && now.routing & GPU_KEEPS && ep_handle_is_latency(now.handle)) {
        keep(&now.moved);
        return status;
    }
    cudaError_t error = status == EP_OK ? cudaDeviceSynchronize() : cudaSuccess;
    if (error != cudaSuccess) status = ep_set_last_error(EP_ERR_SYSTEM, cudaGetErrorString(error));
    bring_home(&now.moved);
    release(&now.moved);
    const Moved *kept =
        status == EP_OK && now.routing & GPU_WRITES ? find_deferred(now.handle) : NULL;
    if (kept) bring_home(kept);
    return status;
}
