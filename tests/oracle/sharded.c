/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/oracle/sharded.h"

#include <stdlib.h>
#include <string.h>

#include "tests/harness/random.h"
#include "tests/oracle/number.h"
#include "tests/oracle/quant.h"

/* ---- the mesh ------------------------------------------------------------------------------ */

int sharded_ranks(const EpMesh *mesh) {
    int ranks = 1;
    for (int i = 0; i < mesh->num_axes; i++)
        ranks *= mesh->axes[i].size;
    return ranks;
}

/* A rank's coordinate along an axis. */
static int coordinate(const EpMesh *mesh, int rank, int axis) {
    int inner = 1;
    for (int i = axis + 1; i < mesh->num_axes; i++)
        inner *= mesh->axes[i].size;
    return rank / inner % mesh->axes[axis].size;
}

/* How a dimension is used: an axis that shards it is gathered, or stays. */
static int is_gathered(const Sharded *s, int dim, int axis) {
    const EpAxes *axes = &s->spec.dims[dim];
    if (s->kind == EP_TENSOR_EXPERT_WEIGHT && dim == 0)
        return s->mesh->axes[axis].role == EP_AXIS_FSDP;
    for (int i = 0; i < axes->num; i++)
        if (s->mesh->axes[axes->axis[i]].role == EP_AXIS_FSDP) return 1;
    return 0;
}

static ShardedBox box_of(const Sharded *s, int rank, int used) {
    ShardedBox box;
    for (int d = 0; d < SHARDED_DIMS; d++) {
        const EpAxes *axes = &s->spec.dims[d];
        int place = 0, parts = 1;
        for (int i = 0; i < axes->num; i++) {
            int axis = axes->axis[i];
            if (used && is_gathered(s, d, axis)) continue;
            place = place * s->mesh->axes[axis].size + coordinate(s->mesh, rank, axis);
            parts *= s->mesh->axes[axis].size;
        }
        box.size[d] = s->shape[d] / parts;
        box.begin[d] = place * box.size[d];
    }
    return box;
}

ShardedBox sharded_stored(const Sharded *s, int rank) {
    return box_of(s, rank, 0);
}

ShardedBox sharded_used(const Sharded *s, int rank) {
    return box_of(s, rank, 1);
}

int64_t sharded_elements(const ShardedBox *box) {
    return box->size[0] * box->size[1] * box->size[2];
}

/* ---- values -------------------------------------------------------------------------------- */

/* The number, in the whole weight, of a box's element. */
static int64_t place_of(const Sharded *s, const ShardedBox *box, int64_t at) {
    int64_t z = at % box->size[2], y = at / box->size[2] % box->size[1],
            x = at / box->size[2] / box->size[1];
    return ((box->begin[0] + x) * s->shape[1] + box->begin[1] + y) * s->shape[2] + box->begin[2] +
           z;
}

static float value_at(EpType type, uint64_t seed, uint64_t stream, int64_t place) {
    Random random = random_stream(seed, stream, (uint64_t)place);
    uint32_t bits = number_bits(type, random_next(&random));
    return number_get(&bits, type, 0);
}

void sharded_fill(const Sharded *s, const ShardedBox *box, void *out) {
    for (int64_t at = 0; at < sharded_elements(box); at++)
        number_set(out, s->type, at, value_at(s->type, s->seed, 1, place_of(s, box, at)));
}

/* Some elements are -0 on all ranks: their sum, from +0 on, is +0. */
static float gradient_at(const Sharded *s, int rank, int step, int64_t place) {
    if (place % 7 == 3) return -0.0f;
    return value_at(s->grad_type, s->seed, (uint64_t)(1000 + 100 * step + rank), place);
}

void sharded_gradient(const Sharded *s, int rank, int step, void *out) {
    ShardedBox box = sharded_used(s, rank);
    for (int64_t at = 0; at < sharded_elements(&box); at++)
        number_set(out, s->grad_type, at, gradient_at(s, rank, step, place_of(s, &box, at)));
}

/* ---- quantised ----------------------------------------------------------------------------- */

/* Element (x, y, z) of a box as it is gathered. */
static int64_t element_at(const ShardedBox *box, int transposed, int64_t x, int64_t y, int64_t z) {
    return transposed ? (x * box->size[1] + z) * box->size[2] + y
                      : (x * box->size[1] + y) * box->size[2] + z;
}

