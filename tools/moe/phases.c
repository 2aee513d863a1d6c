/* SPDX-License-Identifier: Apache-2.0 */

/** The table of phases: what each runs, what it has to do at least, and what it writes. */

#include "tools/moe/phases.h"

#include "tools/common/data.h"
#include "tools/common/util.h"

#define TENSOR(id) (&layer->tensors[T_##id])
#define DEVICE(call, ...) layer->device.call(&layer->device, __VA_ARGS__)

/* What a phase needs to exist: all of these. */
enum {
    ALWAYS = 0,
    SHARDED = 1,     /* weights are gathered in the step */
    DEQUANTISED = 2, /* and dequantised */
    TWICE = 4,       /* for each direction */
    BACKWARD = 8,    /* there is a backward pass */
    SHARED = 16,     /* a shared expert */
    E4M3_ROWS = 32,  /* products take e4m3, and not only as dispatch has quantised them */
    E4M3_GRADS = 64, /* products of a backward pass take e4m3 */
    UNFUSED = 128,   /* products take e4m3, and the activation does not quantise */
    TURNED = 256     /* weights are transposed where they are used */
};

typedef struct Phase Phase;

struct Phase {
    const char *name;
    bool (*run)(Layer *layer, const Phase *p);
    unsigned needs;
    WeightId weight;       /* that it gathers, takes or makes the gradient of */
    bool backward;         /* the weight as backward products take it */
    TensorId in, other;    /* operands of a product */
    TensorId out;          /* what it writes; none: the weight's, or nothing that tests damage */
    int products, routers; /* work: of the experts' slots * H * F, of the router's T * H * E */
    int hidden_rows, ffn_rows; /* work: rows of H or F elements of each slot, read or written */
};

static const Gathered *gathered_of(const Layer *layer, const Phase *p) {
    const Weight *w = &layer->weights[p->weight];
    return p->backward ? &w->backward : &w->forward;
}

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

/* ---- weights ------------------------------------------------------------------------------- */

/* As it travels. */
static const Gathered *fetched_of(const Layer *layer, const Phase *p) {
    const Weight *w = &layer->weights[p->weight];
    return w->turns ? &w->backward : gathered_of(layer, p);
}

static bool gather(Layer *layer, const Phase *p) {
    const Gathered *g = fetched_of(layer, p);
    const Weight *w = &layer->weights[p->weight];
    return bench_ok(ep_weight_gather(w->weight, &g->form, &w->shard,
                                     g->sizes.gather_workspace ? &g->workspace : NULL,
                                     layer->weights_stream, &g->full,
                                     is_quantised(layer) ? &g->scales : NULL),
                    "ep_weight_gather");
}

static bool transpose(Layer *layer, const Phase *p) {
    const Weight *w = &layer->weights[p->weight];
    return DEVICE(transpose, &w->backward.full, &w->forward.full) &&
           DEVICE(transpose, &w->backward.scales, &w->forward.scales);
}

/* Of w1 and w2. */
static bool dequantise(Layer *layer, const Phase *p) {
    bool ok = true;
    for (WeightId id = WEIGHT_W1; ok && id <= WEIGHT_W2; id++) {
        const Weight *w = &layer->weights[id];
        const Gathered *g = p->backward ? &w->backward : &w->forward;
        ok = DEVICE(dequantise, &g->full, &g->scales, g->block_rows, g->block_columns, &g->values);
    }
    return ok;
}

/* The transposed rows are for the gradient of a weight. Both forms are made in one pass, if rows
 * are of a 16-bit type. */
static bool quantise(Layer *layer, const Phase *p) {
    EpRowsForm form = EP_ROWS_FORM_INIT;
    EpTensor rows = layer->tensors[p->in];
    const Scaled *plain = &layer->scaled[p->in], *transposed = &layer->transposed[p->in];
    rows.shape[0] = layer->received;
    if (p->in == T_RECEIVED && layer->dispatches_e4m3)
        return DEVICE(requantise, (EpQuant)layer->options->quant, (EpType)layer->options->type,
                      plain, transposed);
    if (transposed->codes.data && rows.type != EP_TYPE_FP32)
        return DEVICE(quantise, (EpQuant)layer->options->quant, &rows, plain, transposed);
    form.quant = (EpQuant)layer->options->quant;
    form.scale_order = EP_SCALES_BY_COLUMN;
    if (!bench_ok(ep_quantise_rows(layer->group, &form, &rows, NULL, layer->device.stream,
                                   &plain->codes, &plain->scales),
                  "ep_quantise_rows"))
        return false;
    form.transposed = 1;
    return !transposed->codes.data ||
           bench_ok(ep_quantise_rows(layer->group, &form, &rows, NULL, layer->device.stream,
                                     &transposed->codes, &transposed->scales),
                    "ep_quantise_rows");
}

