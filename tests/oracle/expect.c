/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/oracle/expect.h"

#include <math.h>

#include "tests/oracle/number.h"
#include "tests/oracle/quant.h"

static void set_index(const World *world, Image *image, int64_t i, int64_t expert) {
    int32_t narrow = (int32_t)expert;
    if (world->c.index_type == EP_TYPE_INT64)
        memcpy(image->data + i * 8, &expert, 8);
    else
        memcpy(image->data + i * 4, &narrow, 4);
}

/* Write the weight and the expert of entry k of a row that serves several k. */
static void expect_flat_entry(const World *world, int rank, int64_t row, int k, ExpectedRows *out) {
    const RankWorld *me = &world->rank[rank];
    const Row *what = &me->row[row];
    float *weight = (float *)(void *)out->weights.data + row * world->c.top_k + k;
    int64_t cell = row * world->c.top_k + k;
    *weight = 0;
    set_index(world, &out->index, cell, -1);
    if (what->kind != ROW_FILLED) return;
    const RankWorld *from = &world->rank[what->source];
    int64_t entry = (int64_t)what->token * world->c.top_k + k;
    if (world->c.all_weights && case_layout(&world->c)->takes_all) *weight = from->weight[entry];
    if (!world_live(world, what->source, what->token, k)) return;
    if (world_owner(&world->c, from->taken[entry]) != rank) return;
    *weight = from->weight[entry];
    int64_t first = world->c.global_ids ? 0 : me->first_expert;
    set_index(world, &out->index, cell, from->taken[entry] - first);
}

static void expect_weights(const World *world, int rank, int64_t row, ExpectedRows *out) {
    const Row *what = &world->rank[rank].row[row];
    if (case_has_rows(&world->c)) {
        for (int k = 0; k < world->c.top_k; k++)
            expect_flat_entry(world, rank, row, k, out);
        return;
    }
    float weight = 0;
    if (what->kind == ROW_FILLED)
        weight = world->rank[what->source].weight[(int64_t)what->token * world->c.top_k + what->k];
    memcpy(out->weights.data + row * 4, &weight, 4);
}

static void expect_row(Image *image, int64_t row, size_t bytes, const Row *what,
                       const uint8_t *source) {
    uint8_t *to = image->data + (size_t)row * bytes;
    if (what->kind == ROW_FILLED)
        memcpy(to, source + (size_t)what->token * bytes, bytes);
    else
        memset(to, 0, bytes);
}

/* Returns the position of scale i of a row's `scales` in the case's scale order. */
static int64_t scale_cell(const Case *c, int64_t buffer_rows, int64_t row, int64_t scales,
                          int64_t i) {
    if (c->scale_order == EP_SCALES_BY_ROW) return row * scales + i;
    int64_t block = case_block_rows(c) ? case_block_rows(c) : buffer_rows;
    if (c->scale_order == EP_SCALES_SWIZZLED) {
        /* [blocks, tiles of rows, tiles of scales, 32, 4, 4] */
        int64_t r = row % block, tile = row / block * ((block + 127) / 128) + r / 128;
        tile = tile * ((scales + 3) / 4) + i / 4;
        return ((tile * 32 + r % 32) * 4 + r / 32 % 4) * 4 + i % 4;
    }
    return row / block * scales * block + i * block + row % block;
}

/* Write a row's `n` scales, `all` bytes. `from` NULL: zeros. */
static void expect_scales(const World *world, int rank, int64_t row, size_t n, size_t all,
                          const uint8_t *from, Image *image) {
    const Case *c = &world->c;
    size_t written = c->scale_order == EP_SCALES_SWIZZLED ? (n + 3) / 4 * 4 : n;
    for (size_t i = 0; i < written; i++) {
        int64_t cell = scale_cell(c, world->rank[rank].buffer_rows, row, (int64_t)n, (int64_t)i);
        size_t bytes = all / n;
        uint8_t *to = image->data + (size_t)cell * bytes;
        memset(to, 0, bytes);
        if (from && i < n) memcpy(to, from + i * bytes, bytes);
    }
}

