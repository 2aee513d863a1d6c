/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/plan.h"

#include <string.h>

#define LINE 64

/* Hands out consecutive arrays, each on a cache line of its own. Arithmetic on integers, since the
 * base is NULL where only the size is asked for. */
typedef struct Carver {
    uintptr_t base;
    int64_t at;
} Carver;

static void *carve(Carver *c, int64_t count, size_t bytes) {
    void *address = (void *)(c->base + (uintptr_t)c->at);
    c->at = ep_round_up(c->at + count * (int64_t)bytes, LINE);
    return address;
}

static int64_t max_rows(const EpPlanShape *s) {
    return s->num_local ? (int64_t)s->num_ranks * s->max_tokens : 0;
}

/* FLAT has one entry a row; elsewhere an entry is a slot, and what exceeds the capacity is lost. */
int64_t ep_plan_max_entries(const EpPlanShape *s) {
    int64_t entries = max_rows(s) * (s->layout == EP_LAYOUT_FLAT ? 1 : s->max_top_k);
    return s->capacity ? ep_min(entries, s->capacity) : entries;
}

int64_t ep_plan_largest_index(const EpPlanShape *s) {
    int64_t slots = (int64_t)s->num_ranks * s->max_tokens * s->max_top_k;
    /* What the last slab has no room for is counted past its end. */
    if (s->layout == EP_LAYOUT_BATCHED) return s->capacity + slots;
    return ep_max(slots + (int64_t)s->num_local * s->alignment, s->capacity);
}

int64_t ep_plan_map(const EpPlanShape *s, void *memory, EpPlan *plan) {
    Carver c = {(uintptr_t)memory, 0};
    int64_t ranks = s->num_ranks, local = s->num_local, tokens = s->max_tokens, k = s->max_top_k;
    int64_t rows = max_rows(s), entries = ep_plan_max_entries(s);
    int flat = s->layout == EP_LAYOUT_FLAT;
    plan->header = carve(&c, 1, sizeof(EpPlanHeader));
    plan->expert_counts = carve(&c, local, sizeof(int32_t));
    plan->expert_padded = carve(&c, local, sizeof(int32_t));
    plan->expert_offsets = carve(&c, local + 1, sizeof(int32_t));
    plan->send_counts = carve(&c, s->num_experts, sizeof(int32_t));
    plan->owner = carve(&c, tokens * k, sizeof(int16_t));
    plan->send_begin = carve(&c, ranks + 1, sizeof(int32_t));
    plan->send_token = carve(&c, tokens * ep_min(k, ranks), sizeof(int32_t));
    plan->rank_tokens = carve(&c, ranks, sizeof(int32_t));
    plan->source_counts = carve(&c, ranks * local, sizeof(int32_t));
    plan->next_slot = carve(&c, ranks * local, sizeof(int32_t));
    plan->next_row = carve(&c, ranks, sizeof(int32_t));
    plan->next_entry = carve(&c, ranks, sizeof(int32_t));
    plan->recv_begin = carve(&c, ranks + 1, sizeof(int32_t));
    plan->row_token = carve(&c, rows, sizeof(int32_t));
    plan->row_entry = carve(&c, rows, sizeof(int32_t));
    plan->row_entries = carve(&c, rows, sizeof(uint8_t));
    plan->entry_slot = carve(&c, entries, sizeof(int32_t));
    plan->entry_k = carve(&c, flat ? 0 : entries, sizeof(uint8_t));
    plan->row_experts = carve(&c, flat ? entries * k : 0, sizeof(int32_t));
    plan->tail = carve(&c, 1, sizeof(uint64_t));
    return c.at;
}

int64_t ep_plan_slot_limit(const EpPlanShape *s, int32_t expert) {
    if (s->layout == EP_LAYOUT_BATCHED) return (expert + 1) * s->rows_per_expert;
    return s->capacity ? s->capacity : INT64_MAX;
}

static int64_t count_of(const EpPlanShape *s, const EpPlan *plan, int32_t expert) {
    int64_t count = 0;
    for (int32_t r = 0; r < s->num_ranks; r++)
        count += plan->source_counts[(int64_t)r * s->num_local + expert];
    return count;
}

/* Slots of one expert from `start` on, in order of their source rank. */
static void number_slots(const EpPlanShape *s, EpPlan *plan, int32_t expert, int64_t start) {
    for (int32_t r = 0; r < s->num_ranks; r++) {
        int64_t at = (int64_t)r * s->num_local + expert;
        plan->next_slot[at] = (int32_t)start;
        start += plan->source_counts[at];
    }
}

static void lay_expert_major(const EpPlanShape *s, EpPlan *plan) {
    EpPlanHeader *header = plan->header;
    int64_t limit = ep_plan_slot_limit(s, 0), start = 0;
    for (int32_t e = 0; e < s->num_local; e++) {
        int64_t count = count_of(s, plan, e), end = start + ep_round_up(count, s->alignment);
        int64_t kept = ep_max(0, ep_min(count, limit - start));
        number_slots(s, plan, e, start);
        plan->expert_counts[e] = (int32_t)kept;
        plan->expert_offsets[e] = (int32_t)ep_min(start, limit);
        plan->expert_padded[e] = (int32_t)(ep_min(end, limit) - ep_min(start, limit));
        header->dropped_slots += count - kept;
        start = end;
    }
    header->needed_rows = start;
    header->recv_rows = ep_min(start, limit);
    plan->expert_offsets[s->num_local] = (int32_t)header->recv_rows;
}

static void lay_batched(const EpPlanShape *s, EpPlan *plan) {
    EpPlanHeader *header = plan->header;
    for (int32_t e = 0; e < s->num_local; e++) {
        int64_t count = count_of(s, plan, e), padded = ep_round_up(count, s->alignment);
        int64_t kept = ep_min(count, s->rows_per_expert);
        number_slots(s, plan, e, e * s->rows_per_expert);
        plan->expert_counts[e] = (int32_t)kept;
        plan->expert_offsets[e] = (int32_t)(e * s->rows_per_expert);
        plan->expert_padded[e] = (int32_t)ep_min(padded, s->rows_per_expert);
        header->dropped_slots += count - kept;
        header->needed_rows = ep_max(header->needed_rows, padded);
    }
    header->recv_rows = s->num_local * s->rows_per_expert;
    plan->expert_offsets[s->num_local] = (int32_t)header->recv_rows;
}

static void lay_flat(const EpPlanShape *s, EpPlan *plan) {
    EpPlanHeader *header = plan->header;
    memset(plan->expert_counts, 0, (size_t)s->num_local * sizeof(int32_t));
    header->needed_rows = plan->recv_begin[s->num_ranks];
    header->recv_rows = ep_min(header->needed_rows, ep_plan_slot_limit(s, 0));
    header->dropped_slots = header->needed_rows - header->recv_rows;
}

void ep_plan_lay_slabs(const EpPlanShape *s, EpPlan *plan) {
    plan->header->dropped_slots = plan->header->needed_rows = 0;
    if (s->layout == EP_LAYOUT_FLAT)
        lay_flat(s, plan);
    else if (s->layout == EP_LAYOUT_BATCHED)
        lay_batched(s, plan);
    else
        lay_expert_major(s, plan);
}
