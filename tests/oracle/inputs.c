/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/oracle/inputs.h"

#include <math.h>

#include "tests/harness/random.h"
#include "tests/oracle/number.h"
#include "tests/oracle/quant.h"

enum {
    STREAM_COUNT,
    STREAM_INDEX,
    STREAM_BYTES,
    STREAM_WEIGHT,
    STREAM_GRAD,
    STREAM_ROWS,
    STREAM_BIAS
};

static Random stream_of(const World *world, int rank, int what) {
    return random_stream(world->c.seed, (uint64_t)rank, (uint64_t)what);
}

static int token_count(const World *world, int rank) {
    const Case *c = &world->c;
    Random random = stream_of(world, rank, STREAM_COUNT);
    switch (c->spread) {
    case SPREAD_FULL:
        return c->max_tokens;
    case SPREAD_NONE:
        return 0;
    case SPREAD_HOLE:
        return rank == c->ranks / 2 ? 0 : c->max_tokens;
    case SPREAD_ALONE:
        return rank == c->ranks - 1 ? c->max_tokens : 0;
    default:
        return (int)random_below(&random, c->max_tokens + 1);
    }
}

static int64_t draw_expert_of(const Case *c, Random *random, int rank) {
    int64_t first = 0, count = 0;
    while (world_owner(c, first) != rank)
        first++;
    while (first + count < c->experts && world_owner(c, first + count) == rank)
        count++;
    return first + random_below(random, count);
}

static int64_t draw_expert(const Case *c, Random *random) {
    int64_t n = c->experts;
    switch (c->routing) {
    case ROUTING_SKEWED: {
        int64_t a = random_below(random, n), b = random_below(random, n);
        return a * b / n;
    }
    case ROUTING_ONE_EXPERT:
        return c->target;
    case ROUTING_ONE_RANK:
        return draw_expert_of(c, random, c->target);
    default:
        return random_below(random, n);
    }
}

/* Returns an index out of range; with 64 bits sometimes one whose low 32 bits look like an
 * expert. */
static int64_t draw_invalid(const Case *c, Random *random) {
    int64_t wide = c->index_type == EP_TYPE_INT64 ? INT64_C(1) << 32 : c->experts;
    switch (random_below(random, 3)) {
    case 0:
        return c->experts;
    case 1:
        return INT32_MAX;
    default:
        return wide + random_below(random, c->experts);
    }
}

static int64_t draw_masked(const Case *c, Random *random) {
    int64_t lowest = c->index_type == EP_TYPE_INT64 ? INT64_MIN : INT32_MIN;
    int64_t wide = c->index_type == EP_TYPE_INT64 ? -(INT64_C(1) << 32) : -2;
    int64_t choices[] = {-1, -1, -1, lowest, wide};
    return choices[random_below(random, 5)];
}

static int named_before(const int64_t *row, int k, int64_t expert) {
    for (int i = 0; i < k; i++)
        if (row[i] == expert) return 1;
    return 0;
}

static int64_t draw_entry(const Case *c, Random *random, const int64_t *row, int k) {
    if (c->routing == ROUTING_NOBODY || random_percent(random, c->masked_percent))
        return draw_masked(c, random);
    if (random_percent(random, c->invalid_percent)) return draw_invalid(c, random);
    if (c->duplicates && k > 0 && row[k - 1] >= 0 && random_percent(random, 40)) return row[k - 1];
    for (int attempt = 0; attempt < 20; attempt++) {
        int64_t expert = draw_expert(c, random);
        if (c->duplicates || !named_before(row, k, expert)) return expert;
    }
    return -1;
}

static void fill_random(uint8_t *bytes, size_t n, Random *random) {
    for (size_t i = 0; i < n; i += 8) {
        uint64_t value = random_next(random);
        memcpy(bytes + i, &value, n - i < 8 ? n - i : 8);
    }
}

static void fill_numbers(uint8_t *bytes, EpType type, int64_t n, Random *random) {
    size_t size = type == EP_TYPE_FP32 ? 4 : 2;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = number_bits(type, random_next(random));
        memcpy(bytes + (size_t)i * size, &bits, size);
    }
}

/* Fill the rows of strange tokens. Each has a NaN, which any product with it keeps. */
static void put_strange_row(const Case *c, uint8_t *array, EpType type, int64_t row) {
    static const float strange[] = {NAN, INFINITY, -INFINITY};
    for (int h = 0; h < c->hidden && type <= EP_TYPE_FP32; h++)
        number_set(array, type, row * c->hidden + h, strange[h % 3]);
}

static void *new_array(int64_t n, size_t size) {
    return calloc((size_t)n + 1, size);
}

static void make_index(World *world, int rank) {
    const Case *c = &world->c;
    RankWorld *me = &world->rank[rank];
    Random random = stream_of(world, rank, STREAM_INDEX);
    me->index = new_array((int64_t)me->rows * c->top_k, sizeof(int64_t));
    for (int t = 0; t < me->rows; t++) {
        int64_t *row = me->index + (int64_t)t * c->top_k;
        for (int k = 0; k < c->top_k; k++)
            row[k] = world_is_strange(world, t) ? 0 : draw_entry(c, &random, row, k);
    }
}

/* Replace one element by an infinity, a NaN, or a very large or small number. */
static void put_strange(const Case *c, uint8_t *row, Random *random) {
    static const float strange[] = {INFINITY, -INFINITY, NAN,     -NAN,   3e38f, -3e38f,
                                    65504,    1e-30f,    -1e-38f, 1e-45f, -0.0f, 6e-8f};
    int64_t which = random_below(random, sizeof(strange) / sizeof(strange[0]));
    number_set(row, c->row_type, random_below(random, c->hidden), strange[which]);
}

