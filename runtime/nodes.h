/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_NODES_H
#define EP_RUNTIME_NODES_H

/**
 * The nodes of a group, and which rank speaks for which on another node.
 *
 * A row crosses the network once for each other node that needs it. It goes to one rank there, its
 * *relay*, which hands it on over NVLink; the sum of that node comes back through the same rank. So
 * each rank has a relay on each other node, and each rank is the relay of some ranks elsewhere, its
 * *sources*. Rank i of a node has rank i mod m of a node of m ranks as its relay: between nodes of
 * equal size, traffic stays between ranks of equal number, which share a rail of the network.
 */

#include "runtime/layout.h"

typedef struct EpNodes {
    EpNodeSizes sizes;
    int32_t node;     /**< this rank's */
    int32_t rank;     /**< this rank's number on its node */
    int32_t group;    /**< ranks of the group */
    int32_t *of;      /**< [group] node of each rank; nodes are numbered by their lowest ranks */
    int32_t *number;  /**< [group] each rank's number on its node */
    int32_t *begin;   /**< [nodes + 1] where each node's ranks begin in `members` */
    int32_t *members; /**< [group] ranks by node, ascending on each */
} EpNodes;

/** Make room for a group of `size` ranks. Returns 0 when out of memory. */
int ep_nodes_open(int32_t size, EpNodes *out);
void ep_nodes_free(EpNodes *nodes);

/** Set everything else, for this rank, once the caller has set nodes->of. */
void ep_nodes_set(EpNodes *nodes, int32_t rank);

/** Returns the ranks of a node. */
static inline int32_t ep_nodes_size(const EpNodes *n, int32_t node) {
    return n->begin[node + 1] - n->begin[node];
}

/** Returns the rank with this number on a node. */
static inline int32_t ep_nodes_member(const EpNodes *n, int32_t node, int32_t number) {
    return n->members[n->begin[node] + number];
}

/** Returns the relay of a rank on another node. */
static inline int32_t ep_nodes_relay(const EpNodes *n, int32_t rank, int32_t node) {
    return ep_nodes_member(n, node, n->number[rank] % ep_nodes_size(n, node));
}

/** Returns the number of ranks on other nodes that have `rank` as their relay; they become
 *  sources[], ascending, unless that is NULL. */
int32_t ep_nodes_sources(const EpNodes *n, int32_t rank, int32_t *sources);

/** Returns whether all nodes have as many ranks. Then each rank is the relay of one rank of each
 *  other node; else some rank is that of more. */
static inline int ep_nodes_are_equal(const EpNodeSizes *nodes) {
    return nodes->most == nodes->nodes - 1;
}

/** Returns the sizes of a group whose ranks are divided evenly over `nodes` nodes, as
 * LIBEP_TOPOLOGY divides them, on rank 0. */
EpNodeSizes ep_node_sizes_even(int32_t ranks, int32_t nodes);

#endif
