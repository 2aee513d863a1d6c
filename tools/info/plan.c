/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/info/plan.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tools/bench/routing.h"
#include "tools/common/option.h"
#include "tools/info/model.h"

enum { DRAWN = 1 << 16 };        /* tokens of a distribution that are looked at */
static const double odds = 1e-6; /* of an overflow in a step, of what is proposed */

/* What is planned, and how its tokens choose experts. */
typedef struct Plan {
    const PlanOptions *options;
    ModelGroup group;
    ModelRouting routing;
    int64_t experts, most_seen; /* tokens of a trace's rank that another node needs, at most; 0: no
                                   trace of this group */
    Pool pool;
} Plan;

/* ---- options ------------------------------------------------------------------------------- */

static bool read_network(const char *text, ModelGroup *g) {
    double value = 50;
    if (text && strcmp(text, "nvlink") != 0 && strcmp(text, "sockets") != 0 &&
        !option_read_real(text, 0.001, 100000, &value))
        return bench_refuse("--network: expected GB/s of a rank, nvlink or sockets, got \"%s\"",
                            text);
    const char *rate = text && *text == 'n' ? "nvlink_network" : "sockets_network";
    const char *cost = text && *text == 'n' ? "nvlink_exchange" : "sockets_exchange";
    bool is_named = text && (*text == 'n' || *text == 's');
    g->network_gbs = value;
    for (const ModelConstant *c = model_constants; c->name; c++) {
        if (is_named && strcmp(c->name, rate) == 0) g->network_gbs = c->value;
        if (strcmp(c->name, is_named ? cost : "port_exchange") == 0) g->network_us = c->value;
    }
    return true;
}

static bool check_sizes(const Plan *p) {
    const ModelGroup *g = &p->group;
    if (g->ranks > PLAN_MAX_RANKS)
        return bench_refuse("--ranks: expected 1 .. %d, got %lld", PLAN_MAX_RANKS,
                            (long long)g->ranks);
    if (g->nodes < 1 || g->nodes > g->ranks || g->ranks % g->nodes)
        return bench_refuse("--nodes: expected a divisor of the %lld ranks, since nodes of a plan "
                            "have equal numbers of them, got %lld",
                            (long long)g->ranks, (long long)g->nodes);
    if (p->options->node_rows > g->tokens)
        return bench_refuse("--node-rows: expected 1 .. %lld tokens, got %lld",
                            (long long)g->tokens, (long long)p->options->node_rows);
    if (g->top_k > p->experts)
        return bench_refuse("--top-k: expected at most the %lld experts, got %lld",
                            (long long)p->experts, (long long)g->top_k);
    return true;
}

/* ---- routing ------------------------------------------------------------------------------- */

/* The first E mod R ranks own an expert more. */
static int64_t owner_of(const Plan *p, int64_t expert) {
    int64_t each = p->experts / p->group.ranks, more = p->experts % p->group.ranks;
    if (expert < more * (each + 1)) return expert / (each + 1);
    return more + (expert - more * (each + 1)) / each;
}

static int64_t node_of(const Plan *p, int64_t rank) {
    return rank / (p->group.ranks / p->group.nodes);
}

/* The odds that K distinct experts of E, all equally likely, are among those of a part. */
static double odds_of(const Plan *p, int64_t part) {
    double none = 1;
    for (int64_t k = 0; k < p->group.top_k; k++)
        none *= fmax(0, (double)(p->experts - part - k)) / (double)(p->experts - k);
    return 1 - none;
}

static void spread_evenly(Plan *p) {
    const ModelGroup *g = &p->group;
    for (int64_t e = 0; e < p->experts; e++) {
        int64_t rank = owner_of(p, e);
        p->routing.slots[rank]++, p->routing.node[node_of(p, rank)]++;
    }
    for (int64_t r = 0; r < g->ranks; r++) {
        p->routing.rank[r] = odds_of(p, (int64_t)p->routing.slots[r]);
        p->routing.slots[r] *= (double)g->top_k / (double)p->experts;
    }
    for (int64_t n = 0; n < g->nodes; n++)
        p->routing.node[n] = odds_of(p, (int64_t)p->routing.node[n]);
}

/* Count the nodes and ranks that a token needs, and its slots. */
static void count_token(Plan *p, const int32_t *experts) {
    int64_t seen[EP_MAX_TOP_K];
    int count = 0;
    for (int64_t k = 0; k < p->group.top_k; k++) {
        if (experts[k] < 0) continue;
        int64_t rank = owner_of(p, experts[k]);
        bool new_rank = true, new_node = true;
        for (int i = 0; i < count; i++) {
            new_rank = new_rank && seen[i] != rank;
            new_node = new_node && node_of(p, seen[i]) != node_of(p, rank);
        }
        seen[count++] = rank;
        p->routing.slots[rank]++;
        p->routing.rank[rank] += new_rank, p->routing.node[node_of(p, rank)] += new_node;
    }
}