static bool reduce(Layer *layer, const Phase *p) {
    Weight *w = &layer->weights[p->weight];
    const bool space = w->forward.sizes.reduce_workspace > 0;
    return bench_ok(ep_weight_reduce(w->weight, &w->grad, 0, space ? &w->reduce_workspace : NULL,
                                     layer->weights_stream, &w->grad_shard),
                    "ep_weight_reduce");
}

/* ---- products ------------------------------------------------------------------------------ */

static bool product_of(const Layer *layer, const Phase *p, MoeProduct *out);

/* Backward, the gradient of a product's input: the weight is transposed where forward it was not.
 */
static bool multiply(Layer *layer, const Phase *p) {
    const Gathered *g = gathered_of(layer, p);
    MoeProduct e4m3;
    if (product_of(layer, p, &e4m3))
        return DEVICE(multiply_scaled, &layer->experts, &e4m3.a, &e4m3.b, &e4m3.c);
    return DEVICE(multiply, &layer->experts, &layer->tensors[p->in], &g->values,
                  g->form.transposed != p->backward, &layer->tensors[p->out]);
}

static bool correlate(Layer *layer, const Phase *p) {
    MoeProduct e4m3;
    if (product_of(layer, p, &e4m3))
        return DEVICE(correlate_scaled, &layer->experts, &e4m3.a, &e4m3.b, &e4m3.c);
    return DEVICE(correlate, &layer->experts, &layer->tensors[p->in], &layer->tensors[p->other],
                  &layer->weights[p->weight].grad);
}

static bool product_of(const Layer *layer, const Phase *p, MoeProduct *out) {
    const Gathered *g = gathered_of(layer, p);
    if (!layer->multiplies_e4m3) return false;
    if (p->run == multiply) {
        const Scaled weight = {g->full, g->scales, false, g->form.blocks == EP_BLOCKS_TILES};
        *out = (MoeProduct){layer->scaled[p->in], weight, layer->tensors[p->out], false};
        return true;
    }
    if (p->run != correlate || !layer->transposed[p->in].codes.data) return false;
    *out = (MoeProduct){layer->transposed[p->in], layer->transposed[p->other],
                        layer->weights[p->weight].grad, true};
    return true;
}

/* A tensor that some product takes as it is, though another one takes it as e4m3. */
static const EpTensor *plain(const Layer *layer, TensorId id) {
    return layer->options->wgrad == MOE_WGRAD_DTYPE ? &layer->tensors[id] : NULL;
}

static bool activate(Layer *layer, const Phase *p) {
    (void)p;
    if (layer->fuses)
        return DEVICE(activate_scaled, (EpQuant)layer->options->quant, TENSOR(Z),
                      early_weights(layer), plain(layer, T_A), &layer->scaled[T_A],
                      &layer->transposed[T_A]);
    return DEVICE(activate, &layer->experts, TENSOR(Z), early_weights(layer), TENSOR(A));
}

static bool activate_backward(Layer *layer, const Phase *p) {
    (void)p;
    if (layer->fuses)
        return DEVICE(activate_backward_scaled, (EpQuant)layer->options->quant, TENSOR(Z),
                      TENSOR(GRAD_A), plain(layer, T_GRAD_Z), &layer->scaled[T_GRAD_Z],
                      &layer->transposed[T_GRAD_Z]);
    return DEVICE(activate_backward, &layer->experts, TENSOR(Z), early_weights(layer),
                  TENSOR(GRAD_A), TENSOR(GRAD_Z), is_early(layer) ? TENSOR(GRAD_SLOTS) : NULL);
}

