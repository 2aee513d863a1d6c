/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PREPARE_COUNT_H
#define EP_HANDLES_PREPARE_COUNT_H

/** ep_count_routing, checked and described: count.c checks, the backends count. */

#include "runtime/layout.h"
#include "runtime/status.h"

typedef struct EpRoutingCount {
    const void *topk_idx; /**< [num_tokens, top_k] */
    EpType index_type;
    int64_t num_tokens;
    int32_t top_k;
    EpPlacement placement;
    int32_t *rank_tokens, *expert_tokens;
    uint8_t *token_in_rank;
    EpStream stream;
} EpRoutingCount;

#endif