/* Find the fullest message, of a trace whose ranks are the plan's. */
static bool find_fullest(Plan *p, const Routing *from) {
    int64_t *needed = pool_alloc(&p->pool, (size_t)p->group.nodes, sizeof(*needed), "plan");
    if (!needed) return false;
    for (int r = 0; r < from->num_ranks; r++) {
        memset(needed, 0, (size_t)p->group.nodes * sizeof(*needed));
        for (int64_t t = 0; t < from->tokens[r]; t++)
            for (int64_t n = 0; n < p->group.nodes; n++) {
                bool here = false;
                for (int64_t k = 0; k < p->group.top_k && n != node_of(p, r); k++) {
                    int32_t expert = routing_row(from, r, t)[k];
                    here = here || (expert >= 0 && node_of(p, owner_of(p, expert)) == n);
                }
                needed[n] += here;
                if (needed[n] > p->most_seen) p->most_seen = needed[n];
            }
    }
    return true;
}

static bool count_routing(Plan *p, const Routing *from) {
    int64_t tokens = from->first[from->num_ranks];
    if (!tokens) return bench_refuse("--plan: expected a trace with tokens, got none");
    for (int64_t t = 0; t < tokens; t++)
        count_token(p, from->experts + t * from->top_k);
    for (int64_t r = 0; r < p->group.ranks; r++)
        p->routing.rank[r] /= (double)tokens, p->routing.slots[r] /= (double)tokens;
    for (int64_t n = 0; n < p->group.nodes; n++)
        p->routing.node[n] /= (double)tokens;
    bool is_same = from->num_ranks == p->group.ranks && from->max_tokens == p->group.tokens;
    return !is_same || find_fullest(p, from);
}

static bool alloc_routing(Plan *p) {
    p->routing.node = pool_alloc(&p->pool, (size_t)p->group.nodes, sizeof(double), "plan");
    p->routing.rank = pool_alloc(&p->pool, (size_t)p->group.ranks, sizeof(double), "plan");
    p->routing.slots = pool_alloc(&p->pool, (size_t)p->group.ranks, sizeof(double), "plan");
    return !p->pool.failed;
}

/* A trace says how many experts, K and, unless options do, ranks and tokens there are. */
static bool read_trace(Plan *p, Routing *out) {
    TraceShape shape = {0, 0, 0};
    const char *path = p->options->routing;
    if (strncmp(path, "file:", 5) == 0) path += 5;
    if (!trace_read(path, &shape, out)) return false;
    p->experts = out->num_experts, p->group.top_k = out->top_k;
    if (!p->options->ranks) p->group.ranks = out->num_ranks;
    if (!p->options->tokens) p->group.tokens = out->max_tokens > 0 ? out->max_tokens : 1;
    return true;
}

static bool draw(World *world, const Plan *p, double exponent, Routing *out) {
    Options o = {.experts = p->experts, .top_k = p->group.top_k, .zipf_exponent = exponent};
    o.routing = ROUTING_ZIPF, o.run.seed = 1;
    return routing_make(world, &o, DRAWN, out);
}

static bool find_routing(World *world, Plan *p) {
    const char *text = p->options->routing;
    bool is_even = strcmp(text, "uniform") == 0, ok = true;
    bool is_zipf = strcmp(text, "zipf") == 0 || strncmp(text, "zipf:", 5) == 0;
    double exponent = 1;
    Routing from = {.num_ranks = 0};
    if (is_zipf && text[4] && !option_read_real(text + 5, 0, 16, &exponent))
        return bench_refuse("--plan: expected zipf:s with s from 0 to 16, got \"%s\"", text);
    if (!is_even && !is_zipf) ok = read_trace(p, &from);
    ok = ok && check_sizes(p) && alloc_routing(p) && (!is_zipf || draw(world, p, exponent, &from));
    if (ok && is_even) spread_evenly(p);
    ok = ok && (is_even || count_routing(p, &from));
    routing_free(&from);
    for (int64_t r = 0; ok && r < p->group.ranks; r++) {
        p->routing.most_rank = fmax(p->routing.most_rank, p->routing.rank[r]);
        p->routing.most_slots = fmax(p->routing.most_slots, p->routing.slots[r]);
    }
    return ok;
}

/* ---- printing ------------------------------------------------------------------------------ */

static void print_time(const char *what, const ModelTime *t) {
    printf("    %-9s %10.1f us %12.3f MB network %12.3f MB NVLink\n", what, t->us,
           t->network_bytes * 1e-6, t->nvlink_bytes * 1e-6);
}

