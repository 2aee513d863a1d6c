/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Brings async errors into the group: kernels write them into pinned memory. A failure ends the
 * group; bad indices and overflows are recorded.
 */
#include <stdio.h>
#include <string.h>

#include "bootstrap/network/cuda/network.h"
#include "handles/cuda/handle.h"
#include "runtime/args.h"
#include "runtime/cuda/digest.h"

static const char *awaited_name(int32_t phase) {
    static const char *const names[] = {
        [EP_AWAIT_ARRIVAL] = "its arrival", [EP_AWAIT_ROUTES] = "routes",
        [EP_AWAIT_RECORD] = "data",         [EP_AWAIT_CREDIT] = "room",
        [EP_AWAIT_GRID] = "the grid",       [EP_AWAIT_HEAD] = "its head",
        [EP_AWAIT_LINES] = "its rows",      [EP_AWAIT_WEIGHTS] = "its weights"};
    return phase >= EP_AWAIT_ARRIVAL && phase <= EP_AWAIT_WEIGHTS ? names[phase] : "?";
}

/* Write the row that a wait for a record or a credit is about, or in latency mode the token. Other
 * waits have none. */
static void awaited_row(const volatile EpCudaFailure *f, char *out, size_t bytes) {
    int has_row = f->awaited == EP_AWAIT_RECORD || f->awaited == EP_AWAIT_CREDIT;
    out[0] = 0;
    if (has_row || f->awaited == EP_AWAIT_LINES || f->awaited == EP_AWAIT_WEIGHTS)
        snprintf(out, bytes, ", %s %d", has_row ? "row" : "token", f->row);
}

static EpStatus report_timeout(const EpGroup *group, const volatile EpCudaFailure *f,
                               EpFinding *finding) {
    char row[24], refusal[EP_ABORT_BYTES];
    if (f->awaited == EP_AWAIT_DONE)
        return ep_fail(EP_ERR_TIMEOUT,
                       "rank %d: %s: extras.done: block %d was not done within %g s (expected at "
                       "least %u, seen %u)",
                       group->rank, finding->phase, f->row, group->timeout, f->expected, f->seen);
    awaited_row(f, row, sizeof(row));
    ep_cuda_find_refusal(group, f->peer, refusal);
    return ep_fail(EP_ERR_TIMEOUT,
                   "rank %d: %s: rank %d did not arrive within %g s (waiting for %s%s: expected "
                   "%u, seen %u)%s%s",
                   group->rank, finding->phase, f->peer, group->timeout, awaited_name(f->awaited),
                   row, f->expected, f->seen, refusal[0] ? "; " : "", refusal);
}

/* Report the first fact that differs, with the host backend's sentence. */
static EpStatus report_facts(const EpGroup *group, const volatile EpCudaFailure *f,
                             EpFinding *finding) {
    int64_t mine[EP_OP_FACTS], theirs[EP_OP_FACTS];
    const EpOp *op = ep_op_find(EP_DIGEST_OP(f->expected));
    int i = 0;
    ep_facts_unpack(f->facts, mine);
    ep_facts_unpack(f->peer_facts, theirs);
    while (i < EP_OP_FACTS - 1 && mine[i] == theirs[i])
        i++;
    finding->expected = mine[i], finding->seen = theirs[i];
    char text[EP_OP_VALUES_BYTES];
    return ep_fail(i < op->config ? EP_ERR_ORDER : EP_ERR_MISMATCH, "rank %d: %s: %s", group->rank,
                   op->name, ep_op_values(op, i, group->rank, mine[i], f->peer, theirs[i], text));
}

