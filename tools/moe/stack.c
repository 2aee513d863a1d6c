/* SPDX-License-Identifier: Apache-2.0 */

/**
 * A step of a stack. The weights of the next layer travel while one computes, and the gradients of
 * the layer before:
 *
 *     forward, layer i     stream   router ─ prepare ─┬─ dispatch ─ ... ─ combine ─┬─
 *                          side                       └─ gather i + 1 ─────────────┘
 *     backward, layer i    stream   ─┬─ combine_backward ─ ... ─ router_backward ──┬─
 *                          side      └─ gather i - 1 ─ reduce i + 1 ───────────────┘
 *
 * Two layers next to each other have buffers of their own for what is gathered and for gradients,
 * and layers i and i + 2 share them. A fork follows all that was queued before, so that layer i - 1
 * has read its weights when those of i + 1 overwrite them. A join precedes the next layer, so that
 * the gradients of i + 1 have travelled when those of i - 1 overwrite them.
 *
 * No rank waits in a circle, for the reasons in step.c: what waits for other ranks on the stream
 * between fork and join is dispatch, combine and their backwards, which need two of their blocks.
 * prepare runs outside. All ranks call the first of these before the calls of weights.
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
} Stack;

static MoeDevice *device_of(const Stack *s) {
    return &s->layers[0].device;
}

/* Of calls of weights that run beside a layer. Without overlap they run in the same order. */
static EpStream side_of(const Stack *s) {
    return s->layers[0].overlaps ? device_of(s)->side : device_of(s)->stream;
}

/* ---- steps --------------------------------------------------------------------------------- */

/* The top layer's weights are still there when backward begins, if they have one form. */
static bool regathers(const Stack *s, const Layer *layer) {
    return layer != &s->layers[s->num - 1] || layer->weights[WEIGHT_W1].two_forms;
}

static bool run_each(Layer *layer, EpStream stream, const MoePhase *phases, int count) {
    bool ok = true;
    layer->weights_stream = stream;
    for (int i = 0; ok && i < count; i++)
        ok = moe_phase_run(layer, phases[i]);
    layer->weights_stream = layer->device.stream;
    return ok;
}

static bool gather_forward(Layer *layer, EpStream stream) {
    static const MoePhase calls[] = {MOE_GATHER_W1, MOE_GATHER_W2};
    return run_each(layer, stream, calls, 2);
}

static bool gather_backward(const Stack *s, Layer *layer, EpStream stream) {
    static const MoePhase calls[] = {MOE_GATHER_W2_BACKWARD, MOE_GATHER_W1_BACKWARD};
    return !regathers(s, layer) || run_each(layer, stream, calls, 2);
}

static bool reduce(Layer *layer, EpStream stream) {
    static const MoePhase calls[] = {MOE_REDUCE_W2, MOE_REDUCE_W1, MOE_REDUCE_ROUTER};
    return run_each(layer, stream, calls, 3);
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

static bool forward_beside(Stack *s, int64_t i) {
    MoeDevice *d = device_of(s);
    Layer *layer = &s->layers[i];
    return compute(layer, MOE_ROUTER, MOE_PREPARE) && d->fork(d) &&
           compute(layer, MOE_DISPATCH, MOE_DISPATCH) &&
           (i + 1 < s->num ? gather_forward(layer + 1, side_of(s))
                           : gather_backward(s, layer, side_of(s))) &&
           compute(layer, MOE_DISPATCH + 1, MOE_COMBINE) && d->join(d);
}

static bool backward_beside(Stack *s, int64_t i) {
    MoeDevice *d = device_of(s);
    Layer *layer = &s->layers[i];
    return d->fork(d) && compute(layer, MOE_COMBINE_BACKWARD, MOE_COMBINE_BACKWARD) &&
           (i == 0 || gather_backward(s, layer - 1, side_of(s))) &&
           (i + 1 == s->num || reduce(layer + 1, side_of(s))) &&
           compute(layer, MOE_COMBINE_BACKWARD + 1, MOE_ROUTER_BACKWARD) && d->join(d);
}

static bool run_step(Stack *s) {
    bool ok = gather_forward(&s->layers[0], device_of(s)->stream);
    for (int64_t i = 0; ok && i < s->num; i++)
        ok = forward_beside(s, i);
    for (int64_t i = s->num - 1; ok && i >= 0; i--)
        ok = backward_beside(s, i);
    return ok && reduce(&s->layers[0], device_of(s)->stream);
}

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
        ok = layer_create(s->world, &s->options[s->created], mesh, s->created ? layer - 1 : NULL,
                          layer);
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

static bool run(void *context, int which) {
    Stack *s = context;
    MoeDevice *d = device_of(s);
    if (!d->start(d)) return false;
    bool ok = which == STEP ? run_step(s) : which == APART ? run_apart(s) : run_weights(s);
    return ok && d->stop(d);
}

static double took(void *context) {
    return device_of(context)->took_us;
}

static bool measure(Stack *s, const MoeOptions *o, StackResult *out) {
    Quantiles times[NUM_TIMED];
    int64_t bytes[] = {2 * weights_buffers(&s->layers[0]), 0};
    for (int64_t i = 0; i < s->num; i++)
        bytes[1] += s->layers[i].buffer_bytes;
    if (!world_max(s->world, bytes, 2) || (o->run.check && !check(s, out)) ||
        !time_calls_by(s->world, o->run.warmup, o->run.iterations, run, took, s, NUM_TIMED, times))
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
