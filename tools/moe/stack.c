/* SPDX-License-Identifier: Apache-2.0 */

/**
 * A step of a stack. What travels is on the device's second stream, the side, in the order in which
 * the step needs it or makes it. Each follows what it needs, and no more:
 *
 *     forward    side     gather 0 ─ gather 1 ─ ...         a layer ahead of the products
 *     backward   side     ... ─ reduce w2 of i ─ reduce w1 of i ─ ...   each once it is computed
 *
 * A product waits for the weight that it takes. A product for the gradient of a weight waits until
 * the gradient of layer i + 2 has travelled, since layers i and i + 2 share memory for gradients.
 * Weights stay from forward to backward. If they are gathered again, layers i and i + 2 share
 * memory for these, too: a gather then waits until the layer that used the memory is past it.
 *
 * No rank waits in a circle: all ranks queue the same in one order, in which each kernel follows
 * those that it waits for. A kernel of weights holds multiprocessors while it waits for other
 * ranks, but at most WEIGHT_SMS of them (layer.c). The operations of the EP group have no more
 * blocks than multiprocessors are left, so that both can run.
 */

#include "tools/moe/stack.h"

#include <math.h>
#include <stdlib.h>

#include "tools/common/util.h"

typedef struct Stack {
    World *world;
    int64_t num;
    Layer *layers;
    MoeOptions *options; /* of each layer, whose seed is its own: so its weights are, too */
    int64_t created;
    void *graphs[3]; /* of what is timed, where it is replayed */
    int captured;
} Stack;

static MoeDevice *device_of(const Stack *s) {
    return &s->layers[0].device;
}

/* Of calls of weights that run beside a layer. Without overlap they run in the same order. */
static EpStream side_of(const Stack *s) {
    return s->layers[0].overlaps ? device_of(s)->side : device_of(s)->stream;
}

/* ---- steps --------------------------------------------------------------------------------- */

/* Points of a layer: what is gathered or reduced is there, or what these wait for. */
enum {
    HAS_W1,
    HAS_W2,
    HAS_W2_BACKWARD,
    HAS_W1_BACKWARD,
    MULTIPLIED, /* the last product of forward */
    BACKWARD,   /* forward is over, and the layer above's backward */
    HAS_GRADIENT,
    REDUCED = HAS_GRADIENT + NUM_WEIGHTS,
    NUM_POINTS = REDUCED + NUM_WEIGHTS
};

static bool mark(Stack *s, bool side, int64_t layer, int point) {
    const bool overlaps = s->layers[0].overlaps;
    return !overlaps || device_of(s)->mark(device_of(s), side, (int)layer * NUM_POINTS + point);
}

/* Points of layers that the stack does not have are passed. */
static bool await(Stack *s, bool side, int64_t layer, int point) {
    const bool overlaps = s->layers[0].overlaps && layer >= 0 && layer < s->num;
    return !overlaps || device_of(s)->await(device_of(s), side, (int)layer * NUM_POINTS + point);
}

/* The top layer's weights are still there when backward begins, if they travel in one form. */
static bool regathers(const Stack *s, const Layer *layer) {
    const Weight *w1 = &layer->weights[WEIGHT_W1];
    return moe_phase_exists(layer, MOE_GATHER_W1_BACKWARD) &&
           (layer != &s->layers[s->num - 1] || (w1->two_forms && !w1->turns));
}

static bool run_on(Layer *layer, EpStream stream, MoePhase phase) {
    layer->weights_stream = stream;
    bool ok = moe_phase_run(layer, phase);
    layer->weights_stream = layer->device.stream;
    return ok;
}

static bool gather_forward(Layer *layer, EpStream stream) {
    return run_on(layer, stream, MOE_GATHER_W1) && run_on(layer, stream, MOE_GATHER_W2);
}

static bool gather_backward(const Stack *s, Layer *layer, EpStream stream) {
    return !regathers(s, layer) || (run_on(layer, stream, MOE_GATHER_W2_BACKWARD) &&
                                    run_on(layer, stream, MOE_GATHER_W1_BACKWARD));
}

