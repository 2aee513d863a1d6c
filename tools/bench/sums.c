/* SPDX-License-Identifier: Apache-2.0 */

/**
 * --case sums: the error of combine where sums travel as they are and where they travel quantised.
 * Each slot has an expert's output of three kinds, and softmax weights. The figures are the error
 * of `out` against a sum in double precision: rms over all tokens, relative to the rms of that sum;
 * and the largest error of an element, relative to the largest element of its token.
 */

#include <math.h>
#include <stdio.h>

#include "tools/bench/case.h"
#include "tools/bench/device.h"
#include "tools/bench/lines.h"
#include "tools/common/data.h"

typedef enum Kind { GAUSSIAN, OUTLIERS, HEAVY_TAILS, NUM_KINDS } Kind;

static const char *const kind_names[] = {"Gaussian", "outlier channels", "heavy tails"};

/* ---- data ---------------------------------------------------------------------------------- */

/* A random number of 64 bits that depends on all three. */
static uint64_t mix(uint64_t a, uint64_t b, uint64_t c) {
    return hash_add(hash_add(hash_word(a), (int64_t)b), (int64_t)c);
}

static double gaussian(uint64_t a, uint64_t b, uint64_t c) {
    return sqrt(-2 * log(1 - hash_unit(mix(a, b, c)))) *
           cos(6.283185307179586 * hash_unit(mix(c, a, b)));
}

/* What expert `e` makes of element h of a token: tokens differ in size by a factor of e^1/2.
 * Outlier channels: one of 200 is 20 times as large, in all tokens. Heavy tails: Student's t with
 * three degrees of freedom. */
static float output(Kind kind, uint64_t token, int e, int64_t h) {
    const uint64_t id = token << 20 | (uint64_t)e;
    double x = gaussian(id, (uint64_t)h, 1) * exp(0.5 * gaussian(token, 0, 2));
    if (kind == OUTLIERS && mix((uint64_t)h, 3, 3) % 200 == 0) x *= 20;
    if (kind == HEAVY_TAILS) {
        double sum = 0;
        for (uint64_t i = 0; i < 3; i++)
            sum += pow(gaussian(id, (uint64_t)h, 10 + i), 2);
        x /= sqrt(sum / 3);
    }
    return (float)x;
}

static void make_row(const Case *c, Kind kind, uint64_t token, int e, void *row) {
    for (int64_t h = 0; h < c->options->hidden; h++) {
        float x = output(kind, token, e, h);
        data_from_float(EP_TYPE_BF16, &x, (uint16_t *)row + h, 1);
    }
}

static uint64_t token_id(const Case *c, int rank, int64_t token) {
    return (uint64_t)(c->routing.first[rank] + token);
}

static float weight_of(const Case *c, uint64_t token, int k) {
    double sum = 0;
    for (int i = 0; i < c->routing.top_k; i++)
        sum += exp(gaussian(token, (uint64_t)i, 4));
    return (float)(exp(gaussian(token, (uint64_t)k, 4)) / sum);
}

/* Expert outputs and weights in the place of the case's own contents. */
static bool fill(Case *c, Kind kind) {
    for (int64_t row = 0; row < c->slots.num_rows; row++) {
        const Row *r = &c->slots.rows[row];
        if (r->state != ROW_SLOT) continue;
        const uint64_t token = token_id(c, r->rank, r->token);
        make_row(c, kind, token, r->expert, c->buffers.slots_in + (size_t)row * c->row_bytes);
        c->buffers.slot_weights[row] = weight_of(c, token, r->k);
    }
    return !c->device || device_upload(c);
}

/* ---- errors -------------------------------------------------------------------------------- */

typedef struct Error {
    double squares, exact_squares, largest;
} Error;

