/* SPDX-License-Identifier: Apache-2.0 */
/* The host backend's plans, in plain memory, and its buffers of latency mode. */
#include "handles/host/plan.h"

#include <stdlib.h>
#include <string.h>

#define LINE 64 /* each array starts on a cache line */

/* A row with one slot has one entry. In other layouts each entry has a slot of its own. The plan
 * has no entries past the capacity. */
int64_t ep_plan_max_entries(const EpPlanShape *s) {
    int64_t entries = ep_plan_max_rows(s) * (s->has_rows ? 1 : s->max_top_k);
    return s->capacity ? ep_min(entries, s->capacity) : entries;
}

int64_t ep_plan_map(const EpPlanShape *s, void *memory, EpPlan *plan) {
    EpArena arena = {(uintptr_t)memory, 0, LINE};
    int64_t ranks = s->num_ranks, local = s->num_local, tokens = s->max_tokens, k = s->max_top_k;
    int64_t rows = ep_plan_max_rows(s), entries = ep_plan_max_entries(s);
    int has_rows = s->has_rows;
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
    plan->entry_k = ep_arena_array(&arena, has_rows ? 0 : entries, sizeof(uint8_t));
    plan->entry_experts = ep_arena_array(&arena, has_rows ? entries * k : 0, sizeof(int32_t));
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
    int64_t start = 0;
    for (int32_t e = 0; e < s->num_local; e++) {
        int32_t count = count_entries(s, plan, e), rows = ep_slab_rows(s, count);
        EpSlab slab = ep_slab(s, e, start, count);
        number_slots(s, plan, e, ep_block_begin(s, e, start));
        plan->expert_counts[e] = (int32_t)slab.kept;
        plan->expert_offsets[e] = (int32_t)slab.offset;
        plan->expert_padded[e] = (int32_t)slab.padded;
        header->dropped_slots += count - slab.kept;
        header->needed_rows = ep_max(header->needed_rows, s->is_fixed ? rows : start + rows);
        start += rows;
    }
    header->recv_rows = ep_recv_rows(s, start);
    plan->expert_offsets[s->num_local] = (int32_t)header->recv_rows;
}

/* Lay the blocks of sources. One of fixed size has room for all tokens, so nothing is lost there.
 */
static void lay_sources(const EpPlanShape *s, EpPlan *plan) {
    EpPlanHeader *header = plan->header;
    int32_t most = 0, all = plan->recv_begin[s->num_ranks];
    for (int32_t r = 0; r < s->num_ranks; r++)
        most = (int32_t)ep_max(most, plan->recv_begin[r + 1] - plan->recv_begin[r]);
    header->needed_rows = s->is_fixed ? most : all;
    header->recv_rows = ep_recv_rows(s, all);
    header->dropped_slots = ep_max(0, all - header->recv_rows);
}

void ep_plan_lay_slabs(const EpPlanShape *s, EpPlan *plan) {
    plan->header->dropped_slots = plan->header->needed_rows = 0;
    if (!s->has_rows) {
        lay_slabs(s, plan);
        return;
    }
    memset(plan->expert_counts, 0, (size_t)s->num_local * sizeof(int32_t));
    lay_sources(s, plan);
}

/* ---- life ---------------------------------------------------------------------------------- */

int64_t ep_host_plan_bytes(const EpPlanShape *shape) {
    EpPlan plan;
    return ep_plan_map(shape, NULL, &plan);
}

EpStatus ep_host_open_plan(EpHandle *handle, const EpCall *call) {
    handle->own.memory = aligned_alloc(LINE, (size_t)ep_round_up(handle->bytes, LINE));
    if (!handle->own.memory)
        return ep_refuse(call, EP_ERR_NO_MEMORY, "config", "expected %lld bytes, got none",
                         (long long)handle->bytes);
    memset(ep_host_plan(handle, handle->own).header, 0, sizeof(EpPlanHeader));
    handle->group->library_bytes += handle->bytes;
    return EP_OK;
}

void ep_host_close_plan(EpHandle *handle) {
    if (handle->own.memory) handle->group->library_bytes -= handle->bytes;
    free(handle->own.memory);
    handle->own.memory = NULL;
}

/* ---- checks -------------------------------------------------------------------------------- */

/*
 * The numbers in a plan bound what operations read and write, and its memory may have been
 * overwritten since the last call, also the handle's own, which ep_handle_plan lends. What follows
 * refuses numbers that would lead outside the tensors or the messages. Other damage gives wrong
 * rows. Every call that reads a plan begins with it.
 */

