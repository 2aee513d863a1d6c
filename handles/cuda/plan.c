/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Handles' own plans: their memory, and what the host knows of them. It takes shapes from the calls
 * that it issued, and numbers from pinned memory that routing kernels write.
 */
#include <stdlib.h>
#include <string.h>

#include "handles/cuda/handle.h"
#include "runtime/wait.h"

int64_t ep_cuda_plan_bytes(const EpPlanShape *shape) {
    EpCudaPlan plan;
    return ep_cuda_plan_map(shape, NULL, &plan);
}

/* ---- a handle's own plan ------------------------------------------------------------------- */

static void free_own(EpCudaOwn *own) {
    (void)cudaFree(own->memory);
    (void)cudaFreeHost(own->info);
    (void)cudaGetLastError();
    free(own->number);
    free(own->copy);
    free(own);
}

void ep_cuda_free_plans(EpGroup *group) {
    EpCuda *cuda = ep_cuda(group);
    while (cuda->spare) {
        EpCudaOwn *own = cuda->spare;
        cuda->spare = own->next;
        group->library_bytes -= own->bytes;
        free_own(own);
    }
}

/* Returns the plan of a handle that is gone, if one is as large and less than twice as large, and
 * has as many numbers: those of latency mode on several nodes have fewer. */
static EpCudaOwn *take_spare(EpCuda *cuda, int64_t bytes, int64_t words) {
    for (EpCudaOwn **at = &cuda->spare; *at; at = &(*at)->next) {
        EpCudaOwn *own = *at;
        if (own->bytes < bytes || own->bytes >= 2 * bytes || own->words != words) continue;
        *at = own->next;
        return own;
    }
    return NULL;
}

/* Handles of several sizes may come and go at each step, so spare plans of other sizes are kept:
 * freeing them would wait for the device. But handles that are gone must not fill it. */
static void bound_spares(EpGroup *group) {
    enum { MOST_SPARES = 8 };
    int spares = 0;
    for (const EpCudaOwn *own = ep_cuda(group)->spare; own; own = own->next)
        spares++;
    if (spares >= MOST_SPARES) ep_cuda_free_plans(group);
}

static EpStatus allocate_own(EpGroup *group, const EpCall *call, EpCudaOwn *own) {
    size_t words = (size_t)own->words;
    own->number = calloc(words, sizeof(*own->number));
    own->copy = calloc(words, sizeof(*own->copy));
    if (!own->number || !own->copy)
        return ep_refuse(call, EP_ERR_NO_MEMORY, "config", "out of memory");
    if (cudaMalloc(&own->memory, (size_t)own->bytes) != cudaSuccess) ep_cuda_free_plans(group);
    if (!own->memory && cudaMalloc(&own->memory, (size_t)own->bytes) != cudaSuccess) {
        (void)cudaGetLastError();
        return ep_refuse(call, EP_ERR_NO_MEMORY, "config", "expected %lld bytes, got none",
                         (long long)own->bytes);
    }
    EP_TRY(ep_cuda_check(group, "cudaHostAlloc",
                         cudaHostAlloc((void **)&own->info, words * sizeof(*own->info), 0)));
    memset(own->info, 0, words * sizeof(*own->info));
    const EpPlanHeader none = {.magic = 0};
    return ep_cuda_put(group, own->memory, &none, sizeof(none));
}

EpStatus ep_cuda_open_plan(EpHandle *handle, const EpCall *call) {
    EpGroup *group = handle->group;
    EpCudaOwn *own = take_spare(ep_cuda(group), handle->bytes, ep_info_words(&handle->shape));
    if (!own) {
        bound_spares(group);
        own = calloc(1, sizeof(*own));
        if (!own) return ep_refuse(call, EP_ERR_NO_MEMORY, "config", "out of memory");
        own->bytes = handle->bytes, own->words = ep_info_words(&handle->shape);
        EpStatus status = allocate_own(group, call, own);
        if (status != EP_OK) {
            free_own(own);
            return status;
        }
        group->library_bytes += own->bytes;
    }
    own->first = own->awaited = ep_max(own->awaited, ep_cuda_steps_seen(own));
    own->issued = own->captured = 0;
    handle->own_state = own;
    handle->own.memory = own->memory;
    return EP_OK;
}

/* Work under way may still write there, and waiting for it is not for this call: the next handle of
 * this size takes the memory. Its prepare follows that work in the group's order. */
void ep_cuda_close_plan(EpHandle *handle) {
    EpCudaOwn *own = handle->own_state;
    EpCuda *cuda = ep_cuda(handle->group);
    const EpPending *pending = &handle->pending;
    if (!own) return;
    if (pending->kind == EP_PENDING_DISPATCH && !pending->place.is_captured &&
        !pending->scatter.plan.is_named)
        own->awaited--; /* this step will never be complete */
    own->next = cuda->spare;
    cuda->spare = own;
    handle->own_state = NULL, handle->own.memory = NULL;
}

/* ---- numbers ------------------------------------------------------------------------------- */

/* Copy the numbers of a step from pinned memory. `step`: its lower 32 bits. Returns 0 if some
 * numbers are not of this step. A graph that is replayed now may overwrite any word at any time, so
 * each word is read once, and what is checked is what is used. Numbers of the step before stay
 * until all of this step's are here. */
