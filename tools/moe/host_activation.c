/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

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

static void activate_row(const EpTensor *z, int64_t row, float w, const EpTensor *a) {
    float gate[PIECE], up[PIECE];
    const int64_t width = a->shape[1];
    for (int64_t f = 0; f < width; f += PIECE) {
        const int64_t part = width - f < PIECE ? width - f : PIECE;
        data_to_float(z->type, at(z, row, f), gate, part);
        data_to_float(z->type, at(z, row, width + f), up, part);
        for (int64_t i = 0; i < part; i++)
            up[i] = w * (gate[i] / (1 + expf(-gate[i])) * up[i]);
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
        for (int64_t i = 0; i < part; i++) {
            const float sigmoid = 1 / (1 + expf(-gate[i])), silu = gate[i] * sigmoid;
            const float slope = sigmoid * (1 + gate[i] * (1 - sigmoid));
            sum += grad[i] * (silu * up[i]);
            gate[i] = w * grad[i] * up[i] * slope;
            up[i] = w * grad[i] * silu;
        }
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