static void expect_sent_scales(const World *world, int rank, int64_t row, Image *image) {
    const Row *what = &world->rank[rank].row[row];
    size_t all = case_recv_scale_bytes(&world->c);
    const uint8_t *from = world->rank[what->source].sent_scale + (size_t)what->token * all;
    expect_scales(world, rank, row, (size_t)case_scales(&world->c), all,
                  what->kind == ROW_FILLED ? from : NULL, image);
}

void expect_dispatch(const World *world, int rank, ExpectedRows *out) {
    const RankWorld *me = &world->rank[rank];
    for (int64_t row = 0; row < me->buffer_rows; row++) {
        const Row *what = &me->row[row];
        const RankWorld *from = &world->rank[what->source];
        int no_ids = what->kind == ROW_TAIL && world->c.zero_tail == EP_TAIL_IDS;
        for (int k = 0; no_ids && k < world->c.top_k; k++)
            set_index(world, &out->index, row * world->c.top_k + k, -1);
        if (!world_writes(world, what)) continue;
        expect_row(&out->tokens, row, case_recv_bytes(&world->c), what, from->sent);
        expect_sent_scales(world, rank, row, &out->scales);
        expect_weights(world, rank, row, out);
    }
}

/* A token's terms on one rank, in ascending k. In FLAT and RANK_MAJOR one row is one term for any
 * number of k. */
typedef struct Terms {
    int count;
    int64_t row[EP_MAX_TOP_K];
    float weight[EP_MAX_TOP_K];
} Terms;

static Terms terms_of(const World *world, int rank, int token, int peer) {
    Terms terms = {0, {0}, {0}};
    for (int k = 0; k < world->c.top_k; k++) {
        int64_t entry = (int64_t)token * world->c.top_k + k;
        Position position = world->rank[rank].position[entry];
        if (position.row < 0 || position.rank != peer) continue;
        if (case_has_rows(&world->c) && terms.count) continue;
        terms.weight[terms.count] = world->c.weights_at_combine
                                        ? world->rank[rank].weight[entry]
                                        : world->rank[peer].slot_weight[position.row];
        terms.row[terms.count++] = position.row;
    }
    return terms;
}

static float partial_sum(const World *world, int peer, const Terms *terms, int h, int weighted) {
    const RankWorld *there = &world->rank[peer];
    float sum = 0;
    for (int i = 0; i < terms->count; i++) {
        int64_t element = terms->row[i] * world->c.hidden + h;
        float x = number_get(there->expert_out, world->c.sum_type, element);
        sum = weighted ? fmaf(terms->weight[i], x, sum) : sum + x;
    }
    return sum;
}

/** One token's sum, element by element. */
typedef struct Sum {
    const World *world;
    int rank, token, weighted;
    float total[EP_MAX_ROW_BYTES / 2];
    float node[EP_MAX_ROW_BYTES / 2]; /**< of the ranks of another node */
    float part[EP_MAX_ROW_BYTES / 2]; /**< of one rank */
} Sum;

/* Replace a sum by what arrives of it on another rank. */
static void travel(const Case *c, float *row) {
    int quantises = quant_form(c->sum_quant)->bits;
    if (quantises) quant_travel(row, c->hidden);
    for (int h = 0; !quantises && h < c->hidden; h++)
        row[h] = number_round(c->sum_type, row[h]);
}

/* Add the terms on `peer` to `to`. */
static void add_rank(Sum *sum, int peer, int travels, float *to) {
    const Case *c = &sum->world->c;
    Terms terms = terms_of(sum->world, sum->rank, sum->token, peer);
    if (!terms.count) return;
    for (int h = 0; h < c->hidden; h++)
        sum->part[h] = partial_sum(sum->world, peer, &terms, h, sum->weighted);
    if (travels) travel(c, sum->part);
    for (int h = 0; h < c->hidden; h++)
        to[h] += sum->part[h];
}

