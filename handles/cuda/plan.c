/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans in device memory, and the host's knowledge of them: it takes shapes from the calls that it
 * issued, and numbers from pinned memory that routing kernels write.
 */
#include <stdlib.h>
#include <string.h>

#include "bootstrap/cuda/setup.h"
#include "handles/cuda/handle.h"

int64_t ep_cuda_plan_map(const EpPlanShape *s, void *memory, EpCudaPlan *plan) {
    EpArena arena = {.base = (uintptr_t)memory, .unit = 128};
    int64_t ranks = s->num_ranks, local = s->num_local, tokens = s->max_tokens, k = s->max_top_k;
#define TAKE(field, count) plan->field = ep_arena_array(&arena, count, sizeof(*plan->field))
    TAKE(header, 1);
    TAKE(expert_counts, local);
    TAKE(expert_padded, local);
    TAKE(expert_offsets, local + 1);
    TAKE(entries, tokens * k);
    TAKE(own_token, tokens);
    TAKE(tokens, ranks);
    TAKE(flat_begin, ranks);
    TAKE(begins, ranks * (tokens + 1));
    TAKE(routes, ranks * tokens * k);
    TAKE(tail, 1);
#undef TAKE
    return arena.bytes;
}

int64_t ep_cuda_plan_bytes(const EpPlanShape *shape) {
    EpCudaPlan plan;
    return ep_cuda_plan_map(shape, NULL, &plan);
}

EpStatus ep_cuda_format_plan(EpHandle *handle) {
    const EpGroup *group = handle->group;
    size_t words = (size_t)ep_info_words(&handle->shape);
    EpCudaHandle *state = calloc(1, sizeof(*state));
    if (!state)
        return ep_fail(EP_ERR_NO_MEMORY, "rank %d: ep_handle_create: out of memory", group->rank);
    handle->backend_state = state;
    state->number = calloc(words, sizeof(*state->number));
    state->copy = calloc(words, sizeof(*state->copy));
    if (!state->number || !state->copy)
        return ep_fail(EP_ERR_NO_MEMORY, "rank %d: ep_handle_create: out of memory", group->rank);
    EP_TRY(ep_cuda_check(group, "cudaHostAlloc",
                         cudaHostAlloc((void **)&state->info, words * sizeof(*state->info), 0)));
    memset(state->info, 0, words * sizeof(*state->info));
    EpPlanHeader header = ep_plan_header(handle);
    EpCudaPlan plan = ep_cuda_plan(handle);
    EP_TRY(ep_cuda_put(group, plan.header, &header, sizeof(header)));
    return ep_cuda_put(group, plan.tail, &header.magic, sizeof(*plan.tail));
}

/* Copy both ends of the plan at `memory` to the host and check them. */
static EpStatus check_plan_at(const EpHandle *handle, const char *name, void *memory) {
    EpCall call = {name, handle->group->rank};
    EpPlanHeader header, expected = ep_plan_header(handle);
    EpCudaPlan plan;
    uint64_t tail;
    ep_cuda_plan_map(&handle->shape, memory, &plan);
    EP_TRY(ep_cuda_check(handle->group, "cudaMemcpy",
                         cudaMemcpy(&header, plan.header, sizeof(header), cudaMemcpyDefault)));
    EP_TRY(ep_cuda_check(handle->group, "cudaMemcpy",
                         cudaMemcpy(&tail, plan.tail, sizeof(tail), cudaMemcpyDefault)));
    return ep_plan_check(&call, &header, tail, &expected);
}

/* In an operation, kernels check the handle's memory: see ep_enter. */
EpStatus ep_cuda_check_plan(const EpHandle *handle, const char *name, void *memory) {
    return memory == handle->memory ? EP_OK : check_plan_at(handle, name, memory);
}

void ep_cuda_retire_plan(EpHandle *handle) {
    EpCudaHandle *state = handle->backend_state;
    if (!state) return;
    if (ep_nccl_bootstrap_is_pending(&handle->group->bootstrap)) {
        handle->backend_state = NULL; /* stays allocated */
        return;
    }
    (void)cudaDeviceSynchronize(); /* operations under way may still write there */
    /* The caller may have reused its memory: write there only if it still holds this plan. */
    EpPlanHeader dead = ep_plan_header(handle);
    dead.magic = EP_PLAN_DEAD;
    if (handle->owns_memory || check_plan_at(handle, "ep_handle_destroy", handle->memory) == EP_OK)
        (void)ep_cuda_put(handle->group, handle->memory, &dead, sizeof(dead));
    (void)cudaFreeHost(state->info);
    (void)cudaGetLastError();
    free(state->number);
    free(state->copy);
    free(state);
    handle->backend_state = NULL;
}

