/* SPDX-License-Identifier: Apache-2.0 */

/**
 * The calls of w1 and w2 run beside dispatch, on the device's second stream.
 *
 *     stream   ── prepare ─┬─ dispatch ──────────────┬─ gemm1 ──
 *     side                 └─ gather w1 ─ gather w2 ─┘
 *
 * Both move rows of weights or tokens, and wait for other ranks. This is why no rank waits in a
 * circle, though a GPU may not have room for all blocks of both:
 *
 *   - Fork and join are on every rank at the same place of the step, and a GPU has one rank. So
 *     what holds multiprocessors of a GPU in an overlap is its dispatch, its kernels that move
 *     weights, and kernels that wait for nobody and end.
 *   - Dispatch needs the first two of its blocks on each rank (runtime/cuda/device.h). Its other
 *     blocks take no work until they run. Kernels of weights leave room for two. So dispatch ends
 *     on all ranks, whatever these wait for.
 *   - Then kernels of weights have all multiprocessors, and end as they do alone.
 *
 * Whoever runs first, nothing else is asked of the order in which a GPU starts the two. All ranks
 * call dispatch first: calls of NCCL may wait on the host for kernels of this GPU.
 *
 * The handle leaves multiprocessors to these kernels (layer.c), not for this but so that both run
 * at once. prepare needs half of its blocks together, so it runs before the fork.
 *
 * Memory that is used again: the side follows all of the stream's work before the fork, so what is
 * gathered overwrites weights that no product reads any more, and gradients are complete. What
 * reads or overwrites it next follows the join.
 */

#include "tools/moe/phases.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/common/data.h"
#include "tools/common/util.h"

/* ---- planted faults ------------------------------------------------------------------------ */

int moe_fault_phase(void) {
    const char *name = getenv("LIBEP_TEST_MOE_FAULT");
    for (int p = 0; name && p < NUM_MOE_PHASES; p++)
        if (strcmp(name, moe_phase_name((MoePhase)p)) == 0) return p;
    return -1;
}

static float value_at(const EpTensor *t, int64_t i) {
    float value;
    data_to_float(t->type, (const char *)t->data + (size_t)i * ep_type_bytes(t->type), &value, 1);
    return value;
}

/* The largest element changes its sign: more than any bound allows. */
static void damage_number(const EpTensor *t) {
    int64_t at = 0;
    for (int64_t i = 1; i < tensor_elements(t); i++)
        if (fabsf(value_at(t, i)) > fabsf(value_at(t, at))) at = i;
    float value = -value_at(t, at);
    data_from_float(t->type, &value, (char *)t->data + (size_t)at * ep_type_bytes(t->type), 1);
}

static void damage_code(uint8_t *codes, int64_t count) {
    int64_t at = 0;
    for (int64_t i = 1; i < count; i++)
        if ((codes[i] & 0x7f) > (codes[at] & 0x7f)) at = i;
    codes[at] ^= 0x80;
}

static void damage(const EpTensor *tensor) {
    if (tensor->type == EP_TYPE_INT32)
        ((int32_t *)tensor->data)[0] ^= 1;
    else if (tensor->type == EP_TYPE_FP8_E4M3)
        damage_code(tensor->data, tensor_elements(tensor));
    else
        damage_number(tensor);
}

static bool damage_tensor(Layer *layer, const EpTensor *tensor) {
    MoeDevice *d = &layer->device;
    if (!tensor || tensor_elements(tensor) == 0) return true;
    const size_t bytes = (size_t)tensor_bytes(tensor);
    EpTensor copy = *tensor;
    copy.data = bench_alloc(1, bytes, "a damaged tensor");
    bool ok = copy.data && d->download(d, copy.data, tensor->data, bytes);
    if (ok) damage(&copy);
    ok = ok && d->upload(d, tensor->data, copy.data, bytes);
    free(copy.data);
    return ok;
}

static bool plant_fault(Layer *layer, MoePhase phase) {
    return (int)phase != layer->options->fault || layer->world->rank != 0 ||
           damage_tensor(layer, moe_phase_output(layer, phase));
}

/* ---- phases -------------------------------------------------------------------------------- */

static const MoeOverlap overlaps[NUM_MOE_OVERLAPS] = {
    [MOE_OVERLAP_FORWARD] = {MOE_DISPATCH, {MOE_GATHER_W1, MOE_GATHER_W2}, "gather"},
    [MOE_OVERLAP_BACKWARD] = {MOE_COMBINE_BACKWARD,
                              {MOE_GATHER_W2_BACKWARD, MOE_GATHER_W1_BACKWARD},
                              "gather"},
    [MOE_OVERLAP_REDUCE] = {MOE_DISPATCH_BACKWARD, {MOE_REDUCE_W2, MOE_REDUCE_W1}, "reduce"},
};

