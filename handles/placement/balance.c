/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ep_placement_balance: a map from the experts' loads. Both steps are greedy. Spare places go, one
 * at a time, to the expert whose copies have the most load each. Then copies go to ranks, the
 * heaviest first, each to the lightest rank that has room. With nodes experts first go to nodes in
 * the same way, and each node does both steps by itself.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/layout.h"
#include "runtime/status.h"

/** The experts, a heap whose first one has the most load per copy; of equal ones the lowest. */
typedef struct Heap {
    const double *load;
    const int32_t *copies;
    int32_t *expert;
    int32_t count;
} Heap;

/** Bins that are filled up: nodes with experts, or ranks with copies. */
typedef struct Bins {
    double *load;
    int32_t *used, *last; /* the expert that was put there last, -1: none */
    int32_t count, room;  /* of each */
} Bins;

typedef struct Balance {
    const double *load;
    int32_t experts, physical, ranks;
    const int32_t *nodes; /* [ranks] */
    int32_t num_nodes;    /* among which experts are divided; 1: they are not */
    Heap heap;
    Bins bins;
    int32_t *copies; /* [experts] */
    int32_t *node;   /* [experts] */
    int32_t *map;    /* [physical] */
} Balance;

/* ---- heap ---------------------------------------------------------------------------------- */

static int is_above(const Heap *h, int32_t a, int32_t b) {
    double x = h->load[a] / h->copies[a], y = h->load[b] / h->copies[b];
    return x != y ? x > y : a < b;
}

/* Let the expert at a place sink below those that belong above it. */
static void sink(Heap *h, int32_t at) {
    for (;;) {
        int32_t top = at, expert = h->expert[at];
        for (int32_t child = 2 * at + 1; child <= 2 * at + 2 && child < h->count; child++)
            if (is_above(h, h->expert[child], h->expert[top])) top = child;
        if (top == at) return;
        h->expert[at] = h->expert[top], h->expert[top] = expert;
        at = top;
    }
}

static void order(Heap *h) {
    for (int32_t at = h->count / 2 - 1; at >= 0; at--)
        sink(h, at);
}

static int32_t take_first(Heap *h) {
    int32_t first = h->expert[0];
    h->expert[0] = h->expert[--h->count];
    sink(h, 0);
    return first;
}

/* Fill the heap with the experts of a node. */
static void fill(Balance *b, int32_t node) {
    b->heap.count = 0;
    for (int32_t e = 0; e < b->experts; e++)
        if (b->node[e] == node) b->heap.expert[b->heap.count++] = e;
    order(&b->heap);
}

/* ---- bins ---------------------------------------------------------------------------------- */

static void empty(Bins *bins, int32_t count, int32_t room) {
    bins->count = count, bins->room = room;
    memset(bins->load, 0, (size_t)count * sizeof(*bins->load));
    memset(bins->used, 0, (size_t)count * sizeof(*bins->used));
    memset(bins->last, 0xff, (size_t)count * sizeof(*bins->last));
}

/* Returns the lightest bin of the node that has room, if possible one without the expert. */
static int32_t find_bin(const Balance *b, int32_t expert, int32_t node) {
    const Bins *bins = &b->bins;
    int32_t best[2] = {-1, -1};
    for (int32_t i = 0; i < bins->count; i++) {
        int has = bins->last[i] == expert;
        if (bins->used[i] == bins->room || (node >= 0 && b->num_nodes > 1 && b->nodes[i] != node))
            continue;
        if (best[has] < 0 || bins->load[i] < bins->load[best[has]]) best[has] = i;
    }
    return best[0] >= 0 ? best[0] : best[1];
}

/* Put an expert into a bin. Returns the place that it takes there. */
static int32_t put(Bins *bins, int32_t bin, int32_t expert, double load) {
    bins->load[bin] += load;
    bins->last[bin] = expert;
    return bins->used[bin]++;
}

/* ---- steps --------------------------------------------------------------------------------- */

static void divide_among_nodes(Balance *b) {
    fill(b, 0);
    if (b->num_nodes == 1) return;
    empty(&b->bins, b->num_nodes, b->experts / b->num_nodes);
    while (b->heap.count) {
        int32_t expert = take_first(&b->heap);
        b->node[expert] = find_bin(b, expert, -1);
        put(&b->bins, b->node[expert], expert, b->load[expert]);
    }
}

/* Give the spare places of a node to experts. One that has a copy on each rank gets no more, unless
 * all have. */
static void replicate(Balance *b, int32_t node) {
    int32_t ranks = b->ranks / b->num_nodes, most = ranks;
    int32_t spare = (b->physical - b->experts) / b->num_nodes;
    for (fill(b, node); spare > 0; spare--) {
        if (!b->heap.count) fill(b, node), most += ranks;
        int32_t expert = b->heap.expert[0];
        if (++b->copies[expert] >= most)
            (void)take_first(&b->heap);
        else
            sink(&b->heap, 0);
    }
}

