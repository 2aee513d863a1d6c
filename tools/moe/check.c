/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moe/check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/common/data.h"
#include "tools/common/util.h"

/* ---- bounds -------------------------------------------------------------------------------- */

/*
 * Sums of the layer are in fp32. Their errors, relative to the largest element of a tensor, stay
 * below 1e-5 for the lengths in question.
 *
 * With bf16 and fp16, tensors between the phases are rounded to the type. An element of a result
 * depends on a chain of such tensors, each rounded by at most u = 2^-8 or 2^-11 of its magnitude,
 * and the sums between them average such errors rather than add them. So the error of a result is
 * bounded by the number of roundings before it, times u, times the largest element. The gate and
 * the up half of z are two roundings, since the activation multiplies them.
 *
 * Where products take e4m3, their rows are rounded to it, too, with u = 2^-4, and for gradients of
 * weights the transposed rows. This bound is wide; compare.h has a narrow one of the whole.
 */
static const struct {
    const char *name;
    MoePhase phase;
    int roundings;
    int e4m3, transposed; /* of rows, and of transposed rows */
} checks[NUM_CHECKS] = {
    /* none: fp32 from exact operands */
    [CHECK_EXPERTS] = {"experts", MOE_ROUTER, 0, 0, 0},
    [CHECK_TOPK] = {"topk_weights", MOE_ROUTER, 0, 0, 0},
    /* gate, up, a, y, a partial sum that travels, one of a node, out; rows twice, a */
    [CHECK_OUT] = {"out", MOE_COMBINE, 7, 3, 0},
    /* gate, up, grad_y, grad_a, grad_z, the slot's gradient, two partial sums, their sum, the
       logits' gradient, and the sum with the router's part; rows twice, grad_y, grad_z */
    [CHECK_GRAD_TOKENS] = {"grad_tokens", MOE_ROUTER_BACKWARD, 11, 4, 0},
    /* gate, up, grad_y, grad_a, grad_z, the rank's gradient; rows twice, grad_y; rows twice, grad_z
     */
    [CHECK_GRAD_W1] = {"grad_w1", MOE_REDUCE_W1, 6, 3, 3},
    /* gate, up, a, grad_y, the rank's gradient; rows twice; a, grad_y */
    [CHECK_GRAD_W2] = {"grad_w2", MOE_REDUCE_W2, 5, 2, 2},
    /* gate, up, a, y: late; gate, up, grad_a: early; the logits' gradient; rows twice, and a or
       grad_y */
    [CHECK_GRAD_ROUTER] = {"grad_router", MOE_REDUCE_ROUTER, 5, 3, 0},
};

static double bound_of(const MoeOptions *o, CheckId id) {
    const double unit = o->type == EP_TYPE_BF16 ? 0x1p-8 : o->type == EP_TYPE_FP16 ? 0x1p-11 : 0;
    const int e4m3 = (moe_multiplies_e4m3(o) ? checks[id].e4m3 : 0) +
                     (o->wgrad == MOE_WGRAD_FP8 ? checks[id].transposed : 0);
    return 1e-5 + checks[id].roundings * unit + e4m3 * 0x1p-4;
}

/* ---- gathering ----------------------------------------------------------------------------- */

/* Rank 0 gets every rank's tensor, in `bytes` bytes each: NULL on other ranks. */
static bool gather(Layer *layer, const EpTensor *t, int64_t bytes, char **out) {
    World *world = layer->world;
    const size_t each = (size_t)bytes, own = (size_t)tensor_bytes(t);
    char *mine = bench_alloc(1, each, "a tensor's copy");
    *out = world->rank == 0 ? bench_alloc((size_t)world->size, each, "the ranks' tensors") : NULL;
    bool ok = world_all(world, mine && (*out || world->rank != 0));
    ok = ok && world_all(world, layer->device.download(&layer->device, mine, t->data, own)) &&
         world_gather(world, mine, *out, each);
    free(mine);
    if (!ok) free(*out);
    if (!ok) *out = NULL;
    return ok;
}