static bool reduce(Layer *layer, EpStream stream) {
    return run_on(layer, stream, MOE_REDUCE_W2) && run_on(layer, stream, MOE_REDUCE_W1) &&
           run_on(layer, stream, MOE_REDUCE_ROUTER);
}

static bool is_gather(MoePhase p) {
    return p == MOE_GATHER_W1 || p == MOE_GATHER_W2 || p == MOE_GATHER_W1_BACKWARD ||
           p == MOE_GATHER_W2_BACKWARD;
}

/* Phases first .. last, without what is gathered. */
static bool compute(Layer *layer, MoePhase first, MoePhase last) {
    bool ok = true;
    for (int p = (int)first; ok && p <= (int)last; p++)
        ok = is_gather((MoePhase)p) || moe_phase_run(layer, (MoePhase)p);
    return ok;
}

/* ---- beside each other --------------------------------------------------------------------- */

/* Gather a weight, and transpose it where forward takes it so, both on the side. */
static bool fetch(Stack *s, int64_t i, MoePhase gathers, MoePhase transposes, int point) {
    Layer *layer = &s->layers[i];
    MoeDevice *d = &layer->device;
    if (!run_on(layer, side_of(s), gathers)) return false;
    if (layer->overlaps) d->exchange(d);
    bool ok = moe_phase_run(layer, transposes);
    if (layer->overlaps) d->exchange(d);
    return ok && mark(s, true, i, point);
}

/* What products take is in memory that layer i - 2 has used, unless it stays as it travels. */
static bool gather_ahead(Stack *s, int64_t i) {
    const Weight *w1 = &s->layers[i].weights[WEIGHT_W1];
    return ((w1->keeps && !w1->turns) || await(s, true, i - 2, MULTIPLIED)) &&
           fetch(s, i, MOE_GATHER_W1, MOE_TRANSPOSE_W1, HAS_W1) &&
           fetch(s, i, MOE_GATHER_W2, MOE_TRANSPOSE_W2, HAS_W2);
}

/* What layer i's backward products take, after forward or after backward of layer i + 2. */
static bool gather_back(Stack *s, int64_t i) {
    Layer *layer = &s->layers[i];
    if (!regathers(s, layer)) return true;
    return (i + 1 == s->num || await(s, true, i + 1, BACKWARD)) &&
           run_on(layer, side_of(s), MOE_GATHER_W2_BACKWARD) && mark(s, true, i, HAS_W2_BACKWARD) &&
           run_on(layer, side_of(s), MOE_GATHER_W1_BACKWARD) && mark(s, true, i, HAS_W1_BACKWARD);
}

static bool forward_beside(Stack *s, int64_t i) {
    Layer *layer = &s->layers[i];
    return compute(layer, MOE_ROUTER, MOE_DISPATCH) &&
           (i + 1 < s->num ? gather_ahead(s, i + 1) : gather_back(s, i)) &&
           compute(layer, MOE_QUANTISE_ROWS, MOE_QUANTISE_ROWS) && await(s, false, i, HAS_W1) &&
           (!moe_phase_exists(layer, MOE_DEQUANTISE) || await(s, false, i, HAS_W2)) &&
           compute(layer, MOE_DEQUANTISE, MOE_DEQUANTISE) &&
           compute(layer, MOE_GEMM1, MOE_QUANTISE_ACTIVATION) && await(s, false, i, HAS_W2) &&
           compute(layer, MOE_GEMM2, MOE_GEMM2) && mark(s, false, i, MULTIPLIED) &&
           compute(layer, MOE_COMBINE, MOE_COMBINE);
}

/* The phase that makes the gradient of a weight, and the reduction beside what follows. */
static bool reduce_beside(Stack *s, int64_t i, WeightId id, MoePhase makes, MoePhase reduces) {
    Layer *layer = &s->layers[i];
    return await(s, false, i + 2, REDUCED + (int)id) && compute(layer, makes, makes) &&
           mark(s, false, i, HAS_GRADIENT + (int)id) && await(s, true, i, HAS_GRADIENT + (int)id) &&
           run_on(layer, side_of(s), reduces) && mark(s, true, i, REDUCED + (int)id);
}

