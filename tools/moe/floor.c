/* SPDX-License-Identifier: Apache-2.0 */

/**
 * Lower bounds for the times of the phases, from plain work of the same size in the same run: the
 * bytes of a phase copied with memcpy, its operations at the rate of one large GEMM.
 */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/common/util.h"
#include "tools/moe/measure.h"

enum { GEMM_SIZE = 384 };

typedef struct FloorWork {
    int64_t copied[NUM_MOE_PHASES]; /* bytes */
    char *from, *to;
    float *a, *b, *c;
} FloorWork;

static bool copy(void *context, int which) {
    FloorWork *work = context;
    memcpy(work->to, work->from, (size_t)work->copied[which]);
    return true;
}

static bool multiply(void *context, int which) {
    FloorWork *work = context;
    (void)which;
    moe_host_square(GEMM_SIZE, work->a, work->b, work->c);
    return true;
}

/* A copy reads and writes, so half of the phase's bytes are copied. */
static bool make_work(const Layer *layer, FloorWork *work) {
    const size_t square = (size_t)GEMM_SIZE * GEMM_SIZE;
    int64_t most = 1;
    for (int p = 0; p < NUM_MOE_PHASES; p++) {
        work->copied[p] = moe_phase_work(layer, (MoePhase)p).bytes / 2;
        most = work->copied[p] > most ? work->copied[p] : most;
    }
    work->from = bench_alloc((size_t)most, 1, "floor");
    work->to = bench_alloc((size_t)most, 1, "floor");
    work->a = bench_alloc(square, sizeof(float), "floor");
    work->b = bench_alloc(square, sizeof(float), "floor");
    work->c = bench_alloc(square, sizeof(float), "floor");
    if (!work->from || !work->to || !work->a || !work->b || !work->c) return false;
    for (size_t i = 0; i < square; i++)
        work->a[i] = work->b[i] = 1;
    return true;
}

static void free_work(FloorWork *work) {
    free(work->from);
    free(work->to);
    free(work->a);
    free(work->b);
    free(work->c);
}

static void set_floors(const Quantiles *copies, double flops_per_us, MoeResult *out) {
    out->floor_us = 0;
    for (int p = 0; p < NUM_MOE_PHASES; p++) {
        PhaseResult *phase = &out->phases[p];
        if (phase->flops > 0) phase->floor_us = (double)phase->flops / flops_per_us;
        if (phase->bytes > 0) phase->floor_us = copies[p].median_us;
        if (phase->floor_us > 0) out->floor_us += phase->floor_us;
    }
}

bool moe_measure_floor(Layer *layer, MoeResult *out) {
    FloorWork work = {.from = NULL};
    Quantiles copies[NUM_MOE_PHASES], square;
    const int64_t iterations = layer->options->iterations;
    bool ok = world_all(layer->world, make_work(layer, &work)) &&
              time_calls(layer->world, 1, iterations, copy, &work, NUM_MOE_PHASES, copies) &&
              time_calls(layer->world, 1, iterations, multiply, &work, 1, &square);
    free_work(&work);
    if (!ok) return false;
    const double flops_per_us = 2 * pow(GEMM_SIZE, 3) / square.median_us;
    out->gemm_flops = flops_per_us * 1e6;
    out->gemm_size = GEMM_SIZE;
    set_floors(copies, flops_per_us, out);
    return true;
}
