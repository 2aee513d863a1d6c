/* SPDX-License-Identifier: Apache-2.0 */
/* Several live handles, used in any order. Each keeps the plan of its own step, so every operation
 * gives what the oracle expects. */
#include <string.h>

#include "tests/cases/run.h"

enum { RANKS = 3, MAX_LAYERS = 12 };

/* One rank's handles, with a world each. */
typedef struct Layers {
    EpGroup *group;
    Step step[MAX_LAYERS];
    int count;
} Layers;

static World *layer_world(int i, EpLayout layout) {
    Case c = {.ranks = RANKS,
              .experts = 7,
              .top_k = 3,
              .weighted = 1,
              .alignment = 4,
              .layout = layout,
              .scale_bytes = 4,
              .seed = (uint64_t)(40 + i)};
    return world_new(&c);
}

static Layers layers_open(const EpBootstrap *bootstrap, int count, int mixed) {
    Layers layers = {.count = count};
    for (int i = 0; i < count; i++) {
        EpLayout layout = mixed ? (EpLayout)(1 + i % 3) : EP_LAYOUT_EXPERT_MAJOR;
        World *world = layer_world(i, layout);
        if (i == 0) layers.group = open_group(bootstrap, &world->c);
        EpHandle *handle = layers.group ? open_handle(layers.group, &world->c) : NULL;
        layers.step[i] = (Step){layers.group, handle, world, bootstrap->rank, NULL};
    }
    return layers;
}

static void layers_close(Layers *layers) {
    ep_group_destroy(layers->group);
    for (int i = 0; i < layers->count; i++)
        world_free((World *)(uintptr_t)layers->step[i].world);
}

static void forward(const Step *step) {
    step_prepare(step);
    step_dispatch(step);
    step_combine(step);
}

static void backward(const Step *step) {
    step_combine_backward(step);
    step_dispatch_backward(step);
}

ThreadTest(handles_pipeline, f0_f1_b0_f2_b1_b2, RANKS) {
    Layers layers = layers_open(bootstrap, 3, 0);
    Step *micro = layers.step;
    /* Two handles are enough: the third micro-batch reuses the first one's handle. */
    micro[2].handle = micro[0].handle;
    forward(&micro[0]);
    forward(&micro[1]);
    backward(&micro[0]);
    forward(&micro[2]);
    backward(&micro[1]);
    backward(&micro[2]);
    layers_close(&layers);
}

ThreadTest(handles_pipeline, two_equal_layers_interleaved, RANKS) {
    Layers layers = layers_open(bootstrap, 2, 0);
    const Step *a = &layers.step[0], *b = &layers.step[1];
    step_prepare(a);
    step_prepare(b);
    step_dispatch(b);
    step_dispatch(a);
    step_combine_backward(a);
    step_combine(b);
    step_combine(a);
    step_dispatch_backward(b);
    step_combine_backward(b);
    step_dispatch_backward(a);
    layers_close(&layers);
}

/* Forward through all layers, then backward in the opposite order, twice, with handles of every
 * layout. */
ThreadTest(handles_pipeline, twelve_layers_of_all_layouts, RANKS) {
    Layers layers = layers_open(bootstrap, MAX_LAYERS, 1);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < MAX_LAYERS; i++)
            forward(&layers.step[i]);
        for (int i = MAX_LAYERS - 1; i >= 0; i--)
            backward(&layers.step[i]);
    }
    layers_close(&layers);
}

/* Handles are destroyed and created between steps; the others are not affected. */
ThreadTest(handles_pipeline, handles_come_and_go, RANKS) {
    Layers layers = layers_open(bootstrap, 4, 0);
    Step *step = layers.step;
    for (int i = 0; i < 4; i++)
        forward(&step[i]);
    ep_handle_destroy(step[1].handle);
    ep_handle_destroy(step[2].handle);
    backward(&step[3]);
    step[1].handle = open_handle(layers.group, &step[1].world->c);
    if (step[1].handle) forward(&step[1]);
    backward(&step[0]);
    if (step[1].handle) backward(&step[1]);
    layers_close(&layers);
}

/* An operation can be repeated with the same result. */
ThreadTest(handles_pipeline, operations_repeated, RANKS) {
    Layers layers = layers_open(bootstrap, 1, 0);
    step_prepare(layers.step);
    for (int i = 0; i < 3; i++)
        step_dispatch(layers.step);
    for (int i = 0; i < 3; i++)
        step_combine(layers.step);
    for (int i = 0; i < 3; i++)
        backward(layers.step);
    layers_close(&layers);
}

/* Compute the dot products. The oracle has only a bound for them, but their bits must repeat. */
static void slot_gradients(const Step *step, float *out) {
    EpTensor grad_out = step_grad_out(step), weights = step_slot_weights(step);
    EpTensor expert_out = step_expert_out(step), slots = weights;
    const Case *c = &step->world->c;
    Image rows =
        image_new((size_t)step->world->rank[step->rank].buffer_rows * case_sum_bytes(c), 16);
    EpTensor grad_rows = step_rows(step, rows.data, c->sum_type, c->hidden);
    slots.data = out;
    CHECK_OK(ep_combine_backward(step->handle, NULL, &grad_out, &weights, &expert_out, NULL,
                                 &grad_rows, &slots));
    image_free(&rows);
}

static void collect_gradients(const EpBootstrap *bootstrap, float *out) {
    Layers layers = layers_open(bootstrap, 1, 0);
    step_prepare(layers.step);
    slot_gradients(layers.step, out);
    layers_close(&layers);
}

ThreadTest(handles_pipeline, slot_gradients_repeat_to_the_bit, RANKS) {
    enum { ROOM = 400 };
    float first[ROOM] = {0}, again[ROOM] = {0};
    collect_gradients(bootstrap, first);
    for (int i = 0; i < 3; i++) {
        collect_gradients(bootstrap, again);
        CHECK(memcmp(first, again, sizeof(first)) == 0, "run %d differs", i);
    }
    CHECK(first[0] != 0 || first[1] != 0, "nothing was computed");
}

/* Each handle counts its own steps. */
ThreadTest(handles_pipeline, steps_are_counted, RANKS) {
    Layers layers = layers_open(bootstrap, 2, 0);
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    step_prepare(&layers.step[1]);
    for (int i = 1; i <= 3; i++) {
        step_prepare(&layers.step[0]);
        CHECK_OK(ep_handle_info(layers.step[0].handle, &info));
        CHECK(info.step == i, "step %lld instead of %d", (long long)info.step, i);
    }
    CHECK_OK(ep_handle_info(layers.step[1].handle, &info));
    CHECK(info.step == 1, "step %lld instead of 1", (long long)info.step);
    layers_close(&layers);
}

/* T changes from step to step, and is 0 on one rank in one of them. */
ThreadTest(handles_pipeline, tokens_vary_from_step_to_step, RANKS) {
    static const Spread spreads[] = {SPREAD_FULL, SPREAD_NONE, SPREAD_HOLE, SPREAD_ALONE,
                                     SPREAD_RANDOM};
    Layers layers = layers_open(bootstrap, 1, 0);
    for (int i = 0; i < 5 && layers.group; i++) {
        Case c = layers.step[0].world->c;
        c.spread = spreads[i];
        c.seed = (uint64_t)i;
        World *world = world_new(&c);
        Step step = {layers.group, layers.step[0].handle, world, bootstrap->rank, NULL};
        step_all(&step);
        world_free(world);
    }
    layers_close(&layers);
}