/* The gradient of a weight is first of a layer's two products, so that it travels beside the other
 * one. */
static bool backward_beside(Stack *s, int64_t i) {
    Layer *layer = &s->layers[i];
    const bool waits = regathers(s, layer);
    const bool waits_for_both = waits && moe_phase_exists(layer, MOE_DEQUANTISE_BACKWARD);
    return mark(s, false, i, BACKWARD) &&
           compute(layer, MOE_COMBINE_BACKWARD, MOE_COMBINE_BACKWARD) &&
           (i == 0 || gather_back(s, i - 1)) &&
           compute(layer, MOE_QUANTISE_GRAD_Y, MOE_QUANTISE_GRAD_Y) &&
           reduce_beside(s, i, WEIGHT_W2, MOE_GEMM2_WEIGHT, MOE_REDUCE_W2) &&
           (!waits || await(s, false, i, HAS_W2_BACKWARD)) &&
           (!waits_for_both || await(s, false, i, HAS_W1_BACKWARD)) &&
           compute(layer, MOE_DEQUANTISE_BACKWARD, MOE_DEQUANTISE_BACKWARD) &&
           compute(layer, MOE_GEMM2_INPUT, MOE_GEMM2_INPUT) &&
           compute(layer, MOE_ACTIVATION_BACKWARD, MOE_QUANTISE_GRAD_Z) &&
           reduce_beside(s, i, WEIGHT_W1, MOE_GEMM1_WEIGHT, MOE_REDUCE_W1) &&
           (!waits || await(s, false, i, HAS_W1_BACKWARD)) &&
           compute(layer, MOE_GEMM1_INPUT, MOE_GEMM1_INPUT) &&
           compute(layer, MOE_DISPATCH_BACKWARD, MOE_DISPATCH_BACKWARD) &&
           reduce_beside(s, i, WEIGHT_ROUTER, MOE_ROUTER_BACKWARD, MOE_REDUCE_ROUTER);
}

static bool run_step(Stack *s) {
    MoeDevice *d = device_of(s);
    bool ok = d->fork(d) && gather_ahead(s, 0);
    for (int64_t i = 0; ok && i < s->num; i++)
        ok = forward_beside(s, i);
    for (int64_t i = s->num - 1; ok && i >= 0; i--)
        ok = backward_beside(s, i);
    return ok && d->join(d);
}

/* ---- apart --------------------------------------------------------------------------------- */

static bool run_apart(Stack *s) {
    EpStream stream = device_of(s)->stream;
    bool ok = true;
    for (int64_t i = 0; ok && i < s->num; i++)
        ok = compute(&s->layers[i], MOE_ROUTER, MOE_DISPATCH) &&
             gather_forward(&s->layers[i], stream) &&
             compute(&s->layers[i], MOE_DISPATCH + 1, MOE_COMBINE);
    for (int64_t i = s->num - 1; ok && i >= 0; i--)
        ok = gather_backward(s, &s->layers[i], stream) &&
             compute(&s->layers[i], MOE_COMBINE_BACKWARD, MOE_ROUTER_BACKWARD) &&
             reduce(&s->layers[i], stream);
    return ok;
}

static bool run_weights(Stack *s) {
    EpStream stream = device_of(s)->stream;
    bool ok = true;
    for (int64_t i = 0; ok && i < s->num; i++)
        ok = gather_forward(&s->layers[i], stream);
    for (int64_t i = s->num - 1; ok && i >= 0; i--)
        ok = gather_backward(s, &s->layers[i], stream) && reduce(&s->layers[i], stream);
    return ok;
}

/* ---- layers -------------------------------------------------------------------------------- */

