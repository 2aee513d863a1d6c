/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/prepare/cuda/count.h"

#include "runtime/cuda/cuda.h"

EpStatus ep_cuda_count_routing(const EpCall *call, const EpRoutingCount *c) {
    EpCountArgs args = {.topk_idx = c->topk_idx,
                        .num_tokens = (int32_t)c->num_tokens,
                        .top_k = c->top_k,
                        .num_experts = c->placement.num_experts,
                        .num_ranks = c->placement.num_ranks,
                        .rank_tokens = c->rank_tokens,
                        .expert_tokens = c->expert_tokens,
                        .token_in_rank = c->token_in_rank,
                        .owners = ep_placement_owners(&c->placement)};
    return ep_cuda_launched(call,
                            ep_cuda_launch_count(&args, c->index_type == EP_TYPE_INT64, c->stream));
}

EpStatus ep_cuda_launched(const EpCall *call, int error) {
    if (error == cudaSuccess) return EP_OK;
    (void)cudaGetLastError(); /* reported: do not leave it for the next call */
    return ep_refuse(call, EP_ERR_SYSTEM, "stream", "%s", cudaGetErrorString((cudaError_t)error));
}
