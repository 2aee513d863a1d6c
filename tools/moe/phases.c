/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moe/phases.h"

#include "tools/common/data.h"
#include "tools/common/util.h"

#define TENSOR(id) (&layer->tensors[T_##id])
#define DEVICE(call, ...) layer->device.call(&layer->device, __VA_ARGS__)

static bool is_early(const Layer *layer) {
    return layer->options->weights_at == WEIGHTS_EARLY;
}

static bool is_quantised(const Layer *layer) {
    return quant_format(layer->options->quant)->bits;
}

static const EpTensor *early_weights(const Layer *layer) {
    return is_early(layer) ? TENSOR(SLOT_WEIGHTS) : NULL;
}

static const EpTensor *late_weights(const Layer *layer) {
    return is_early(layer) ? NULL : TENSOR(SLOT_WEIGHTS);
}

/* ---- forward ------------------------------------------------------------------------------- */

static bool run_router(Layer *layer) {
    return DEVICE(multiply, &layer->all_tokens, TENSOR(TOKENS),
                  &layer->weights[WEIGHT_ROUTER].forward.values, false, TENSOR(PROBS)) &&
           DEVICE(choose, TENSOR(PROBS), TENSOR(INDEX), TENSOR(TOPK));
}

static bool run_prepare(Layer *layer) {
    return bench_ok(
        ep_prepare(layer->handle, NULL, TENSOR(INDEX), NULL, layer->device.stream, NULL),
        "ep_prepare");
}

static bool run_dispatch(Layer *layer) {
    return bench_ok(ep_dispatch(layer->handle, NULL, NULL, TENSOR(TOKENS), TENSOR(TOPK), NULL,
                                layer->device.stream, TENSOR(RECEIVED), TENSOR(SLOT_WEIGHTS), NULL,
                                NULL),
                    "ep_dispatch");
}

static bool gather(Layer *layer, WeightId id, Gathered *g) {
    Weight *w = &layer->weights[id];
    return bench_ok(ep_weight_gather(w->weight, &g->form, &w->shard,
                                     g->sizes.gather_workspace ? &g->workspace : NULL,
                                     layer->weights_stream, &g->full,
                                     is_quantised(layer) ? &g->scales : NULL),
                    "ep_weight_gather");
}

static bool run_gather_w1(Layer *layer) {
    return gather(layer, WEIGHT_W1, &layer->weights[WEIGHT_W1].forward);
}

static bool run_gather_w2(Layer *layer) {
    return gather(layer, WEIGHT_W2, &layer->weights[WEIGHT_W2].forward);
}

static bool dequantise(Layer *layer, const Gathered *g) {
    return DEVICE(dequantise, &g->full, &g->scales, g->block_rows, g->block_columns, &g->values);
}

static bool run_dequantise(Layer *layer) {
    return dequantise(layer, &layer->weights[WEIGHT_W1].forward) &&
           dequantise(layer, &layer->weights[WEIGHT_W2].forward);
}

static bool multiply_forward(Layer *layer, TensorId in, WeightId id, TensorId out) {
    const Gathered *g = &layer->weights[id].forward;
    return DEVICE(multiply, &layer->experts, &layer->tensors[in], &g->values, g->form.transposed,
                  &layer->tensors[out]);
}

static bool run_gemm1(Layer *layer) {
    return multiply_forward(layer, T_RECEIVED, WEIGHT_W1, T_Z);
}

static bool run_activation(Layer *layer) {
    return DEVICE(activate, &layer->experts, TENSOR(Z), early_weights(layer), TENSOR(A));
}

static bool run_gemm2(Layer *layer) {
    return multiply_forward(layer, T_A, WEIGHT_W2, T_Y);
}

static bool run_combine(Layer *layer) {
    return bench_ok(ep_combine(layer->handle, NULL, TENSOR(Y), late_weights(layer), NULL,
                               layer->device.stream, TENSOR(OUT)),
                    "ep_combine");
}

/* ---- backward ------------------------------------------------------------------------------ */

