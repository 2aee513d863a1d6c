/* SPDX-License-Identifier: Apache-2.0 */
/* A step's routing and what ranks agree on, as the CUDA backend's kernels are told. */
#include "handles/handle_cuda.h"
#include "handles/ops.h"

/* FNV-1a over the values. */
uint32_t ep_cuda_digest(const EpHandle *handle, const EpOp *op, const int64_t *values, int count) {
    uint32_t hash = 2166136261u;
    const unsigned char *byte = (const unsigned char *)values;
    for (size_t i = 0; i < (size_t)count * sizeof(*values); i++)
        hash = (hash ^ byte[i]) * 16777619u;
    return EP_DIGEST(op->code, handle->ordinal, hash ^ hash >> 20);
}

static EpCudaVector vector_of(const EpTensor *t) {
    return t ? (EpCudaVector){t->data, t->type == EP_TYPE_INT64} : (EpCudaVector){NULL, 0};
}

/* The last depends on L in the batched layout, if it were the capacity. */
static void list_facts(const EpPlanShape *shape, int64_t top_k, int64_t facts[EP_ROUND_FACTS]) {
    facts[0] = top_k, facts[1] = shape->alignment, facts[2] = shape->layout;
    facts[3] = shape->layout == EP_LAYOUT_BATCHED ? shape->rows_per_expert : shape->capacity;
    facts[4] = shape->quant;
}

void ep_cuda_describe_routing(const EpHandle *handle, const EpRouting *routing, EpPrepareArgs *args,
                              int64_t facts[EP_ROUND_FACTS]) {
    EpCuda *cuda = ep_cuda(handle->group);
    const EpCudaHandle *state = handle->backend_state;
    const EpPlanTensors *out = routing->out;
    int32_t rows = (int32_t)routing->num_rows, lanes = cuda->device.lanes;
    *args = (EpPrepareArgs){.group = cuda->device,
                            .plan = ep_cuda_plan(handle),
                            .shape = handle->shape,
                            .owners = ep_placement_owners(&handle->group->placement),
                            .top_k = (int32_t)routing->top_k,
                            .num_rows = rows,
                            .lane_tokens = rows / lanes + (rows % lanes != 0),
                            .topk_idx = routing->topk_idx,
                            .idx_is_int64 = routing->idx_type == EP_TYPE_INT64,
                            .num_tokens = {(void *)(uintptr_t)routing->num_tokens,
                                           routing->num_tokens_type == EP_TYPE_INT64},
                            .info = state->info,
                            .notes = cuda->notes};
    if (out) {
        args->counts = vector_of(out->expert_counts);
        args->padded = vector_of(out->expert_padded);
        args->offsets = vector_of(out->expert_offsets);
        args->totals = vector_of(out->totals);
        args->source_counts = vector_of(out->source_counts);
    }
    list_facts(&handle->shape, routing->top_k, facts);
    args->group.facts = ep_facts_pack(facts);
}