/* A layer's rows depend on its tokens, which are the output of the one below. */
static bool create(Stack *s, const MoeOptions *o, const MoeMesh *mesh) {
    bool ok = true;
    for (; ok && s->created < s->num; s->created++) {
        Layer *layer = &s->layers[s->created];
        s->options[s->created] = *o;
        s->options[s->created].run.seed += s->created;
        const Layer *below = s->created ? layer - 1 : NULL;
        ok = layer_create(s->world, &s->options[s->created], mesh, below, below, layer);
        if (!ok) break;
        ok = compute(layer, MOE_ROUTER, MOE_DISPATCH) &&
             gather_forward(layer, layer->device.stream) &&
             compute(layer, MOE_DISPATCH + 1, MOE_COMBINE) && layer->device.finish(&layer->device);
        ok = world_all(s->world, ok);
    }
    return ok;
}

static void destroy(Stack *s) {
    for (int64_t i = s->created - 1; i >= 0; i--)
        layer_destroy(&s->layers[i]);
}

/* ---- the check ----------------------------------------------------------------------------- */

/* Number `i` of the results: the output, the tokens' gradient, and the gradients of shards. */
static const EpTensor *result_of(const Stack *s, int64_t i) {
    if (i == 0) return &s->layers[s->num - 1].tensors[T_OUT];
    if (i == 1) return &s->layers[0].tensors[T_GRAD_TOKENS];
    return &s->layers[(i - 2) / NUM_WEIGHTS].weights[(i - 2) % NUM_WEIGHTS].grad_shard;
}

static int64_t count_results(const Stack *s) {
    return 2 + s->num * NUM_WEIGHTS;
}

/* A copy in the device's memory. */
static bool take(Stack *s, int64_t i, EpTensor *out) {
    MoeDevice *d = device_of(s);
    const size_t bytes = (size_t)tensor_bytes(result_of(s, i));
    *out = *result_of(s, i);
    out->data = d->alloc(d, bytes, "a result of layers apart");
    return out->data && d->copy(d, out->data, result_of(s, i)->data, bytes);
}

static bool compare(Stack *s, int64_t i, const EpTensor *want, StackResult *out) {
    MoeDevice *d = device_of(s);
    Difference difference;
    if (!d->differ(d, result_of(s, i), want, &difference)) return false;
    out->wrong += difference.elements;
    out->elements += tensor_elements(want);
    return true;
}

static void plant_fault(Stack *s, int fault) {
    for (int64_t i = 0; i < s->num; i++)
        s->options[i].fault = fault;
}

/* Without the faults that tests plant. */
static bool take_apart(Stack *s, EpTensor *want) {
    const int fault = s->options[0].fault;
    plant_fault(s, -1);
    bool ok = run_apart(s) && device_of(s)->finish(device_of(s));
    for (int64_t i = 0; ok && i < count_results(s); i++)
        ok = take(s, i, &want[i]);
    for (int64_t i = 0; ok && i < s->num; i++)
        ok = weights_spoil(&s->layers[i]);
    plant_fault(s, fault);
    return ok;
}

/* The step gives the same bits as layers apart. */
static bool check(Stack *s, StackResult *out) {
    const int64_t count = count_results(s);
    EpTensor *want = bench_alloc((size_t)count, sizeof(EpTensor), "results");
    bool ok = want && take_apart(s, want);
    ok = world_all(s->world, ok);
    ok = ok && world_all(s->world, run_step(s) && device_of(s)->finish(device_of(s)));
    out->wrong = 0;
    for (int64_t i = 0; ok && i < count; i++)
        ok = compare(s, i, &want[i], out);
    for (int64_t i = 0; want && i < count; i++)
        if (want[i].data) device_of(s)->release(device_of(s), want[i].data);
    free(want);
    int64_t sums[] = {out->elements, out->wrong};
    if (!world_all(s->world, ok) || !world_sum(s->world, sums, 2)) return false;
    out->elements = sums[0], out->wrong = sums[1];
    return true;
}

/* ---- times --------------------------------------------------------------------------------- */