static bool run_combine_backward(Layer *layer) {
    const bool late = !is_early(layer);
    return bench_ok(ep_combine_backward(layer->handle, NULL, TENSOR(GRAD_OUT), late_weights(layer),
                                        late ? TENSOR(Y) : NULL, layer->device.stream,
                                        TENSOR(GRAD_Y), late ? TENSOR(GRAD_SLOTS) : NULL),
                    "ep_combine_backward");
}

static bool run_gather_w1_backward(Layer *layer) {
    return gather(layer, WEIGHT_W1, &layer->weights[WEIGHT_W1].backward);
}

static bool run_gather_w2_backward(Layer *layer) {
    return gather(layer, WEIGHT_W2, &layer->weights[WEIGHT_W2].backward);
}

static bool run_dequantise_backward(Layer *layer) {
    return dequantise(layer, &layer->weights[WEIGHT_W1].backward) &&
           dequantise(layer, &layer->weights[WEIGHT_W2].backward);
}

/* The gradient of a product's input: the weight is transposed where forward it was not. */
static bool multiply_backward(Layer *layer, TensorId in, WeightId id, TensorId out) {
    const Gathered *g = &layer->weights[id].backward;
    return DEVICE(multiply, &layer->experts, &layer->tensors[in], &g->values, !g->form.transposed,
                  &layer->tensors[out]);
}

static bool run_gemm2_input(Layer *layer) {
    return multiply_backward(layer, T_GRAD_Y, WEIGHT_W2, T_GRAD_A);
}

static bool run_gemm2_weight(Layer *layer) {
    return DEVICE(correlate, &layer->experts, TENSOR(A), TENSOR(GRAD_Y),
                  &layer->weights[WEIGHT_W2].grad);
}

static bool run_activation_backward(Layer *layer) {
    return DEVICE(activate_backward, &layer->experts, TENSOR(Z), early_weights(layer),
                  TENSOR(GRAD_A), TENSOR(GRAD_Z), is_early(layer) ? TENSOR(GRAD_SLOTS) : NULL);
}

static bool run_gemm1_input(Layer *layer) {
    return multiply_backward(layer, T_GRAD_Z, WEIGHT_W1, T_GRAD_RECEIVED);
}

static bool run_gemm1_weight(Layer *layer) {
    return DEVICE(correlate, &layer->experts, TENSOR(RECEIVED), TENSOR(GRAD_Z),
                  &layer->weights[WEIGHT_W1].grad);
}

static bool run_dispatch_backward(Layer *layer) {
    return bench_ok(ep_dispatch_backward(layer->handle, NULL, TENSOR(GRAD_RECEIVED),
                                         TENSOR(GRAD_SLOTS), layer->device.stream,
                                         TENSOR(GRAD_TOKENS), TENSOR(GRAD_TOPK)),
                    "ep_dispatch_backward");
}

/* Tokens reach the output by way of the experts and by way of the router; both gradients add up. */
static bool run_router_backward(Layer *layer) {
    const Weight *w = &layer->weights[WEIGHT_ROUTER];
    return DEVICE(choose_backward, TENSOR(PROBS), TENSOR(INDEX), TENSOR(GRAD_TOPK),
                  TENSOR(GRAD_LOGITS)) &&
           DEVICE(multiply, &layer->all_tokens, TENSOR(GRAD_LOGITS), &w->forward.values, true,
                  TENSOR(ROUTED)) &&
           DEVICE(add, TENSOR(ROUTED), TENSOR(GRAD_TOKENS)) &&
           DEVICE(correlate, &layer->all_tokens, TENSOR(TOKENS), TENSOR(GRAD_LOGITS), &w->grad);
}

static bool reduce(Layer *layer, WeightId id) {
    Weight *w = &layer->weights[id];
    const bool space = w->forward.sizes.reduce_workspace > 0;
    return bench_ok(ep_weight_reduce(w->weight, &w->grad, 0, space ? &w->reduce_workspace : NULL,
                                     layer->weights_stream, &w->grad_shard),
                    "ep_weight_reduce");
}

