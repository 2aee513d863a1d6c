/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/group.h"

#include <stdio.h>
#include <string.h>

EpStatus ep_group_fail_aborted(const EpGroup *group, const char *phase) {
    return ep_fail(EP_ERR_ABORTED, "rank %d: %s%sthe group was aborted: %s", group->rank, phase,
                   phase[0] ? ": " : "", group->abort.sentence);
}

static void keep_sentence(EpGroup *group) {
    snprintf(group->failure_sentence, sizeof(group->failure_sentence), "%s", ep_last_error());
}

/* Whether the group fails because a rank leaves it, which that rank has a reason for, and this one
 * is leaving, too. Nothing is wrong if a process just ends. */
static int is_farewell(const EpGroup *group) {
    return group->ends && (group->failed == EP_ERR_ABORTED || group->failed == EP_ERR_PEER);
}

/* Other threads read failure and sentence once the abort says that the group has failed. */
EpStatus ep_group_fail(EpGroup *group, const EpFinding *finding) {
    group->failure = *finding;
    keep_sentence(group);
    if (ep_abort_fail(&group->abort)) {
        group->failure.peer = -1, group->failure.expected = group->failure.seen = -1;
        group->failure.status = ep_group_fail_aborted(group, finding->phase);
        keep_sentence(group);
    }
    group->failed = group->failure.status;
    EP_LOG_AT(is_farewell(group) ? EP_LOG_INFO : EP_LOG_WARN, "group failed: %s",
              group->failure_sentence);
    ep_record_log(&group->recorder, is_farewell(group) ? EP_LOG_INFO : EP_LOG_WARN);
    return group->failed;
}

EpStatus ep_group_suspend(EpGroup *group, const EpFinding *finding) {
    if (ep_abort_requested(&group->abort)) return ep_group_fail(group, finding);
    group->failure = *finding;
    keep_sentence(group);
    group->suspended = finding->status;
    EP_LOG_AT(group->ends ? EP_LOG_INFO : EP_LOG_WARN, "group suspended: %s",
              group->failure_sentence);
    return group->suspended;
}

void ep_group_keep_out(EpGroup *group) {
    EpFinding finding = EP_FINDING_INIT;
    finding.status = EP_ERR_TIMEOUT, finding.rank = finding.peer = group->rank, finding.count = 1;
    snprintf(finding.phase, sizeof(finding.phase), "join");
    group->failure = finding;
    snprintf(group->failure_sentence, sizeof(group->failure_sentence),
             "rank %d: %s: this rank is masked", group->rank, group->call);
    group->suspended = finding.status;
}

/* Another thread has aborted the group, and no wait has noticed. */
static EpStatus fail_aborted(EpGroup *group) {
    EpFinding finding = EP_FINDING_INIT;
    finding.status = EP_ERR_ABORTED, finding.rank = group->rank, finding.count = 1;
    if (group->backend->give_up) group->backend->give_up(group);
    return ep_group_fail(group, &finding);
}

EpStatus ep_group_usable(EpGroup *group) {
    if (group->failed != EP_OK) return ep_fail(group->failed, "%s", group->failure_sentence);
    if (ep_abort_requested(&group->abort)) return fail_aborted(group);
    if (group->suspended == EP_OK) return EP_OK;
    return ep_fail(group->suspended, "%s (operations are refused until ep_group_mask)",
                   group->failure_sentence);
}

void ep_group_record(EpFinding *pending, const EpFinding *finding) {
    int64_t count = pending->status == EP_OK ? 0 : pending->count;
    if (pending->status == EP_OK) *pending = *finding;
    pending->count = count + finding->count;
}

EpStatus ep_group_query(const EpGroup *group, EpGroupInfo *out) {
    EpCall call = {"ep_group_query", -1};
    EP_TRY(ep_object_check(&call, "group", group, EP_OBJECT_GROUP));
    EP_TRY(ep_check_grown_struct(&call, "out", out, EP_FIRST_SIZE(EpGroupInfo, library_bytes),
                                 sizeof(*out)));
    EpGroupInfo info = {.struct_size = sizeof(info),
                        .rank = group->rank,
                        .size = group->size,
                        .num_experts = group->config.num_experts,
                        .first_expert = group->first_expert,
                        .num_local_experts = group->num_local,
                        .backend = group->backend->id,
                        .node = group->nodes.node,
                        .num_nodes = group->nodes.sizes.nodes,
                        .numa_node = group->numa,
                        .num_cpus = group->cpus,
                        .library_bytes = group->library_bytes,
                        .device = group->choice.device,
                        .bound = group->bound,
                        .mode =
                            ep_config_mode(group->config.mode, group->config.max_tokens,
                                           group->config.max_recv_rows > 0,
                                           ep_group_offers(group)),
                        .num_physical = group->placement.num_experts,
                        .choice = group->config.choice};
    snprintf(info.gpu, sizeof(info.gpu), "%s", group->choice.gpu);
    snprintf(info.reason, sizeof(info.reason), "%s", group->choice.reason);
    group->backend->describe(group, &info);
    ep_write_struct(out, &info);
    return EP_OK;
}