void sharded_quantise(const Sharded *s, const ShardedBox *box, const EpWeightForm *form,
                      uint8_t *out, uint8_t *scales, int64_t blocks[SHARDED_DIMS]) {
    enum { MOST = 128 * 128 };
    int t = form->transposed, width = quant_form(form->quant)->block;
    int height = form->blocks == EP_BLOCKS_TILES ? width : 1;
    int64_t rows = box->size[t ? 2 : 1], columns = box->size[t ? 1 : 2];
    float *x = malloc(MOST * sizeof(*x));
    uint8_t codes[MOST];
    int64_t number = 0;
    blocks[0] = box->size[0];
    blocks[1] = (rows + height - 1) / height;
    blocks[2] = (columns + width - 1) / width;
    for (int64_t e = 0; e < box->size[0]; e++)
        for (int64_t y0 = 0; y0 < rows; y0 += height)
            for (int64_t z0 = 0; z0 < columns; z0 += width, number++) {
                int n = 0;
                for (int64_t y = y0; y < y0 + height && y < rows; y++)
                    for (int64_t z = z0; z < z0 + width && z < columns; z++)
                        x[n++] = value_at(s->type, s->seed, 1,
                                          place_of(s, box, element_at(box, t, e, y, z)));
                quant_block(form->quant, 0, x, n, codes,
                            scales + number * quant_scale_bytes(form->quant));
                n = 0;
                for (int64_t y = y0; y < y0 + height && y < rows; y++)
                    for (int64_t z = z0; z < z0 + width && z < columns; z++)
                        out[(e * rows + y) * columns + z] = codes[n++];
            }
    free(x);
}

/* ---- sums ---------------------------------------------------------------------------------- */

/* Whether two ranks have the same coordinates on all axes but those that `varies` picks. */
static int are_together(const Sharded *s, int a, int b, int (*varies)(const Sharded *s, int axis)) {
    for (int axis = 0; axis < s->mesh->num_axes; axis++)
        if (!varies(s, axis) && coordinate(s->mesh, a, axis) != coordinate(s->mesh, b, axis))
            return 0;
    return 1;
}

static int dimension_of(const Sharded *s, int axis) {
    for (int d = 0; d < SHARDED_DIMS; d++)
        for (int i = 0; i < s->spec.dims[d].num; i++)
            if (s->spec.dims[d].axis[i] == axis) return d;
    return -1;
}

/* Gradients are added over axes that are gathered, and over those along which ranks have other
 * tokens for the same weight. */
static int adds(const Sharded *s, int axis) {
    int d = dimension_of(s, axis);
    EpAxisRole role = s->mesh->axes[axis].role;
    if (d >= 0) return is_gathered(s, d, axis);
    if (role == EP_AXIS_EXPERT) return s->kind == EP_TENSOR_WEIGHT;
    return role == EP_AXIS_DATA || role == EP_AXIS_FSDP;
}

static float sum_at(const Sharded *s, int rank, int step, int64_t place) {
    int ranks = sharded_ranks(s->mesh), any = 0;
    float total = 0;
    for (int node = 0; node < s->nodes; node++) {
        float part = 0;
        int there = 0;
        for (int r = 0; r < ranks; r++)
            if (r * s->nodes / ranks == node && are_together(s, rank, r, adds)) {
                part += gradient_at(s, r, step, place);
                there = 1;
            }
        if (there) total = any++ ? total + part : part;
    }
    return total;
}

void sharded_reduced(const Sharded *s, int rank, int step, const void *before, void *out) {
    ShardedBox box = sharded_stored(s, rank);
    for (int64_t at = 0; at < sharded_elements(&box); at++) {
        float sum = sum_at(s, rank, step, place_of(s, &box, at));
        if (before) sum = number_get(before, s->reduced_type, at) + sum;
        number_set(out, s->reduced_type, at, sum);
    }
}

/* ---- amax ---------------------------------------------------------------------------------- */

static int shares_scale(const Sharded *s, int axis) {
    return dimension_of(s, axis) >= 0 || s->mesh->axes[axis].role == EP_AXIS_DATA;
}

/* Along the axes that shard the experts, ranks have other experts. */
static int shares_expert_scale(const Sharded *s, int axis) {
    return shares_scale(s, axis) && dimension_of(s, axis) != 0;
}

float sharded_amax(const Sharded *s, int rank, int i) {
    Random random = random_stream(s->seed, 77, (uint64_t)(rank * 1000 + i));
    return random_unit(&random) + 1;
}

float sharded_largest(const Sharded *s, int rank, EpAmaxScope scope, int i) {
    float largest = 0;
    for (int r = 0; r < sharded_ranks(s->mesh); r++) {
        float amax = sharded_amax(s, r, i);
        if (are_together(s, rank, r,
                         scope == EP_AMAX_TENSOR ? shares_scale : shares_expert_scale) &&
            amax > largest)
            largest = amax;
    }
    return largest;
}