static void print_step(const Plan *p, const char *what, ModelMode mode, int64_t node_rows) {
    ModelGroup g = p->group;
    g.node_rows = node_rows;
    ModelStep step = model_step(&g, &p->routing, mode);
    printf("  %s\n", what);
    if (mode != MODEL_LATENCY) print_time("prepare", &step.prepare);
    print_time("dispatch", &step.dispatch);
    print_time("combine", &step.combine);
}

static void print_memory(const Plan *p, int64_t node_rows) {
    ModelGroup g = p->group;
    g.node_rows = node_rows;
    ModelMemory m = model_memory(&g, p->options->sets);
    printf(
        "    memory    %10.1f MB messages %9.1f MB routing; latency mode with %lld sets %.1f MB\n",
        (double)m.messages * 1e-6, (double)m.routing * 1e-6, (long long)p->options->sets,
        (double)m.latency * 1e-6);
}

static void print_odds(const Plan *p, int64_t node_rows) {
    ModelGroup g = p->group;
    double lost;
    g.node_rows = node_rows;
    double any = model_overflow(&g, &p->routing, &lost);
    printf("    overflow  %10.2g odds of too few places in a step; %.2g of %lld tokens lost\n", any,
           lost, (long long)(g.ranks * g.tokens));
}

/* Entries of a rank, which its slots pad by less than an alignment each, are no more correlated
 * than independent ones. */
static void print_capacity(const Plan *p) {
    const ModelGroup *g = &p->group;
    double none = 0;
    if (!p->options->capacity) return;
    for (int64_t r = 0; r < g->ranks; r++) {
        double share = p->routing.slots[r] / (double)g->top_k;
        double tail = model_tail(g->ranks * g->tokens * g->top_k, share, p->options->capacity);
        none += log1p(-fmin(tail, 1 - 1e-16));
    }
    printf("  capacity of %lld rows: %.2g odds in a step that a rank needs more, padding apart\n",
           (long long)p->options->capacity, fabs(expm1(none)));
}

static void print_steps(const Plan *p) {
    const ModelGroup *g = &p->group;
    int64_t proposed = model_propose(*g, &p->routing, odds), given = p->options->node_rows;
    char what[128];
    if (g->nodes == 1) {
        print_step(p, "throughput", MODEL_STATIC, g->tokens);
        if (g->tokens * g->top_k <= 100000) print_step(p, "latency", MODEL_LATENCY, g->tokens);
        return;
    }
    if (p->most_seen > proposed) proposed = p->most_seen;
    print_step(p, "throughput, exact sizes", MODEL_EXACT, g->tokens);
    int64_t rows[] = {g->tokens, proposed, given};
    for (int i = 0; i < 3; i++) {
        if (!rows[i] || (i == 1 && proposed == g->tokens)) continue;
        snprintf(what, sizeof(what), "throughput, static sizes, node_rows %lld%s",
                 (long long)rows[i],
                 i == 1 ? " (proposed)"
                 : i    ? " (given)"
                        : " (all)");
        print_step(p, what, MODEL_STATIC, rows[i]);
        print_memory(p, rows[i]);
        print_odds(p, rows[i]);
    }
    if (p->most_seen)
        printf("  the fullest message of the trace has %lld tokens\n", (long long)p->most_seen);
}

static void print_constants(void) {
    printf("\nconstants\n");
    for (const ModelConstant *c = model_constants; c->name; c++)
        printf("  %-22s %7g %-10s %s\n", c->name, c->value, c->unit, c->measured);
}

static void print_all(const Plan *p) {
    const ModelGroup *g = &p->group;
    double most = 0;
    for (int64_t n = 0; n < g->nodes; n++)
        most = fmax(most, p->routing.node[n]);
    printf("plan, computed: %lld ranks on %lld node%s, %lld tokens a rank, top-%lld of %lld "
           "experts,\n  rows of %lld bytes, %s\n",
           (long long)g->ranks, (long long)g->nodes, g->nodes == 1 ? "" : "s", (long long)g->tokens,
           (long long)g->top_k, (long long)p->experts, (long long)g->row_bytes,
           p->options->routing);
    if (g->nodes > 1)
        printf("network: %g GB/s of a rank each way, %g us an exchange\n"
               "a token needs the busiest node with odds %.3f\n",
               g->network_gbs, g->network_us, most);
    print_steps(p);
    print_capacity(p);
    print_constants();
}

bool print_plan(World *world, const PlanOptions *o) {
    Plan p = {.options = o, .experts = o->experts};
    p.group = (ModelGroup){.ranks = o->ranks ? o->ranks : 1,
                           .nodes = o->nodes ? o->nodes : 1,
                           .tokens = o->tokens ? o->tokens : 128,
                           .top_k = o->top_k,
                           .row_bytes = o->row_bytes};
    bool ok = read_network(o->network, &p.group) && find_routing(world, &p);
    if (ok) print_all(&p);
    pool_free(&p.pool);
    return ok;
}