/* Put the copies of a node's experts into its ranks, the heaviest first. */
static void pack(Balance *b, int32_t node) {
    int32_t each = b->physical / b->ranks;
    fill(b, node);
    while (b->heap.count) {
        int32_t expert = take_first(&b->heap);
        double load = b->load[expert] / b->copies[expert];
        for (int32_t i = 0; i < b->copies[expert]; i++) {
            int32_t rank = find_bin(b, expert, node);
            int32_t place = put(&b->bins, rank, expert, load);
            b->map[rank * each + place] = expert;
        }
    }
}

static int compare(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

static void run(Balance *b) {
    int32_t each = b->physical / b->ranks;
    for (int32_t e = 0; e < b->experts; e++)
        b->copies[e] = 1;
    divide_among_nodes(b);
    for (int32_t node = 0; node < b->num_nodes; node++)
        replicate(b, node);
    empty(&b->bins, b->ranks, each);
    for (int32_t node = 0; node < b->num_nodes; node++)
        pack(b, node);
    for (int32_t r = 0; r < b->ranks; r++)
        qsort(b->map + r * each, (size_t)each, sizeof(*b->map), compare);
}

/* ---- the call ------------------------------------------------------------------------------ */

static EpStatus check(const EpCall *call, const Balance *b) {
    if (b->experts < 1 || b->experts > EP_MAX_EXPERTS)
        return ep_refuse(call, EP_ERR_RANGE, "num_experts", "expected 1 .. %d, got %d",
                         EP_MAX_EXPERTS, b->experts);
    if (b->ranks < 1 || b->ranks > EP_MAX_RANKS)
        return ep_refuse(call, EP_ERR_RANGE, "num_ranks", "expected 1 .. %d, got %d", EP_MAX_RANKS,
                         b->ranks);
    if (b->physical < b->experts || b->physical > EP_MAX_EXPERTS || b->physical % b->ranks)
        return ep_refuse(call, EP_ERR_RANGE, "num_physical",
                         "expected a multiple of num_ranks = %d in %d .. %d, got %d", b->ranks,
                         b->experts, EP_MAX_EXPERTS, b->physical);
    for (int32_t e = 0; e < b->experts; e++)
        if (!(b->load[e] >= 0) || isinf(b->load[e]))
            return ep_refuse(call, EP_ERR_RANGE, "load",
                             "expected finite numbers of at least 0, got %g of expert %d",
                             b->load[e], e);
    for (int32_t r = 0; b->nodes && r < b->ranks; r++)
        if (b->nodes[r] < 0 || b->nodes[r] >= b->ranks)
            return ep_refuse(call, EP_ERR_RANGE, "nodes", "expected 0 .. %d, got %d of rank %d",
                             b->ranks - 1, b->nodes[r], r);
    return EP_OK;
}

/* Returns the number of nodes if experts can be divided among them, else 1. `counts` [ranks]. */
static int32_t count_nodes(const Balance *b, int32_t *counts) {
    int32_t nodes = 1;
    if (!b->nodes) return 1;
    memset(counts, 0, (size_t)b->ranks * sizeof(*counts));
    for (int32_t r = 0; r < b->ranks; r++) {
        counts[b->nodes[r]]++;
        nodes = (int32_t)ep_max(nodes, b->nodes[r] + 1);
    }
    for (int32_t node = 0; node < nodes; node++)
        if (counts[node] * nodes != b->ranks) return 1;
    return b->experts % nodes ? 1 : nodes;
}

EpStatus ep_placement_balance(const double *load, int32_t num_experts, int32_t num_physical,
                              int32_t num_ranks, const int32_t *nodes, int32_t *map) {
    EpCall call = {"ep_placement_balance", -1};
    Balance b = {load, num_experts, num_physical, num_ranks, nodes, 1};
    if (!load || !map)
        return ep_refuse(&call, EP_ERR_NULL, load ? "map" : "load",
                         "expected a pointer, got NULL");
    EP_TRY(check(&call, &b));
    size_t experts = (size_t)num_experts, ranks = (size_t)num_ranks;
    double *loads = calloc(ranks, sizeof(double));
    int32_t *block = calloc(3 * experts + 2 * ranks, sizeof(int32_t));
    EpStatus status = EP_OK;
    if (loads && block) {
        b.copies = block, b.node = block + experts, b.map = map;
        b.bins = (Bins){.load = loads,
                        .used = block + 3 * experts,
                        .last = block + 3 * experts + ranks};
        b.heap = (Heap){load, b.copies, block + 2 * experts, 0};
        b.num_nodes = count_nodes(&b, b.bins.used);
        run(&b);
    } else {
        status = ep_refuse(&call, EP_ERR_NO_MEMORY, "num_experts",
                           "expected memory for %d experts, got none", num_experts);
    }
    free(loads);
    free(block);
    return status;
}
