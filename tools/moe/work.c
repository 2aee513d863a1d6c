/* SPDX-License-Identifier: Apache-2.0 */

/** What each phase has to do at least, and what it writes. */

#include "tools/common/data.h"
#include "tools/moe/phases.h"

/* ---- work ---------------------------------------------------------------------------------- */

static int64_t bytes_of(const Layer *layer, TensorId id) {
    return tensor_bytes(&layer->tensors[id]);
}

/* Bytes of the slots' rows of `columns` elements, without padding. */
static int64_t slot_bytes(const Layer *layer, int64_t columns) {
    return layer->slots * columns * (int64_t)ep_type_bytes((EpType)layer->options->type);
}

/* The rank's own output is written, and as much is read. */
static int64_t gather_bytes(const Gathered *g) {
    return 2 * (tensor_bytes(&g->full) +
                (!quant_format(g->form.quant)->bits ? 0 : tensor_bytes(&g->scales)));
}

static int64_t dequantise_bytes(const Gathered *g) {
    return tensor_bytes(&g->full) + tensor_bytes(&g->scales) + tensor_bytes(&g->values);
}

/* All ranks together read every gradient once, and each writes the sum for its shard. So ranks that
 * keep the same shard read their share of its parts. */
static int64_t reduce_bytes(const Layer *layer, WeightId id) {
    const Weight *w = &layer->weights[id];
    const int64_t part = tensor_elements(&w->grad_shard) * (int64_t)ep_type_bytes(w->grad.type);
    return part * moe_scattered_ranks(layer, id) + tensor_bytes(&w->grad_shard);
}

static int64_t flops_of(const Layer *layer, MoePhase phase) {
    const MoeOptions *o = layer->options;
    const int64_t product = 2 * layer->slots * o->hidden * o->ffn;
    switch (phase) {
    case MOE_ROUTER:
        return 2 * layer->tokens * o->hidden * o->experts;
    case MOE_ROUTER_BACKWARD:
        return 4 * layer->tokens * o->hidden * o->experts;
    case MOE_GEMM1:
    case MOE_GEMM1_INPUT:
    case MOE_GEMM1_WEIGHT:
        return 2 * product;
    case MOE_GEMM2:
    case MOE_GEMM2_INPUT:
    case MOE_GEMM2_WEIGHT:
        return product;
    default:
        return 0;
    }
}

static int64_t bytes_moved(const Layer *layer, MoePhase phase) {
    const MoeOptions *o = layer->options;
    const Weight *w1 = &layer->weights[WEIGHT_W1], *w2 = &layer->weights[WEIGHT_W2];
    switch (phase) {
    case MOE_PREPARE:
        return 2 * bytes_of(layer, T_INDEX);
    case MOE_DISPATCH:
    case MOE_COMBINE:
    case MOE_COMBINE_BACKWARD:
    case MOE_DISPATCH_BACKWARD:
        return 2 * slot_bytes(layer, o->hidden);
    case MOE_GATHER_W1:
        return gather_bytes(&w1->forward);
    case MOE_GATHER_W2:
        return gather_bytes(&w2->forward);
    case MOE_DEQUANTISE:
        return dequantise_bytes(&w1->forward) + dequantise_bytes(&w2->forward);
    case MOE_GATHER_W1_BACKWARD:
        return gather_bytes(&w1->backward);
    case MOE_GATHER_W2_BACKWARD:
        return gather_bytes(&w2->backward);
    case MOE_DEQUANTISE_BACKWARD:
        return dequantise_bytes(&w1->backward) + dequantise_bytes(&w2->backward);
    case MOE_ACTIVATION:
        return slot_bytes(layer, 3 * o->ffn);
    case MOE_ACTIVATION_BACKWARD:
        return slot_bytes(layer, 5 * o->ffn);
    case MOE_REDUCE_W1:
        return reduce_bytes(layer, WEIGHT_W1);
    case MOE_REDUCE_W2:
        return reduce_bytes(layer, WEIGHT_W2);
    case MOE_REDUCE_ROUTER:
        return reduce_bytes(layer, WEIGHT_ROUTER);
    default:
        return 0;
    }
}

MoeWork moe_phase_work(const Layer *layer, MoePhase phase) {
    if (!moe_phase_exists(layer, phase)) return (MoeWork){0, 0};
    return (MoeWork){flops_of(layer, phase), bytes_moved(layer, phase)};
}

/* ---- outputs ------------------------------------------------------------------------------- */

/* The tensor that a phase writes, -1: none or a weight's. */
static const int outputs[NUM_MOE_PHASES] = {
    [MOE_ROUTER] = T_INDEX,
    [MOE_PREPARE] = -1,
    [MOE_DISPATCH] = T_RECEIVED,
    [MOE_GATHER_W1] = -1,
    [MOE_GATHER_W2] = -1,
    [MOE_DEQUANTISE] = -1,
    [MOE_GEMM1] = T_Z,
    [MOE_ACTIVATION] = T_A,
    [MOE_GEMM2] = T_Y,
    [MOE_COMBINE] = T_OUT,
    [MOE_COMBINE_BACKWARD] = T_GRAD_Y,
    [MOE_GATHER_W2_BACKWARD] = -1,
    [MOE_GATHER_W1_BACKWARD] = -1,
    [MOE_DEQUANTISE_BACKWARD] = -1,
    [MOE_GEMM2_INPUT] = T_GRAD_A,
    [MOE_GEMM2_WEIGHT] = -1,
    [MOE_ACTIVATION_BACKWARD] = T_GRAD_Z,
    [MOE_GEMM1_INPUT] = T_GRAD_RECEIVED,
    [MOE_GEMM1_WEIGHT] = -1,
    [MOE_DISPATCH_BACKWARD] = T_GRAD_TOKENS,
    [MOE_ROUTER_BACKWARD] = T_GRAD_TOKENS,
    [MOE_REDUCE_W2] = -1,
    [MOE_REDUCE_W1] = -1,
    [MOE_REDUCE_ROUTER] = -1,
};

static const EpTensor *weight_output(const Layer *layer, MoePhase phase) {
    const Weight *w1 = &layer->weights[WEIGHT_W1], *w2 = &layer->weights[WEIGHT_W2];
    switch (phase) {
    case MOE_GATHER_W1:
        return &w1->forward.full;
    case MOE_GATHER_W2:
        return &w2->forward.full;
    case MOE_GATHER_W1_BACKWARD:
        return &w1->backward.full;
    case MOE_GATHER_W2_BACKWARD:
        return &w2->backward.full;
    case MOE_DEQUANTISE:
        return &w1->forward.values;
    case MOE_DEQUANTISE_BACKWARD:
        return &w2->backward.values;
    case MOE_GEMM1_WEIGHT:
        return &w1->grad;
    case MOE_GEMM2_WEIGHT:
        return &w2->grad;
    case MOE_REDUCE_W1:
        return &w1->grad_shard;
    case MOE_REDUCE_W2:
        return &w2->grad_shard;
    case MOE_REDUCE_ROUTER:
        return &layer->weights[WEIGHT_ROUTER].grad_shard;
    default:
        return NULL;
    }
}

const EpTensor *moe_phase_output(const Layer *layer, MoePhase phase) {
    return outputs[phase] >= 0 ? &layer->tensors[outputs[phase]] : weight_output(layer, phase);
}