/* ---- router -------------------------------------------------------------------------------- */

static bool route(Layer *layer, const Phase *p) {
    (void)p;
    return DEVICE(multiply_narrow, TENSOR(TOKENS), &layer->weights[WEIGHT_ROUTER].forward.values,
                  TENSOR(PROBS)) &&
           DEVICE(choose, TENSOR(PROBS), TENSOR(INDEX), TENSOR(TOPK));
}

/* Tokens reach the output by way of the experts and by way of the router; both gradients add up. */
static bool route_backward(Layer *layer, const Phase *p) {
    const Weight *w = &layer->weights[WEIGHT_ROUTER];
    (void)p;
    return DEVICE(choose_backward, TENSOR(PROBS), TENSOR(INDEX), TENSOR(GRAD_TOPK),
                  TENSOR(GRAD_LOGITS)) &&
           DEVICE(accumulate, &layer->all_tokens, TENSOR(GRAD_LOGITS), &w->forward.values, true,
                  TENSOR(GRAD_TOKENS)) &&
           DEVICE(correlate, &layer->all_tokens, TENSOR(TOKENS), TENSOR(GRAD_LOGITS), &w->grad);
}

/* The shared expert takes all tokens. */
static bool multiply_shared(Layer *layer, const Phase *p) {
    const Groups *all = &layer->all_tokens;
    (void)p;
    return DEVICE(multiply, all, TENSOR(TOKENS), TENSOR(SHARED_W1), false, TENSOR(SHARED_Z)) &&
           DEVICE(activate, all, TENSOR(SHARED_Z), NULL, TENSOR(SHARED_A)) &&
           DEVICE(multiply, all, TENSOR(SHARED_A), TENSOR(SHARED_W2), false, TENSOR(SHARED_Y));
}

/* ---- tokens -------------------------------------------------------------------------------- */

static bool prepare(Layer *layer, const Phase *p) {
    (void)p;
    return bench_ok(
        ep_prepare(layer->handle, NULL, TENSOR(INDEX), NULL, layer->device.stream, NULL),
        "ep_prepare");
}

static bool dispatch(Layer *layer, const Phase *p) {
    const Scaled *e4m3 = layer->dispatches_e4m3 ? &layer->scaled[T_RECEIVED] : NULL;
    (void)p;
    return bench_ok(ep_dispatch(layer->handle, NULL, NULL, TENSOR(TOKENS), TENSOR(TOPK), NULL,
                                layer->device.stream, e4m3 ? &e4m3->codes : TENSOR(RECEIVED),
                                TENSOR(SLOT_WEIGHTS), e4m3 ? &e4m3->scales : NULL, NULL),
                    "ep_dispatch");
}

/* It adds what the shared expert makes. */
static bool combine(Layer *layer, const Phase *p) {
    EpExtras extras = EP_EXTRAS_INIT;
    (void)p;
    if (layer->options->shared) extras.bias0 = TENSOR(SHARED_Y);
    return bench_ok(ep_combine_with(layer->handle, NULL, TENSOR(Y), late_weights(layer), NULL,
                                    layer->device.stream, TENSOR(OUT), &extras),
                    "ep_combine");
}

static bool combine_backward(Layer *layer, const Phase *p) {
    const bool late = !is_early(layer);
    (void)p;
    return bench_ok(ep_combine_backward(layer->handle, NULL, TENSOR(GRAD_OUT), late_weights(layer),
                                        late ? TENSOR(Y) : NULL, layer->device.stream,
                                        TENSOR(GRAD_Y), late ? TENSOR(GRAD_SLOTS) : NULL),
                    "ep_combine_backward");
}

static bool dispatch_backward(Layer *layer, const Phase *p) {
    (void)p;
    return bench_ok(ep_dispatch_backward(layer->handle, NULL, TENSOR(GRAD_RECEIVED),
                                         TENSOR(GRAD_SLOTS), layer->device.stream,
                                         TENSOR(GRAD_TOKENS), TENSOR(GRAD_TOPK)),
                    "ep_dispatch_backward");
}

/* ---- the table ----------------------------------------------------------------------------- */

#define W1 .weight = WEIGHT_W1
#define W2 .weight = WEIGHT_W2
#define BACK .backward = true

