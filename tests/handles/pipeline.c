/* SPDX-License-Identifier: Apache-2.0 */
/* Several live handles, used in any order. Each keeps the plan of its own step, so every operation
 * gives what the oracle expects. */
#include "tests/cases/run.h"

enum { RANKS = 3, MAX_LAYERS = 9 };

/* One rank's handles, with a world each. */
typedef struct Layers {
    EpGroup *group;
    Step step[MAX_LAYERS];
    int count;
} Layers;

static Layers layers_open(const EpBootstrap *bootstrap, int count, int mixed) {
    Layers layers = {.count = count};
    for (int i = 0; i < count; i++) {
        Case c = case_of("ranks=%d experts=7 top_k=3 weighted=1 alignment=4 layout=%d "
                         "scale_bytes=4 seed=%d",
                         RANKS, mixed ? 1 + i % 3 : 1, 40 + i);
        World *world = world_new(&c);
        if (i == 0) layers.group = open_group(bootstrap, &world->c);
        EpHandle *handle = open_handle(layers.group, &world->c);
        layers.step[i] = (Step){layers.group, handle, world, bootstrap->rank, NULL};
    }
    return layers;
}

static void layers_close(Layers *layers) {
    ep_group_destroy(layers->group);
    for (int i = 0; i < layers->count; i++)
        world_free(layers->step[i].world);
}

/* Run operations: "p" prepare, "d" dispatch, "c" combine, "C" combine backward, "D" dispatch
 * backward, "f" forward (pdc), "b" backward (CD), each with the number of a layer. */
static void run_script(const Layers *layers, const char *script) {
    for (; *script; script += script[2] ? 3 : 2) {
        const Step *step = &layers->step[script[1] - '0'];
        int forward = *script == 'f', backward = *script == 'b';
        check_note("at %s", script);
        if (*script == 'p' || forward) step_prepare(step);
        if (*script == 'd' || forward) step_dispatch(step);
        if (*script == 'c' || forward) step_combine(step);
        if (*script == 'C' || backward) step_combine_backward(step);
        if (*script == 'D' || backward) step_dispatch_backward(step);
    }
}

static void run_alone(const EpBootstrap *bootstrap, int count, int mixed, const char *script) {
    Layers layers = layers_open(bootstrap, count, mixed);
    run_script(&layers, script);
    layers_close(&layers);
}

RankTest(handles_pipeline, two_equal_layers_interleaved, RANKS,
         run_alone(bootstrap, 2, 0, "p0 p1 d1 d0 C0 c1 c0 D1 C1 D0"));
/* An operation can be repeated with the same result. */
RankTest(handles_pipeline, operations_repeated, RANKS,
         run_alone(bootstrap, 1, 0, "p0 d0 d0 d0 c0 c0 c0 b0 b0 b0"));
/* Forward through all layers, then backward in the opposite order, twice, in every layout. */
RankTest(handles_pipeline, nine_layers_of_all_layouts, RANKS,
         run_alone(bootstrap, 9, 1,
                   "f0 f1 f2 f3 f4 f5 f6 f7 f8 b8 b7 b6 b5 b4 b3 b2 b1 b0 "
                   "f0 f1 f2 f3 f4 f5 f6 f7 f8 b8 b7 b6 b5 b4 b3 b2 b1 b0"));

/* Two handles are enough for three micro-batches: the third one reuses the first one's handle. */
ThreadTest(handles_pipeline, f0_f1_b0_f2_b1_b2, RANKS) {
    Layers layers = layers_open(bootstrap, 3, 0);
    layers.step[2].handle = layers.step[0].handle;
    run_script(&layers, "f0 f1 b0 f2 b1 b2");
    layers_close(&layers);
}

/* Handles are destroyed and created between steps; the others are not affected. */
ThreadTest(handles_pipeline, handles_come_and_go, RANKS) {
    Layers layers = layers_open(bootstrap, 4, 0);
    Step *step = layers.step;
    run_script(&layers, "f0 f1 f2 f3");
    ep_handle_destroy(step[1].handle);
    ep_handle_destroy(step[2].handle);
    run_script(&layers, "b3");
    step[1].handle = open_handle(layers.group, &step[1].world->c);
    run_script(&layers, "f1 b0 b1");
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