/* Report that another rank has entered another operation, or the same one with other sizes. */
static EpStatus report_order(const EpGroup *group, const volatile EpCudaFailure *f,
                             EpFinding *finding) {
    int32_t own = EP_DIGEST_OP(f->expected);
    int routes =
        own == ep_op_prepare.code || own == ep_op_route.code || own == ep_op_route_send.code;
    if (!ep_same_call(f->expected, f->seen)) {
        if (own == EP_DIGEST_OP(f->seen))
            finding->expected = EP_DIGEST_HANDLE(f->expected),
            finding->seen = EP_DIGEST_HANDLE(f->seen);
        return ep_fail_digests(group->rank, f->expected, f->peer, f->seen);
    }
    int has_facts = f->facts && f->peer_facts && f->facts != f->peer_facts;
    if (has_facts && routes) return report_facts(group, f, finding);
    if (has_facts && own == ep_op_placement.code) {
        char text[EP_OP_VALUES_BYTES];
        finding->expected = (int64_t)f->facts, finding->seen = (int64_t)f->peer_facts;
        return ep_fail(EP_ERR_ORDER, "rank %d: %s: %s", group->rank, finding->phase,
                       ep_op_values(&ep_op_placement, 0, group->rank, finding->expected, f->peer,
                                    finding->seen, text));
    }
    if (has_facts) {
        finding->expected = (int64_t)f->facts, finding->seen = (int64_t)f->peer_facts;
        return ep_fail(EP_ERR_ORDER,
                       "rank %d: %s: the operation that wrote the plan differs: rank %d has %lld, "
                       "rank %d has %lld",
                       group->rank, finding->phase, group->rank, (long long)finding->expected,
                       f->peer, (long long)finding->seen);
    }
    return ep_fail_digests(group->rank, f->expected, f->peer, f->seen);
}

/* Report that a peer has given up. As on the host, the finding names the rank that it blames. */
static EpStatus report_peer(const EpGroup *group, const volatile EpCudaFailure *f,
                            EpFinding *finding) {
    uint64_t why[EP_ABORT_WORDS];
    for (int i = 0; i < EP_ABORT_WORDS; i++)
        why[i] = f->why[i];
    finding->peer = (int32_t)f->seen, finding->expected = finding->seen = -1;
    return ep_fail_peer(group->rank, finding->phase, f->peer, finding->peer, (const char *)why);
}

/* Report rows that would go to a window which this rank has not adopted. */
static EpStatus report_window(const EpGroup *group, const volatile EpCudaFailure *f,
                              EpFinding *finding) {
    finding->peer = (int32_t)f->seen, finding->expected = f->row, finding->seen = -1;
    if (f->row < 0)
        return ep_fail(
            EP_ERR_ORDER,
            "rank %d: %s: expected receive rows in an adopted window (EP_WINDOW_PAIRED), "
            "as rank %d has them, got other memory",
            group->rank, finding->phase, finding->peer);
    return ep_fail(EP_ERR_ORDER,
                   "rank %d: %s: expected the adopted window %d, in which rank %d receives rows, "
                   "got none: this rank must call ep_window_adopt with id %d before the operation",
                   group->rank, finding->phase, f->row, finding->peer, f->row);
}

/* Report a plan that is not the expected one, with the host backend's sentences. */
static EpStatus report_plan(const EpGroup *group, const volatile EpCudaFailure *f,
                            EpFinding *finding) {
    EpCall call = {finding->phase, group->rank};
    finding->peer = -1;
    if (f->awaited == EP_PLAN_TOKENS)
        return ep_refuse(&call, EP_ERR_SHAPE, "plan",
                         "expected tensors of T = %d tokens, as ep_prepare had, got %d",
                         (int)f->expected, (int)f->seen);
    if (f->awaited == EP_PLAN_ROWS)
        return ep_refuse(&call, EP_ERR_BUFFER_SIZE, "plan",
                         "expected tensors of at least %d receive rows, got %d", (int)f->expected,
                         (int)f->seen);
    if (f->awaited == EP_PLAN_BLOCKS)
        return ep_refuse(&call, EP_ERR_SHAPE, "plan",
                         "expected tensors with room for %d rows of each source, the tokens of a "
                         "rank, got room for %d",
                         (int)f->expected, (int)f->seen);
    if (f->awaited == EP_PLAN_TOP_K)
        return ep_refuse(&call, EP_ERR_HANDLE_MEMORY, "plan",
                         "expected untouched bytes, got damaged numbers");
    finding->expected = finding->seen = -1;
    EpPlanHeader expected = {
        .magic = EP_PLAN_MAGIC, .group = group->id, .config = f->expected_config};
    EpPlanHeader got = {.magic = f->mark.magic, .group = f->mark.group, .config = f->mark.config};
    return ep_plan_check(&call, &got, f->mark.tail, &expected);
}

