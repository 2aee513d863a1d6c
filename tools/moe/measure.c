/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moe/measure.h"

#include <math.h>
#include <string.h>

#include "tools/common/util.h"

/* What an iteration times. The step is last: the check compares what it has written. */
enum {
    TOGETHER = NUM_MOE_PHASES,
    APART = TOGETHER + NUM_MOE_OVERLAPS,
    CALLS = APART + NUM_MOE_OVERLAPS,
    WHOLE_STEP,
    NUM_TIMED
};

static bool run_step(Layer *layer) {
    const int64_t before = layer->device.gemm_calls;
    if (layer->graph) return layer->device.replay(&layer->device, layer->graph);
    bool ok = moe_step_run(layer);
    layer->gemm_calls = layer->device.gemm_calls - before;
    return ok;
}

static bool queue_step(void *layer) {
    return moe_step_run(layer);
}

static bool run_timed(Layer *layer, int which) {
    if (which == WHOLE_STEP) return run_step(layer);
    if (which == CALLS) return !layer->graph || moe_step_run(layer);
    if (which >= APART) return moe_overlap_run_apart(layer, (MoeOverlapId)(which - APART));
    if (which >= TOGETHER) return moe_overlap_run(layer, (MoeOverlapId)(which - TOGETHER));
    return moe_phase_run(layer, (MoePhase)which);
}

static bool run(void *context, int which) {
    Layer *layer = context;
    MoeDevice *d = &layer->device;
    return d->start(d) && run_timed(layer, which) && d->stop(d);
}

static double took(void *context) {
    return ((Layer *)context)->device.took_us;
}

/* An iteration is each phase alone, each overlap, and then a whole step, so that all of them see
 * the same machine. */
static bool time_phases(Layer *layer, MoeResult *out) {
    const MoeOptions *o = layer->options;
    Quantiles times[NUM_TIMED];
    if (!time_calls_by(layer->world, o->run.warmup, o->run.iterations, run, took, layer, NUM_TIMED,
                       times))
        return false;
    for (int p = 0; p < NUM_MOE_PHASES; p++)
        out->phases[p].time = times[p];
    for (int i = 0; i < NUM_MOE_OVERLAPS; i++)
        out->overlaps[i] = (OverlapResult){moe_overlap_exists(layer, (MoeOverlapId)i),
                                           times[TOGETHER + i], times[APART + i]};
    out->step = times[WHOLE_STEP];
    if (layer->graph) out->calls = times[CALLS];
    out->gemm_calls = layer->gemm_calls;
    return true;
}

/* What the library promised before it allocated the EP group and the handle's plan. */
static bool count_promised(const Layer *layer, int64_t *out) {
    EpGroupMemory memory = EP_GROUP_MEMORY_INIT;
    EpHandleCost cost = EP_HANDLE_COST_INIT;
    bool ok =
        bench_ok(ep_group_memory(&layer->group_config, layer->mesh.ep_size, &memory),
                 "ep_group_memory") &&
        bench_ok(ep_handle_cost(layer->group, &layer->handle_config, &cost), "ep_handle_cost");
    *out = memory.shared_bytes + memory.private_bytes + cost.plan_bytes;
    return ok;
}

/* Work of the rank that has most. */
static bool count_work(Layer *layer, MoeResult *out) {
    int64_t most[3 * NUM_MOE_PHASES];
    for (int p = 0; p < NUM_MOE_PHASES; p++) {
        const MoeWork work = moe_phase_work(layer, (MoePhase)p);
        most[3 * p] = work.flops, most[3 * p + 1] = work.bytes, most[3 * p + 2] = work.remote;
        out->phases[p].exists = moe_phase_exists(layer, (MoePhase)p);
        out->phases[p].floor_us = -1;
    }
    if (!world_max(layer->world, most, 3 * NUM_MOE_PHASES)) return false;
    for (int p = 0; p < NUM_MOE_PHASES; p++)
        out->phases[p].flops = most[3 * p], out->phases[p].bytes = most[3 * p + 1],
        out->phases[p].remote = most[3 * p + 2];
    return true;
}

static bool count_facts(Layer *layer, MoeResult *out) {
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    int64_t promised = 0;
    bool ok = bench_ok(ep_group_query(layer->group, &info), "ep_group_query") &&
              count_promised(layer, &promised);
    if (!world_all(layer->world, ok)) return false;
    int64_t most[] = {layer->tokens, layer->slots, info.library_bytes, promised,
                      weights_workspace(layer)};
    int64_t least[] = {layer->tokens, layer->slots};
    if (!world_max(layer->world, most, 5) || !world_min(layer->world, least, 2)) return false;
    out->tokens_max = most[0], out->slots_max = most[1], out->library_bytes = most[2];
    out->promised_bytes = most[3], out->workspace_bytes = most[4];
    out->tokens_min = least[0], out->slots_min = least[1];
    return true;
}

/* ---- lower bounds from plain work of the same size in the same run ------------------------- */