static const Phase phases[NUM_MOE_PHASES] = {
    [MOE_ROUTER] = {"router", route, ALWAYS, .out = T_INDEX, .routers = 1},
    [MOE_PREPARE] = {"prepare", prepare, ALWAYS},
    [MOE_SHARED] = {"shared_expert", multiply_shared, SHARED, .out = T_SHARED_Y},
    [MOE_DISPATCH] = {"dispatch", dispatch, ALWAYS, .out = T_RECEIVED, .hidden_rows = 2},
    [MOE_GATHER_W1] = {"gather_w1", gather, SHARDED, W1},
    [MOE_GATHER_W2] = {"gather_w2", gather, SHARDED, W2},
    [MOE_DEQUANTISE] = {"dequantise", dequantise, DEQUANTISED, W1},
    [MOE_TRANSPOSE_W1] = {"transpose_w1", transpose, TURNED, W1},
    [MOE_QUANTISE_ROWS] = {"quantise_rows", quantise, E4M3_ROWS, .in = T_RECEIVED,
                           .hidden_rows = 1},
    [MOE_GEMM1] = {"gemm1", multiply, ALWAYS, W1, .in = T_RECEIVED, .out = T_Z, .products = 2},
    [MOE_ACTIVATION] = {"activation", activate, ALWAYS, .out = T_A, .ffn_rows = 3},
    [MOE_QUANTISE_ACTIVATION] = {"quantise_activation", quantise, UNFUSED, .in = T_A,
                                 .ffn_rows = 1},
    [MOE_TRANSPOSE_W2] = {"transpose_w2", transpose, TURNED, W2},
    [MOE_GEMM2] = {"gemm2", multiply, ALWAYS, W2, .in = T_A, .out = T_Y, .products = 1},
    [MOE_COMBINE] = {"combine", combine, ALWAYS, .out = T_OUT, .hidden_rows = 2},
    [MOE_COMBINE_BACKWARD] = {"combine_backward", combine_backward, BACKWARD, .out = T_GRAD_Y,
                              .hidden_rows = 2},
    [MOE_GATHER_W2_BACKWARD] = {"gather_w2_backward", gather, TWICE, W2, BACK},
    [MOE_GATHER_W1_BACKWARD] = {"gather_w1_backward", gather, TWICE, W1, BACK},
    [MOE_DEQUANTISE_BACKWARD] = {"dequantise_backward", dequantise, DEQUANTISED | TWICE, W2, BACK},
    [MOE_QUANTISE_GRAD_Y] = {"quantise_grad_y", quantise, E4M3_GRADS, .in = T_GRAD_Y,
                             .hidden_rows = 1},
    [MOE_GEMM2_INPUT] = {"gemm2_grad_input", multiply, BACKWARD, W2, BACK, .in = T_GRAD_Y,
                         .out = T_GRAD_A, .products = 1},
    [MOE_GEMM2_WEIGHT] = {"gemm2_grad_weight", correlate, BACKWARD, W2, .in = T_A,
                          .other = T_GRAD_Y, .products = 1},
    [MOE_ACTIVATION_BACKWARD] = {"activation_backward", activate_backward, BACKWARD,
                                 .out = T_GRAD_Z, .ffn_rows = 5},
    [MOE_QUANTISE_GRAD_Z] = {"quantise_grad_z", quantise, UNFUSED | BACKWARD, .in = T_GRAD_Z,
                             .ffn_rows = 2},
    [MOE_GEMM1_INPUT] = {"gemm1_grad_input", multiply, BACKWARD, W1, BACK, .in = T_GRAD_Z,
                         .out = T_GRAD_RECEIVED, .products = 2},
    [MOE_GEMM1_WEIGHT] = {"gemm1_grad_weight", correlate, BACKWARD, W1, .in = T_RECEIVED,
                          .other = T_GRAD_Z, .products = 2},
    [MOE_DISPATCH_BACKWARD] = {"dispatch_backward", dispatch_backward, BACKWARD,
                               .out = T_GRAD_TOKENS, .hidden_rows = 2},
    [MOE_ROUTER_BACKWARD] = {"router_backward", route_backward, BACKWARD, .out = T_GRAD_TOKENS,
                             .routers = 2},
    [MOE_REDUCE_W2] = {"reduce_w2", reduce, BACKWARD, W2},
    [MOE_REDUCE_W1] = {"reduce_w1", reduce, BACKWARD, W1},
    [MOE_REDUCE_ROUTER] = {"reduce_router", reduce, BACKWARD, .weight = WEIGHT_ROUTER},
};

