/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PREPARE_CUDA_COUNT_H
#define EP_HANDLES_PREPARE_CUDA_COUNT_H

/** ep_count_routing on GPUs: one launch of count.cu. */

#include "handles/prepare/count.h"
#include "runtime/cuda/device.h"

typedef struct EpCountArgs {
    const void *topk_idx; /**< [num_tokens, top_k] */
    int32_t num_tokens, top_k, num_experts, num_ranks;
    int32_t expert_blocks; /**< blocks that count experts; behind them is one for each rank */
    int32_t *rank_tokens, *expert_tokens;
    uint8_t *token_in_rank;
    EpOwners owners;
} EpCountArgs;

#ifdef __cplusplus
extern "C" {
#endif
int ep_cuda_launch_count(const EpCountArgs *args, int is_int64, void *stream);
/** What a launch without a group has returned, as a status. */
EpStatus ep_cuda_launched(const EpCall *call, int error);
EpStatus ep_cuda_count_routing(const EpCall *call, const EpRoutingCount *count);
#ifdef __cplusplus
}
#endif

#endif
