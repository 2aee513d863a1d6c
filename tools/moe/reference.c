/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moe/reference.h"

#include <math.h>
#include <stdio.h>

#include "tools/common/data.h"
#include "tools/common/util.h"

/* ---- memory and inputs --------------------------------------------------------------------- */

static int64_t count_tokens(const MoeOptions *o, int ranks) {
    int64_t sum = 0;
    for (int r = 0; r < ranks; r++)
        sum += moe_tokens_of(o, ranks, r);
    return sum;
}

int64_t reference_bytes(const MoeOptions *options, const MoeMesh *mesh, int ranks) {
    int64_t weights = 0, row = options->hidden * (2 * 4 + 2 * 8) + options->top_k * 12 + 16;
    for (int i = 0; i < NUM_WEIGHTS; i++)
        weights += moe_weight_elements(mesh, (WeightId)i);
    if (options->forward) return weights * 2 * 4 + count_tokens(options, ranks) * row;
    return weights * (2 * 4 + 8) + count_tokens(options, ranks) * row;
}

static void *numbers(Reference *r, int64_t count, size_t bytes) {
    return pool_alloc(&r->pool, (size_t)count, bytes, "the reference");
}

static double *doubles(Reference *r, int64_t count) {
    return numbers(r, count, sizeof(double));
}

static void make_tokens(Reference *r, int ranks) {
    const MoeOptions *o = r->options;
    int64_t g = 0;
    for (int rank = 0; rank < ranks; rank++) {
        for (int64_t t = 0; t < moe_tokens_of(o, ranks, rank); t++, g++) {
            const int64_t at = moe_token_at(rank, t) * o->hidden;
            r->origins[g] = (Origin){rank, t};
            moe_input(o, INPUT_TOKENS, at, o->hidden, r->x + g * o->hidden);
            moe_input(o, INPUT_GRAD_OUT, at, o->hidden, r->grad_out + g * o->hidden);
        }
    }
}

static bool make_weight(Reference *r, const MoeMesh *mesh, WeightId id) {
    const MoeOptions *o = r->options;
    const int64_t count = moe_weight_elements(mesh, id);
    float *plain = numbers(r, count, sizeof(float));
    r->weights[id] = r->backward[id] = plain;
    if (!o->forward) r->grads[id] = doubles(r, count);
    if (r->pool.failed) return false;
    moe_input(o, id, 0, count, plain);
    if (id == WEIGHT_ROUTER || !quant_format(o->quant)->bits) return true;
    const int64_t *shape = mesh->weights[id].shape;
    float *forward = numbers(r, count, sizeof(float));
    if (!forward) return false;
    r->weights[id] = forward;
    reference_quantise(o, true, shape, plain, forward);
    reference_quantise(o, false, shape, plain, plain);
    return true;
}

static void make_scratch(Reference *r) {
    const int64_t h = r->options->hidden;
    int64_t f = r->options->ffn;
    r->logits = doubles(r, r->options->experts);
    r->gz = doubles(r, 2 * f), r->ga = doubles(r, f);
    if (r->options->shared > f) f = r->options->shared;
    r->z = doubles(r, 2 * f), r->a = doubles(r, f);
    r->y = doubles(r, h), r->gw = doubles(r, r->options->top_k);
}

bool reference_create(const MoeOptions *options, const MoeMesh *mesh, int ranks, Reference *out) {
    *out = (Reference){.options = options, .tokens = count_tokens(options, ranks)};
    const int64_t row = out->tokens * options->hidden, chosen = out->tokens * options->top_k;
    out->origins = numbers(out, out->tokens, sizeof(Origin));
    out->idx = numbers(out, chosen, sizeof(int32_t));
    out->x = numbers(out, row, sizeof(float)), out->grad_out = numbers(out, row, sizeof(float));
    out->out = doubles(out, row), out->grad_x = doubles(out, row);
    out->topk = doubles(out, chosen);
    make_scratch(out);
    const int64_t counts[2] = {2 * options->hidden * options->shared,
                               options->hidden * options->shared};
    for (int i = 0; options->shared && i < 2; i++)
        out->shared[i] = numbers(out, counts[i], sizeof(float));
    if (out->pool.failed) return false;
    for (int i = 0; options->shared && i < 2; i++)
        moe_input(options, INPUT_SHARED_W1 + i, 0, counts[i], out->shared[i]);
    make_tokens(out, ranks);
    bool ok = true;
    for (int i = 0; ok && i < NUM_WEIGHTS; i++)
        ok = make_weight(out, mesh, (WeightId)i);
    return ok;
}