static int is_within(int64_t value, int64_t least, int64_t most) {
    return value >= least && value <= most;
}

/* Returns whether begin[R + 1] are ranges of at most `most` numbers. */
static int are_ranges(const int32_t *begin, int32_t ranks, int64_t most) {
    int sound = begin[0] == 0 && begin[ranks] <= most;
    for (int32_t r = 0; r < ranks; r++)
        sound &= begin[r] <= begin[r + 1];
    return sound;
}

/* Returns whether each range lists tokens in ascending order; those of range r are below
 * tokens[r], or below tokens[0] if there is one number for all. */
static int are_tokens(const int32_t *token, const int32_t *begin, int32_t ranks,
                      const int32_t *tokens, int is_each) {
    int sound = 1;
    for (int32_t r = 0; r < ranks; r++) {
        int32_t last = -1, end = tokens[is_each ? r : 0];
        for (int32_t i = begin[r]; i < begin[r + 1]; i++) {
            sound &= token[i] > last && token[i] < end;
            last = token[i];
        }
    }
    return sound;
}

static int is_header_sound(const EpPlanShape *s, const EpPlanHeader *h, int64_t top_k) {
    int64_t most_rows = s->capacity ? s->capacity : ep_plan_largest_index(s);
    return h->top_k == top_k && is_within(h->num_rows, 0, s->max_tokens) &&
           is_within(h->num_tokens, 0, h->num_rows) && is_within(h->recv_rows, 0, most_rows) &&
           is_within(h->most_tokens, h->num_tokens, s->max_tokens);
}

/* Returns whether the slabs, with their padding, are within the receive rows. */
static int are_slabs_sound(const EpPlanShape *s, const EpPlan *plan) {
    int sound = 1;
    for (int32_t e = 0; e < s->num_local && !s->has_rows; e++)
        sound &= is_within(plan->expert_offsets[e], 0, plan->header->recv_rows) &&
                 is_within(plan->expert_counts[e], 0, plan->expert_padded[e]) &&
                 is_within(plan->expert_padded[e], 0,
                           plan->header->recv_rows - plan->expert_offsets[e]) &&
                 is_within(plan->expert_offsets[e + 1], plan->expert_offsets[e],
                           plan->header->recv_rows);
    return sound;
}

static int are_entries_sound(const EpPlanShape *s, const EpPlan *plan) {
    int64_t entries = ep_plan_max_entries(s), rows = plan->recv_begin[s->num_ranks];
    int has_rows = s->has_rows, sound = 1;
    for (int64_t row = 0; row < rows && sound; row++) {
        int64_t first = plan->row_entry[row], count = plan->row_entries[row];
        sound =
            first >= 0 && count <= (has_rows ? 1 : plan->header->top_k) && first + count <= entries;
        for (int64_t i = first; sound && i < first + count; i++)
            sound &= is_within(plan->entry_slot[i], 0, plan->header->recv_rows - 1) &&
                     (has_rows || plan->entry_k[i] < plan->header->top_k);
    }
    return sound;
}

/* Returns whether a token has an entry on a rank. */
static int has_owner(const EpPlan *plan, int64_t token, int64_t top_k, int32_t rank) {
    int found = 0;
    for (int64_t i = token * top_k; i < (token + 1) * top_k; i++)
        found |= plan->owner[i] == rank;
    return found;
}

/* Returns whether each row that this rank sends has an entry on its rank, so that a token has at
 * most K rows, and whether this rank receives as many rows from itself as it sends itself: combine
 * counts the latter, and finds their slots as the former's. */
static int are_sent_rows_sound(const EpPlanShape *s, const EpPlan *plan, int64_t top_k) {
    const int32_t *sent = plan->send_begin + s->rank, *received = plan->recv_begin + s->rank;
    int sound = sent[1] - sent[0] == received[1] - received[0];
    for (int32_t r = 0; r < s->num_ranks; r++)
        for (int32_t i = plan->send_begin[r]; i < plan->send_begin[r + 1] && sound; i++)
            sound = has_owner(plan, plan->send_token[i], top_k, r);
    return sound;
}

