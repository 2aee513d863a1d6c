/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_NODES_CUDA_RELAY_TABLES_H
#define EP_HANDLES_NODES_CUDA_RELAY_TABLES_H

/**
 * What kernels know of a group's nodes. Pointers are to device memory that is written once, when
 * the group is created.
 *
 * Words: a rank's *number* counts the ranks of its node. An *agent* is a rank of this node that
 * speaks for a rank of the group: for itself, or as its relay. A *lane* is one of the sources that
 * an agent relays for. *Others* are the other nodes, numbered without this one.
 */

#include <stdint.h>

#define EP_NODE_BEGINS (1 << 30) /* in by_node: this rank is the lowest of its node */

typedef struct EpRelayTables {
    int32_t group, nodes, ranks; /**< ranks of the group, its nodes, ranks of this node */
    int32_t node, rank;          /**< this rank's node, and its number there */
    int32_t self;                /**< this rank's number in the group */
    int32_t lanes;               /**< most lanes of an agent of this node */
    int32_t chunk, chunks;       /**< tokens of a chunk, chunks of max_tokens */
    int32_t experts;             /**< of this node */
    const int32_t *other_of;     /**< [group] the rank's node among the others; -1: this node */
    const int32_t *number_of;    /**< [group] on this node; -1: elsewhere */
    const int32_t *agent_of;     /**< [group] number of the rank's agent */
    const int32_t *lane_of;      /**< [group] its lane there; -1: it is its own agent */
    const int32_t *lanes_of;     /**< [ranks] lanes of each agent */
    const int32_t *source_of;    /**< [ranks, lanes] the rank of each lane */
    const int32_t *by_node;      /**< [group] ranks by node, ascending on each: EP_NODE_BEGINS */
    const int32_t *members;      /**< [ranks] the rank of each number */
    const int32_t *first_expert; /**< [ranks + 1] first of its experts, among those of this node */
    const int32_t
        *order; /**< [ranks + nodes - 1] place in the order of summation: see EpNodeSums */
} EpRelayTables;

#endif