static void add_token(const Case *c, int64_t t, char *term, double *exact, Error *out) {
    const int rank = c->world->rank;
    const int64_t hidden = c->options->hidden;
    const uint64_t token = token_id(c, rank, t);
    double worst = 0, most = 0;
    for (int64_t h = 0; h < hidden; h++)
        exact[h] = 0;
    for (int k = 0; k < c->routing.top_k; k++) {
        float x;
        const double weight = (double)weight_of(c, token, k);
        make_row(c, (Kind)c->options->sums_kind, token, routing_row(&c->routing, rank, t)[k], term);
        for (int64_t h = 0; h < hidden; h++) {
            data_to_float(EP_TYPE_BF16, (uint16_t *)(void *)term + h, &x, 1);
            exact[h] += weight * (double)x;
        }
    }
    for (int64_t h = 0; h < hidden; h++) {
        float got;
        data_to_float(EP_TYPE_BF16, c->buffers.tokens_out + (size_t)t * c->row_bytes + 2 * h, &got,
                      1);
        const double off = fabs((double)got - exact[h]);
        out->squares += off * off, out->exact_squares += exact[h] * exact[h];
        worst = fmax(worst, off), most = fmax(most, fabs(exact[h]));
    }
    if (most > 0) out->largest = fmax(out->largest, worst / most);
}

/* Collective: of all ranks. */
static bool measure_error(Case *c, Error *out) {
    Error mine = {0, 0, 0};
    Pool pool = {.count = 0};
    const size_t size = (size_t)c->world->size, hidden = (size_t)c->options->hidden;
    char *term = pool_alloc(&pool, hidden, sizeof(uint16_t), "sums");
    double *exact = pool_alloc(&pool, hidden, sizeof(double), "sums");
    Error *all = pool_alloc(&pool, size, sizeof(Error), "sums");
    for (int64_t t = 0; !pool.failed && t < c->tokens; t++)
        add_token(c, t, term, exact, &mine);
    bool ok =
        world_all(c->world, !pool.failed) && world_allgather(c->world, &mine, all, sizeof(mine));
    *out = (Error){0, 0, 0};
    for (size_t r = 0; ok && r < size; r++) {
        out->squares += all[r].squares, out->exact_squares += all[r].exact_squares;
        out->largest = fmax(out->largest, all[r].largest);
    }
    pool_free(&pool);
    return ok;
}

static bool run_case(Case *c, Kind kind, Error *out) {
    bool ok = world_all(c->world, fill(c, kind) && phase_begin(c)) && phase_run(c, PHASE_PREPARE) &&
              phase_run(c, PHASE_COMBINE) && phase_fetch(c, PHASE_COMBINE);
    return world_all(c->world, ok) && measure_error(c, out);
}

static bool measure(World *world, const Options *options, Kind kind, EpQuant quant, Error *out) {
    Options o = *options;
    Case c;
    o.sum_quant = quant, o.sums_kind = kind;
    bool ok = case_create(world, &o, o.tokens_end, &c) && run_case(&c, kind, out);
    if (!world->broken) case_destroy(&c);
    return ok;
}

bool sums_case(World *world, const Options *options) {
    Lines lines;
    char name[64];
    if (!lines_begin(&lines, world, options, "errors of combine, whose sums travel as bf16 or fp8"))
        return false;
    for (int kind = 0; kind < NUM_KINDS; kind++) {
        Error plain, fp8;
        if (!measure(world, options, (Kind)kind, EP_QUANT_NONE, &plain) ||
            !measure(world, options, (Kind)kind, EP_QUANT_FP8, &fp8))
            return false;
        for (int i = 0; i < 4; i++) {
            const Error *e = i % 2 ? &fp8 : &plain;
            const double value = i < 2 ? sqrt(e->squares / e->exact_squares) : e->largest;
            snprintf(name, sizeof(name), "%s, %s, %s", kind_names[kind], i < 2 ? "rms" : "largest",
                     i % 2 ? "fp8" : "bf16");
            lines_add(&lines, name, "share", (Quantiles){value, value}, -1, 0);
        }
    }
    return lines_end(&lines);
}