/* Fill rows to quantise: random bits, zeros, or moderate numbers, some rows with extreme ones. */
static void make_numbers(const Case *c, RankWorld *me, Random *random) {
    size_t bytes = case_row_bytes(c);
    for (int t = 0; t < me->rows; t++) {
        uint8_t *row = me->token + (size_t)t * bytes;
        int kind = (int)random_below(random, 5);
        if (kind == 0) fill_random(row, bytes, random);
        if (kind > 1) fill_numbers(row, c->row_type, c->hidden, random);
        for (int i = 0; kind == 4 && i < 6; i++)
            put_strange(c, row, random);
    }
}

static void make_sent(const Case *c, RankWorld *me) {
    size_t bytes = case_row_bytes(c), row = case_recv_bytes(c), scale = case_recv_scale_bytes(c);
    me->sent = new_array(me->rows, row);
    me->sent_scale = new_array(me->rows, scale);
    for (int t = 0; t < me->rows; t++) {
        const uint8_t *token = me->token + (size_t)t * bytes;
        uint8_t *sent = me->sent + (size_t)t * row, *scales = me->sent_scale + (size_t)t * scale;
        if (quant_form(c->quant)->bits) {
            quant_row(c->quant, me->global_scale, c->row_type, token, c->hidden, sent, scales);
        } else {
            memcpy(sent, token, row);
            memcpy(scales, me->scale + (size_t)t * scale, scale);
        }
    }
}

/* Biases of rows that are not routed are NaN. */
static void make_biases(World *world, int rank) {
    const Case *c = &world->c;
    RankWorld *me = &world->rank[rank];
    Random random = stream_of(world, rank, STREAM_BIAS);
    for (int i = 0; i < 2; i++)
        me->bias[i] = new_array(i < c->biases ? me->rows : 0, case_sum_bytes(c));
    for (int i = 0; i < c->biases; i++) {
        memset(me->bias[i], 0xff, (size_t)me->rows * case_sum_bytes(c));
        fill_numbers(me->bias[i], c->sum_type, (int64_t)me->tokens * c->hidden, &random);
    }
}

void inputs_make_tokens(World *world, int rank) {
    static const float globals[] = {1, 2688, 0.37f, 0x1.8p20f};
    const Case *c = &world->c;
    RankWorld *me = &world->rank[rank];
    me->tokens = token_count(world, rank);
    me->rows = c->counted ? c->max_tokens : me->tokens;
    make_index(world, rank);

    Random random = stream_of(world, rank, STREAM_BYTES);
    me->token = new_array(me->rows, case_row_bytes(c));
    me->scale = new_array(me->rows, (size_t)c->scale_bytes);
    fill_random(me->token, (size_t)me->rows * case_row_bytes(c), &random);
    if (quant_form(c->quant)->bits) make_numbers(c, me, &random);
    for (int t = 0; t < me->rows; t++)
        if (world_is_strange(world, t)) put_strange_row(c, me->token, c->row_type, t);
    fill_random(me->scale, (size_t)me->rows * (size_t)c->scale_bytes, &random);

    me->global_scale = globals[(c->seed + (uint64_t)rank) % 4];
    make_sent(c, me);

    random = stream_of(world, rank, STREAM_WEIGHT);
    me->weight = new_array((int64_t)me->rows * c->top_k, sizeof(float));
    for (int64_t i = 0; i < (int64_t)me->rows * c->top_k; i++)
        me->weight[i] = random_unit(&random);

    random = stream_of(world, rank, STREAM_GRAD);
    me->grad_out = new_array(me->rows, case_sum_bytes(c));
    fill_numbers(me->grad_out, c->sum_type, (int64_t)me->rows * c->hidden, &random);
    for (int t = 0; t < me->rows; t++)
        if (world_is_strange(world, t)) put_strange_row(c, me->grad_out, c->sum_type, t);
    make_biases(world, rank);
}

void inputs_spoil_weights(World *world, int rank) {
    RankWorld *me = &world->rank[rank];
    for (int64_t i = 0; i < (int64_t)me->rows * world->c.top_k; i++)
        if (world->c.weights_at_combine && me->position[i].row < 0) me->weight[i] = NAN;
}

void inputs_make_rows(World *world, int rank) {
    const Case *c = &world->c;
    RankWorld *me = &world->rank[rank];
    Random random = stream_of(world, rank, STREAM_ROWS);
    int per_row = world_row_weights(c);
    me->expert_out = new_array(me->buffer_rows, case_sum_bytes(c));
    me->slot_weight = new_array(me->buffer_rows, sizeof(float));
    me->grad_slot_weight = new_array(me->buffer_rows * per_row, sizeof(float));
    memset(me->expert_out, 0xff, (size_t)me->buffer_rows * case_sum_bytes(c));
    memset(me->slot_weight, 0xff, (size_t)me->buffer_rows * sizeof(float));
    memset(me->grad_slot_weight, 0xff, (size_t)(me->buffer_rows * per_row) * sizeof(float));
    for (int64_t row = 0; row < me->buffer_rows; row++) {
        if (!world_has_token(&me->row[row])) continue;
        uint8_t *numbers = me->expert_out + (size_t)row * case_sum_bytes(c);
        fill_numbers(numbers, c->sum_type, c->hidden, &random);
        if (world_is_strange(world, me->row[row].token))
            put_strange_row(c, me->expert_out, c->sum_type, row);
        me->slot_weight[row] = random_unit(&random);
        for (int k = 0; k < per_row; k++)
            me->grad_slot_weight[row * per_row + k] = random_unit(&random);
    }
}
