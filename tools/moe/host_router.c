/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "tools/common/data.h"
#include "tools/moe/host_rows.h"

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
bool host_choose_backward(MoeDevice *d, const EpTensor *p, const EpTensor *idx,
                          const EpTensor *grad_weights, const EpTensor *grad) {
    const int64_t experts = p->shape[1], k = idx->shape[1];
    (void)d;
    for (int64_t t = 0; t < p->shape[0]; t++) {
        const int32_t *chosen = (const int32_t *)idx->data + t * k;
        const float *row = row_of(p, t), *given = row_of(grad_weights, t);
        float *out = row_of(grad, t), mean = 0;
        for (int64_t i = 0; i < k; i++)
            mean += row[chosen[i]] * given[i];
        for (int64_t e = 0; e < experts; e++)
            out[e] = -row[e] * mean;
        for (int64_t i = 0; i < k; i++)
            out[chosen[i]] += row[chosen[i]] * given[i];
    }
    return true;
}

enum { PIECE = 1024 };

bool host_add(MoeDevice *d, const EpTensor *in, const EpTensor *out) {
    const int64_t count = in->shape[0] * in->shape[1];
    const size_t unit = ep_type_bytes(out->type);
    float sum[PIECE];
    (void)d;
    for (int64_t at = 0; at < count; at += PIECE) {
        const int64_t part = count - at < PIECE ? count - at : PIECE;
        char *place = (char *)out->data + (size_t)at * unit;
        data_to_float(out->type, place, sum, part);
        data_add(sum, (const float *)in->data + at, part);
        data_from_float(out->type, sum, place, part);
    }
    return true;
}
