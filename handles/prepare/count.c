/* SPDX-License-Identifier: Apache-2.0 */
/* ep_count_routing: check the arguments, describe the work, hand it to the backend. */
#include "handles/prepare/count.h"

#include "runtime/args.h"
#include "runtime/backend.h"

EpStatus ep_find_backend(const EpCall *call, EpBackend backend, const EpBackendOps **ops) {
    if (backend != EP_BACKEND_HOST && backend != EP_BACKEND_CUDA)
        return ep_refuse(call, EP_ERR_RANGE, "backend",
                         "expected EP_BACKEND_HOST or EP_BACKEND_CUDA, got %d", (int)backend);
    *ops = ep_backend_ops(backend);
    if (*ops) return EP_OK;
    return ep_refuse(call, EP_ERR_UNSUPPORTED, "backend",
                     "expected a backend of this build, which has no CUDA, got EP_BACKEND_CUDA");
}

static EpStatus read_routing(const EpCall *call, const EpTensor *topk_idx, EpRoutingCount *c) {
    EP_TRY(ep_arg_tensor(call, "topk_idx", topk_idx, 2));
    EP_TRY(ep_arg_index_type(call, "topk_idx", topk_idx));
    int64_t entries = ep_size_of(1, topk_idx->shape, 2);
    if (entries > INT32_MAX)
        return ep_refuse(call, EP_ERR_RANGE, "topk_idx",
                         "expected at most %d entries, a size of 0 counted as 1, got %lld",
                         INT32_MAX, (long long)entries);
    c->topk_idx = topk_idx->data, c->index_type = topk_idx->type;
    c->num_tokens = topk_idx->shape[0], c->top_k = (int32_t)topk_idx->shape[1];
    return EP_OK;
}

/* Read a vector of counts, whose length is a number of ranks or experts. */
static EpStatus read_counts(const EpCall *call, const char *argument, const EpTensor *t,
                            int32_t most, int32_t *length, int32_t **counts) {
    EP_TRY(ep_arg_tensor(call, argument, t, 1));
    EP_TRY(ep_arg_type(call, argument, t, EP_TYPE_INT32));
    EP_TRY(ep_arg_alignment(call, argument, t, sizeof(int32_t)));
    if (t->shape[0] < 1 || t->shape[0] > most)
        return ep_refuse(call, EP_ERR_RANGE, argument, "expected a length of 1 .. %d, got %lld",
                         most, (long long)t->shape[0]);
    *length = (int32_t)t->shape[0];
    *counts = (int32_t *)(uintptr_t)t->data;
    return EP_OK;
}

static EpStatus read_token_in_rank(const EpCall *call, const EpTensor *t, EpRoutingCount *c) {
    EP_TRY(ep_arg_tensor(call, "token_in_rank", t, 2));
    EP_TRY(ep_arg_type(call, "token_in_rank", t, EP_TYPE_UINT8));
    EP_TRY(ep_arg_dim(call, "token_in_rank", t, 0, c->num_tokens, "T"));
    EP_TRY(ep_arg_dim(call, "token_in_rank", t, 1, c->placement.num_ranks, "R"));
    c->token_in_rank = (uint8_t *)(uintptr_t)t->data;
    return EP_OK;
}

EpStatus ep_count_routing(EpBackend backend, const EpTensor *topk_idx, EpStream stream,
                          const EpTensor *rank_tokens, const EpTensor *expert_tokens,
                          const EpTensor *token_in_rank) {
    EpCall call = {"ep_count_routing", -1, NULL};
    const EpBackendOps *ops;
    EpRoutingCount c = {.stream = stream};
    EP_TRY(ep_find_backend(&call, backend, &ops));
    EP_TRY(read_routing(&call, topk_idx, &c));
    EP_TRY(read_counts(&call, "rank_tokens", rank_tokens, EP_MAX_RANKS, &c.placement.num_ranks,
                       &c.rank_tokens));
    EP_TRY(read_counts(&call, "expert_tokens", expert_tokens, EP_MAX_EXPERTS,
                       &c.placement.num_experts, &c.expert_tokens));
    EP_TRY(read_token_in_rank(&call, token_in_rank, &c));
    return ops->count_routing(&call, &c);
}
