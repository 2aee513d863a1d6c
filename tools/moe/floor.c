/* SPDX-License-Identifier: Apache-2.0 */

/**
 * Lower bounds for the times of the phases, from plain work of the same size in the same run: the
 * bytes of a phase copied, its operations at the rate of one large GEMM.
 */

#include <math.h>

#include "tools/moe/measure.h"

typedef struct FloorWork {
    Layer *layer;
    int64_t copied[NUM_MOE_PHASES]; /* bytes */
    char *from, *to;
    EpTensor a, b, c;
    int32_t rows[2]; /* the one slab of the GEMM: 0, and its rows */
} FloorWork;

static double took(void *context) {
    return ((FloorWork *)context)->layer->device.took_us;
}

static bool copy(void *context, int which) {
    FloorWork *work = context;
    MoeDevice *d = &work->layer->device;
    return d->start(d) && d->copy(d, work->to, work->from, (size_t)work->copied[which]) &&
           d->stop(d);
}

static bool multiply(void *context, int which) {
    FloorWork *work = context;
    MoeDevice *d = &work->layer->device;
    const Groups all = {1, &work->rows[0], &work->rows[1]};
    (void)which;
    return d->start(d) && d->multiply(d, &all, &work->a, &work->b, false, &work->c) && d->stop(d);
}

/* On CPUs products are in fp32; GPUs multiply in the layer's type. */
static bool make_square(Layer *layer, EpTensor *out) {
    const EpType type =
        layer->device.backend == EP_BACKEND_HOST ? EP_TYPE_FP32 : (EpType)layer->options->type;
    *out = ep_tensor_2d(NULL, type, layer->device.square, layer->device.square);
    return tensor_alloc(layer, out, "floor");
}

/* A copy reads and writes, so half of the phase's bytes are copied. */
static bool make_work(Layer *layer, FloorWork *work) {
    MoeDevice *d = &layer->device;
    int64_t most = 1;
    work->layer = layer;
    work->rows[1] = d->square;
    for (int p = 0; p < NUM_MOE_PHASES; p++) {
        work->copied[p] = moe_phase_work(layer, (MoePhase)p).bytes / 2;
        most = work->copied[p] > most ? work->copied[p] : most;
    }
    work->from = d->alloc(d, (size_t)most, "floor");
    work->to = d->alloc(d, (size_t)most, "floor");
    return work->from && work->to && make_square(layer, &work->a) && make_square(layer, &work->b) &&
           make_square(layer, &work->c);
}

static void free_work(FloorWork *work) {
    MoeDevice *d = &work->layer->device;
    void *all[] = {work->from, work->to, work->a.data, work->b.data, work->c.data};
    for (int i = 0; i < 5; i++)
        if (all[i]) d->release(d, all[i]);
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
    bool ok =
        world_all(layer->world, make_work(layer, &work)) &&
        time_calls_by(layer->world, 1, iterations, copy, took, &work, NUM_MOE_PHASES, copies) &&
        time_calls_by(layer->world, 1, iterations, multiply, took, &work, 1, &square);
    free_work(&work);
    if (!ok) return false;
    const double flops_per_us = 2 * pow(layer->device.square, 3) / square.median_us;
    out->gemm_flops = flops_per_us * 1e6;
    out->gemm_size = layer->device.square;
    set_floors(copies, flops_per_us, out);
    return true;
}
