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

struct EpBackendOps;

/** Find a backend for a call without a group. EP_ERR_UNSUPPORTED: this build does not have it. */
EpStatus ep_find_backend(const EpCall *call, EpBackend backend, const struct EpBackendOps **ops);

#endif
