/* SPDX-License-Identifier: Apache-2.0 */

/** Products of e4m3, computed again for some elements from the codes and scales in the device's
 * memory, in double precision. */

#include <math.h>
#include <stdlib.h>

#include "tools/common/data.h"
#include "tools/common/util.h"
#include "tools/moe/compare.h"

enum { BLOCK = 128, POINTS = 4 /* of a group */ };

/* A row of an operand, or the part of it that is one group's; and all scales of the operand. */
typedef struct Row {
    double *values;
    uint8_t *codes;
    float *scales;
} Row;

static bool fetch(Layer *layer, const EpTensor *t, int64_t at, int64_t count, void *out) {
    const size_t unit = ep_type_bytes(t->type);
    return layer->device.download(&layer->device, out, (const char *)t->data + (size_t)at * unit,
                                  (size_t)count * unit);
}

/* Columns from .. from + count - 1 of a row; `from` begins a block. */
static bool read_row(Layer *layer, const Scaled *s, int64_t group, int64_t row, int64_t from,
                     int64_t count, Row *out) {
    const int d = s->codes.ndim - 2;
    const int64_t *shape = s->codes.shape + d, *scales = s->scales.shape + d;
    const int64_t first = (d ? group * shape[0] + row : row) * shape[1] + from;
    const int64_t place = s->tiles ? row / BLOCK : row;
    if (!fetch(layer, &s->codes, first, count, out->codes)) return false;
    for (int64_t b = 0; b * BLOCK < count; b++) {
        const int64_t block = from / BLOCK + b;
        const int64_t at = s->by_column ? block * scales[1] + place : place * scales[1] + block;
        const float scale = out->scales[(d ? group * scales[0] * scales[1] : 0) + at];
        for (int64_t i = b * BLOCK; i < count && i < (b + 1) * BLOCK; i++)
            out->values[i] = (double)e4m3_value(out->codes[i]) * (double)scale;
    }
    return true;
}

static double unit_of(EpType type) {
    return type == EP_TYPE_BF16 ? 0x1p-8 : type == EP_TYPE_FP16 ? 0x1p-11 : 0x1p-24;
}

/*
 * Element i, j of a group's product. It is rounded to its type. A matrix unit cuts each product of
 * a sum at about 2^-13 of the largest one, which is a few times the mean, and all may be cut in one
 * direction: 2^-10 of the sum of magnitudes.
 */
static bool check_element(Layer *layer, const MoeProduct *p, int32_t group, int64_t i, int64_t j,
                          Row *a, Row *b, double *worst) {
    const int64_t slab = layer->first[group], slots = layer->count[group];
    const int64_t from = p->sums_rows ? slab : 0, n = p->c.shape[p->c.ndim - 1];
    const int64_t k = p->sums_rows ? slots : p->a.codes.shape[1];
    const int64_t line = p->sums_rows ? group * p->a.codes.shape[0] + i : slab + i;
    double want = 0, magnitude = 0;
    char stored[4];
    float got;
    if (!read_row(layer, &p->a, 0, p->sums_rows ? i : slab + i, from, k, a) ||
        !read_row(layer, &p->b, group, j, from, k, b) ||
        !fetch(layer, &p->c, line * n + j, 1, stored))
        return false;
    data_to_float(p->c.type, stored, &got, 1);
    for (int64_t l = 0; l < k; l++) {
        want += a->values[l] * b->values[l];
        magnitude += fabs(a->values[l] * b->values[l]);
    }
    const double error = fabs((double)got - want);
    const double bound = unit_of(p->c.type) * fabs(want) + 0x1p-10 * magnitude;
    const double ratio = error == 0 ? 0 : error / bound;
    if (!(ratio <= *worst)) *worst = isnan(ratio) ? INFINITY : ratio;
    return true;
}

static bool read_scales(Layer *layer, const EpTensor *scales, Row *out) {
    const int64_t count = tensor_elements(scales);
    free(out->scales);
    out->scales = bench_alloc((size_t)count, sizeof(float), "scales");
    return out->scales && fetch(layer, scales, 0, count, out->scales);
}

/* The last element of each group, and others that the seed chooses. */
static bool check_product(Layer *layer, MoePhase phase, const MoeProduct *p, Row *a, Row *b,
                          int64_t *elements, double *worst) {
    const int64_t n = p->c.shape[p->c.ndim - 1];
    const uint64_t seed = hash_add(hash_word((uint64_t)layer->options->run.seed), phase);
    bool ok = read_scales(layer, &p->a.scales, a) && read_scales(layer, &p->b.scales, b);
    for (int32_t g = 0; ok && g < layer->num_local; g++) {
        const int64_t m = p->sums_rows ? p->a.codes.shape[0] : layer->count[g];
        for (int64_t point = 0; ok && m > 0 && point < POINTS; point++, ++*elements) {
            const uint64_t chosen = hash_add(hash_add(seed, g), point);
            const int64_t i = point ? (int64_t)(hash_unit(chosen) * (double)m) : m - 1;
            const int64_t j = point ? (int64_t)(hash_unit(hash_add(chosen, 1)) * (double)n) : n - 1;
            ok = check_element(layer, p, g, i, j, a, b, worst);
        }
    }
    return ok;
}

/* Elements in the longest row of any operand. */
static size_t longest(const Layer *layer) {
    const int64_t h = layer->options->hidden, f = 2 * layer->options->ffn;
    const int64_t row = h > f ? h : f;
    return (size_t)(row > layer->received ? row : layer->received);
}

static bool allocate(const Layer *layer, Row *row) {
    const size_t count = longest(layer);
    row->values = bench_alloc(count, sizeof(double), "a row's numbers");
    row->codes = bench_alloc(count, 1, "a row's codes");
    return row->values && row->codes;
}

bool moe_check_products(Layer *layer, ProductResult *out) {
    Row a = {.values = NULL}, b = {.values = NULL};
    int64_t elements[NUM_MOE_PHASES] = {0};
    double worst[NUM_MOE_PHASES] = {0};
    MoeProduct product;
    bool ok = allocate(layer, &a) && allocate(layer, &b);
    for (int p = 0; ok && p < NUM_MOE_PHASES; p++)
        ok = !moe_phase_product(layer, (MoePhase)p, &product) ||
             check_product(layer, (MoePhase)p, &product, &a, &b, &elements[p], &worst[p]);
    free(a.values), free(a.codes), free(a.scales);
    free(b.values), free(b.codes), free(b.scales);
    if (!world_all(layer->world, ok) || !world_sum(layer->world, elements, NUM_MOE_PHASES) ||
        !world_max_double(layer->world, worst, NUM_MOE_PHASES))
        return false;
    for (int p = 0; p < NUM_MOE_PHASES; p++)
        out[p] = (ProductResult){elements[p], worst[p]};
    return true;
}