/* Add what another node's ranks have to the total, in the place of its lowest rank. */
static void add_node(Sum *sum, int lowest) {
    const Case *c = &sum->world->c;
    memset(sum->node, 0, (size_t)c->hidden * sizeof(float));
    for (int peer = lowest; peer < c->ranks; peer++)
        if (case_node(c, peer) == lowest) add_rank(sum, peer, 1, sum->node);
    travel(c, sum->node);
    for (int h = 0; h < c->hidden; h++)
        sum->total[h] += sum->node[h];
}

/* Add a token's entries on all ranks, in ascending k. */
static void add_entries(Sum *sum) {
    const Case *c = &sum->world->c;
    const RankWorld *me = &sum->world->rank[sum->rank];
    for (int k = 0; k < c->top_k; k++) {
        int64_t entry = (int64_t)sum->token * c->top_k + k;
        Position at = me->position[entry];
        if (at.row < 0) continue;
        const RankWorld *there = &sum->world->rank[at.rank];
        float weight = c->weights_at_combine ? me->weight[entry] : there->slot_weight[at.row];
        for (int h = 0; h < c->hidden; h++) {
            float x = number_get(there->expert_out, c->sum_type, at.row * c->hidden + h);
            sum->total[h] = sum->weighted ? fmaf(weight, x, sum->total[h]) : sum->total[h] + x;
        }
    }
}

static void expect_sums(const World *world, int rank, int weighted, Image *out) {
    const Case *c = &world->c;
    Sum sum = {.world = world, .rank = rank, .weighted = weighted};
    memset(out->data, 0, out->bytes);
    for (; sum.token < world->rank[rank].tokens; sum.token++) {
        memset(sum.total, 0, (size_t)c->hidden * sizeof(float));
        if (c->by_entry) add_entries(&sum);
        for (int peer = 0; peer < c->ranks && !c->by_entry; peer++) {
            if (case_node(c, peer) == case_node(c, rank))
                add_rank(&sum, peer, peer != rank, sum.total);
            else if (case_node(c, peer) == peer)
                add_node(&sum, peer);
        }
        for (int h = 0; h < c->hidden; h++) {
            int64_t element = (int64_t)sum.token * c->hidden + h;
            float value = 0 + sum.total[h];
            for (int i = 0; i < c->biases; i++)
                value += number_get(world->rank[rank].bias[i], c->sum_type, element);
            number_set(out->data, c->sum_type, element, value);
        }
    }
}

void expect_combine(const World *world, int rank, Image *out) {
    expect_sums(world, rank, world->c.weighted || world->c.weights_at_combine, out);
}

void expect_dispatch_backward(const World *world, int rank, Image *tokens, Image *weights) {
    const RankWorld *me = &world->rank[rank];
    expect_sums(world, rank, 0, tokens);
    int per_row = world_row_weights(&world->c);
    for (int64_t i = 0; i < (int64_t)me->rows * world->c.top_k; i++) {
        Position position = me->position[i];
        int64_t k = per_row > 1 ? i % world->c.top_k : 0;
        float gradient = 0;
        if (position.row >= 0)
            gradient = world->rank[position.rank].grad_slot_weight[position.row * per_row + k];
        memcpy(weights->data + i * 4, &gradient, 4);
    }
}

/* Write a row of a combine_backward that quantises, and its scales. `what`: a token, or zeros. */
static void expect_quantised(const World *world, int rank, int64_t row, Image *rows,
                             Image *scales) {
    const Case *c = &world->c;
    const Row *what = &world->rank[rank].row[row];
    const uint8_t *grads = world->rank[what->source].grad_out;
    uint8_t of_row[EP_MAX_ROW_BYTES / 16], *to = rows->data + (size_t)row * case_grad_bytes(c);
    int is_filled = what->kind == ROW_FILLED;
    if (is_filled)
        quant_row(c->grad_quant, 0, c->sum_type, grads + (size_t)what->token * case_sum_bytes(c),
                  c->hidden, to, of_row);
    expect_scales(world, rank, row, (size_t)quant_scales(c->grad_quant, c->hidden),
                  case_grad_scale_bytes(c), is_filled ? of_row : NULL, scales);
}