const MoeOverlap *moe_overlap(MoeOverlapId id) {
    return &overlaps[id];
}

bool moe_overlap_exists(const Layer *layer, MoeOverlapId id) {
    return layer->overlaps && moe_phase_exists(layer, overlaps[id].beside[0]);
}

bool moe_phase_run(Layer *layer, MoePhase phase) {
    if (!moe_phase_exists(layer, phase)) return true;
    return moe_phase_queue(layer, phase) && plant_fault(layer, phase);
}

static bool queue_beside(Layer *layer, const MoeOverlap *o) {
    bool ok = true;
    layer->weights_stream = layer->device.side;
    for (int i = 0; ok && i < MOE_BESIDE; i++)
        ok = moe_phase_queue(layer, o->beside[i]);
    layer->weights_stream = layer->device.stream;
    return ok;
}

bool moe_overlap_run(Layer *layer, MoeOverlapId id) {
    MoeDevice *d = &layer->device;
    const MoeOverlap *o = &overlaps[id];
    if (!moe_overlap_exists(layer, id)) return true;
    bool ok = d->fork(d) && moe_phase_queue(layer, o->phase) && queue_beside(layer, o) &&
              d->join(d) && plant_fault(layer, o->phase);
    for (int i = 0; ok && i < MOE_BESIDE; i++)
        ok = plant_fault(layer, o->beside[i]);
    return ok;
}

bool moe_overlap_run_apart(Layer *layer, MoeOverlapId id) {
    const MoeOverlap *o = &overlaps[id];
    if (!moe_overlap_exists(layer, id)) return true;
    bool ok = moe_phase_run(layer, o->phase);
    for (int i = 0; ok && i < MOE_BESIDE; i++)
        ok = moe_phase_run(layer, o->beside[i]);
    return ok;
}

/* The overlap that a phase is part of, or NUM_MOE_OVERLAPS. */
static MoeOverlapId overlap_of(const Layer *layer, MoePhase phase) {
    int id = 0;
    for (; id < NUM_MOE_OVERLAPS; id++) {
        const MoeOverlap *o = &overlaps[id];
        bool has = phase == o->phase || phase == o->beside[0] || phase == o->beside[1];
        if (has && moe_overlap_exists(layer, (MoeOverlapId)id)) break;
    }
    return (MoeOverlapId)id;
}

/* The shared expert takes the tokens that dispatch sends, and combine adds what it makes. So it
 * runs beside all between them, on the second stream. */
static bool run_shared(Layer *layer) {
    MoeDevice *d = &layer->device;
    if (!d->fork(d)) return false;
    d->exchange(d);
    bool ok = moe_phase_run(layer, MOE_SHARED);
    d->exchange(d);
    return ok;
}

static bool run_forward(Layer *layer) {
    const bool shared = layer->options->shared > 0;
    MoeDevice *d = &layer->device;
    bool ok = true;
    for (int p = 0; ok && p < NUM_MOE_PHASES; p++) {
        if (p == MOE_SHARED)
            ok = !shared || run_shared(layer);
        else
            ok = (p != MOE_COMBINE || !shared || d->join(d)) && moe_phase_run(layer, (MoePhase)p);
    }
    return ok;
}

/* The first of an overlap's phases runs all of them. */
bool moe_step_run(Layer *layer) {
    bool ok = true;
    if (layer->options->forward) return run_forward(layer);
    for (int p = 0; ok && p < NUM_MOE_PHASES; p++) {
        const MoeOverlapId id = overlap_of(layer, (MoePhase)p);
        if (id == NUM_MOE_OVERLAPS)
            ok = moe_phase_run(layer, (MoePhase)p);
        else if (overlaps[id].phase == (MoePhase)p)
            ok = moe_overlap_run(layer, id);
    }
    return ok;
}

bool moe_weights_warm_up(Layer *layer) {
    static const MoePhase calls[] = {MOE_GATHER_W1,          MOE_GATHER_W2, MOE_GATHER_W2_BACKWARD,
                                     MOE_GATHER_W1_BACKWARD, MOE_REDUCE_W2, MOE_REDUCE_W1,
                                     MOE_REDUCE_ROUTER};
    MoeDevice *d = &layer->device;
    bool ok = true;
    for (size_t i = 0; ok && i < sizeof(calls) / sizeof(*calls); i++)
        ok = moe_phase_run(layer, calls[i]);
    return world_all(layer->world, ok && d->finish(d));
}
