/* SPDX-License-Identifier: Apache-2.0 */
/* ep_group_mask and ep_group_alive: their arguments, and the ranks that take part. */
#include <string.h>

#include "runtime/group.h"

static EpStatus check_words(const EpCall *call, const uint32_t *alive) {
    if (alive) return EP_OK;
    return ep_refuse(call, EP_ERR_NULL, "alive", "expected words of bits, got NULL");
}

/* A suspended group can be mended, one that has failed cannot. */
static EpStatus check_group(const EpCall *call, EpGroup *group) {
    if (!group->config.masks)
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "group",
                         "expected one with config.masks, got one without");
    group->backend->poll(group);
    EpStatus status = ep_group_usable(group);
    return group->failed == EP_OK ? EP_OK : status;
}

static EpStatus read_mask(const EpCall *call, const EpGroup *group, const uint32_t *alive,
                          EpMask *out) {
    EP_TRY(check_words(call, alive));
    *out = (EpMask){{0}};
    memcpy(out->word, alive, (size_t)ep_mask_words(group->size) * sizeof(*alive));
    for (int32_t r = group->size; r < 32 * ep_mask_words(group->size); r++)
        if (ep_mask_has(out, r))
            return ep_refuse(call, EP_ERR_RANGE, "alive",
                             "expected bits of %d ranks, got that of rank %d", group->size, r);
    for (int32_t r = 0; r < group->size; r++)
        if (ep_mask_has(out, r) && !ep_mask_has(&group->members, r))
            return ep_refuse(call, EP_ERR_RANGE, "alive",
                             "expected ranks that are there, got rank %d, whose place is empty", r);
    if (ep_mask_has(out, group->rank)) return EP_OK;
    return ep_refuse(call, EP_ERR_RANGE, "alive",
                     "expected this rank's own bit, %d, which ranks that stay away lack, got 0",
                     group->rank);
}

EpStatus ep_group_mask(EpGroup *group, const uint32_t *alive, EpStream stream) {
    EpCall call = {"ep_group_mask", -1};
    EpMask mask;
    EP_TRY(ep_object_check(&call, "group", group, EP_OBJECT_GROUP));
    call.rank = group->rank;
    EP_TRY(check_group(&call, group));
    EP_TRY(read_mask(&call, group, alive, &mask));
    int before = ep_group_enter(group, call.name);
    ep_record_begin(&group->recorder, &(EpActivity){.call = call.name, .tokens = -1});
    EpStatus status = group->backend->mask(group, &mask, stream);
    ep_record_end(&group->recorder, status);
    ep_group_leave(group, before);
    if (status != EP_OK) return status;
    group->alive = mask;
    group->cut = (EpMask){{0}}, group->late.status = EP_OK;
    group->suspended = EP_OK;
    return EP_OK;
}

EpStatus ep_group_alive(EpGroup *group, uint32_t *alive) {
    EpCall call = {"ep_group_alive", -1};
    EP_TRY(ep_object_check(&call, "group", group, EP_OBJECT_GROUP));
    call.rank = group->rank;
    EP_TRY(check_words(&call, alive));
    group->backend->poll(group); /* kernels may have cut ranks meanwhile */
    for (int32_t i = 0; i < ep_mask_words(group->size); i++)
        alive[i] = group->alive.word[i] & ~group->cut.word[i];
    return EP_OK;
}

EpStatus ep_group_cut(EpGroup *group, int32_t rank, EpStream stream) {
    EpCall call = {"ep_group_cut", -1};
    EpMask cut = {{0}};
    EP_TRY(ep_object_check(&call, "group", group, EP_OBJECT_GROUP));
    call.rank = group->rank;
    EP_TRY(ep_group_usable(group));
    if (group->config.on_late != EP_LATE_MASK)
        return ep_refuse(&call, EP_ERR_UNSUPPORTED, "group",
                         "expected one with config.on_late = EP_LATE_MASK, got one without");
    if (rank < 0 || rank >= group->size || rank == group->rank)
        return ep_refuse(&call, EP_ERR_RANGE, "rank",
                         "expected another rank's number below %d, got %d", group->size, rank);
    if (!ep_mask_has(&group->alive, rank)) return EP_OK;
    EP_TRY(group->backend->cut(group, rank, stream));
    ep_mask_add(&cut, rank);
    ep_group_record_cuts(group, &cut, "cut");
    group->late.status = EP_OK; /* the caller knows */
    return EP_OK;
}