static EpStatus report_flight(const EpGroup *group, const volatile EpCudaFailure *f,
                              EpFinding *finding) {
    finding->peer = -1;
    return ep_fail(EP_ERR_ORDER,
                   "rank %d: %s: expected a free set of buffers, or the send phase before its "
                   "receive phase, got more operations in flight than the group's %d sets "
                   "(latency_sets), or a graph that was replayed out of order",
                   group->rank, finding->phase, (int)f->expected);
}

static EpStatus report_global(const EpGroup *group, const volatile EpCudaFailure *f,
                              EpFinding *finding) {
    EpCall call = {finding->phase, group->rank};
    finding->peer = -1, finding->expected = finding->seen = -1;
    return ep_refuse_global_scale(&call, ep_quant_float(f->seen));
}

/* Report that an exchange has ended, and nobody knows why. */
static EpStatus report_ended(const EpGroup *group, const volatile EpCudaFailure *f,
                             EpFinding *finding) {
    finding->expected = finding->seen = -1;
    return ep_fail(EP_ERR_SYSTEM, "rank %d: %s: expected data of rank %d by NCCL, got none",
                   group->rank, finding->phase, f->peer);
}

/* Masks: ranks that have left the operation, which the caller cannot tell from ranks that are
 * late. */
static EpStatus report_left(const EpGroup *group, const volatile EpCudaFailure *f,
                            EpFinding *finding) {
    finding->expected = finding->seen = -1;
    return ep_fail(EP_ERR_TIMEOUT, "rank %d: %s: rank %d has left it to call ep_group_mask",
                   group->rank, finding->phase, f->peer);
}

static EpStatus report_masked(const EpGroup *group, const volatile EpCudaFailure *f,
                              EpFinding *finding) {
    finding->peer = group->rank, finding->expected = finding->seen = -1;
    return ep_fail(EP_ERR_TIMEOUT, "rank %d: %s: rank %d has masked this rank", group->rank,
                   finding->phase, f->peer);
}

static EpStatus report_absent(const EpGroup *group, const volatile EpCudaFailure *f,
                              EpFinding *finding) {
    finding->expected = finding->seen = -1;
    return ep_fail(EP_ERR_TIMEOUT,
                   "rank %d: %s: rank %d is masked, but took part when the move was enqueued or "
                   "captured",
                   group->rank, finding->phase, f->peer);
}

/* Whether a failure only suspends the group: ranks are missing, or have given up. */
static int suspends(const EpGroup *group, EpStatus status) {
    return group->config.masks && (status == EP_ERR_TIMEOUT || status == EP_ERR_PEER);
}

/* The acquire orders the failure's fields, which the kernel writes before `fault`, after it. */
static void poll_failure(EpGroup *group) {
    static EpStatus (*const report[])(const EpGroup *, const volatile EpCudaFailure *,
                                      EpFinding *) = {
        [EP_FAULT_LATE] = report_timeout,  [EP_FAULT_ORDER] = report_order,
        [EP_FAULT_PEER] = report_peer,     [EP_FAULT_PLAN] = report_plan,
        [EP_FAULT_FLIGHT] = report_flight, [EP_FAULT_WINDOW] = report_window,
        [EP_FAULT_ENDED] = report_ended,   [EP_FAULT_GLOBAL] = report_global,
        [EP_FAULT_LEFT] = report_left,     [EP_FAULT_MASKED] = report_masked,
        [EP_FAULT_ABSENT] = report_absent};
    const volatile EpCudaFailure *f = ep_cuda(group)->device.failure;
    int32_t fault = __atomic_load_n(&f->fault, __ATOMIC_ACQUIRE);
    if (!fault || group->failed != EP_OK || group->suspended != EP_OK) return;
    /* Kernels learn by NCCL that a rank of another node has given up, but not why. */
    int others_know = fault == EP_FAULT_ENDED || (fault == EP_FAULT_PEER && !f->why[0]);
    if (others_know && ep_cuda_watch_explains(group)) return;
    EpFinding finding = EP_FINDING_INIT;
    finding.rank = group->rank, finding.peer = f->peer;
    finding.expected = f->expected, finding.seen = f->seen, finding.count = 1;
    strncpy(finding.phase, ep_op_find(f->op)->name, sizeof(finding.phase) - 1);
    finding.status = report[fault](group, f, &finding);
    if (suspends(group, finding.status)) {
        finding.status = EP_ERR_TIMEOUT;
        ep_group_suspend(group, &finding);
    } else {
        ep_group_fail(group, &finding);
    }
}

