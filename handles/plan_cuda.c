/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans in device memory, and what the host knows of them: shapes from the calls it issued, numbers
 * from pinned memory that ep_prepare writes at its end.
 */
#include <stdlib.h>
#include <string.h>

#include "handles/handle_cuda.h"

int64_t ep_cuda_plan_map(const EpPlanShape *s, void *memory, EpCudaPlan *plan) {
    uintptr_t base = (uintptr_t)memory;
    int64_t at = 0, ranks = s->num_ranks, local = s->num_local, k = s->max_top_k;
#define TAKE(field, count)                        \
    plan->field = (void *)(base + (uintptr_t)at); \
    at = ep_round_up(at + (count) * (int64_t)sizeof(*plan->field), 128)
    TAKE(header, 1);
    TAKE(expert_counts, local);
    TAKE(expert_padded, local);
    TAKE(expert_offsets, local + 1);
    TAKE(entries, s->max_tokens * k);
    TAKE(own_token, s->max_tokens);
    TAKE(tokens, ranks);
    TAKE(flat_begin, ranks);
    TAKE(begins, ranks * (s->max_tokens + 1));
    TAKE(routes, ranks * s->max_tokens * k);
    TAKE(tail, 1);
#undef TAKE
    return at;
}

int64_t ep_cuda_plan_bytes(const EpPlanShape *shape) {
    EpCudaPlan plan;
    return ep_cuda_plan_map(shape, NULL, &plan);
}

EpStatus ep_cuda_format_plan(EpHandle *handle) {
    const EpGroup *group = handle->group;
    size_t experts = 3 * (size_t)handle->shape.num_local + 1;
    size_t info_bytes = sizeof(EpCudaInfo) + experts * sizeof(int32_t);
    EpCudaHandle *state = calloc(1, sizeof(*state));
    if (!state)
        return ep_fail(EP_ERR_NO_MEMORY, "rank %d: ep_handle_create: out of memory", group->rank);
    handle->backend_state = state;
    EP_TRY(
        ep_cuda_check(group, "cudaHostAlloc", cudaHostAlloc((void **)&state->info, info_bytes, 0)));
    memset(state->info, 0, info_bytes);
    EpPlanHeader header = ep_plan_header(handle);
    EpCudaPlan plan = ep_cuda_plan(handle);
    EP_TRY(ep_cuda_check(group, "cudaMemcpy",
                         cudaMemcpy(plan.header, &header, sizeof(header), cudaMemcpyDefault)));
    return ep_cuda_check(
        group, "cudaMemcpy",
        cudaMemcpy(plan.tail, &header.magic, sizeof(*plan.tail), cudaMemcpyDefault));
}

static EpStatus look_at_plan(const EpHandle *handle, const char *name, void *memory) {
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

/* In an operation, kernels look at the memory: see ep_enter. */
EpStatus ep_cuda_check_plan(const EpHandle *handle, const char *name, void *memory) {
    return memory == handle->memory ? EP_OK : look_at_plan(handle, name, memory);
}

void ep_cuda_retire_plan(EpHandle *handle) {
    EpCudaHandle *state = handle->backend_state;
    if (!state) return;
    /* Operations under way may still write there. And the caller's memory may be in other use by
     * now: touch it only if it is still this plan. */
    (void)cudaDeviceSynchronize();
    EpPlanHeader dead = ep_plan_header(handle);
    dead.magic = EP_PLAN_DEAD;
    if (handle->owns_memory || look_at_plan(handle, "ep_handle_destroy", handle->memory) == EP_OK)
        (void)cudaMemcpy(handle->memory, &dead, sizeof(dead), cudaMemcpyDefault);
    (void)cudaFreeHost(state->info);
    (void)cudaGetLastError();
    free(state);
    handle->backend_state = NULL;
}

/* What the caller has moved, or brought back to where it was, may be the plan of an earlier step:
 * its numbers are in the block. */
EpStatus ep_cuda_adopt_plan(EpHandle *handle) {
    EP_TRY(look_at_plan(handle, "ep_handle_bind", handle->memory));
    EpCudaHandle *state = handle->backend_state;
    EpCudaPlan plan = ep_cuda_plan(handle);
    int32_t *experts = state->info->experts, local = handle->shape.num_local;
    size_t bytes = (size_t)local * sizeof(int32_t);
    cudaError_t error =
        cudaMemcpy(&state->info->header, plan.header, sizeof(EpPlanHeader), cudaMemcpyDefault);
    if (error == cudaSuccess)
        error = cudaMemcpy(experts, plan.expert_counts, bytes, cudaMemcpyDefault);
    if (error == cudaSuccess)
        error = cudaMemcpy(experts + local, plan.expert_padded, bytes, cudaMemcpyDefault);
    if (error == cudaSuccess)
        error = cudaMemcpy(experts + 2 * local, plan.expert_offsets, bytes + sizeof(int32_t),
                           cudaMemcpyDefault);
    const EpPlanHeader *header = &state->info->header;
    state->prepares = header->step;
    state->num_rows = header->num_rows, state->top_k = header->top_k;
    state->exact = header->exact_rows;
    return ep_cuda_check(handle->group, "cudaMemcpy", error);
}

EpStatus ep_cuda_read_plan(const EpHandle *handle, EpStep *out) {
    const EpCudaHandle *state = handle->backend_state;
    const volatile EpPlanHeader *header = &state->info->header;
    if (!state->prepares) return EP_OK;
    EpHandleInfo *info = &out->info;
    int32_t local = handle->shape.num_local;
    out->prepared = 1;
    out->known = header->step >= state->prepares;
    out->num_rows = state->num_rows, out->exact = state->exact;
    info->top_k = state->top_k;
    info->num_local_experts = local;
    info->step = header->step;
    info->num_tokens = out->known ? header->num_tokens : 0;
    info->recv_rows = header->recv_rows;
    info->needed_rows = header->needed_rows;
    info->dropped_slots = header->dropped_slots;
    info->remote_rows_sent = state->info->remote_sent;
    info->remote_rows_received = state->info->remote_received;
    info->local_rows = state->info->local;
    info->expert_counts = state->info->experts;
    info->expert_padded = state->info->experts + local;
    info->expert_offsets = state->info->experts + 2 * local;
    return EP_OK;
}