/* Bytes of rows of `width` bytes on the rank with most tokens, rank 0. */
static int64_t most_bytes(const Layer *layer, const EpTensor *t) {
    return layer->options->tokens * t->shape[1] * (int64_t)ep_type_bytes(t->type);
}

/* ---- comparing ----------------------------------------------------------------------------- */

static double largest(const double *values, int64_t count) {
    double most = 0;
    for (int64_t i = 0; i < count; i++)
        most = fmax(most, fabs(values[i]));
    return most;
}

/* `got` are elements at .. at + count - 1 of the whole tensor. */
static void compare(MoeCheck *check, CheckId id, int rank, int64_t at, const float *got,
                    const double *want, double most, int64_t count) {
    CheckResult *r = &check->results[id];
    const double scale = most > 0 ? 1 / most : 1;
    for (int64_t i = 0; i < count; i++) {
        const double error = fabs((double)got[i] - want[i]) * scale;
        if (!(error <= r->worst)) r->worst = error; /* NaN as well */
        if (error <= r->bound) continue;
        if (r->wrong++ == 0 && !check->first[0])
            snprintf(check->first, sizeof(check->first),
                     "%s: rank %d, element %lld: expected %.9g, got %.9g (bound %.3g)", r->name,
                     rank, (long long)(at + i), want[i], (double)got[i], r->bound * most);
    }
    r->elements += count;
}

/* Rows of tokens, rank by rank. */
static bool compare_tokens(MoeCheck *check, CheckId id, TensorId tensor, const double *want) {
    Layer *layer = check->layer;
    const EpTensor *t = &layer->tensors[tensor];
    const int64_t width = t->shape[1], each = most_bytes(layer, t);
    char *all;
    if (!gather(layer, t, each, &all)) return false;
    float *row = bench_alloc((size_t)width, sizeof(float), "a row");
    const double most = all ? largest(want, check->reference.tokens * width) : 0;
    for (int64_t g = 0; all && row && g < check->reference.tokens; g++) {
        const Origin *o = &check->reference.origins[g];
        data_to_float(t->type,
                      all + (size_t)o->rank * (size_t)each +
                          (size_t)(o->token * width) * ep_type_bytes(t->type),
                      row, width);
        compare(check, id, o->rank, o->token * width, row, want + g * width, most, width);
    }
    free(row);
    free(all);
    return world_all(layer->world, row != NULL);
}

/* One rank's shard [local] of a whole weight, at `begin`; matrices have a first dimension of 1. */
static void compare_shard(MoeCheck *check, CheckId id, int rank, const int64_t *shape,
                          const int64_t *begin, const int64_t *local, const float *got,
                          const double *want, double most) {
    for (int64_t i = 0; i < local[0] * local[1]; i++) {
        const int64_t row = (begin[0] + i / local[1]) * shape[1] + begin[1] + i % local[1];
        const int64_t at = row * shape[2] + begin[2];
        compare(check, id, rank, at, got + i * local[2], want + at, most, local[2]);
    }
}

/* Every rank's shard, the replicas' too. */
static bool compare_weight(MoeCheck *check, CheckId id, WeightId weight) {
    Layer *layer = check->layer;
    const EpWeightConfig *config = &layer->mesh.weights[weight];
    const EpTensor *t = &layer->weights[weight].grad_shard;
    const double *want = check->reference.grads[weight];
    const int pad = 3 - config->spec.ndim;
    int64_t shape[3] = {1}, begin[3] = {0}, local[3] = {1};
    char *all;
    if (!gather(layer, t, tensor_bytes(t), &all)) return false;
    memcpy(shape + pad, config->shape, (size_t)config->spec.ndim * sizeof(int64_t));
    const double most = all ? largest(want, moe_weight_elements(&layer->mesh, weight)) : 0;
    bool ok = true;
    for (int r = 0; all && ok && r < layer->world->size; r++) {
        ok = bench_ok(ep_spec_shard(&layer->mesh.mesh, &config->spec, config->name, config->shape,
                                    r, begin + pad, local + pad),
                      "ep_spec_shard");
        const char *shard = all + (size_t)r * (size_t)tensor_bytes(t);
        if (ok)
            compare_shard(check, id, r, shape, begin, local, (const float *)(const void *)shard,
                          want, most);
    }
    free(all);
    return world_all(layer->world, ok);
}

