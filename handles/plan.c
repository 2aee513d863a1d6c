/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checks whose plan a block of handle memory holds. The header identifies the plan, and the last
 * word repeats the magic, so the check notices damage at both ends.
 */
#include "handles/handle.h"

int64_t ep_plan_largest_index(const EpPlanShape *s) {
    int64_t slots = (int64_t)s->num_ranks * s->max_tokens * s->max_top_k;
    /* Entries that do not fit into the last slab get numbers past its end. */
    if (s->layout == EP_LAYOUT_BATCHED) return s->capacity + slots;
    return ep_max(slots + (int64_t)s->num_local * s->alignment, s->capacity);
}

EpPlanHeader ep_plan_header(const EpHandle *handle) {
    return (EpPlanHeader){.magic = EP_PLAN_MAGIC,
                          .group = handle->group->id,
                          .handle = handle->ordinal,
                          .bytes = handle->bytes};
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