static int is_sound(const EpPlanShape *s, const EpPlan *plan, int64_t top_k) {
    int32_t ranks = s->num_ranks, tokens = (int32_t)plan->header->num_tokens, sound = 1;
    if (!is_header_sound(s, plan->header, top_k) || !are_slabs_sound(s, plan)) return 0;
    for (int32_t r = 0; r < ranks; r++)
        sound &= is_within(plan->rank_tokens[r], 0, s->max_tokens);
    for (int64_t i = 0; i < tokens * top_k; i++)
        sound &= is_within(plan->owner[i], -1, ranks - 1);
    return sound && are_ranges(plan->send_begin, ranks, tokens * ep_min(top_k, ranks)) &&
           are_ranges(plan->recv_begin, ranks, ep_plan_max_rows(s)) &&
           are_tokens(plan->send_token, plan->send_begin, ranks, &tokens, 0) &&
           are_tokens(plan->row_token, plan->recv_begin, ranks, plan->rank_tokens, 1) &&
           plan->rank_tokens[s->rank] == tokens && are_sent_rows_sound(s, plan, top_k) &&
           are_entries_sound(s, plan);
}

/* Check a plan of `top_k` experts per token. */
static EpStatus check_plan(const EpHandle *handle, const EpCall *call, const EpPlan *plan,
                           int64_t top_k) {
    EpPlanHeader expected = ep_plan_mark(handle, top_k);
    EP_TRY(ep_plan_check(call, plan->header, *plan->tail, &expected));
    if (is_sound(&handle->shape, plan, top_k)) return EP_OK;
    return ep_refuse(call, EP_ERR_HANDLE_MEMORY, "plan",
                     "expected untouched bytes, got damaged numbers");
}

EpStatus ep_host_check_plan(const EpHandle *handle, const EpCall *call, EpPlanRef ref,
                            int64_t top_k) {
    const EpPlan plan = ep_host_plan(handle, ref);
    return check_plan(handle, call, &plan, top_k);
}

EpStatus ep_host_check_blocks(const EpHandle *handle, const EpCall *call, EpPlanRef ref,
                              int64_t block_rows) {
    const EpPlanShape *s = &handle->shape;
    const EpPlan plan = ep_host_plan(handle, ref);
    if (!ep_has_source_blocks(s) || block_rows == s->block_rows) return EP_OK;
    for (int32_t r = 0; r < s->num_ranks; r++)
        if (plan.rank_tokens[r] > block_rows)
            return ep_refuse(call, EP_ERR_SHAPE, "plan",
                             "expected tensors with room for %d rows of each source, the tokens of "
                             "rank %d, got room for %lld",
                             plan.rank_tokens[r], r, (long long)block_rows);
    for (int64_t row = 0; row < plan.recv_begin[s->num_ranks]; row++)
        if (plan.row_entries[row] &&
            plan.entry_slot[plan.row_entry[row]] % s->block_rows >= block_rows)
            return ep_refuse(call, EP_ERR_HANDLE_MEMORY, "plan",
                             "expected untouched bytes, got damaged numbers");
    return EP_OK;
}

/* ---- numbers ------------------------------------------------------------------------------- */

/* Returns K of a plan. A handle whose configuration leaves K open may have had any in its own. */
static int64_t plan_top_k(const EpHandle *handle, const EpPlan *plan, EpPlanRef ref) {
    int64_t most = ep_handle_top_k(handle);
    if (ref.is_named || handle->top_k != EP_DEFAULT) return most;
    return is_within(plan->header->top_k, 1, most) ? plan->header->top_k : most;
}

EpStatus ep_host_read_plan(const EpHandle *handle, const EpCall *call, EpPlanRef ref, EpStep *out) {
    const EpPlan plan = ep_host_plan(handle, ref);
    const EpPlanHeader *header = plan.header;
    int32_t rank = handle->group->rank, size = handle->group->size;
    if (!ref.is_named && header->magic != EP_PLAN_MAGIC) return EP_OK; /* no prepare yet */
    EP_TRY(check_plan(handle, call, &plan, plan_top_k(handle, &plan, ref)));
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

int64_t ep_host_set_bytes(const EpGroupConfig *config, int32_t num_ranks) {
    int64_t record =
        ep_record(config->max_row_bytes, config->max_top_k, config->max_scale_bytes).bytes;
    int64_t rows = (int64_t)num_ranks * config->max_tokens;
    int64_t sums = 2 * config->max_row_bytes * config->max_tokens; /* FP32, of rows of 16 bits */
    return ep_round_up(ep_max(rows * record, sums), LINE);
}
