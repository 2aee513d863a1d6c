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

/* Those that GPUs cannot reach have copies in the pinned buffer. A call on a stream passes
 * unchanged: tests of gpu/ make it, and do not wait. */
typedef struct Moved {
    EpStream stream;
    EpTensor tensor[32];
    void *home[32];
    int is_output[32];
    int count;
} Moved;

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

static int copies_tensors = 1;

void gpu_copy_tensors(int copies) {
    copies_tensors = copies;
}

/* Tensors that are wrong on purpose are passed unchanged. */
static const EpTensor *move(Moved *m, const EpTensor *t, int is_output) {
    size_t bytes = t ? tensor_bytes(t) : 0;
    if (m->stream || !copies_tensors || !bytes || !t->data || gpu_owns(t->data) ||
        (uintptr_t)t->data % 4)
        return t;
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

/* Return the tensor to pass. */
static const EpTensor *input(Moved *m, const EpTensor *t) {
    return move(m, t, 0);
}

static const EpTensor *output(Moved *m, const EpTensor *t) {
    return move(m, t, 1);
}

/* Copy the outputs back. Inputs are not, since they may be constants. */
static void bring_home(const Moved *m) {
    for (int i = 0; i < m->count; i++)
        if (m->is_output[i]) memcpy(m->home[i], m->tensor[i].data, tensor_bytes(&m->tensor[i]));
}

static void release(Moved *m) {
    for (int i = 0; i < m->count; i++)
        gpu_release(m->tensor[i].data);
    m->count = 0;
}

/* Wait for a call, and end it. */
static EpStatus settle(Moved *m, EpStatus status) {
    if (m->stream) return status;
    cudaError_t error = status == EP_OK ? cudaDeviceSynchronize() : cudaSuccess;
    if (error != cudaSuccess) status = ep_set_last_error(EP_ERR_SYSTEM, cudaGetErrorString(error));
    bring_home(m);
    release(m);
    return status;
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

static void keep(const EpHandle *handle, const Moved *m) {
    forget(handle, NULL);
    Deferred *deferred = m->count ? gpu_allocate(64, sizeof(*deferred)) : NULL;
    if (!deferred) return;
    pthread_mutex_lock(&mutex);
    *deferred = (Deferred){all_deferred, handle, handle->group, *m};
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

/* End a dispatch: its outputs, and those of the kept tensors, go home. */
static EpStatus deliver(const EpHandle *handle, Moved *m, EpStatus status) {
    status = settle(m, status);
    const Moved *kept = status == EP_OK ? find_deferred(handle) : NULL;
    if (kept) bring_home(kept);
    return status;
}

void gpu_handle_destroy(EpHandle *handle) {
    forget(handle, NULL);
    ep_handle_destroy(handle);
}

void gpu_group_destroy(EpGroup *group) {
    forget(NULL, group);
    ep_group_destroy(group);
}

/* ---- operations ---------------------------------------------------------------------------- */

/* Returns `out`, or `moved` with copies of its vectors. */
static const EpPlanTensors *move_numbers(Moved *m, const EpPlanTensors *out, EpPlanTensors *moved) {
    if (!out || out->struct_size != sizeof(*out)) return out;
    *moved = *out;
    const EpTensor **vectors[] = {
        &moved->expert_counts, &moved->expert_padded, &moved->expert_offsets,
        &moved->totals,        &moved->source_counts, &moved->recv_rows,
        &moved->needed_rows,   &moved->dropped_slots, &moved->source_rows};
    for (size_t i = 0; i < sizeof(vectors) / sizeof(*vectors); i++)
        *vectors[i] = output(m, *vectors[i]);
    return moved;
}

/* Returns `extras`, or `copy` with copies of its tensors. */
static const EpExtras *move_extras(Moved *m, const EpExtras *extras, EpExtras *copy) {
    if (!extras || extras->struct_size != sizeof(*extras)) return extras;
    *copy = *extras;
    copy->bias0 = input(m, extras->bias0), copy->bias1 = input(m, extras->bias1);
    copy->global_scale = input(m, extras->global_scale);
    const EpTensor **counters[] = {&copy->expert_tokens, &copy->peer_rows, &copy->peer_bytes,
                                   &copy->peer_wait_ns, &copy->peer_longest_wait_ns};
    for (size_t i = 0; i < sizeof(counters) / sizeof(*counters); i++)
        *counters[i] = output(m, *counters[i]);
    return copy;
}
#define EXTRAS move_extras(&m, extras, &(EpExtras){0})

EpStatus gpu_prepare_with(EpHandle *handle, const EpTensor *plan, const EpTensor *topk_idx,
                          const EpTensor *num_tokens, EpStream stream, const EpPlanTensors *out,
                          const EpExtras *extras) {
    Moved m = {.stream = stream};
    EpPlanTensors moved;
    EpStatus status =
        ep_prepare_with(handle, output(&m, plan), input(&m, topk_idx), input(&m, num_tokens),
                        stream, move_numbers(&m, out, &moved), EXTRAS);
    if (status != EP_OK || !ep_handle_is_latency(handle)) return settle(&m, status);
    keep(handle, &m);
    return status;
}

EpStatus gpu_prepare(EpHandle *handle, const EpTensor *plan, const EpTensor *topk_idx,
                     const EpTensor *num_tokens, EpStream stream, const EpPlanTensors *out) {
    Moved m = {.stream = stream};
    EpPlanTensors moved;
    EpStatus status = ep_prepare(handle, output(&m, plan), input(&m, topk_idx),
                                 input(&m, num_tokens), stream, move_numbers(&m, out, &moved));
    if (status != EP_OK || !ep_handle_is_latency(handle)) return settle(&m, status);
    keep(handle, &m);
    return status;
}

EpStatus gpu_dispatch_with(EpHandle *handle, const EpTensor *plan, const EpPrepare *prepare,
                           const EpTensor *tokens, const EpTensor *topk_weights,
                           const EpTensor *scales, EpStream stream, const EpTensor *recv_tokens,
                           const EpTensor *recv_topk_weights, const EpTensor *recv_scales,
                           const EpTensor *recv_topk_idx, const EpExtras *extras) {
    Moved m = {.stream = stream};
    EpPlanTensors numbers;
    EpPrepare outputs;
    if (prepare && prepare->struct_size == sizeof(*prepare) && !prepare->topk_idx) {
        outputs = *prepare, outputs.out = move_numbers(&m, prepare->out, &numbers);
        prepare = &outputs;
    }
    refresh(handle);
    EpStatus status = ep_dispatch_with(handle, output(&m, plan), prepare, input(&m, tokens),
                                       input(&m, topk_weights), input(&m, scales), stream,
                                       output(&m, recv_tokens), output(&m, recv_topk_weights),
                                       output(&m, recv_scales), output(&m, recv_topk_idx), EXTRAS);
    return deliver(handle, &m, status);
}

EpStatus gpu_dispatch(EpHandle *handle, const EpTensor *plan, const EpPrepare *prepare,
                      const EpTensor *tokens, const EpTensor *topk_weights, const EpTensor *scales,
                      EpStream stream, const EpTensor *recv_tokens,
                      const EpTensor *recv_topk_weights, const EpTensor *recv_scales,
                      const EpTensor *recv_topk_idx) {
    return gpu_dispatch_with(handle, plan, prepare, tokens, topk_weights, scales, stream,
                             recv_tokens, recv_topk_weights, recv_scales, recv_topk_idx, NULL);
}

/* A call whose tensors are moved, and which is over when it returns. */
#define SETTLED(name, parameters, ...)             \
    EpStatus gpu_##name parameters {               \
        Moved m = {.stream = stream};              \
        return settle(&m, ep_##name(__VA_ARGS__)); \
    }
#define IN(tensor) input(&m, tensor)
#define OUT(tensor) output(&m, tensor)
#define TENSOR const EpTensor *

EpStatus gpu_dispatch_send_with(EpHandle *handle, TENSOR plan, const EpPrepare *prepare,
                                TENSOR tokens, TENSOR topk_weights, TENSOR scales, EpStream stream,
                                const EpExtras *extras) {
    Moved m = {.stream = stream};
    refresh(handle);
    return settle(&m, ep_dispatch_send_with(handle, OUT(plan), prepare, IN(tokens),
                                            IN(topk_weights), IN(scales), stream, EXTRAS));
}

EpStatus gpu_dispatch_send(EpHandle *handle, TENSOR plan, const EpPrepare *prepare, TENSOR tokens,
                           TENSOR topk_weights, TENSOR scales, EpStream stream) {
    return gpu_dispatch_send_with(handle, plan, prepare, tokens, topk_weights, scales, stream,
                                  NULL);
}

EpStatus gpu_dispatch_wait(EpHandle *handle, EpStream stream, TENSOR recv_tokens,
                           TENSOR recv_topk_weights, TENSOR recv_scales, TENSOR recv_topk_idx) {
    Moved m = {.stream = stream};
    return deliver(handle, &m,
                   ep_dispatch_wait(handle, stream, OUT(recv_tokens), OUT(recv_topk_weights),
                                    OUT(recv_scales), OUT(recv_topk_idx)));
}

EpStatus gpu_dispatch_wait_with(EpHandle *handle, EpStream stream, TENSOR recv_tokens,
                                TENSOR recv_topk_weights, TENSOR recv_scales, TENSOR recv_topk_idx,
                                const EpExtras *extras) {
    Moved m = {.stream = stream};
    return deliver(handle, &m,
                   ep_dispatch_wait_with(handle, stream, OUT(recv_tokens), OUT(recv_topk_weights),
                                         OUT(recv_scales), OUT(recv_topk_idx), EXTRAS));
}

SETTLED(combine,
        (EpHandle * handle, TENSOR plan, TENSOR expert_out, TENSOR slot_weights,
         TENSOR topk_weights, EpStream stream, TENSOR out),
        handle, OUT(plan), IN(expert_out), IN(slot_weights), IN(topk_weights), stream, OUT(out))
SETTLED(combine_send,
        (EpHandle * handle, TENSOR plan, TENSOR expert_out, TENSOR slot_weights,
         TENSOR topk_weights, EpStream stream),
        handle, OUT(plan), IN(expert_out), IN(slot_weights), IN(topk_weights), stream)
SETTLED(combine_wait, (EpHandle * handle, EpStream stream, TENSOR out), handle, stream, OUT(out))
SETTLED(dispatch_backward,
        (EpHandle * handle, TENSOR plan, TENSOR rows, TENSOR weights, EpStream stream,
         TENSOR grad_tokens, TENSOR grad_topk_weights),
        handle, OUT(plan), IN(rows), IN(weights), stream, OUT(grad_tokens), OUT(grad_topk_weights))
SETTLED(combine_backward,
        (EpHandle * handle, TENSOR plan, TENSOR grad_out, TENSOR slot_weights, TENSOR expert_out,
         EpStream stream, TENSOR grad_expert_out, TENSOR grad_slot_weights),
        handle, OUT(plan), IN(grad_out), IN(slot_weights), IN(expert_out), stream,
        OUT(grad_expert_out), OUT(grad_slot_weights))
SETTLED(weight_gather,
        (EpWeight * weight, const EpWeightForm *form, TENSOR shard, TENSOR workspace,
         EpStream stream, TENSOR out, TENSOR scales),
        weight, form, IN(shard), OUT(workspace), stream, OUT(out), OUT(scales))
SETTLED(weight_reduce,
        (EpWeight * weight, TENSOR grad, int accumulate, TENSOR workspace, EpStream stream,
         TENSOR out),
        weight, IN(grad), accumulate, OUT(workspace), stream, OUT(out))
SETTLED(weight_amax, (EpWeight * weight, EpAmaxScope scope, EpStream stream, TENSOR amax), weight,
        scope, stream, OUT(amax))
SETTLED(quantise_rows,
        (EpGroup * group, const EpRowsForm *form, TENSOR rows, TENSOR num_rows, EpStream stream,
         TENSOR out, TENSOR scales),
        group, form, IN(rows), IN(num_rows), stream, OUT(out), OUT(scales))
SETTLED(count_routing,
        (EpBackend backend, TENSOR topk_idx, EpStream stream, TENSOR rank_tokens,
         TENSOR expert_tokens, TENSOR token_in_rank),
        backend, IN(topk_idx), stream, OUT(rank_tokens), OUT(expert_tokens), OUT(token_in_rank))
SETTLED(read_routing_map,
        (EpBackend backend, TENSOR map, TENSOR probs, EpStream stream, TENSOR topk_idx,
         TENSOR topk_weights),
        backend, IN(map), IN(probs), stream, OUT(topk_idx), OUT(topk_weights))
SETTLED(write_routing_map,
        (EpBackend backend, TENSOR topk_idx, TENSOR topk_weights, EpStream stream, TENSOR map,
         TENSOR probs),
        backend, IN(topk_idx), IN(topk_weights), stream, OUT(map), OUT(probs))

SETTLED(combine_send_with,
        (EpHandle * handle, TENSOR plan, TENSOR expert_out, TENSOR slot_weights,
         TENSOR topk_weights, EpStream stream, const EpExtras *extras),
        handle, OUT(plan), IN(expert_out), IN(slot_weights), IN(topk_weights), stream, EXTRAS)
SETTLED(combine_backward_with,
        (EpHandle * handle, TENSOR plan, TENSOR grad_out, TENSOR slot_weights, TENSOR expert_out,
         EpStream stream, TENSOR grad_expert_out, TENSOR grad_slot_weights, const EpExtras *extras),
        handle, OUT(plan), IN(grad_out), IN(slot_weights), IN(expert_out), stream,
        OUT(grad_expert_out), OUT(grad_slot_weights), EXTRAS)
SETTLED(combine_with,
        (EpHandle * handle, TENSOR plan, TENSOR expert_out, TENSOR slot_weights,
         TENSOR topk_weights, EpStream stream, TENSOR out, const EpExtras *extras),
        handle, OUT(plan), IN(expert_out), IN(slot_weights), IN(topk_weights), stream, OUT(out),
        EXTRAS)
SETTLED(combine_wait_with, (EpHandle * handle, EpStream stream, TENSOR out, const EpExtras *extras),
        handle, stream, OUT(out), EXTRAS)
SETTLED(dispatch_backward_with,
        (EpHandle * handle, TENSOR plan, TENSOR rows, TENSOR weights, EpStream stream,
         TENSOR grad_tokens, TENSOR grad_topk_weights, const EpExtras *extras),
        handle, OUT(plan), IN(rows), IN(weights), stream, OUT(grad_tokens), OUT(grad_topk_weights),
        EXTRAS)
