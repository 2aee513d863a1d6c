/* SPDX-License-Identifier: Apache-2.0 */
/* ep_quantise_rows against the oracle's blocks, and what it refuses. */
#include "ep/ep_quant.h"

#include "tests/cases/refusals.h"
#include "tests/cases/run.h"
#include "tests/harness/random.h"
#include "tests/oracle/number.h"
#include "tests/oracle/quant.h"

enum { GUARD = 64, FILL = 0x5a };

/** Rows [slabs, rows, columns]; `three`: the tensor has three dimensions. */
typedef struct Shape {
    int64_t slabs, rows, columns;
    int three;
    EpType type;
    int64_t count[8]; /* of each slab; -1: num_rows is not given */
} Shape;

static EpTensor tensor_of(const void *data, EpType type, int three, int64_t a, int64_t b,
                          int64_t c) {
    return three ? ep_tensor_3d(data, type, a, b, c) : ep_tensor_2d(data, type, b, c);
}

static char *filled(int64_t bytes) {
    char *memory = aligned_alloc(64, (size_t)((bytes + GUARD + 63) / 64 * 64));
    memset(memory, FILL, (size_t)(bytes + GUARD));
    return memory;
}

/* ---- the oracle ---------------------------------------------------------------------------- */

/* What the bytes and scales become: `out` and `scales` hold FILL before. */
typedef struct Expected {
    const Shape *s;
    const EpRowsForm *form;
    const void *rows;
    uint8_t *out, *scales;
} Expected;

/* The result's element (i, j) of a slab, as an index of the input. */
static int64_t input_at(const Expected *x, int64_t slab, int64_t i, int64_t j) {
    const Shape *s = x->s;
    return slab * s->rows * s->columns +
           (x->form->transposed ? j * s->columns + i : i * s->columns + j);
}

/* Quantise one block: rows [i, i_end) and columns [j, j_end) of the result, `wide` to a row. */
static void expect_block(const Expected *x, int64_t slab, const int64_t at[4], int64_t high,
                         int64_t wide, int64_t scale) {
    static float values[128 * 128];
    static uint8_t codes[128 * 128];
    int n = 0;
    for (int64_t i = at[0]; i < at[1]; i++)
        for (int64_t j = at[2]; j < at[3]; j++)
            values[n++] = number_get(x->rows, x->s->type, input_at(x, slab, i, j));
    quant_block(x->form->quant, 0, values, n, codes,
                x->scales + scale * quant_scale_bytes(x->form->quant));
    n = 0;
    for (int64_t i = at[0]; i < at[1]; i++)
        for (int64_t j = at[2]; j < at[3]; j++)
            x->out[(slab * high + i) * wide + j] = codes[n++];
}

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static void expect(const Expected *x) {
    const Shape *s = x->s;
    int t = x->form->transposed;
    int64_t width = quant_form(x->form->quant)->block;
    int64_t height = x->form->blocks == EP_BLOCKS_TILES ? width : 1;
    int64_t high = t ? s->columns : s->rows, wide = t ? s->rows : s->columns;
    int64_t down = (high + height - 1) / height, across = (wide + width - 1) / width;
    for (int64_t slab = 0; slab < s->slabs; slab++) {
        int64_t there = s->count[slab] < 0 ? s->rows : s->count[slab];
        int64_t end_i = t ? high : there, end_j = t ? there : wide;
        for (int64_t i = 0; i * height < end_i; i++)
            for (int64_t j = 0; j * width < end_j; j++) {
                int64_t at[4] = {i * height, least((i + 1) * height, end_i), j * width,
                                 least((j + 1) * width, end_j)};
                int64_t scale =
                    x->form->scale_order == EP_SCALES_BY_COLUMN ? j * down + i : i * across + j;
                expect_block(x, slab, at, high, wide, slab * down * across + scale);
            }
    }
}

/* ---- one case ------------------------------------------------------------------------------ */