const char *moe_phase_name(MoePhase phase) {
    return phases[phase].name;
}

static unsigned facts_of(const Layer *layer) {
    const bool forward = layer->options->forward, e4m3 = layer->multiplies_e4m3;
    const Weight *w1 = &layer->weights[WEIGHT_W1];
    return (w1->whole || forward ? 0 : SHARDED) | (forward ? 0 : BACKWARD) |
           (is_quantised(layer) && !e4m3 && !forward ? DEQUANTISED : 0) | (w1->twice ? TWICE : 0) |
           (layer->options->shared ? SHARED : 0) |
           (e4m3 && !(forward && layer->dispatches_e4m3) ? E4M3_ROWS : 0) |
           (e4m3 && !forward ? E4M3_GRADS : 0) | (e4m3 && !layer->fuses ? UNFUSED : 0) |
           (w1->turns ? TURNED : 0);
}

bool moe_phase_exists(const Layer *layer, MoePhase phase) {
    return (phases[phase].needs & ~facts_of(layer)) == 0;
}

bool moe_weights_load(Layer *layer) {
    const Weight *w1 = &layer->weights[WEIGHT_W1];
    return w1->whole ||
           (moe_phase_queue(layer, MOE_GATHER_W1) && moe_phase_queue(layer, MOE_GATHER_W2) &&
            (!is_quantised(layer) || layer->multiplies_e4m3 ||
             moe_phase_queue(layer, MOE_DEQUANTISE)));
}

bool moe_phase_queue(Layer *layer, MoePhase phase) {
    return phases[phase].run(layer, &phases[phase]);
}

/* ---- work ---------------------------------------------------------------------------------- */

/* The rank's own output is written, and as much is read. */
static int64_t gather_bytes(const Gathered *g) {
    return 2 * (tensor_bytes(&g->full) +
                (quant_format(g->form.quant)->bits ? tensor_bytes(&g->scales) : 0));
}

static int64_t dequantise_bytes(const Layer *layer, bool backward) {
    int64_t bytes = 0;
    for (WeightId id = WEIGHT_W1; id <= WEIGHT_W2; id++) {
        const Weight *w = &layer->weights[id];
        const Gathered *g = backward ? &w->backward : &w->forward;
        bytes += tensor_bytes(&g->full) + tensor_bytes(&g->scales) + tensor_bytes(&g->values);
    }
    return bytes;
}

/* All ranks together read every gradient once, and each writes the sum for its shard. So ranks that
 * keep the same shard read their share of its parts. */
static int64_t reduce_bytes(const Layer *layer, WeightId id) {
    const Weight *w = &layer->weights[id];
    const int64_t part = tensor_elements(&w->grad_shard) * (int64_t)ep_type_bytes(w->grad.type);
    return part * moe_scattered_ranks(layer, id) + tensor_bytes(&w->grad_shard);
}

static int64_t unit_of(const Layer *layer) {
    return (int64_t)ep_type_bytes((EpType)layer->options->type);
}

/* Rows are read once. */
static int64_t quantise_bytes(const Layer *layer, int64_t elements, TensorId in) {
    const int64_t forms = layer->transposed[in].codes.data ? 2 : 1;
    if (in == T_RECEIVED && layer->dispatches_e4m3) return layer->slots * elements * 2;
    return layer->slots * elements * (unit_of(layer) + forms);
}

