/* SPDX-License-Identifier: Apache-2.0 */
#include "bootstrap/bootstrap.h"

#include <stdio.h>
#include <string.h>

#include "runtime/callback.h"

EpStatus ep_bootstrap_gather(const EpBootstrap *bootstrap, const void *mine, void *all,
                             size_t bytes, double timeout) {
    memset(all, 0, bytes * (size_t)bootstrap->size);
    EP_TRY(ep_call_allgather(bootstrap, mine, all, bytes, timeout));
    if (!memcmp((const char *)all + bytes * (size_t)bootstrap->rank, mine, bytes)) return EP_OK;
    return ep_fail(EP_ERR_BOOTSTRAP,
                   "rank %d: bootstrap.allgather: expected this rank's own %zu bytes in its place, "
                   "got others",
                   bootstrap->rank, bytes);
}

const char *ep_entrance_name(EpEntrance entrance) {
    static const char *const names[] = {"ep_group_create", "ep_group_join", "ep_group_admit",
                                        "ep_bootstrap_mesh", "ep_mesh_comm_create"};
    return (unsigned)entrance < sizeof(names) / sizeof(*names) ? names[entrance] : "another call";
}

/* What ranks tell each other first. */
typedef struct Entry {
    int32_t status, version, entrance, reserved;
} Entry;

static int is_admission(int32_t entrance) {
    return entrance == EP_ENTER_JOIN || entrance == EP_ENTER_ADMIT;
}

static EpStatus compare_entries(const EpCall *call, const Entry *all, int32_t size) {
    int admits = !is_admission(all[0].entrance);
    for (int32_t r = 0; r < size; r++)
        if (all[r].version != all[0].version)
            return ep_refuse(call, EP_ERR_MISMATCH, "the library's version",
                             "expected one value on all ranks, got %d on rank 0 and %d on rank %d",
                             all[0].version, all[r].version, r);
    for (int32_t r = 0; r < size; r++)
        if (all[r].status != EP_OK)
            return ep_refuse(call, EP_ERR_PEER, "bootstrap", "rank %d was refused: out of memory",
                             r);
    for (int32_t r = 0; r < size; r++) {
        int is_same = all[r].entrance == all[0].entrance;
        if (!is_same && !(is_admission(all[0].entrance) && is_admission(all[r].entrance)))
            return ep_refuse(call, EP_ERR_ORDER, "bootstrap",
                             "expected all ranks in one call, got rank 0 in %s and rank %d in %s",
                             ep_entrance_name((EpEntrance)all[0].entrance), r,
                             ep_entrance_name((EpEntrance)all[r].entrance));
        admits |= all[r].entrance == EP_ENTER_ADMIT;
    }
    if (admits) return EP_OK;
    return ep_refuse(call, EP_ERR_ORDER, "bootstrap",
                     "expected ranks that call ep_group_admit, got newcomers alone");
}

EpStatus ep_bootstrap_enter(const EpCall *call, const EpBootstrap *bootstrap, EpEntrance entrance,
                            int has_memory, double timeout) {
    Entry mine = {has_memory ? EP_OK : EP_ERR_NO_MEMORY, ep_version(), entrance, 0};
    Entry all[EP_MAX_RANKS];
    EpStatus status = ep_bootstrap_gather(bootstrap, &mine, all, sizeof(mine), timeout);
    if (!has_memory) return ep_refuse(call, EP_ERR_NO_MEMORY, "bootstrap", "out of memory");
    if (status == EP_OK) status = compare_entries(call, all, bootstrap->size);
    int32_t rank;
    if (status == EP_OK && ep_bootstrap_elsewhere(bootstrap, sizeof(mine), &rank))
        return ep_refuse(call, EP_ERR_PEER, "bootstrap",
                         "rank %d of the mesh was refused: out of memory", rank);
    return status;
}