enum { STEP, APART, WEIGHTS, NUM_TIMED };

static bool queue(Stack *s, int which) {
    return which == STEP ? run_step(s) : which == APART ? run_apart(s) : run_weights(s);
}

static bool run(void *context, int which) {
    Stack *s = context;
    MoeDevice *d = device_of(s);
    if (!d->start(d)) return false;
    bool ok = s->graphs[which] ? d->replay(d, s->graphs[which]) : queue(s, which);
    return ok && d->stop(d);
}

static double took(void *context) {
    return device_of(context)->took_us;
}

static bool queue_captured(void *context) {
    Stack *s = context;
    return queue(s, s->captured);
}

/* Each has run once before it is captured. */
static bool capture(Stack *s) {
    MoeDevice *d = device_of(s);
    bool ok = true;
    for (s->captured = 0; ok && s->captured < NUM_TIMED; s->captured++) {
        ok = world_all(s->world, queue(s, s->captured) && d->finish(d)) &&
             world_all(s->world, d->capture(d, queue_captured, s, &s->graphs[s->captured]));
    }
    return ok;
}

/* Of all layers, which have the lowest one's work. */
static bool add_floors(Stack *s, StackResult *out) {
    MoeResult one = {.floor_us = -1};
    if (!moe_measure_floor(&s->layers[0], &one)) return false;
    for (int p = 0; p < NUM_MOE_PHASES; p++) {
        double *sum = moe_phase_travels((MoePhase)p) ? &out->wire_us : &out->compute_us;
        if (one.phases[p].floor_us > 0) *sum += (double)s->num * one.phases[p].floor_us;
    }
    return true;
}

static bool measure(Stack *s, const MoeOptions *o, StackResult *out) {
    Quantiles times[NUM_TIMED];
    int64_t bytes[] = {weights_buffers(&s->layers[0], s->num), 0};
    for (int64_t i = 0; i < s->num; i++)
        bytes[1] += s->layers[i].buffer_bytes;
    if (!world_max(s->world, bytes, 2) || (o->run.check && !check(s, out)) ||
        (o->graph && !capture(s)) ||
        !time_calls_by(s->world, o->run.warmup, o->run.iterations, run, took, s, NUM_TIMED,
                       times) ||
        (o->run.floor && !add_floors(s, out)))
        return false;
    out->promised_bytes = bytes[0], out->taken_bytes = bytes[1];
    out->step = times[STEP], out->apart = times[APART], out->weights = times[WEIGHTS];
    return true;
}

double moe_stack_hidden(const StackResult *r) {
    if (!r->overlaps || r->weights.median_us <= 0) return NAN;
    return (r->apart.median_us - r->step.median_us) / r->weights.median_us;
}

static bool report_all(Stack *s, MoeReport *report, const StackResult *r) {
    const char *path = report->options->run.json_path;
    if (s->world->rank == 0) moe_report_stack(r);
    bool written = s->world->rank != 0 || !path || moe_json_write_stack(report, r, path);
    if (!world_all(s->world, written)) return false;
    return r->wrong <= 0 || bench_fail("%lld elements are wrong", (long long)r->wrong);
}

bool moe_stack_run(World *world, const MoeOptions *options, const MoeMesh *mesh,
                   MoeReport *report) {
    Stack s = {.world = world, .num = options->layers};
    StackResult result = {.layers = options->layers, .wrong = -1};
    s.layers = bench_alloc((size_t)s.num, sizeof(Layer), "layers");
    s.options = bench_alloc((size_t)s.num, sizeof(MoeOptions), "layers");
    bool ok = world_all(world, s.layers && s.options) && create(&s, options, mesh);
    if (ok) {
        report->layer = &s.layers[0];
        result.overlaps = s.layers[0].overlaps;
        if (world->rank == 0) moe_report_header(report);
        ok = measure(&s, options, &result) && report_all(&s, report, &result);
    }
    if (s.layers && !world->broken) destroy(&s);
    free(s.layers);
    free(s.options);
    return ok;
}
