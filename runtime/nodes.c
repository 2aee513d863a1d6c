/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/nodes.h"

#include <stdlib.h>

int32_t ep_nodes_sources(const EpNodes *n, int32_t rank, int32_t *sources) {
    int32_t count = 0, node = n->of[rank];
    for (int32_t s = 0; s < n->group; s++) {
        if (n->of[s] == node || ep_nodes_relay(n, s, node) != rank) continue;
        if (sources) sources[count] = s;
        count++;
    }
    return count;
}

static EpNodeSizes measure(const EpNodes *n) {
    EpNodeSizes sizes = {.nodes = n->sizes.nodes, .ranks = ep_nodes_size(n, n->node)};
    sizes.most = sizes.nodes - 1;
    for (int32_t r = 0; r < n->group; r++) {
        int32_t sources = ep_nodes_sources(n, r, NULL);
        if (n->of[r] == n->node && sources > sizes.sources) sizes.sources = sources;
        if (sources > sizes.most) sizes.most = sources;
    }
    return sizes;
}

/* Sort the ranks by node. */
static void list_members(EpNodes *n) {
    int32_t at = 0;
    for (int32_t node = 0; node < n->sizes.nodes; node++) {
        n->begin[node] = at;
        for (int32_t r = 0; r < n->group; r++) {
            if (n->of[r] != node) continue;
            n->number[r] = at - n->begin[node];
            n->members[at++] = r;
        }
    }
    n->begin[n->sizes.nodes] = at;
}

int ep_nodes_open(int32_t size, EpNodes *out) {
    size_t count = (size_t)size;
    *out = (EpNodes){.group = size};
    out->of = calloc(4 * count + 1, sizeof(*out->of));
    if (!out->of) return 0;
    out->number = out->of + count, out->members = out->number + count;
    out->begin = out->members + count;
    return 1;
}

void ep_nodes_free(EpNodes *nodes) {
    free(nodes->of);
    *nodes = (EpNodes){.of = NULL};
}

void ep_nodes_set(EpNodes *nodes, int32_t rank) {
    nodes->sizes.nodes = 0;
    for (int32_t r = 0; r < nodes->group; r++)
        if (nodes->of[r] >= nodes->sizes.nodes) nodes->sizes.nodes = nodes->of[r] + 1;
    list_members(nodes);
    nodes->node = nodes->of[rank], nodes->rank = nodes->number[rank];
    nodes->sizes = measure(nodes);
}

EpNodeSizes ep_node_sizes_even(int32_t ranks, int32_t nodes) {
    EpNodes n;
    EpNodeSizes sizes = {.nodes = 1, .ranks = ranks};
    if (nodes <= 1 || !ep_nodes_open(ranks, &n)) return sizes;
    for (int32_t r = 0; r < ranks; r++)
        n.of[r] = (int32_t)((int64_t)r * (nodes < ranks ? nodes : ranks) / ranks);
    ep_nodes_set(&n, 0);
    sizes = n.sizes;
    ep_nodes_free(&n);
    return sizes;
}