EpRankStatus ep_rank_status(EpStatus status) {
    EpRankStatus mine = {.status = status};
    if (status != EP_OK) snprintf(mine.sentence, sizeof(mine.sentence), "%s", ep_last_error());
    return mine;
}

static EpStatus gather_within(EpGroup *group, const void *mine, void *all, size_t bytes,
                              double seconds) {
    EpStatus status = ep_group_await(group);
    if (status == EP_OK) status = ep_bootstrap_gather(&group->bootstrap, mine, all, bytes, seconds);
    (void)ep_group_await(NULL);
    if (status != EP_OK) group->lost = 1;
    return status;
}

EpStatus ep_group_meet(EpGroup *group) {
    EpStatus status = ep_group_await(group);
    if (status == EP_OK) status = ep_call_barrier(&group->bootstrap, group->timeout);
    (void)ep_group_await(NULL);
    if (status != EP_OK) group->lost = 1;
    return status;
}

EpStatus ep_group_gather(EpGroup *group, const void *mine, void *all, size_t bytes) {
    return gather_within(group, mine, all, bytes, group->timeout);
}

static const EpRankStatus *status_of(const void *all, size_t stride, int32_t rank) {
    return (const EpRankStatus *)((const char *)all + stride * (size_t)rank);
}

EpStatus ep_rank_status_check(const EpCall *call, const EpBootstrap *bootstrap, const void *all,
                              size_t stride) {
    const EpRankStatus *mine = status_of(all, stride, call->rank), *other;
    int32_t rank;
    if (mine->status != EP_OK) return ep_fail(mine->status, "%s", mine->sentence);
    for (int32_t r = 0; r < bootstrap->size; r++) {
        other = status_of(all, stride, r);
        if (other->status != EP_OK)
            return ep_refuse(call, EP_ERR_PEER, "bootstrap", "rank %d was refused: %.*s", r,
                             (int)sizeof(other->sentence) - 1, other->sentence);
    }
    other = ep_bootstrap_elsewhere(bootstrap, stride, &rank);
    if (!other) return EP_OK;
    return ep_refuse(call, EP_ERR_PEER, "bootstrap", "rank %d of the mesh was refused: %.*s", rank,
                     (int)sizeof(other->sentence) - 1, other->sentence);
}

EpStatus ep_group_agree(EpGroup *group, const EpCall *call, EpStatus mine) {
    return ep_group_agree_within(group, call, mine, group->timeout);
}

EpStatus ep_group_agree_within(EpGroup *group, const EpCall *call, EpStatus mine, double seconds) {
    if (group->lost && mine != EP_OK) return mine;
    EpRankStatus own = ep_rank_status(mine), *all = group->gathered;
    _Static_assert(sizeof(own) <= EP_RENDEZVOUS_BYTES, "the group has memory for it");
    EpStatus status = gather_within(group, &own, all, sizeof(own), seconds);
    if (status == EP_OK) return ep_rank_status_check(call, &group->bootstrap, all, sizeof(own));
    /* A rank that failed by itself reports its own error, even if no peer arrived. After a timeout
     * of its own, within NCCL for example, it reports the rendezvous' error: that names the peer.
     * It also does if the same abort ended both. */
    if (mine != EP_OK && mine != EP_ERR_TIMEOUT && mine != status)
        return ep_fail(mine, "%s", own.sentence);
    return status;
}

EpStatus ep_group_break(EpGroup *group, const EpCall *call, EpStatus status) {
    EpFinding finding = EP_FINDING_INIT;
    finding.status = status, finding.rank = group->rank, finding.count = 1;
    finding.peer = group->aborted_peer;
    /* without the prefix "ep_", like the phases of operations */
    for (size_t i = 0; call->name[3 + i] && i < sizeof(finding.phase) - 1; i++)
        finding.phase[i] = call->name[3 + i];
    if (group->backend->give_up) group->backend->give_up(group);
    return ep_group_fail(group, &finding);
}