/* Weights of experts that have rows, and rows in and out, are read or written once. */
static int64_t product_bytes(const Layer *layer, const Phase *p) {
    const MoeOptions *o = layer->options;
    const bool sums_rows = p->run == correlate;
    MoeProduct e4m3;
    const int64_t narrow = product_of(layer, p, &e4m3) ? 1 : unit_of(layer);
    const int64_t wide = unit_of(layer), rows = layer->slots;
    int64_t experts = 0;
    for (int32_t g = 0; g < layer->num_local; g++)
        experts += sums_rows || layer->count[g] > 0;
    const int64_t out = sums_rows ? 0 : layer->tensors[p->out].shape[1];
    const int64_t in =
        layer->tensors[p->in].shape[1] + (sums_rows ? layer->tensors[p->other].shape[1] : 0);
    return experts * p->products * o->hidden * o->ffn * (sums_rows ? wide : narrow) +
           rows * (in * narrow + out * wide);
}

/* The router's logits, or their gradient, and tokens, once for each product. */
static int64_t router_bytes(const Layer *layer, int products) {
    const MoeOptions *o = layer->options;
    return products * layer->tokens * (o->hidden * unit_of(layer) + o->experts * 4);
}

static int64_t bytes_moved(Layer *layer, const Phase *p) {
    const MoeOptions *o = layer->options;
    const int64_t elements = p->hidden_rows * o->hidden + p->ffn_rows * o->ffn;
    if (p->run == prepare) return 2 * tensor_bytes(TENSOR(INDEX));
    if (p->run == gather) return gather_bytes(fetched_of(layer, p));
    if (p->run == transpose) return gather_bytes(gathered_of(layer, p));
    if (p->run == dequantise) return dequantise_bytes(layer, p->backward);
    if (p->run == reduce) return reduce_bytes(layer, p->weight);
    if (p->run == quantise) return quantise_bytes(layer, elements, p->in);
    if (p->products) return product_bytes(layer, p);
    if (p->routers) return router_bytes(layer, p->routers);
    return layer->slots * elements * (int64_t)ep_type_bytes((EpType)o->type);
}

/* Each of n ranks sends its part of what is gathered to the others, and of what is reduced their
 * parts. Ranks of a host copy. */
static int64_t remote_bytes(const Layer *layer, const Phase *p) {
    const Gathered *g = fetched_of(layer, p);
    const int64_t ranks = moe_scattered_ranks(layer, p->weight);
    if (layer->device.backend == EP_BACKEND_HOST) return 0;
    if (p->run == gather)
        return (tensor_bytes(&g->full) + (is_quantised(layer) ? tensor_bytes(&g->scales) : 0)) *
               (ranks - 1) / ranks;
    return p->run == reduce ? tensor_bytes(&layer->weights[p->weight].grad) * (ranks - 1) / ranks
                            : 0;
}

bool moe_phase_travels(MoePhase phase) {
    return phases[phase].run == gather || phases[phase].run == reduce;
}

MoeWork moe_phase_work(Layer *layer, MoePhase phase) {
    const MoeOptions *o = layer->options;
    const Phase *p = &phases[phase];
    if (!moe_phase_exists(layer, phase)) return (MoeWork){0, 0, 0};
    return (MoeWork){2 * p->products * layer->slots * o->hidden * o->ffn +
                         2 * p->routers * layer->tokens * o->hidden * o->experts,
                     bytes_moved(layer, p), remote_bytes(layer, p)};
}

/* ---- outputs ------------------------------------------------------------------------------- */

bool moe_phase_product(const Layer *layer, MoePhase phase, MoeProduct *out) {
    return moe_phase_exists(layer, phase) && product_of(layer, &phases[phase], out);
}

const EpTensor *moe_phase_output(Layer *layer, MoePhase phase) {
    const Phase *p = &phases[phase];
    const Weight *w = &layer->weights[p->weight];
    if (p->run == quantise && p->in == T_RECEIVED && layer->dispatches_e4m3)
        return &layer->transposed[p->in].codes;
    if (p->run == quantise) return &layer->scaled[p->in].codes;
    if (p->run == dispatch && layer->dispatches_e4m3) return &layer->scaled[p->out].codes;
    if (p->run == activate && layer->fuses) return &layer->scaled[p->out].codes;
    if (p->out) return &layer->tensors[p->out];
    if (p->run == gather) return &fetched_of(layer, p)->full;
    if (p->run == transpose) return &gathered_of(layer, p)->full;
    if (p->run == dequantise) return &gathered_of(layer, p)->values;
    if (p->run == correlate) return &w->grad;
    return p->run == reduce ? &w->grad_shard : NULL;
}