static void fill_rows(const Shape *s, uint64_t seed, void *rows) {
    Random random = random_stream(seed, 3, 0);
    for (int64_t i = 0; i < s->slabs * s->rows * s->columns; i++) {
        uint32_t bits = number_bits(s->type, random_next(&random));
        number_set(rows, s->type, i, number_get(&bits, s->type, 0));
    }
}

static void check_form(EpGroup *group, const Shape *s, const EpRowsForm *form, EpType count_type) {
    int64_t elements = s->slabs * s->rows * s->columns;
    int64_t width = quant_form(form->quant)->block;
    int64_t height = form->blocks == EP_BLOCKS_TILES ? width : 1;
    int64_t high = form->transposed ? s->columns : s->rows;
    int64_t wide = form->transposed ? s->rows : s->columns;
    int64_t down = (high + height - 1) / height, across = (wide + width - 1) / width;
    int64_t scale_bytes = s->slabs * down * across * quant_scale_bytes(form->quant);
    int by_column = form->scale_order == EP_SCALES_BY_COLUMN;
    char *rows = filled(elements * (int64_t)ep_type_bytes(s->type));
    char *out = filled(elements), *memory = filled(scale_bytes + 4);
    char *scales = memory + 4; /* they start on 4 bytes */
    char *expected_out = filled(elements), *expected_scales = filled(scale_bytes);
    int64_t *counts = (int64_t *)filled(64);
    for (int64_t e = 0; e < s->slabs; e++)
        if (count_type == EP_TYPE_INT64)
            counts[e] = s->count[e];
        else
            ((int32_t *)counts)[e] = (int32_t)s->count[e];
    fill_rows(s, 5 + (uint64_t)s->rows, rows);
    expect(&(Expected){s, form, rows, (uint8_t *)expected_out, (uint8_t *)expected_scales});
    EpTensor in = tensor_of(rows, s->type, s->three, s->slabs, s->rows, s->columns);
    EpTensor result = tensor_of(out, EP_TYPE_FP8_E4M3, s->three, s->slabs, high, wide);
    EpType scale_type = quant_form(form->quant)->scale_type;
    EpTensor scaled = tensor_of(scales, scale_type, s->three, s->slabs, by_column ? across : down,
                                by_column ? down : across);
    EpTensor num_rows = ep_tensor_1d(counts, count_type, s->slabs);
    check_note(
        "[%lld, %lld, %lld] type %d, quant %d, blocks %d, transposed %d, order %d, %lld rows",
        (long long)s->slabs, (long long)s->rows, (long long)s->columns, s->type, form->quant,
        form->blocks, form->transposed, form->scale_order, (long long)s->count[0]);
    CHECK_OK(ep_quantise_rows(group, form, &in, s->count[0] < 0 ? NULL : &num_rows, NULL, &result,
                              &scaled));
    CHECK(memcmp(out, expected_out, (size_t)(elements + GUARD)) == 0, "other bytes");
    CHECK(memcmp(scales, expected_scales, (size_t)(scale_bytes + GUARD)) == 0, "other scales");
    free(rows);
    free(out);
    free(memory);
    free(expected_out);
    free(expected_scales);
    free(counts);
}

static void check_shape(EpGroup *group, const Shape *s) {
    for (int quant = EP_QUANT_FP8; quant <= EP_QUANT_FP8_POW2; quant++)
        for (int i = 0; i < 8; i++) {
            EpRowsForm form = EP_ROWS_FORM_INIT;
            form.quant = (EpQuant)quant;
            form.blocks = i & 1 ? EP_BLOCKS_TILES : EP_BLOCKS_ROWS;
            form.transposed = i >> 1 & 1;
            form.scale_order = i & 4 ? EP_SCALES_BY_COLUMN : EP_SCALES_BY_ROW;
            if (form.blocks == EP_BLOCKS_TILES && form.quant == EP_QUANT_MXFP8) continue;
            check_form(group, s, &form, i % 3 ? EP_TYPE_INT32 : EP_TYPE_INT64);
        }
}

