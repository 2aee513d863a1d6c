/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/host/host.h"

#include <string.h>

/* If a whole step fits into this, staging holds it, so that every operation is one round. */
#define SMALL_STAGE_BYTES (4 << 20)
/* MPI counts the bytes of a message in an int. */
#define MOST_STAGE_BYTES (1LL << 30)

int64_t ep_host_route_bytes(const EpGroupConfig *c, int32_t num_ranks) {
    EpPlacement placement = ep_config_placement(c, num_ranks);
    int64_t head = EP_ROUTE_HEAD_WORDS + ep_placement_most(&placement);
    return 4 * (head + c->max_tokens * ep_route_words(c->max_top_k));
}

int64_t ep_host_routes_bytes(const EpGroupConfig *c, int32_t num_ranks) {
    return c->on_late == EP_LATE_MASK ? num_ranks * ep_host_route_bytes(c, num_ranks) : 0;
}

int64_t ep_host_stage_bytes(const EpGroupConfig *c, int32_t num_ranks, const EpSettings *settings) {
    EpPlacement placement = ep_config_placement(c, num_ranks);
    int64_t record = ep_config_record_bytes(c);
    int64_t route =
        4 * (EP_ROUTE_HEAD_WORDS + ep_placement_most(&placement) + ep_route_words(c->max_top_k));
    int64_t ballot = c->masks ? ep_exchange_ballot_bytes() : 0;
    /* A plan whose source is cut has all of its routes, or none. */
    if (c->on_late == EP_LATE_MASK) route = ep_host_route_bytes(c, num_ranks);
    int64_t least = ep_exchange_least_stage(num_ranks, ep_max(ballot, ep_max(record, route)));
    int64_t one_round = ep_exchange_least_stage(num_ranks, ep_max(record * c->max_tokens, route));
    /* Larger groups get room for about half of the rows that a step may send to other ranks. More
     * would save little time, and take more memory than a step sends. */
    int64_t spread = ep_max(2, ep_min(c->max_top_k, num_ranks - 1) / 2);
    if (c->sums == EP_SUMS_BY_ENTRY) spread = 1; /* a token's entries, wherever they are */
    int64_t lean = spread * ep_round_up(record * c->max_tokens + 64, 64);
    int64_t useful = ep_max(lean, ep_min(one_round, SMALL_STAGE_BYTES));
    int64_t most = ep_min(settings->stage_bytes, MOST_STAGE_BYTES);
    return ep_round_up(ep_max(least, ep_min(most, useful)), 256);
}

void ep_host_choose_copies(EpGroup *group) {
    const EpCopyMemory *copies = &group->copies.memory;
    EpExchange *x = ep_host(group)->exchange;
    if (!copies->of) return;
    memset(copies->alive, 0, (size_t)ep_mask_words(group->size) * sizeof(*copies->alive));
    for (int32_t r = 0; r < group->size; r++) {
        copies->alive[r / 32] |= (uint32_t)ep_exchange_is_alive(x, r) << r % 32;
        copies->node_of[r] = group->nodes.of[r];
    }
    ep_copies_build(&group->copies);
}

EpStatus ep_host_broken(EpGroup *group) {
    const EpExchangeFailure *failure = ep_exchange_failure(ep_host(group)->exchange);
    EpFinding finding = EP_FINDING_INIT;
    finding.status = failure->status;
    finding.rank = group->rank, finding.peer = failure->peer;
    finding.expected = failure->expected, finding.seen = failure->seen;
    finding.count = 1;
    strncpy(finding.phase, failure->phase, sizeof(finding.phase) - 1);
    return failure->suspends ? ep_group_suspend(group, &finding) : ep_group_fail(group, &finding);
}