/* ---- numbers ------------------------------------------------------------------------------- */

/* Copy the numbers of a step from pinned memory. `step`: its lower 32 bits. Returns 0 if some
 * numbers are not of this step. A graph that is replayed now may overwrite any word at any time, so
 * each word is read once, and what is checked is what is used. Numbers of the step before stay
 * until all of this step's are here. */
static int copy_numbers(const EpHandle *handle, uint32_t step) {
    EpCudaHandle *state = handle->backend_state;
    const volatile uint64_t *word = state->info;
    int64_t words = ep_info_words(&handle->shape), reported = 0;
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
static int32_t count_new_steps(const EpCudaHandle *state) {
    uint32_t step = (uint32_t)(*(const volatile uint64_t *)state->info >> 32);
    return (int32_t)(step - (uint32_t)state->step);
}

/* Update the last complete step seen. */
static void update_step(const EpHandle *handle) {
    EpCudaHandle *state = handle->backend_state;
    int32_t more = count_new_steps(state);
    if (more && copy_numbers(handle, (uint32_t)state->step + (uint32_t)more)) state->step += more;
}

int64_t ep_cuda_steps_seen(const EpHandle *handle) {
    const EpCudaHandle *state = handle->backend_state;
    return state->step + count_new_steps(state);
}

/* A captured kernel produces a step at each replay, so a capture sets no step to wait for. */
void ep_cuda_routing_issued(const EpHandle *handle, const EpRouting *routing, int captured,
                            int64_t before) {
    EpCudaHandle *state = handle->backend_state;
    if (!captured) state->awaited = 1 + ep_max(state->awaited, before);
    state->issued = 1;
    state->num_rows = routing->num_rows, state->top_k = routing->top_k;
    state->exact = routing->num_tokens == NULL;
}

/* The memory may hold the plan of an earlier step, which the caller has saved. Read the step and
 * its numbers from there. */
EpStatus ep_cuda_adopt_plan(EpHandle *handle) {
    EP_TRY(check_plan_at(handle, "ep_handle_bind", handle->memory));
    EpCudaHandle *state = handle->backend_state;
    EpCudaPlan plan = ep_cuda_plan(handle);
    EpPlanHeader header;
    int32_t *experts = state->number + EP_INFO_EXPERTS, local = handle->shape.num_local;
    size_t bytes = (size_t)local * sizeof(int32_t);
    cudaError_t error = cudaMemcpy(&header, plan.header, sizeof(header), cudaMemcpyDefault);
    if (error == cudaSuccess)
        error = cudaMemcpy(experts, plan.expert_counts, bytes, cudaMemcpyDefault);
    if (error == cudaSuccess)
        error = cudaMemcpy(experts + local, plan.expert_padded, bytes, cudaMemcpyDefault);
    if (error == cudaSuccess)
        error = cudaMemcpy(experts + 2 * local, plan.expert_offsets, bytes + sizeof(int32_t),
                           cudaMemcpyDefault);
    EP_TRY(ep_cuda_check(handle->group, "cudaMemcpy", error));
    state->number[EP_INFO_TOKENS] = (int32_t)header.num_tokens;
    state->number[EP_INFO_ROWS] = (int32_t)header.recv_rows;
    state->number[EP_INFO_NEEDED] = (int32_t)header.needed_rows;
    state->number[EP_INFO_DROPPED] = (int32_t)header.dropped_slots;
    state->number[EP_INFO_SENT] = header.rows_sent;
    state->number[EP_INFO_RECEIVED] = header.rows_received;
    state->number[EP_INFO_LOCAL] = header.rows_kept;
    for (int64_t i = 0; i < ep_info_words(&handle->shape); i++)
        state->info[i] = (uint64_t)(uint32_t)header.step << 32 | (uint32_t)state->number[i];
    state->step = state->awaited = header.step;
    state->issued = header.step > 0;
    state->num_rows = header.num_rows, state->top_k = header.top_k;
    state->exact = header.exact_rows;
    return EP_OK;
}

EpStatus ep_cuda_read_plan(const EpHandle *handle, EpStep *out) {
    const EpCudaHandle *state = handle->backend_state;
    const int32_t *number = state->number;
    if (!state->issued) return EP_OK;
    update_step(handle);
    EpHandleInfo *info = &out->info;
    int32_t local = handle->shape.num_local;
    out->prepared = 1;
    out->known = state->step > 0 && state->step >= state->awaited;
    out->num_rows = state->num_rows, out->exact = state->exact;
    info->top_k = state->top_k;
    info->num_local_experts = local;
    info->step = state->step;
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
    return EP_OK;
}
