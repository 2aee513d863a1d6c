/* SPDX-License-Identifier: Apache-2.0 */

/** The layer's arithmetic on CPUs, row by row: router, activation, dequantising. */

#include "tools/moe/host_rows.h"

#include <math.h>
#include <string.h>

#include "tools/common/data.h"

/* Rows pass in pieces, so that no scratch memory is needed. */
enum { PIECE = 512 };

/* ---- router -------------------------------------------------------------------------------- */

static float *row_of(const EpTensor *t, int64_t row) {
    return (float *)t->data + row * t->shape[1];
}

static void softmax(float *row, int64_t count) {
    float most = row[0], sum = 0;
    for (int64_t e = 1; e < count; e++)
        most = row[e] > most ? row[e] : most;
    for (int64_t e = 0; e < count; e++) {
        row[e] = expf(row[e] - most);
        sum += row[e];
    }
    for (int64_t e = 0; e < count; e++)
        row[e] /= sum;
}

/* Whether expert `a` goes before `b`: the larger logit, of equal ones the lower number. */
static bool precedes(const float *logits, int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

/* Insert one expert after another into the K best so far. */
static void find_largest(const float *logits, int32_t experts, int32_t *idx, int32_t k) {
    int32_t held = 0;
    for (int32_t e = 0; e < experts; e++) {
        int32_t at = held;
        if (held == k && !precedes(logits, e, idx[k - 1])) continue;
        if (held < k)
            held++;
        else
            at = k - 1;
        for (; at > 0 && precedes(logits, e, idx[at - 1]); at--)
            idx[at] = idx[at - 1];
        idx[at] = e;
    }
}

/* Experts are chosen by their logits: different logits may have equal probabilities. */
bool host_choose(MoeDevice *d, const EpTensor *p, const EpTensor *idx, const EpTensor *weights) {
    const int64_t experts = p->shape[1], k = idx->shape[1];
    (void)d;
    for (int64_t t = 0; t < p->shape[0]; t++) {
        int32_t *chosen = (int32_t *)idx->data + t * k;
        float *row = row_of(p, t);
        find_largest(row, (int32_t)experts, chosen, (int32_t)k);
        softmax(row, experts);
        for (int64_t i = 0; i < k; i++)
            row_of(weights, t)[i] = row[chosen[i]];
    }
    return true;
}

/* With probabilities p and their gradients g (0 of those not chosen): p * (g - sum of p * g). */
static void choose_backward_row(const float *p, const int32_t *chosen, const float *given,
                                int64_t experts, int64_t k, EpType type, char *out) {
    float piece[PIECE], mean = 0;
    for (int64_t i = 0; i < k; i++)
        mean += p[chosen[i]] * given[i];
    for (int64_t begin = 0; begin < experts; begin += PIECE) {
        const int64_t count = experts - begin < PIECE ? experts - begin : PIECE;
        for (int64_t e = 0; e < count; e++)
            piece[e] = -p[begin + e] * mean;
        for (int64_t i = 0; i < k; i++) {
            const int64_t at = chosen[i] - begin;
            if (at >= 0 && at < count) piece[at] += p[chosen[i]] * given[i];
        }
        data_from_float(type, piece, out + (size_t)begin * ep_type_bytes(type), count);
    }
}

bool host_choose_backward(MoeDevice *d, const EpTensor *p, const EpTensor *idx,
                          const EpTensor *grad_weights, const EpTensor *grad) {
    const int64_t experts = p->shape[1], k = idx->shape[1];
    (void)d;
    for (int64_t t = 0; t < p->shape[0]; t++)
        choose_backward_row(row_of(p, t), (const int32_t *)idx->data + t * k,
                            row_of(grad_weights, t), experts, k, grad->type,
                            (char *)grad->data + (size_t)(t * experts) * ep_type_bytes(grad->type));
    return true;
}

/* ---- activation ---------------------------------------------------------------------------- */

static char *at(const EpTensor *t, int64_t row, int64_t column) {
    return (char *)t->data + (size_t)(row * t->shape[1] + column) * ep_type_bytes(t->type);
}

static float weight_of(const EpTensor *w, int64_t row) {
    return w ? ((const float *)w->data)[row] : 1;
}

/* 1 / (1 + e^-x), in a form that compilers turn into vector instructions, unlike a call of expf.
 * e^y = 2^n * e^r with |r| <= ln(2) / 2, where e^r is its Taylor series: an error of 2e-7. */
static inline float sigmoid(float x) {
    const float most = 87, magic = 0x1.8p23f;
    float y = -x < -most ? -most : -x > most ? most : -x;
    const float shifted = y * 0x1.715476p0f + magic, n = shifted - magic;
    const float r = (y - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
    float e =
        1 + r * (1 + r * (1 / 2.f +
                          r * (1 / 6.f + r * (1 / 24.f + r * (1 / 120.f + r * (1 / 720.f))))));
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof(bits));
    bits = (bits - 0x4B400000u + 127) << 23;
    memcpy(&y, &bits, sizeof(y));
    return 1 / (1 + e * y);
}

/* up = w * silu(gate) * up */
BENCH_WIDE static void activate_piece(float w, const float *gate, float *up, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        up[i] = w * (gate[i] * sigmoid(gate[i]) * up[i]);
}

static void activate_row(const EpTensor *z, int64_t row, float w, const EpTensor *a) {
    float gate[PIECE], up[PIECE];
    const int64_t width = a->shape[1];
    for (int64_t f = 0; f < width; f += PIECE) {
        const int64_t part = width - f < PIECE ? width - f : PIECE;
        data_to_float(z->type, at(z, row, f), gate, part);
        data_to_float(z->type, at(z, row, width + f), up, part);
        activate_piece(w, gate, up, part);
        data_from_float(a->type, up, at(a, row, f), part);
    }
}

bool host_activate(MoeDevice *d, const Groups *groups, const EpTensor *z, const EpTensor *w,
                   const EpTensor *a) {
    (void)d;
    for (int32_t g = 0; g < groups->num; g++) {
        for (int64_t i = 0; i < groups->count[g]; i++)
            activate_row(z, groups->first[g] + i, weight_of(w, groups->first[g] + i), a);
    }
    return true;
}

/* Gate and up become their gradients, `grad` becomes its products with the activation. */
BENCH_WIDE static void backward_piece(float w, float *gate, float *up, float *grad, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const float s = sigmoid(gate[i]), silu = gate[i] * s, given = w * grad[i];
        const float slope = s * (1 + gate[i] * (1 - s));
        grad[i] = grad[i] * (silu * up[i]);
        gate[i] = given * up[i] * slope;
        up[i] = given * silu;
    }
}