/* Rows and columns of several tiles and of parts of one; counts of all, some, no and too many rows.
 * Local: ranks need not call it together. */
GroupTest(handles_rows_quant, against_the_oracle, 1, "alignment=128") {
    static const Shape shapes[] = {
        {1, 384, 200, 0, EP_TYPE_BF16, {256}},     {1, 300, 136, 0, EP_TYPE_FP32, {-1}},
        {1, 128, 96, 0, EP_TYPE_FP16, {0}},        {3, 128, 264, 1, EP_TYPE_BF16, {5, 128, 0}},
        {2, 256, 48, 1, EP_TYPE_FP32, {255, 999}}, {4, 128, 16, 1, EP_TYPE_FP16, {-1, -1, -1, -1}},
        {1, 272, 1168, 0, EP_TYPE_BF16, {261}}};
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        Shape s = shapes[i];
        for (int e = 0; e < 8; e++)
            if (s.count[e] > s.rows) s.count[e] = s.rows; /* the oracle's view */
        check_shape(group, &s);
    }
}

/* A group whose rank 1 never calls. */
GroupTest(handles_rows_quant, is_local, 2, "") {
    Shape s = {1, 128, 64, 0, EP_TYPE_BF16, {-1}};
    EpRowsForm form = EP_ROWS_FORM_INIT;
    if (bootstrap->rank == 0) check_form(group, &s, &form, EP_TYPE_INT32);
}

/* ---- what it refuses ----------------------------------------------------------------------- */

/* ep_quantise_rows's arguments. */
typedef struct Given {
    EpGroup *group;
    EpRowsForm form;
    EpTensor rows, num_rows, out, scales;
    const EpTensor *given;
} Given;

static const TextField form_fields[] = {
    TEXT_FIELD(EpRowsForm, struct_size, NULL), TEXT_FIELD(EpRowsForm, quant, TEXT_QUANTS),
    TEXT_FIELD(EpRowsForm, blocks, "|rows|tiles"), TEXT_FIELD(EpRowsForm, transposed, NULL),
    TEXT_FIELD(EpRowsForm, scale_order, TEXT_ORDERS)};

static EpStatus quantise(void *context, const char *call) {
    const Given *g = context;
    (void)call;
    return ep_quantise_rows(g->group, &g->form, g->given, &g->num_rows, NULL, &g->out, &g->scales);
}

GroupTest(handles_rows_quant, refuses, 1, "alignment=64") {
    static const Member members[] = {MEMBER("form", form_fields, Given, form),
                                     TENSOR("rows", Given, rows, given),
                                     {"num_rows", NULL, 0, offsetof(Given, num_rows), 0},
                                     {"out", NULL, 0, offsetof(Given, out), 0},
                                     {"scales", NULL, 0, offsetof(Given, scales), 0}};
    static const Subject subject = {members, LENGTH(members), sizeof(Given), quantise};
    char *memory = filled(1 << 16);
    Given g = {.group = group, .form = EP_ROWS_FORM_INIT, .given = &g.rows};
    g.rows = ep_tensor_2d(memory, EP_TYPE_BF16, 64, 64);
    g.out = ep_tensor_2d(memory + 8192, EP_TYPE_FP8_E4M3, 64, 64);
    g.scales = ep_tensor_2d(memory + 16384, EP_TYPE_FP32, 64, 1);
    g.num_rows = ep_tensor_1d(memory + 32768, EP_TYPE_INT32, 1);
    check_refusals("rows_quant", &subject, &g);
    CHECK_REFUSED(ep_quantise_rows(NULL, &g.form, &g.rows, NULL, NULL, &g.out, &g.scales),
                  EP_ERR_NULL, "group");
    CHECK_REFUSED(ep_quantise_rows(g.group, NULL, &g.rows, NULL, NULL, &g.out, &g.scales),
                  EP_ERR_NULL, "form");
    for (int i = 0; i < 1 << 16; i++)
        CHECK(memory[i] == FILL, "a refused call has changed byte %d", i);
    free(memory);
}