/* Copy the latest report of bad indices. Returns its number. A kernel writes report n + 2 where
 * report n is, so the copy is whole if at most one report has begun since: n + 1 is not complete.
 * If reports keep coming, a later poll finds them. */
static unsigned long long copy_bad_indices(const EpCudaAsyncErrors *errors, EpCudaBadIndices *out) {
    unsigned long long before, number = __atomic_load_n(&errors->bad_reports, __ATOMIC_ACQUIRE);
    for (int i = 0; i < 1000; i++) {
        const volatile EpCudaBadIndices *report = &errors->bad[number % 2];
        before = number;
        *out = (EpCudaBadIndices){report->total, report->entry, report->index, report->top_k};
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        number = __atomic_load_n(&errors->bad_reports, __ATOMIC_ACQUIRE);
        if (number == before) return number;
    }
    return 0;
}

static void poll_routing(EpGroup *group) {
    EpCuda *cuda = ep_cuda(group);
    EpCudaBadIndices bad;
    if (__atomic_load_n(&cuda->errors->bad_reports, __ATOMIC_RELAXED) == cuda->bad_reports) return;
    unsigned long long number = copy_bad_indices(cuda->errors, &bad);
    if (!number) return;
    EpFinding finding = EP_FINDING_INIT;
    finding.status = EP_ERR_ROUTING, finding.rank = group->rank;
    if (bad.top_k)
        finding.token = (int64_t)bad.entry / bad.top_k, finding.k = (int64_t)bad.entry % bad.top_k;
    else
        finding.token = (int64_t)bad.entry; /* of a map */
    finding.expected = group->config.num_experts, finding.seen = bad.index;
    finding.count = (int64_t)(bad.total - cuda->bad_total);
    cuda->bad_reports = number, cuda->bad_total = bad.total;
    strcpy(finding.phase, bad.top_k ? "prepare" : "place");
    ep_group_record(&group->routing, &finding);
}

/* The sum may be seen to shrink for a moment: see report_overflow. */
static void poll_overflow(EpGroup *group) {
    EpCuda *cuda = ep_cuda(group);
    unsigned long long lost = __atomic_load_n(&cuda->errors->lost, __ATOMIC_ACQUIRE);
    if (lost <= cuda->lost) return;
    uint64_t overflow = __atomic_load_n(&cuda->errors->overflow, __ATOMIC_RELAXED);
    EpFinding finding = EP_FINDING_INIT;
    finding.status = EP_ERR_OVERFLOW, finding.rank = group->rank;
    finding.expected = (uint32_t)overflow, finding.seen = (int64_t)(overflow >> 32);
    finding.count = (int64_t)(lost - cuda->lost);
    cuda->lost = lost;
    strcpy(finding.phase, "prepare");
    ep_group_record(&group->overflow, &finding);
}

/* The words also have the ranks that were masked before. ep_group_mask clears them. */
static void poll_cuts(EpGroup *group) {
    const volatile EpCudaFailure *f = ep_cuda(group)->device.failure;
    EpMask cut = {{0}};
    if (group->config.on_late != EP_LATE_MASK) return;
    for (int i = 0; i < EP_ALIVE_WORDS; i++)
        cut.word[i] = (uint32_t)f->cut[i] & group->alive.word[i];
    ep_group_record_cuts(group, &cut, f->cut_op ? ep_op_find(f->cut_op)->name : "drop");
}

void ep_cuda_poll(EpGroup *group) {
    poll_failure(group);
    ep_cuda_watch_poll(group);
    poll_routing(group);
    poll_overflow(group);
    poll_cuts(group);
}