/* Returns the gradient of w: the sum of grad * silu(gate) * up. */
static float activate_backward_row(const EpTensor *z, int64_t row, float w, const EpTensor *grad_a,
                                   const EpTensor *grad_z) {
    float gate[PIECE], up[PIECE], grad[PIECE], sum = 0;
    const int64_t width = grad_a->shape[1];
    for (int64_t f = 0; f < width; f += PIECE) {
        const int64_t part = width - f < PIECE ? width - f : PIECE;
        data_to_float(z->type, at(z, row, f), gate, part);
        data_to_float(z->type, at(z, row, width + f), up, part);
        data_to_float(grad_a->type, at(grad_a, row, f), grad, part);
        backward_piece(w, gate, up, grad, part);
        for (int64_t i = 0; i < part; i++)
            sum += grad[i];
        data_from_float(z->type, gate, at(grad_z, row, f), part);
        data_from_float(z->type, up, at(grad_z, row, width + f), part);
    }
    return sum;
}

bool host_activate_backward(MoeDevice *d, const Groups *groups, const EpTensor *z,
                            const EpTensor *w, const EpTensor *grad_a, const EpTensor *grad_z,
                            const EpTensor *grad_w) {
    (void)d;
    for (int32_t g = 0; g < groups->num; g++) {
        for (int64_t i = 0; i < groups->count[g]; i++) {
            const int64_t row = groups->first[g] + i;
            float sum = activate_backward_row(z, row, weight_of(w, row), grad_a, grad_z);
            if (grad_w) ((float *)grad_w->data)[row] = sum;
        }
    }
    return true;
}

void host_add(const float *in, int64_t count, EpType type, void *out) {
    const size_t unit = ep_type_bytes(type);
    float sum[PIECE];
    for (int64_t at = 0; at < count; at += PIECE) {
        const int64_t part = count - at < PIECE ? count - at : PIECE;
        char *place = (char *)out + (size_t)at * unit;
        data_to_float(type, place, sum, part);
        data_add(sum, in + at, part);
        data_from_float(type, sum, place, part);
    }
}

/* ---- e4m3 ---------------------------------------------------------------------------------- */

static float scale_at(const EpTensor *scales, int64_t i) {
    if (scales->type == EP_TYPE_FP32) return ((const float *)scales->data)[i];
    return ldexpf(1, (int)((const uint8_t *)scales->data)[i] - 127);
}

bool host_dequantise(MoeDevice *d, const EpTensor *q, const EpTensor *scales, int64_t rows,
                     int64_t columns, const EpTensor *out) {
    float values[256];
    (void)d;
    for (int code = 0; code < 256; code++)
        values[code] = e4m3_value((uint8_t)code);
    const int64_t height = q->shape[1], width = q->shape[2];
    for (int64_t line = 0; line < q->shape[0] * height; line++) {
        const int64_t matrix = line / height, row = line % height / rows;
        const int64_t first = (matrix * scales->shape[1] + row) * scales->shape[2];
        const uint8_t *in = (const uint8_t *)q->data + line * width;
        float *to = (float *)out->data + line * width;
        for (int64_t begin = 0; begin < width; begin += columns) {
            const float scale = scale_at(scales, first + begin / columns);
            for (int64_t i = begin; i < width && i < begin + columns; i++)
                to[i] = values[in[i]] * scale;
        }
    }
    return true;
}