/* The bytes of a phase copied, and its operations at the rate of one large GEMM. */
typedef struct FloorWork {
    Layer *layer;
    int64_t copied[NUM_MOE_PHASES]; /* bytes */
    char *from, *to;
    EpTensor a, b, c;
    int32_t rows[2]; /* the one slab of the GEMM: 0, and its rows */
} FloorWork;

static double floor_took(void *context) {
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
    const Groups all = {1, &work->rows[0], &work->rows[1], NULL};
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

/* Matrix units multiply e4m3 at twice the rate of 16-bit types, in which the plain GEMM is. */
static double rate_of(const Layer *layer, MoePhase phase) {
    MoeProduct product;
    return moe_phase_product(layer, phase, &product) && layer->options->type != EP_TYPE_FP32 ? 2
                                                                                             : 1;
}

static void set_floors(const Layer *layer, const Quantiles *copies, double flops_per_us,
                       MoeResult *out) {
    out->floor_us = 0;
    for (int p = 0; p < NUM_MOE_PHASES; p++) {
        PhaseResult *phase = &out->phases[p];
        if (phase->flops > 0)
            phase->floor_us = (double)phase->flops / (flops_per_us * rate_of(layer, (MoePhase)p));
        if (phase->bytes > 0) phase->floor_us = fmax(phase->floor_us, copies[p].median_us);
        if (phase->remote > 0)
            phase->floor_us =
                fmax(phase->floor_us, (double)phase->remote * 1e-3 / (double)layer->options->wire);
        if (phase->floor_us > 0) out->floor_us += phase->floor_us;
    }
}

static bool measure_floor(Layer *layer, MoeResult *out) {
    FloorWork work = {.from = NULL};
    Quantiles copies[NUM_MOE_PHASES], square;
    const int64_t iterations = layer->options->run.iterations;
    bool ok = world_all(layer->world, make_work(layer, &work)) &&
              time_calls_by(layer->world, 1, iterations, copy, floor_took, &work, NUM_MOE_PHASES,
                            copies) &&
              time_calls_by(layer->world, 1, iterations, multiply, floor_took, &work, 1, &square);
    free_work(&work);
    if (!ok) return false;
    const double flops_per_us = 2 * pow(layer->device.square, 3) / square.median_us;
    out->gemm_flops = flops_per_us * 1e6;
    out->gemm_size = layer->device.square;
    set_floors(layer, copies, flops_per_us, out);
    return true;
}

bool moe_measure_floor(Layer *layer, MoeResult *out) {
    return count_work(layer, out) && measure_floor(layer, out);
}

/* ---- all of it ----------------------------------------------------------------------------- */

/* Rank 0 has compared. The others learn how much was wrong, for their exit status. */
static bool share_checks(Layer *layer, const MoeCheck *check, MoeResult *out) {
    out->checked = true;
    out->wrong = check_wrong(check);
    memcpy(out->checks, check->results, sizeof(out->checks));
    memcpy(out->first_wrong, check->first, sizeof(out->first_wrong));
    return world_broadcast(layer->world, &out->wrong, sizeof(out->wrong));
}

/* It is captured when all of it has run once. */
static bool capture(Layer *layer) {
    MoeDevice *d = &layer->device;
    const int64_t before = d->gemm_calls;
    if (!layer->options->graph) return true;
    bool ok = world_all(layer->world, moe_step_run(layer) && d->finish(d)) &&
              world_all(layer->world, d->capture(d, queue_step, layer, &layer->graph));
    layer->gemm_calls = (d->gemm_calls - before) / 2;
    return ok;
}

static bool measure(Layer *layer, MoeCheck *check, MoeResult *out) {
    const bool checks = layer->options->run.check;
    return count_work(layer, out) && count_facts(layer, out) &&
           (!checks || (check_open(layer, check) && check_step(check))) &&
           (!layer->options->compare || moe_compare(layer, &out->comparison)) && capture(layer) &&
           time_phases(layer, out) && (!checks || check_step(check)) &&
           (!layer->options->run.floor || measure_floor(layer, out)) &&
           (!checks || share_checks(layer, check, out));
}

bool moe_measure(Layer *layer, MoeResult *out) {
    MoeCheck check = {.layer = NULL};
    *out = (MoeResult){.floor_us = -1};
    bool ok = measure(layer, &check, out);
    check_close(&check);
    return ok;
}

int64_t moe_phase_wrong(const MoeResult *result, MoePhase phase) {
    int64_t wrong = -1;
    for (int i = 0; result->checked && i < NUM_CHECKS; i++) {
        if (result->checks[i].phase == phase)
            wrong = (wrong < 0 ? 0 : wrong) + result->checks[i].wrong;
    }
    return wrong;
}

double moe_overlap_hidden(const MoeResult *result, MoeOverlapId id) {
    const OverlapResult *o = &result->overlaps[id];
    const double alone = result->phases[moe_overlap(id)->phase].time.median_us;
    const double added = o->apart.median_us - alone;
    return added > 0 ? (o->apart.median_us - o->together.median_us) / added : NAN;
}
