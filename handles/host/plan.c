/* SPDX-License-Identifier: Apache-2.0 */
/* The host backend's plans, in plain memory, and its buffers of latency mode. */
#include "handles/host/plan.h"

#include <stdlib.h>
#include <string.h>

#define LINE 64 /* each array starts on a cache line */

/* FLAT has one entry per row. In other layouts each entry has a slot of its own, and the plan has
 * no entries past the capacity. */
int64_t ep_plan_max_entries(const EpPlanShape *s) {
    int64_t entries = ep_plan_max_rows(s) * (s->layout == EP_LAYOUT_FLAT ? 1 : s->max_top_k);
    return s->capacity ? ep_min(entries, s->capacity) : entries;
}

int64_t ep_plan_map(const EpPlanShape *s, void *memory, EpPlan *plan) {
    EpArena arena = {(uintptr_t)memory, 0, LINE};
    int64_t ranks = s->num_ranks, local = s->num_local, tokens = s->max_tokens, k = s->max_top_k;
    int64_t rows = ep_plan_max_rows(s), entries = ep_plan_max_entries(s);
    int flat = s->layout == EP_LAYOUT_FLAT;
    plan->header = ep_arena_array(&arena, 1, sizeof(EpPlanHeader));
    plan->expert_counts = ep_arena_array(&arena, local, sizeof(int32_t));
    plan->expert_padded = ep_arena_array(&arena, local, sizeof(int32_t));
    plan->expert_offsets = ep_arena_array(&arena, local + 1, sizeof(int32_t));
    plan->send_counts = ep_arena_array(&arena, s->num_experts, sizeof(int32_t));
    plan->owner = ep_arena_array(&arena, tokens * k, sizeof(int16_t));
    plan->send_begin = ep_arena_array(&arena, ranks + 1, sizeof(int32_t));
    plan->send_token = ep_arena_array(&arena, tokens * ep_min(k, ranks), sizeof(int32_t));
    plan->rank_tokens = ep_arena_array(&arena, ranks, sizeof(int32_t));
    plan->source_counts = ep_arena_array(&arena, ranks * local, sizeof(int32_t));
    plan->next_slot = ep_arena_array(&arena, ranks * local, sizeof(int32_t));
    plan->next_row = ep_arena_array(&arena, ranks, sizeof(int32_t));
    plan->next_entry = ep_arena_array(&arena, ranks, sizeof(int32_t));
    plan->recv_begin = ep_arena_array(&arena, ranks + 1, sizeof(int32_t));
    plan->row_token = ep_arena_array(&arena, rows, sizeof(int32_t));
    plan->row_entry = ep_arena_array(&arena, rows, sizeof(int32_t));
    plan->row_entries = ep_arena_array(&arena, rows, sizeof(uint8_t));
    plan->entry_slot = ep_arena_array(&arena, entries, sizeof(int32_t));
    plan->entry_k = ep_arena_array(&arena, flat ? 0 : entries, sizeof(uint8_t));
    plan->row_experts = ep_arena_array(&arena, flat ? entries * k : 0, sizeof(int32_t));
    plan->tail = ep_arena_array(&arena, 1, sizeof(uint64_t));
    return arena.bytes;
}

/* ---- slabs --------------------------------------------------------------------------------- */

/* Returns the entries of all ranks for one local expert. */
static int32_t count_entries(const EpPlanShape *s, const EpPlan *plan, int32_t expert) {
    int32_t count = 0;
    for (int32_t r = 0; r < s->num_ranks; r++)
        count += plan->source_counts[(int64_t)r * s->num_local + expert];
    return count;
}

/* Set each rank's first slot of one expert, from `start` on in ascending rank. */
static void number_slots(const EpPlanShape *s, EpPlan *plan, int32_t expert, int64_t start) {
    for (int32_t r = 0; r < s->num_ranks; r++) {
        int64_t at = (int64_t)r * s->num_local + expert;
        plan->next_slot[at] = (int32_t)start;
        start += plan->source_counts[at];
    }
}

static void lay_slabs(const EpPlanShape *s, EpPlan *plan) {
    EpPlanHeader *header = plan->header;
    int batched = s->layout == EP_LAYOUT_BATCHED;
    int64_t start = 0;
    for (int32_t e = 0; e < s->num_local; e++) {
        int32_t count = count_entries(s, plan, e), rows = ep_slab_rows(s, count);
        EpSlab slab = ep_slab(s, e, start, count);
        number_slots(s, plan, e, batched ? slab.offset : start);
        plan->expert_counts[e] = (int32_t)slab.kept;
        plan->expert_offsets[e] = (int32_t)slab.offset;
        plan->expert_padded[e] = (int32_t)slab.padded;
        header->dropped_slots += count - slab.kept;
        header->needed_rows = ep_max(header->needed_rows, batched ? rows : start + rows);
        start += rows;
    }
    header->recv_rows =
        batched ? s->num_local * s->rows_per_expert : ep_min(start, ep_slot_limit(s, 0));
    plan->expert_offsets[s->num_local] = (int32_t)header->recv_rows;
}

static void lay_flat(const EpPlanShape *s, EpPlan *plan) {
    EpPlanHeader *header = plan->header;
    memset(plan->expert_counts, 0, (size_t)s->num_local * sizeof(int32_t));
    header->needed_rows = plan->recv_begin[s->num_ranks];
    header->recv_rows = ep_min(header->needed_rows, ep_slot_limit(s, 0));
    header->dropped_slots = header->needed_rows - header->recv_rows;
}

void ep_plan_lay_slabs(const EpPlanShape *s, EpPlan *plan) {
    plan->header->dropped_slots = plan->header->needed_rows = 0;
    if (s->layout == EP_LAYOUT_FLAT)
        lay_flat(s, plan);
    else
        lay_slabs(s, plan);
}

/* ---- life ---------------------------------------------------------------------------------- */

int64_t ep_host_plan_bytes(const EpPlanShape *shape) {
    EpPlan plan;
    return ep_plan_map(shape, NULL, &plan);
}

EpStatus ep_host_format_plan(EpHandle *handle) {
    EpPlan plan = ep_host_plan(handle);
    *plan.header = ep_plan_header(handle);
    *plan.tail = EP_PLAN_MAGIC;
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
    /* The caller may have reused its memory: write there only if it still holds this plan. */
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

/* ---- buffers of latency mode --------------------------------------------------------------- */

/* Between the two phases the buffer holds the rows that a dispatch has received, or a combine's
 * sums for this rank's tokens. */
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
