/* SPDX-License-Identifier: Apache-2.0 */
/* ep_read_routing_map, ep_write_routing_map: check the arguments, hand the work to the backend. */
#include "handles/prepare/routing_map.h"

#include "handles/prepare/count.h"
#include "runtime/args.h"
#include "runtime/backend.h"

/* Read [T, columns]. NULL stays NULL where `is_optional`. */
static EpStatus read_table(const EpCall *call, const char *argument, const EpTensor *t, EpType type,
                           int is_optional, const EpRoutingMap *m, int64_t columns, void **data) {
    if (!t && is_optional) return EP_OK;
    EP_TRY(ep_arg_tensor(call, argument, t, 2));
    EP_TRY(ep_arg_type(call, argument, t, type));
    EP_TRY(ep_arg_alignment(call, argument, t, type == EP_TYPE_UINT8 ? 1 : sizeof(float)));
    EP_TRY(ep_arg_dim(call, argument, t, 0, m->num_tokens, "T"));
    EP_TRY(ep_arg_dim(call, argument, t, 1, columns, columns == m->top_k ? "K" : "E"));
    *data = (void *)(uintptr_t)t->data;
    return EP_OK;
}

static EpStatus read_sizes(const EpCall *call, const EpTensor *topk_idx, const char *wide,
                           const EpTensor *by_expert, EpRoutingMap *m) {
    EP_TRY(ep_arg_tensor(call, "topk_idx", topk_idx, 2));
    EP_TRY(ep_arg_index_type(call, "topk_idx", topk_idx));
    EP_TRY(ep_arg_tensor(call, wide, by_expert, 2));
    int64_t k = topk_idx->shape[1], experts = by_expert->shape[1];
    if (k < 1 || k > EP_MAX_TOP_K)
        return ep_refuse(call, EP_ERR_TOP_K, "topk_idx", "expected 1 .. %d columns, got %lld",
                         EP_MAX_TOP_K, (long long)k);
    if (experts < 1 || experts > EP_MAX_EXPERTS)
        return ep_refuse(call, EP_ERR_RANGE, wide, "expected 1 .. %d experts, got %lld",
                         EP_MAX_EXPERTS, (long long)experts);
    m->num_tokens = topk_idx->shape[0];
    m->top_k = (int32_t)k, m->num_experts = (int32_t)experts;
    m->index_type = topk_idx->type;
    return EP_OK;
}

static EpStatus refuse_weights(const EpCall *call, const char *there, const char *missing) {
    return ep_refuse(call, EP_ERR_NULL, missing, "expected a tensor, since %s is given, got NULL",
                     there);
}

EpStatus ep_read_routing_map(EpBackend backend, const EpTensor *map, const EpTensor *probs,
                             EpStream stream, const EpTensor *topk_idx,
                             const EpTensor *topk_weights) {
    EpCall call = {"ep_read_routing_map", -1, NULL};
    const EpBackendOps *ops;
    EpRoutingMap m = {.stream = stream};
    EP_TRY(ep_find_backend(&call, backend, &ops));
    EP_TRY(read_sizes(&call, topk_idx, "map", map, &m));
    EP_TRY(ep_arg_type(&call, "topk_idx", topk_idx, EP_TYPE_INT32));
    if (!probs != !topk_weights)
        return probs ? refuse_weights(&call, "probs", "topk_weights")
                     : refuse_weights(&call, "topk_weights", "probs");
    EP_TRY(read_table(&call, "map", map, EP_TYPE_UINT8, 0, &m, m.num_experts, (void **)&m.map));
    EP_TRY(
        read_table(&call, "probs", probs, EP_TYPE_FP32, 1, &m, m.num_experts, (void **)&m.probs));
    EP_TRY(read_table(&call, "topk_idx", topk_idx, EP_TYPE_INT32, 0, &m, m.top_k, &m.topk_idx));
    EP_TRY(read_table(&call, "topk_weights", topk_weights, EP_TYPE_FP32, 1, &m, m.top_k,
                      (void **)&m.topk_weights));
    return m.num_tokens ? ops->read_routing_map(&call, &m) : EP_OK;
}

EpStatus ep_write_routing_map(EpBackend backend, const EpTensor *topk_idx,
                              const EpTensor *topk_weights, EpStream stream, const EpTensor *map,
                              const EpTensor *probs) {
    EpCall call = {"ep_write_routing_map", -1, NULL};
    const EpBackendOps *ops;
    EpRoutingMap m = {.stream = stream};
    EP_TRY(ep_find_backend(&call, backend, &ops));
    EP_TRY(read_sizes(&call, topk_idx, map ? "map" : "probs", map ? map : probs, &m));
    if (probs && !topk_weights) return refuse_weights(&call, "probs", "topk_weights");
    EP_TRY(read_table(&call, "topk_idx", topk_idx, m.index_type, 0, &m, m.top_k, &m.topk_idx));
    EP_TRY(read_table(&call, "topk_weights", topk_weights, EP_TYPE_FP32, 1, &m, m.top_k,
                      (void **)&m.topk_weights));
    EP_TRY(read_table(&call, "map", map, EP_TYPE_UINT8, 1, &m, m.num_experts, (void **)&m.map));
    EP_TRY(
        read_table(&call, "probs", probs, EP_TYPE_FP32, 1, &m, m.num_experts, (void **)&m.probs));
    return m.num_tokens ? ops->write_routing_map(&call, &m) : EP_OK;
}
