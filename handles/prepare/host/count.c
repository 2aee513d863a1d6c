/* SPDX-License-Identifier: Apache-2.0 */
/* ep_count_routing on the host. */
#include "handles/prepare/host/count.h"

#include <string.h>

static void count_token(const EpRoutingCount *c, int64_t token) {
    uint8_t *in_rank = c->token_in_rank + token * c->placement.num_ranks;
    for (int64_t i = token * c->top_k; i < (token + 1) * c->top_k; i++) {
        int64_t expert = c->index_type == EP_TYPE_INT64 ? ((const int64_t *)c->topk_idx)[i]
                                                        : ((const int32_t *)c->topk_idx)[i];
        if (expert < 0 || expert >= c->placement.num_experts) continue;
        int32_t rank = ep_placement_owner(&c->placement, (int32_t)expert);
        c->expert_tokens[expert]++;
        c->rank_tokens[rank] += !in_rank[rank];
        in_rank[rank] = 1;
    }
}

EpStatus ep_host_count_routing(const EpCall *call, const EpRoutingCount *c) {
    (void)call;
    size_t ranks = (size_t)c->placement.num_ranks;
    memset(c->rank_tokens, 0, ranks * sizeof(int32_t));
    memset(c->expert_tokens, 0, (size_t)c->placement.num_experts * sizeof(int32_t));
    if (c->num_tokens) memset(c->token_in_rank, 0, (size_t)c->num_tokens * ranks);
    for (int64_t token = 0; token < c->num_tokens; token++)
        count_token(c, token);
    return EP_OK;
}