static bool check_gradients(MoeCheck *check) {
    return compare_tokens(check, CHECK_GRAD_TOKENS, T_GRAD_TOKENS, check->reference.grad_x) &&
           compare_weight(check, CHECK_GRAD_W1, WEIGHT_W1) &&
           compare_weight(check, CHECK_GRAD_W2, WEIGHT_W2) &&
           compare_weight(check, CHECK_GRAD_ROUTER, WEIGHT_ROUTER);
}

bool check_step(MoeCheck *check) {
    const Reference *r = &check->reference;
    return compare_tokens(check, CHECK_TOPK, T_TOPK, r->topk) &&
           compare_tokens(check, CHECK_OUT, T_OUT, r->out) &&
           (check->layer->options->forward || check_gradients(check));
}
int64_t check_wrong(const MoeCheck *check) {
    int64_t wrong = 0;
    for (int i = 0; i < NUM_CHECKS; i++)
        wrong += check->results[i].wrong;
    return wrong;
}

/* ---- the reference ------------------------------------------------------------------------- */

static bool take_choice(MoeCheck *check) {
    Layer *layer = check->layer;
    Reference *r = &check->reference;
    const EpTensor *t = &layer->tensors[T_INDEX];
    const int64_t each = most_bytes(layer, t), k = layer->options->top_k;
    char *all;
    if (!gather(layer, t, each, &all)) return false;
    for (int64_t g = 0; all && g < r->tokens; g++)
        memcpy(r->idx + g * k,
               all + (size_t)r->origins[g].rank * (size_t)each +
                   (size_t)(r->origins[g].token * k) * sizeof(int32_t),
               (size_t)k * sizeof(int32_t));
    free(all);
    return true;
}

/* The other ranks wait for rank 0, no longer than the deadline of their waits: they meet after a
 * few tokens each time. */
static bool compute(MoeCheck *check, int64_t tokens) {
    Layer *layer = check->layer;
    const MoeOptions *o = layer->options;
    const int64_t flops = 18 * o->top_k * o->hidden * o->ffn + 6 * o->hidden * o->experts;
    const int64_t block = 1 + (int64_t)2e9 / flops;
    for (int64_t at = 0; at < tokens; at += block) {
        if (layer->world->rank == 0)
            reference_run(&check->reference, at, at + block < tokens ? at + block : tokens);
        if (!world_barrier(layer->world)) return false;
    }
    return true;
}

bool check_open(Layer *layer, MoeCheck *out) {
    World *world = layer->world;
    int64_t tokens = layer->tokens;
    *out = (MoeCheck){.layer = layer};
    for (int i = 0; i < NUM_CHECKS; i++)
        out->results[i] = (CheckResult){.name = checks[i].name,
                                        .phase = checks[i].phase,
                                        .bound = bound_of(layer->options, (CheckId)i)};
    bool ok = world->rank != 0 ||
              reference_create(layer->options, &layer->mesh, world->size, &out->reference);
    if (!world_all(world, ok) || !world_sum(world, &tokens, 1) ||
        !world_all(world, weights_spoil(layer) && moe_step_run(layer)) || !take_choice(out) ||
        !compute(out, tokens))
        return false;
    out->results[CHECK_EXPERTS].elements = tokens;
    out->results[CHECK_EXPERTS].wrong = out->reference.bad_choices;
    memcpy(out->first, out->reference.first_bad, sizeof(out->first));
    return true;
}

void check_close(MoeCheck *check) {
    reference_destroy(&check->reference);
}
