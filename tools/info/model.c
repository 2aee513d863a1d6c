/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/info/model.h"

#include <math.h>
#include <stddef.h>

const ModelConstant model_constants[] = {
#define CONSTANT_ROW(name, value, unit, measured) {#name, value, unit, measured},
    MODEL_CONSTANTS(CONSTANT_ROW)
#undef CONSTANT_ROW
        {NULL, 0, NULL, NULL}};

/* Their values, by name. */
static const struct {
#define CONSTANT_FIELD(name, value, unit, measured) double name;
    MODEL_CONSTANTS(CONSTANT_FIELD)
#undef CONSTANT_FIELD
} constant = {
#define CONSTANT_VALUE(name, value, unit, measured) .name = value,
    MODEL_CONSTANTS(CONSTANT_VALUE)
#undef CONSTANT_VALUE
};

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t parts(int64_t all, int64_t each) {
    return (all + each - 1) / each;
}

/* Microseconds of bytes at a rate in GB/s. */
static double pass(double bytes, double gbs) {
    return bytes / gbs * 1e-3;
}

static int64_t record_bytes(const ModelGroup *g) {
    return parts(g->row_bytes + 4 * g->top_k, 16) * 16;
}

/* ---- chunks -------------------------------------------------------------------------------- */

/* As libep divides a step: ep_config_chunks in runtime/config.h. */
static int64_t count_messages(const ModelGroup *g, int64_t rows) {
    int64_t token = (g->nodes - 1) * record_bytes(g), quarter = rows * token / 4;
    int64_t bytes = least(quarter > 1 << 20 ? quarter : 1 << 20, 32 << 20);
    int64_t places = least(rows, bytes / token);
    return parts(rows, places > 0 ? places : 1);
}

/* ---- bytes --------------------------------------------------------------------------------- */

/* The rank that receives most decides. What it gets from its own tokens or as a relay stays. */
static double nvlink_bytes(const ModelGroup *g, const ModelRouting *routing) {
    double on_node = (double)(g->ranks / g->nodes), tokens = (double)(g->ranks * g->tokens);
    return tokens * routing->most_rank * (on_node - 1) / on_node * (double)g->row_bytes;
}

/* Tokens of a rank that another node needs, on the average over the nodes. */
static double mean_needed(const ModelGroup *g, const ModelRouting *routing) {
    double sum = 0;
    for (int64_t n = 0; n < g->nodes; n++)
        sum += routing->node[n];
    return sum / (double)g->nodes * (double)g->tokens;
}

static double most_needed(const ModelGroup *g, const ModelRouting *routing) {
    double most = 0;
    for (int64_t n = 0; n < g->nodes; n++)
        most = fmax(most, routing->node[n]);
    return most * (double)g->tokens;
}

/* Rows that the busiest rank reads and writes: its own tokens, those that it relays, its slots. */
static double memory_bytes(const ModelGroup *g, const ModelRouting *routing) {
    double relayed = (double)(g->nodes - 1) * mean_needed(g, routing);
    double slots = (double)(g->ranks * g->tokens) * routing->most_slots;
    return ((double)g->tokens + relayed + slots) * (double)g->row_bytes;
}

/* With exact sizing the busiest node's relays receive most. */
static double network_bytes(const ModelGroup *g, const ModelRouting *routing, ModelMode mode) {
    double rows = mode == MODEL_STATIC ? (double)g->node_rows : most_needed(g, routing);
    return (double)(g->nodes - 1) * rows * (double)record_bytes(g);
}

/* ---- time ---------------------------------------------------------------------------------- */

/* The slower of network and kernels decides, and a chunk's time on the faster one comes on top. */
static ModelTime between_nodes(const ModelGroup *g, const ModelRouting *routing, ModelMode mode,
                               double chunk, double memory) {
    ModelTime t = {0, network_bytes(g, routing, mode), nvlink_bytes(g, routing)};
    double chunks = (double)count_messages(g, mode == MODEL_STATIC ? g->node_rows : g->tokens);
    double network = chunks * g->network_us + pass(t.network_bytes, g->network_gbs);
    double bytes =
        fmax(pass(t.nvlink_bytes, constant.nvlink), pass(memory_bytes(g, routing), memory));
    double kernels = chunks * chunk + bytes;
    t.us = fmax(kernels, network) + fmin(kernels, network) / chunks;
    return t;
}

static ModelTime on_a_node(const ModelGroup *g, const ModelRouting *routing, double call,
                           double wire, double memory, double at_least) {
    ModelTime t = {0, 0, nvlink_bytes(g, routing)};
    double bytes = fmax(pass(t.nvlink_bytes, wire), pass(memory_bytes(g, routing), memory));
    t.us = fmax(call + bytes, at_least);
    return t;
}

/* Every rank reads the routing of all ranks where there are several nodes. */
static ModelTime time_prepare(const ModelGroup *g) {
    double entries = (double)(g->tokens * g->top_k), all = entries * (double)g->ranks;
    double others = (double)(g->ranks - g->ranks / g->nodes) / (double)g->ranks;
    ModelTime t = {constant.prepare, 0, 0};
    if (g->nodes == 1) {
        double beyond = fmax(0, entries - 2048.0 * 8);
        t.us += beyond / constant.prepare_entries * 1e-3;
        return t;
    }
    t.network_bytes = all * others * 4;
    t.us = constant.nodes_prepare + pass(t.network_bytes, g->network_gbs) +
           all / constant.prepare_entries * 1e-3;
    return t;
}

