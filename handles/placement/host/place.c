/* SPDX-License-Identifier: Apache-2.0 */
/* The ranks compare the map's hash in a round without data; then each makes its own table. */
#include "handles/placement/host/place.h"

#include <string.h>

#include "runtime/host/host.h"

static EpStatus compare(EpExchange *x, int32_t rank, int32_t size, uint64_t hash) {
    const EpRoundHeader header = {.fact = {(int64_t)hash}};
    EP_TRY(ep_round_open(x, &ep_op_placement, &header, EP_ROUND_EACH));
    EP_TRY(ep_round_publish(x));
    for (int32_t i = 1; i < size; i++) {
        const void *body;
        EP_TRY(ep_round_receive(x, ep_round_peer(rank, size, i), NULL, &body));
        ep_round_release(x, ep_round_peer(rank, size, i));
    }
    ep_round_close(x);
    return ep_exchange_flush(x, &ep_op_placement);
}

static void record_bad(EpGroup *group, int32_t physical, int32_t logical) {
    EpFinding finding = EP_FINDING_INIT;
    finding.status = EP_ERR_ROUTING, finding.rank = group->rank;
    finding.token = physical;
    finding.expected = group->config.num_experts, finding.seen = logical;
    finding.count = 1;
    strcpy(finding.phase, "place");
    ep_group_record(&group->routing, &finding);
}

EpStatus ep_host_place(EpGroup *group, const int32_t *map, EpStream stream) {
    const EpCopySetup *copies = &group->copies;
    uint64_t hash = 0;
    (void)stream;
    for (int32_t p = 0; p < copies->placement.num_experts; p++)
        hash += ep_copies_hash(p, map[p]);
    EP_TRY_EXCHANGE(group, compare(ep_host(group)->exchange, group->rank, group->size,
                                   ep_copies_hash_end(hash)));
    for (int32_t p = 0; p < copies->placement.num_experts; p++) {
        int is_bad = map[p] < -1 || map[p] >= copies->num_logical;
        if (is_bad) record_bad(group, p, map[p]);
        copies->memory.logical_of[p] = is_bad ? -1 : map[p];
    }
    ep_copies_build(copies);
    return EP_OK;
}
