/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "tools/common/data.h"
#include "tools/moe/host_rows.h"

/* Rows pass in pieces, so that no scratch memory is needed. */
enum { PIECE = 512 };

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