void reference_destroy(Reference *r) {
    pool_free(&r->pool);
}

/* ---- vectors ------------------------------------------------------------------------------- */

/* acc += s * v */
BENCH_WIDE static void add_floats(double *acc, double s, const float *v, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        acc[i] += s * (double)v[i];
}

BENCH_WIDE static void add_doubles(double *acc, double s, const double *v, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        acc[i] += s * v[i];
}

static double dot(const double *a, const float *b, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += a[i] * (double)b[i];
    return sum;
}

static void clear(double *v, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        v[i] = 0;
}

/* ---- router -------------------------------------------------------------------------------- */

/* Logits that differ by less than fp32 sums may be off count as equal. */
static const double logit_tolerance = 1e-5;

/* Whether expert `a` may come before `b`. */
static bool may_precede(const Reference *r, int64_t g, int32_t a, int32_t b) {
    const double difference = r->logits[a] - r->logits[b];
    const bool zero_token = r->origins[g].token == MOE_ZERO_TOKEN;
    return zero_token ? a < b : difference > -logit_tolerance;
}

/* The chosen are in descending order, no expert twice, and none that is left out precedes them. */
static bool is_choice(const Reference *r, int64_t g, const int32_t *idx) {
    const int32_t experts = (int32_t)r->options->experts, k = (int32_t)r->options->top_k;
    for (int32_t i = 0; i < k; i++) {
        if (idx[i] < 0 || idx[i] >= experts) return false;
        for (int32_t j = 0; j < i; j++)
            if (idx[j] == idx[i] || !may_precede(r, g, idx[j], idx[i])) return false;
    }
    for (int32_t e = 0; e < experts; e++) {
        bool chosen = false;
        for (int32_t i = 0; i < k; i++)
            chosen = chosen || idx[i] == e;
        if (!chosen && !may_precede(r, g, idx[k - 1], e)) return false;
    }
    return true;
}

static void complain(Reference *r, int64_t g) {
    const Origin *o = &r->origins[g];
    if (r->bad_choices++ == 0)
        snprintf(r->first_bad, sizeof(r->first_bad),
                 "experts: rank %d, token %lld: not the %lld largest logits in descending order",
                 o->rank, (long long)o->token, (long long)r->options->top_k);
}

/* Logits become probabilities. */
static void softmax(double *p, int64_t count) {
    double most = p[0], sum = 0;
    for (int64_t e = 1; e < count; e++)
        most = p[e] > most ? p[e] : most;
    for (int64_t e = 0; e < count; e++) {
        p[e] = exp(p[e] - most);
        sum += p[e];
    }
    for (int64_t e = 0; e < count; e++)
        p[e] /= sum;
}

/* A choice that is wrong is replaced, so that the rest is computed with valid experts. */
static void route(Reference *r, int64_t g) {
    const int64_t hidden = r->options->hidden, experts = r->options->experts, k = r->options->top_k;
    int32_t *idx = r->idx + g * k;
    clear(r->logits, experts);
    for (int64_t h = 0; h < hidden; h++)
        add_floats(r->logits, (double)r->x[g * hidden + h], r->weights[WEIGHT_ROUTER] + h * experts,
                   experts);
    if (!is_choice(r, g, idx)) {
        complain(r, g);
        for (int64_t i = 0; i < k; i++)
            idx[i] = (int32_t)i;
    }
    softmax(r->logits, experts);
    for (int64_t i = 0; i < k; i++)
        r->topk[g * k + i] = r->logits[idx[i]];
}

/* r->logits still holds the probabilities, r->gw the gradients of the chosen ones. */
static void route_backward(Reference *r, int64_t g) {
    const int64_t hidden = r->options->hidden, experts = r->options->experts, k = r->options->top_k;
    const int32_t *idx = r->idx + g * k;
    const float *x = r->x + g * hidden, *weight = r->weights[WEIGHT_ROUTER];
    double mean = 0, *p = r->logits;
    for (int64_t i = 0; i < k; i++)
        mean += r->topk[g * k + i] * r->gw[i];
    for (int64_t e = 0; e < experts; e++)
        p[e] *= -mean;
    for (int64_t i = 0; i < k; i++)
        p[idx[i]] += r->topk[g * k + i] * r->gw[i];
    for (int64_t h = 0; h < hidden; h++) {
        r->grad_x[g * hidden + h] += dot(p, weight + h * experts, experts);
        add_doubles(r->grads[WEIGHT_ROUTER] + h * experts, (double)x[h], p, experts);
    }
}

