/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans in device memory, and what the host knows of them: shapes from the calls it issued, numbers
 * from pinned memory that routing kernels write.
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
    size_t words = (size_t)ep_info_words(&handle->shape);
    EpCudaHandle *state = calloc(1, sizeof(*state));
    if (!state)
        return ep_fail(EP_ERR_NO_MEMORY, "rank %d: ep_handle_create: out of memory", group->rank);
    handle->backend_state = state;
    state->number = calloc(words, sizeof(*state->number));
    if (!state->number)
        return ep_fail(EP_ERR_NO_MEMORY, "rank %d: ep_handle_create: out of memory", group->rank);
    EP_TRY(ep_cuda_check(group, "cudaHostAlloc",
                         cudaHostAlloc((void **)&state->info, words * sizeof(*state->info), 0)));
    memset(state->info, 0, words * sizeof(*state->info));
    EpPlanHeader header = ep_plan_header(handle);
    EpCudaPlan plan = ep_cuda_plan(handle);
    EP_TRY(ep_cuda_put(group, plan.header, &header, sizeof(header)));
    return ep_cuda_put(group, plan.tail, &header.magic, sizeof(*plan.tail));
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
        (void)ep_cuda_put(handle->group, handle->memory, &dead, sizeof(dead));
    (void)cudaFreeHost(state->info);
    (void)cudaGetLastError();
    free(state->number);
    free(state);
    handle->backend_state = NULL;
}

/* ---- numbers ------------------------------------------------------------------------------- */

/* Copy the numbers of a step, of which the host knows the lower half; whether all are there. */
static int take_numbers(const EpHandle *handle, uint32_t step) {
    EpCudaHandle *state = handle->backend_state;
    const volatile uint64_t *word = state->info;
    int64_t words = ep_info_words(&handle->shape), same = 0;
    for (int64_t i = 0; i < words; i++)
        same += (uint32_t)(word[i] >> 32) == step;
    if (same < words) return 0;
    for (int64_t i = 0; i < words; i++)
        state->number[i] = (int32_t)(uint32_t)word[i];
    return 1;
}

/* How many steps have told of themselves since the one that was last seen to be complete: also
 * those of replayed graphs, which were not seen to be issued. */
static int32_t more_steps(const EpCudaHandle *state) {
    uint32_t step = (uint32_t)(*(const volatile uint64_t *)state->info >> 32);
    return (int32_t)(step - (uint32_t)state->step);
}

/* The last step that is complete. */
static void look_for_step(const EpHandle *handle) {
    EpCudaHandle *state = handle->backend_state;
    int32_t more = more_steps(state);
    if (more && take_numbers(handle, (uint32_t)state->step + (uint32_t)more)) state->step += more;
}

int64_t ep_cuda_steps_seen(const EpHandle *handle) {
    const EpCudaHandle *state = handle->backend_state;
    return state->step + more_steps(state);
}

/* What is captured makes a step when it is replayed, and as often as it is. */
void ep_cuda_note_routing(const EpHandle *handle, const EpRouting *routing, int captured,
                          int64_t before) {
    EpCudaHandle *state = handle->backend_state;
    if (!captured) state->awaited = 1 + ep_max(state->awaited, before);
    state->issued = 1;
    state->num_rows = routing->num_rows, state->top_k = routing->top_k;
    state->exact = routing->num_tokens == NULL;
}

/* What the caller has moved, or brought back to where it was, may be the plan of an earlier step:
 * its numbers are in the block. */
EpStatus ep_cuda_adopt_plan(EpHandle *handle) {
    EP_TRY(look_at_plan(handle, "ep_handle_bind", handle->memory));
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
    look_for_step(handle);
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