static bool run_reduce_w2(Layer *layer) {
    return reduce(layer, WEIGHT_W2);
}

static bool run_reduce_w1(Layer *layer) {
    return reduce(layer, WEIGHT_W1);
}

static bool run_reduce_router(Layer *layer) {
    return reduce(layer, WEIGHT_ROUTER);
}

/* ---- the table ----------------------------------------------------------------------------- */

/* When a phase exists: always, where weights are not whole, where they are quantised, where they
 * are gathered for each direction, and where that is of quantised weights. */
enum { ALWAYS, SHARDED, QUANTISED, TWICE, QUANTISED_TWICE };

static const struct {
    const char *name;
    bool (*run)(Layer *layer);
    int exists;
} phases[NUM_MOE_PHASES] = {
    [MOE_ROUTER] = {"router", run_router, ALWAYS},
    [MOE_PREPARE] = {"prepare", run_prepare, ALWAYS},
    [MOE_DISPATCH] = {"dispatch", run_dispatch, ALWAYS},
    [MOE_GATHER_W1] = {"gather_w1", run_gather_w1, SHARDED},
    [MOE_GATHER_W2] = {"gather_w2", run_gather_w2, SHARDED},
    [MOE_DEQUANTISE] = {"dequantise", run_dequantise, QUANTISED},
    [MOE_GEMM1] = {"gemm1", run_gemm1, ALWAYS},
    [MOE_ACTIVATION] = {"activation", run_activation, ALWAYS},
    [MOE_GEMM2] = {"gemm2", run_gemm2, ALWAYS},
    [MOE_COMBINE] = {"combine", run_combine, ALWAYS},
    [MOE_COMBINE_BACKWARD] = {"combine_backward", run_combine_backward, ALWAYS},
    [MOE_GATHER_W2_BACKWARD] = {"gather_w2_backward", run_gather_w2_backward, TWICE},
    [MOE_GATHER_W1_BACKWARD] = {"gather_w1_backward", run_gather_w1_backward, TWICE},
    [MOE_DEQUANTISE_BACKWARD] = {"dequantise_backward", run_dequantise_backward, QUANTISED_TWICE},
    [MOE_GEMM2_INPUT] = {"gemm2_grad_input", run_gemm2_input, ALWAYS},
    [MOE_GEMM2_WEIGHT] = {"gemm2_grad_weight", run_gemm2_weight, ALWAYS},
    [MOE_ACTIVATION_BACKWARD] = {"activation_backward", run_activation_backward, ALWAYS},
    [MOE_GEMM1_INPUT] = {"gemm1_grad_input", run_gemm1_input, ALWAYS},
    [MOE_GEMM1_WEIGHT] = {"gemm1_grad_weight", run_gemm1_weight, ALWAYS},
    [MOE_DISPATCH_BACKWARD] = {"dispatch_backward", run_dispatch_backward, ALWAYS},
    [MOE_ROUTER_BACKWARD] = {"router_backward", run_router_backward, ALWAYS},
    [MOE_REDUCE_W2] = {"reduce_w2", run_reduce_w2, ALWAYS},
    [MOE_REDUCE_W1] = {"reduce_w1", run_reduce_w1, ALWAYS},
    [MOE_REDUCE_ROUTER] = {"reduce_router", run_reduce_router, ALWAYS},
};

const char *moe_phase_name(MoePhase phase) {
    return phases[phase].name;
}

bool moe_phase_exists(const Layer *layer, MoePhase phase) {
    const Weight *w1 = &layer->weights[WEIGHT_W1];
    switch (phases[phase].exists) {
    case SHARDED:
        return !w1->whole;
    case QUANTISED:
        return is_quantised(layer);
    case TWICE:
        return w1->twice;
    case QUANTISED_TWICE:
        return w1->twice && is_quantised(layer);
    default:
        return true;
    }
}

bool moe_phase_queue(Layer *layer, MoePhase phase) {
    return phases[phase].run(layer);
}