void expect_combine_backward(const World *world, int rank, Image *rows, Image *scales) {
    const Case *c = &world->c;
    const RankWorld *me = &world->rank[rank];
    for (int64_t row = 0; row < me->buffer_rows; row++) {
        const Row *what = &me->row[row];
        if (!world_writes(world, what)) continue;
        memset(rows->data + (size_t)row * case_grad_bytes(c), 0, case_grad_bytes(c));
        if (case_grad_scale_bytes(c)) {
            expect_quantised(world, rank, row, rows, scales);
            continue;
        }
        for (int h = 0; what->kind == ROW_FILLED && h < c->hidden; h++) {
            int64_t element = (int64_t)what->token * c->hidden + h;
            float g = number_get(world->rank[what->source].grad_out, c->sum_type, element);
            float value = c->weighted ? me->slot_weight[row] * g : g;
            number_set(rows->data, c->sum_type, row * c->hidden + h, value);
        }
    }
}

double expect_slot_gradient(const World *world, int rank, int64_t row, double *magnitude) {
    const Case *c = &world->c;
    const RankWorld *me = &world->rank[rank];
    const Row *what = &me->row[row];
    double sum = 0;
    *magnitude = 0;
    for (int h = 0; what->kind == ROW_FILLED && h < c->hidden; h++) {
        int64_t element = (int64_t)what->token * c->hidden + h;
        double g = number_get(world->rank[what->source].grad_out, c->sum_type, element);
        double x = number_get(me->expert_out, c->sum_type, row * c->hidden + h);
        sum += x * g;
        *magnitude += fabs(x * g);
    }
    return sum;
}

/* ---- rows between ranks ---- */

/* Returns whether a token has an entry on a rank or, with `node`, on that rank's node. `slots`:
 * returns how many there have a slot. */
static int is_needed(const World *world, int from, int token, int to, int node, int slots) {
    const Case *c = &world->c;
    int found = 0, kept = 0;
    for (int k = 0; k < c->top_k; k++) {
        if (!world_live(world, from, token, k)) continue;
        int64_t entry = (int64_t)token * c->top_k + k;
        int owner = world_owner(c, world->rank[from].taken[entry]);
        if (node ? case_node(c, owner) != case_node(c, to) : owner != to) continue;
        found = 1, kept += world->rank[from].position[entry].row >= 0;
    }
    return slots ? kept : found;
}

static int64_t count_needed(const World *world, int from, int to, int node, int slots) {
    int64_t rows = 0;
    for (int t = 0; t < world->rank[from].tokens; t++)
        rows += is_needed(world, from, t, to, node, slots);
    return rows;
}

int64_t expect_rows(const World *world, int from, int to, int slots) {
    return count_needed(world, from, to, 0, slots);
}

/* Returns the rank that stands for `rank` on the node of `there`: itself on its own node, else the
 * one whose number there is its own number modulo the node's size. */
static int agent_of(const Case *c, int rank, int there) {
    int number = 0, size = 0;
    if (case_node(c, rank) == case_node(c, there)) return rank;
    for (int r = 0; r < rank; r++)
        number += case_node(c, r) == case_node(c, rank);
    for (int r = 0; r < c->ranks; r++)
        size += case_node(c, r) == case_node(c, there);
    number %= size;
    for (int r = 0;; r++)
        if (case_node(c, r) == case_node(c, there) && number-- == 0) return r;
}

int64_t expect_relayed_rows(const World *world, int from, int to, int slots) {
    const Case *c = &world->c;
    int64_t rows = 0;
    if (case_node(c, from) != case_node(c, to))
        return agent_of(c, from, to) == to ? count_needed(world, from, to, 1, slots) : 0;
    for (int source = 0; source < c->ranks; source++)
        if (agent_of(c, source, from) == from) rows += count_needed(world, source, to, 0, slots);
    return rows;
}