EpStatus ep_group_tuning(const EpGroup *group, char *text, size_t bytes) {
    EpCall call = {"ep_group_tuning", -1};
    EP_TRY(ep_object_check(&call, "group", group, EP_OBJECT_GROUP));
    call.rank = group->rank;
    if (!text) return ep_refuse(&call, EP_ERR_NULL, "text", "expected a pointer, got NULL");
    if (!group->backend->write_tuning)
        return ep_refuse(&call, EP_ERR_UNSUPPORTED, "group",
                         "expected one of the cuda backend, whose blocks are divided");
    size_t length = group->backend->write_tuning(group, NULL, 0);
    if (length >= bytes)
        return ep_refuse(&call, EP_ERR_BUFFER_SIZE, "bytes", "expected at least %zu, got %zu",
                         length + 1, bytes);
    (void)group->backend->write_tuning(group, text, bytes);
    return EP_OK;
}

EpStatus ep_group_relay(const EpGroup *group, int32_t node, int32_t *rank) {
    EpCall call = {"ep_group_relay", -1};
    EP_TRY(ep_object_check(&call, "group", group, EP_OBJECT_GROUP));
    call.rank = group->rank;
    int32_t nodes = group->nodes.sizes.nodes;
    if (!rank) return ep_refuse(&call, EP_ERR_NULL, "rank", "expected a pointer, got NULL");
    if (node < 0 || node >= nodes)
        return ep_refuse(&call, EP_ERR_RANGE, "node", "expected 0 .. %d, got %d", nodes - 1, node);
    if (group->backend->id == EP_BACKEND_HOST)
        return ep_refuse(
            &call, EP_ERR_UNSUPPORTED, "group",
            "expected one of the cuda backend, since ranks of the host backend send to "
            "each other directly");
    *rank =
        node == group->nodes.node ? group->rank : ep_nodes_relay(&group->nodes, group->rank, node);
    return EP_OK;
}

void ep_group_record_cuts(EpGroup *group, const EpMask *cut, const char *phase) {
    for (int32_t r = 0; r < group->size; r++) {
        EpFinding finding = EP_FINDING_INIT;
        if (!ep_mask_has(cut, r) || ep_mask_has(&group->cut, r)) continue;
        finding.status = EP_ERR_MASKED, finding.count = 1;
        finding.rank = group->rank, finding.peer = r;
        snprintf(finding.phase, sizeof(finding.phase), "%s", phase);
        ep_group_record(&group->late, &finding);
        ep_mask_add(&group->cut, r);
        EP_LOG_AT(EP_LOG_WARN, "%s: rank %d was late, and is cut", phase, r);
    }
}

/* Names all ranks that are cut: the new ones and, since their findings are gone, the others. */
static EpStatus report_late(const EpGroup *group, const EpFinding *f) {
    char ranks[256] = "";
    for (int32_t r = 0, at = 0; r < group->size && at < (int32_t)sizeof(ranks) - 8; r++)
        if (ep_mask_has(&group->cut, r))
            at += snprintf(ranks + at, sizeof(ranks) - (size_t)at, "%s%d", at ? ", " : "", r);
    return ep_fail(f->status,
                   "rank %d: %s: late within %d us, so this rank goes on without them until "
                   "ep_group_mask: ranks %s",
                   f->rank, f->phase, group->config.late_us, ranks);
}

static EpStatus report_routing(const EpFinding *f) {
    if (f->k < 0)
        return ep_fail(f->status,
                       "rank %d: ep_group_place: map: expected an expert below %lld or -1, got %lld "
                       "at %lld (%lld such entries; treated as -1)",
                       f->rank, (long long)f->expected, (long long)f->seen, (long long)f->token,
                       (long long)f->count);
    return ep_fail(f->status,
                   "rank %d: ep_prepare: topk_idx: expected an expert below %lld, got %lld at "
                   "token %lld, k %lld (%lld such entries; treated as no expert)",
                   f->rank, (long long)f->expected, (long long)f->seen, (long long)f->token,
                   (long long)f->k, (long long)f->count);
}

static EpStatus report_overflow(const EpFinding *f) {
    if (f->seen <= f->expected)
        return ep_fail(f->status,
                       "rank %d: ep_prepare: expected at most config.node_rows tokens of a rank "
                       "for this node, got more; %lld slots were lost",
                       f->rank, (long long)f->count);
    return ep_fail(f->status,
                   "rank %d: ep_prepare: expected at most %lld receive rows (batched layout: of an "
                   "expert), needed %lld; %lld slots were lost",
                   f->rank, (long long)f->expected, (long long)f->seen, (long long)f->count);
}

/* Copy a pending async error to `out`, clear it, and return its status. */
static EpStatus take(EpFinding *pending, EpFinding *out, EpStatus (*report)(const EpFinding *)) {
    EpStatus status = report(pending);
    if (out) ep_write_struct(out, pending);
    pending->status = EP_OK;
    return status;
}

EpStatus ep_group_status(EpGroup *group, EpFinding *out) {
    EpCall call = {"ep_group_status", -1};
    EP_TRY(ep_object_check(&call, "group", group, EP_OBJECT_GROUP));
    if (out)
        EP_TRY(ep_check_grown_struct(&call, "out", out, EP_FIRST_SIZE(EpFinding, phase),
                                     sizeof(*out)));
    group->backend->poll(group);
    EpStatus status = ep_group_usable(group);
    if (status != EP_OK) {
        if (out) ep_write_struct(out, &group->failure);
        return status;
    }
    if (group->routing.status != EP_OK) return take(&group->routing, out, report_routing);
    if (group->overflow.status != EP_OK) return take(&group->overflow, out, report_overflow);
    if (group->late.status != EP_OK) {
        status = report_late(group, &group->late);
        if (out) ep_write_struct(out, &group->late);
        group->late.status = EP_OK;
        return status;
    }
    if (out) ep_write_struct(out, &(EpFinding)EP_FINDING_INIT);
    return EP_OK;
}
