/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checks whose plan a block of memory holds. The header identifies the plan, and the last word
 * repeats the magic, so the check notices damage at both ends.
 */
#include "handles/handle.h"

int64_t ep_plan_largest_index(const EpPlanShape *s) {
    int64_t slots = (int64_t)s->num_ranks * s->max_tokens * s->max_top_k;
    /* Entries that do not fit into the last slab get numbers past its end. */
    if (s->is_fixed && !s->has_rows) return s->capacity + slots;
    return ep_max(slots + (int64_t)s->num_local * ep_slab_rows(s, 1), s->capacity);
}

/* Hashes with FNV-1a, number by number. */
static uint64_t mix(uint64_t hash, int64_t value) {
    for (int i = 0; i < 64; i += 8)
        hash = (hash ^ ((uint64_t)value >> i & 0xff)) * 0x100000001b3ull;
    return hash;
}

uint64_t ep_plan_config(const EpPlanShape *s, int32_t top_k) {
    const int64_t numbers[] = {s->num_ranks, s->rank,   s->num_experts, s->max_tokens,
                               s->max_top_k, s->layout, s->alignment,   s->capacity,
                               s->mode,      s->merges, top_k,          s->block_rows};
    uint64_t hash = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
        hash = mix(hash, numbers[i]);
    return hash;
}

EpStatus ep_plan_check(const EpCall *call, const EpPlanHeader *got, uint64_t tail,
                       const EpPlanHeader *expected) {
    if (got->magic != EP_PLAN_MAGIC)
        return ep_refuse(call, EP_ERR_NOT_PREPARED, "plan",
                         "expected a plan, which ep_prepare writes (latency mode: ep_dispatch), "
                         "got other bytes (0x%016llx)",
                         (unsigned long long)got->magic);
    if (got->group != expected->group)
        return ep_refuse(call, EP_ERR_FOREIGN, "plan",
                         "expected a plan of group %016llx, got one of group %016llx",
                         (unsigned long long)expected->group, (unsigned long long)got->group);
    if (got->config != expected->config)
        return ep_refuse(call, EP_ERR_FOREIGN, "plan",
                         "expected a plan of the handle's configuration and of this rank, got one "
                         "of another");
    if (tail != EP_PLAN_MAGIC)
        return ep_refuse(call, EP_ERR_HANDLE_MEMORY, "plan",
                         "expected untouched bytes, got a damaged end (0x%016llx)",
                         (unsigned long long)tail);
    return EP_OK;
}
