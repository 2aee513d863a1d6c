/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moe/compare.h"

#include <math.h>
#include <stdio.h>

#include "tools/common/util.h"

/*
 * A rounding to e4m3, with 3 bits behind the leading one, is off by at most 2^-4 of the number, and
 * by 0.026 of it in the mean of squares. A sum over many numbers averages their errors: relative to
 * the sum's norm, the error of one operand's rounding stays what it is for a number. Errors of
 * several roundings are independent, so their squares add up: of n roundings at most 2^-4 sqrt(n),
 * and by the mean 0.026 sqrt(n). The activation multiplies gate and up, so that what is before it
 * counts twice, and its slope, at most 1.1, is within the room between the two. If the scales of
 * one block in 32 were wrong, the error would be above sqrt(1 / 32) = 0.18.
 *
 * Roundings of weights, of rows, and of transposed rows.
 */
static const struct {
    const char *name;
    TensorId tensor; /* none: the gradient of the weight's shard */
    WeightId weight;
    int weights, rows, transposed;
} compared[MOE_COMPARED] = {
    /* gate and up: w1, rows; w2, activation */
    {"out", T_OUT, WEIGHT_W1, 3, 3, 0},
    /* gate and up; w2, grad_y; w1, grad_z */
    {"grad_tokens", T_GRAD_TOKENS, WEIGHT_W1, 4, 4, 0},
    /* gate and up; w2, grad_y; rows, which were e4m3 before, and grad_z, transposed */
    {"grad_w1", T_NONE, WEIGHT_W1, 3, 3, 3},
    /* gate and up; activation and grad_y, transposed */
    {"grad_w2", T_NONE, WEIGHT_W2, 2, 2, 2},
};

static double bound_of(const Layer *layer, int i) {
    const bool sums_rows = layer->options->wgrad == MOE_WGRAD_FP8;
    const int roundings = compared[i].weights + (layer->multiplies_e4m3 ? compared[i].rows : 0) +
                          (sums_rows ? compared[i].transposed : 0);
    return 0x1p-4 * sqrt(roundings);
}

static const EpTensor *tensor_of(const Layer *layer, int i) {
    return compared[i].tensor ? &layer->tensors[compared[i].tensor]
                              : &layer->weights[compared[i].weight].grad_shard;
}

/* NaN, where either has one, is no error that a bound allows. */
static bool compare(Layer *layer, Layer *plain, int i, double *out) {
    Difference difference;
    if (!layer->device.differ(&layer->device, tensor_of(layer, i), tensor_of(plain, i),
                              &difference))
        return false;
    *out = difference.squares == 0 ? 0 : sqrt(difference.squares / difference.norm);
    if (isnan(*out)) *out = INFINITY;
    return true;
}

/* Forward alone has one result, and no gradients. */
static int count_compared(const Layer *layer) {
    return layer->options->forward ? 1 : MOE_COMPARED;
}

static bool run(Layer *layer) {
    return world_all(layer->world, moe_step_run(layer) && layer->device.finish(&layer->device));
}

static bool compare_all(Layer *layer, Layer *plain, MoeComparison *out) {
    double errors[MOE_COMPARED] = {0};
    const int count = count_compared(layer);
    bool ok = true;
    for (int i = 0; ok && i < count; i++)
        ok = compare(layer, plain, i, &errors[i]);
    if (!world_all(layer->world, ok) || !world_max_double(layer->world, errors, MOE_COMPARED))
        return false;
    for (int i = 0; i < count; i++)
        out->results[i] = (CompareResult){compared[i].name, errors[i], bound_of(layer, i)};
    return true;
}

static void find_first(MoeComparison *c) {
    for (int i = MOE_COMPARED - 1; i >= 0; i--) {
        const CompareResult *r = &c->results[i];
        if (!(r->error <= r->bound))
            snprintf(c->first, sizeof(c->first),
                     "%s: expected at most %.3g off the layer without --quant, got %.3g", r->name,
                     r->bound, r->error);
    }
    for (int p = NUM_MOE_PHASES - 1; p >= 0; p--) {
        if (c->products[p].elements && !(c->products[p].worst <= 1))
            snprintf(c->first, sizeof(c->first),
                     "%s: expected sums of the e4m3 products, got %.3g times the bound off",
                     moe_phase_name((MoePhase)p), c->products[p].worst);
    }
}

/* The second layer lives for one step. A fault is planted in the first alone. */
bool moe_compare(Layer *layer, MoeComparison *out) {
    Layer plain = {.world = NULL};
    MoeOptions options = *layer->options;
    *out = (MoeComparison){.exists = true};
    options.quant = EP_QUANT_NONE, options.wgrad = 0, options.regather = 0;
    options.fault = -1;
    bool ok = run(layer) && moe_check_products(layer, out->products) &&
              layer_create(layer->world, &options, &layer->mesh, layer, NULL, &plain);
    ok = ok && run(&plain) && compare_all(layer, &plain, out);
    if (plain.world && !layer->world->broken) layer_destroy(&plain);
    find_first(out);
    return ok;
}