/* ---- experts ------------------------------------------------------------------------------- */

/* out[columns] = in[rows] * m[rows, columns] */
static void product(double *out, const double *in, const float *m, int64_t rows, int64_t columns) {
    clear(out, columns);
    for (int64_t i = 0; i < rows; i++)
        add_floats(out, in[i], m + i * columns, columns);
}

/* An expert of f inner elements, w1 [H, 2f] and w2 [f, H]. */
static void run_expert(Reference *r, int64_t g, const float *w1, const float *w2, int64_t f,
                       double weight) {
    const int64_t h = r->options->hidden;
    clear(r->z, 2 * f);
    for (int64_t i = 0; i < h; i++)
        add_floats(r->z, (double)r->x[g * h + i], w1 + i * 2 * f, 2 * f);
    for (int64_t i = 0; i < f; i++)
        r->a[i] = r->z[i] / (1 + exp(-r->z[i])) * r->z[f + i];
    product(r->y, r->a, w2, f, h);
    add_doubles(r->out + g * h, weight, r->y, h);
}

static void forward(Reference *r, int64_t g, int32_t expert, double weight) {
    const int64_t h = r->options->hidden, f = r->options->ffn;
    run_expert(r, g, r->weights[WEIGHT_W1] + expert * h * 2 * f,
               r->weights[WEIGHT_W2] + expert * f * h, f, weight);
}

/* The gradient of gate and up, from that of the activation. */
static void activation_backward(Reference *r) {
    const int64_t f = r->options->ffn;
    for (int64_t i = 0; i < f; i++) {
        const double gate = r->z[i], s = 1 / (1 + exp(-gate));
        r->gz[i] = r->ga[i] * r->z[f + i] * s * (1 + gate * (1 - s));
        r->gz[f + i] = r->ga[i] * gate * s;
    }
}

/*
 * After forward of the same token and expert. Returns the gradient of the token's weight: late, the
 * product of the expert's output and the output's gradient; early, of the activation and its
 * gradient. These differ where the two directions have differently quantised weights.
 */
static double backward(Reference *r, int64_t g, int32_t expert, double weight) {
    const int64_t h = r->options->hidden, f = r->options->ffn;
    const float *w1 = r->backward[WEIGHT_W1] + expert * h * 2 * f;
    const float *w2 = r->backward[WEIGHT_W2] + expert * f * h;
    const float *grad = r->grad_out + g * h;
    double *grad_w1 = r->grads[WEIGHT_W1] + expert * h * 2 * f;
    double *grad_w2 = r->grads[WEIGHT_W2] + expert * f * h;
    const double late = dot(r->y, grad, h);
    double early = 0;
    for (int64_t i = 0; i < h; i++)
        r->y[i] = (double)grad[i];
    for (int64_t i = 0; i < f; i++) {
        r->ga[i] = dot(r->y, w2 + i * h, h);
        early += r->ga[i] * r->a[i];
        r->ga[i] *= weight;
        add_doubles(grad_w2 + i * h, weight * r->a[i], r->y, h);
    }
    activation_backward(r);
    for (int64_t i = 0; i < h; i++) {
        r->grad_x[g * h + i] += dot(r->gz, w1 + i * 2 * f, 2 * f);
        add_doubles(grad_w1 + i * 2 * f, (double)r->x[g * h + i], r->gz, 2 * f);
    }
    return r->options->weights_at == WEIGHTS_EARLY ? early : late;
}

void reference_run(Reference *reference, int64_t begin, int64_t end) {
    const int64_t k = reference->options->top_k;
    for (int64_t g = begin; g < end; g++) {
        route(reference, g);
        for (int64_t i = 0; i < k; i++) {
            const int32_t expert = reference->idx[g * k + i];
            forward(reference, g, expert, reference->topk[g * k + i]);
            if (reference->options->forward) continue;
            reference->gw[i] = backward(reference, g, expert, reference->topk[g * k + i]);
        }
        if (reference->options->shared)
            run_expert(reference, g, reference->shared[0], reference->shared[1],
                       reference->options->shared, 1);
        if (!reference->options->forward) route_backward(reference, g);
    }
}