static int copy_numbers(EpCudaOwn *state, uint32_t step) {
    const volatile uint64_t *word = state->info;
    int64_t words = state->words, reported = 0;
    for (int64_t i = 0; i < words; i++) {
        state->copy[i] = word[i];
        reported += (uint32_t)(state->copy[i] >> 32) == step;
    }
    if (reported < words) return 0;
    for (int64_t i = 0; i < words; i++)
        state->number[i] = (int32_t)(uint32_t)state->copy[i];
    return 1;
}

/* Returns how many steps kernels have reported since the last complete step seen. Includes steps of
 * replayed graphs, which the host did not issue. */
static int32_t count_new_steps(const EpCudaOwn *state) {
    uint32_t step = (uint32_t)(*(const volatile uint64_t *)state->info >> 32);
    return (int32_t)(step - (uint32_t)state->step);
}

/* Update the last complete step seen. */
static void update_step(EpCudaOwn *state) {
    int32_t more = count_new_steps(state);
    if (more && copy_numbers(state, (uint32_t)state->step + (uint32_t)more)) state->step += more;
}

int64_t ep_cuda_steps_seen(EpCudaOwn *own) {
    return own->step + count_new_steps(own);
}

/* A step that has failed may have left some of its numbers. The next one has its number. */
static void settle(EpCudaOwn *own) {
    update_step(own);
    for (int64_t i = 0; i < own->words; i++)
        if ((uint32_t)(own->info[i] >> 32) != (uint32_t)own->step)
            own->info[i] = (uint64_t)own->step << 32 | (uint32_t)own->number[i];
    if (own->awaited > own->step && !own->captured) own->issued = 0;
    own->awaited = ep_min(own->awaited, own->step);
}

void ep_cuda_settle_plans(EpGroup *group) {
    for (EpOwned *owned = group->handles; owned; owned = owned->next) {
        const EpHandle *handle = owned->object;
        if (handle->own_state) settle(handle->own_state);
    }
    for (EpCudaOwn *own = ep_cuda(group)->spare; own; own = own->next)
        settle(own);
}

/* A captured kernel produces a step at each replay, so a capture sets no step to wait for. */
void ep_cuda_routing_issued(EpCudaOwn *own, const EpRouting *routing, int captured,
                            int64_t before) {
    if (!captured) own->awaited = 1 + ep_max(own->awaited, before);
    own->issued = 1, own->captured |= captured;
    own->num_rows = routing->num_rows, own->top_k = routing->top_k;
    own->exact = routing->num_tokens == NULL;
}

/* Exact sizing: the caller has read the numbers before it made room for the rows, so this waits
 * only on a rank that has none. */
EpStatus ep_cuda_await_numbers(EpHandle *handle, const int32_t **number) {
    EpCudaOwn *own = handle->own_state;
    EpWait wait;
    ep_wait_begin(&wait, handle->group->timeout, 0);
    update_step(own);
    while (own->step <= own->first || own->step < own->awaited) {
        handle->group->backend->poll(handle->group);
        EP_TRY(ep_group_usable(handle->group));
        if (!ep_wait_pause(&wait))
            return ep_fail(EP_ERR_TIMEOUT,
                           "rank %d: expected ep_prepare to finish within %g s, it has not",
                           handle->group->rank, handle->group->timeout);
        update_step(own);
    }
    *number = own->number;
    return EP_OK;
}

static void read_own(EpCudaOwn *state, int32_t local, EpStep *out) {
    const int32_t *number = state->number;
    EpHandleInfo *info = &out->info;
    update_step(state);
    out->prepared = 1;
    out->known = state->step > state->first && state->step >= state->awaited;
    out->num_rows = state->num_rows, out->exact = state->exact;
    info->top_k = state->top_k;
    info->num_local_experts = local;
    info->step = state->step - state->first;
    info->num_tokens = out->known ? number[EP_INFO_TOKENS] : 0;
    info->recv_rows = number[EP_INFO_ROWS];
    info->needed_rows = number[EP_INFO_NEEDED];
    info->dropped_slots = number[EP_INFO_DROPPED];
    info->remote_rows_sent = number[EP_INFO_SENT];
    info->remote_rows_received = number[EP_INFO_RECEIVED];
    info->local_rows = number[EP_INFO_LOCAL];
    info->expert_counts = number + EP_INFO_EXPERTS;
    info->expert_padded = number + EP_INFO_EXPERTS + local;
    info->expert_offsets = number + EP_INFO_EXPERTS + 2 * local;
}

/* Of a named plan the host reads nothing: kernels check it. */
EpStatus ep_cuda_read_plan(const EpHandle *handle, const EpCall *call, EpPlanRef ref, EpStep *out) {
    EpCudaOwn *own = handle->own_state;
    (void)call;
    if (!ref.is_named) {
        if (own->issued) read_own(own, handle->shape.num_local, out);
        return EP_OK;
    }
    out->prepared = out->checked_later = out->exact = 1;
    out->num_rows = -1;
    out->info.top_k = ep_handle_top_k(handle);
    return EP_OK;
}
