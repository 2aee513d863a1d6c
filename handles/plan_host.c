/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans in plain memory. The header says whose plan it is; the last word repeats the magic, so that
 * a block which was overwritten from either end is noticed.
 */
#include <stdlib.h>
#include <string.h>

#include "handles/handle.h"

int64_t ep_host_plan_bytes(const EpPlanShape *shape) {
    EpPlan plan;
    return ep_plan_map(shape, NULL, &plan);
}

EpPlanHeader ep_plan_header(const EpHandle *handle) {
    return (EpPlanHeader){.magic = EP_PLAN_MAGIC,
                          .group = handle->group->id,
                          .handle = handle->ordinal,
                          .bytes = handle->bytes};
}

EpStatus ep_host_format_plan(EpHandle *handle) {
    EpPlan plan = ep_host_plan(handle);
    *plan.header = ep_plan_header(handle);
    *plan.tail = EP_PLAN_MAGIC;
    return EP_OK;
}

EpStatus ep_plan_check(const EpCall *call, const EpPlanHeader *got, uint64_t tail,
                       const EpPlanHeader *expected) {
    if (got->magic == EP_PLAN_DEAD)
        return ep_refuse(call, EP_ERR_DESTROYED, "handle memory",
                         "expected a live handle's plan, got that of one that was destroyed");
    if (got->magic != EP_PLAN_MAGIC)
        return ep_refuse(call, EP_ERR_HANDLE_MEMORY, "handle memory",
                         "expected the plan of handle %d, got other bytes (0x%016llx)",
                         expected->handle, (unsigned long long)got->magic);
    if (got->group != expected->group)
        return ep_refuse(call, EP_ERR_FOREIGN, "handle memory",
                         "expected a plan of group %016llx, got one of group %016llx",
                         (unsigned long long)expected->group, (unsigned long long)got->group);
    if (got->handle != expected->handle)
        return ep_refuse(call, EP_ERR_FOREIGN, "handle memory",
                         "expected the plan of handle %d, got that of handle %d", expected->handle,
                         got->handle);
    if (got->bytes != expected->bytes)
        return ep_refuse(call, EP_ERR_HANDLE_MEMORY, "handle memory",
                         "expected %lld untouched bytes, got a damaged header",
                         (long long)expected->bytes);
    if (tail != EP_PLAN_MAGIC)
        return ep_refuse(call, EP_ERR_HANDLE_MEMORY, "handle memory",
                         "expected %lld untouched bytes, got a damaged end",
                         (long long)expected->bytes);
    return EP_OK;
}

EpStatus ep_host_check_plan(const EpHandle *handle, const char *name, void *memory) {
    EpCall call = {name, handle->group->rank};
    EpPlanHeader expected = ep_plan_header(handle);
    EpPlan plan;
    ep_plan_map(&handle->shape, memory, &plan);
    return ep_plan_check(&call, plan.header, *plan.tail, &expected);
}

void ep_host_retire_plan(EpHandle *handle) {
    /* The caller's memory may be in other use by now: touch it only if it is still this plan. */
    if (handle->owns_memory ||
        ep_host_check_plan(handle, "ep_handle_destroy", handle->memory) == EP_OK)
        ep_host_plan(handle).header->magic = EP_PLAN_DEAD;
}

EpStatus ep_host_read_plan(const EpHandle *handle, EpStep *out) {
    const EpPlan plan = ep_host_plan(handle);
    const EpPlanHeader *header = plan.header;
    int32_t rank = handle->group->rank, size = handle->group->size;
    if (!header->prepared) return EP_OK;
    out->prepared = out->known = 1;
    EpHandleInfo *info = &out->info;
    info->num_local_experts = handle->shape.num_local;
    info->expert_counts = plan.expert_counts;
    info->expert_padded = plan.expert_padded;
    info->expert_offsets = plan.expert_offsets;
    info->step = header->step;
    info->num_tokens = header->num_tokens;
    info->top_k = header->top_k;
    info->recv_rows = header->recv_rows;
    info->needed_rows = header->needed_rows;
    info->dropped_slots = header->dropped_slots;
    info->local_rows = plan.send_begin[rank + 1] - plan.send_begin[rank];
    info->remote_rows_sent = plan.send_begin[size] - info->local_rows;
    info->remote_rows_received = plan.recv_begin[size] - info->local_rows;
    out->num_rows = header->num_rows;
    out->exact = header->exact_rows;
    return EP_OK;
}

/* ---- what latency mode has beside it ------------------------------------------------------- */

/* Between the halves of an operation the rows of all ranks that came for this one, or sums for its
 * own tokens. */
int64_t ep_host_buffer_bytes(const EpPlanShape *s, const EpGroupConfig *config) {
    int64_t rows = s->num_local ? (int64_t)s->num_ranks * s->max_tokens : 0;
    int64_t record = ep_record(config->max_row_bytes, s->max_top_k, config->max_scale_bytes).bytes;
    return ep_max(rows * record, s->max_tokens * config->max_row_bytes);
}

EpStatus ep_host_open_buffers(EpHandle *handle, const EpCall *call, EpStatus mine) {
    if (mine != EP_OK) return mine;
    int64_t bytes = ep_host_buffer_bytes(&handle->shape, &handle->group->config);
    handle->buffer = aligned_alloc(64, (size_t)ep_round_up(bytes, 64));
    if (handle->buffer) return EP_OK;
    return ep_refuse(call, EP_ERR_NO_MEMORY, "buffers", "expected %lld bytes, got none",
                     (long long)bytes);
}

void ep_host_close_buffers(EpHandle *handle) {
    free(handle->buffer);
    handle->buffer = NULL;
}