ModelStep model_step(const ModelGroup *g, const ModelRouting *routing, ModelMode mode) {
    ModelStep step = {.prepare = time_prepare(g)};
    if (mode == MODEL_LATENCY) {
        step.prepare = (ModelTime){0, 0, 0};
        step.dispatch =
            on_a_node(g, routing, constant.latency_dispatch, constant.latency_dispatch_wire,
                      constant.latency_memory, constant.latency_least_dispatch);
        step.combine =
            on_a_node(g, routing, constant.latency_combine, constant.latency_combine_wire,
                      constant.latency_memory, constant.latency_least_combine);
    } else if (g->nodes == 1) {
        step.dispatch = on_a_node(g, routing, constant.call, constant.nvlink,
                                  constant.spread_memory, constant.least_dispatch);
        step.combine = on_a_node(g, routing, constant.call, constant.nvlink, constant.sum_memory,
                                 constant.least_combine);
    } else {
        step.dispatch =
            between_nodes(g, routing, mode, constant.nodes_dispatch, constant.spread_memory);
        step.combine = between_nodes(g, routing, mode, constant.nodes_combine, constant.sum_memory);
    }
    return step;
}

/* ---- odds ---------------------------------------------------------------------------------- */

/* The continued fraction of the incomplete beta function (Lentz's method), for x below
 * (a + 1) / (a + b + 2). */
static double beta_fraction(double a, double b, double x) {
    double c = 1, d = 1 - (a + b) * x / (a + 1), result;
    d = 1 / (fabs(d) < 1e-300 ? 1e-300 : d), result = d;
    for (int i = 1; i < 100000; i++) {
        double even = i * (b - i) * x / ((a + 2 * i - 1) * (a + 2 * i));
        double odd = -(a + i) * (a + b + i) * x / ((a + 2 * i) * (a + 2 * i + 1));
        double before = result;
        for (int j = 0; j < 2; j++) {
            double term = j ? odd : even;
            d = 1 + term * d, c = 1 + term / c;
            d = 1 / (fabs(d) < 1e-300 ? 1e-300 : d), c = fabs(c) < 1e-300 ? 1e-300 : c;
            result *= c * d;
        }
        if (fabs(result - before) < 1e-14 * fabs(result)) break;
    }
    return result;
}

/* The regularised incomplete beta function I_x(a, b). */
static double incomplete_beta(double a, double b, double x) {
    double front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x));
    if (x < (a + 1) / (a + b + 2)) return front * beta_fraction(a, b, x) / a;
    return 1 - front * beta_fraction(b, a, 1 - x) / b;
}

double model_tail(int64_t n, double p, int64_t most) {
    if (most >= n || p <= 0) return 0;
    if (most < 0 || p >= 1) return 1;
    return incomplete_beta((double)most + 1, (double)(n - most), p);
}

double model_overflow(const ModelGroup *g, const ModelRouting *routing, double *lost) {
    double none = 0, sources = (double)(g->ranks - g->ranks / g->nodes);
    if (lost) *lost = 0;
    for (int64_t n = 0; n < g->nodes && g->nodes > 1; n++) {
        double tail = model_tail(g->tokens, routing->node[n], g->node_rows);
        none += sources * log1p(-fmin(tail, 1 - 1e-16));
        for (int64_t k = g->node_rows; lost && k < g->tokens && tail > 1e-18; k++) {
            *lost += sources * tail;
            tail = model_tail(g->tokens, routing->node[n], k + 1);
        }
    }
    return fabs(expm1(none));
}

int64_t model_propose(ModelGroup g, const ModelRouting *routing, double odds) {
    int64_t low = 1, high = g.tokens;
    while (low < high) {
        g.node_rows = (low + high) / 2;
        if (model_overflow(&g, routing, NULL) <= odds)
            high = g.node_rows;
        else
            low = g.node_rows + 1;
    }
    return high;
}

/* ---- memory -------------------------------------------------------------------------------- */

/* Throughput mode: two buffers to send and two to receive, and a combine keeps the messages of all
 * chunks where they have fewer places than there are tokens. Latency mode, for each set: messages
 * to and from the other nodes, and rows of the node's ranks. */
ModelMemory model_memory(const ModelGroup *g, int64_t sets) {
    int64_t others = g->nodes - 1, record = record_bytes(g), on_node = g->ranks / g->nodes;
    ModelMemory m = {0, 0, sets * on_node * g->tokens * record};
    if (!others) return m;
    int64_t chunks = count_messages(g, g->node_rows), places = parts(g->node_rows, chunks);
    int64_t received = g->node_rows < g->tokens && chunks > 2 ? chunks : 2;
    m.messages = (2 + received) * others * places * record;
    m.routing = g->ranks * g->tokens * g->top_k * 4;
    m.latency += sets * 2 * others * g->node_rows * record;
    return m;
}
