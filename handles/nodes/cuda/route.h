/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_NODES_CUDA_ROUTE_H
#define EP_HANDLES_NODES_CUDA_ROUTE_H

/**
 * ep_prepare on several nodes of GPUs.
 *
 * NCCL gives every rank the routing of all ranks, a few bytes for each token. From there on each
 * rank computes its part of the plan by itself: ranks of a node come to the same numbers, since
 * they compute them from the same routing. Four kernels, and the exchange between the first two:
 *
 *     collect   this rank's routing becomes a message: checked, as int32, -1 for no expert
 *     count     for each tile of each rank's tokens: its entries for each expert of this node,
 *               its rows to each rank of this node, and how many of its tokens this node needs
 *     sum       each count becomes the sum over the tiles before
 *     assign    slots, rows and message slots of all entries: the plan; the last block publishes it
 *
 * With a limit (node_rows) another kernel follows the exchange:
 *
 *     limit     the tokens of each rank elsewhere that this node needs, up to the limit, move to
 * the front of its routing, which then has no others: tokens are places of its messages. This
 * rank's own tokens get places, and those without lose their entries there.
 *
 * A *tile* is a number of consecutive tokens of a rank, of one chunk, with an entry for each
 * thread of a block. Tiles are counted by rank, then by token.
 */

#include "runtime/cuda/plan.h"

#define EP_ROUTE_THREADS 256
#define EP_ROUTE_WARPS (EP_ROUTE_THREADS / 32)

/* ---- the nodes of a group ------------------------------------------------------------------ */

/*
 * What kernels know of a group's nodes. Pointers are to device memory that is written once, when
 * the group is created.
 *
 * Words: a rank's *number* counts the ranks of its node. An *agent* is a rank of this node that
 * speaks for a rank of the group: for itself, or as its relay. The ranks that an agent relays for
 * are its *sources*. *Others* are the other nodes, numbered without this one.
 */

typedef struct EpRelayTables {
    int32_t group, nodes, ranks; /**< ranks of the group, its nodes, ranks of this node */
    int32_t node, rank;          /**< this rank's node, and its number there */
    int32_t self;                /**< this rank's number in the group */
    int32_t sources;             /**< most sources of an agent of this node */
    int32_t chunk, chunks;       /**< tokens of a chunk, chunks of max_tokens */
    int32_t limit, message;      /**< see EpNodeSizes */
    int32_t experts;             /**< of this node */
    const int32_t *other_of;     /**< [group] the rank's node among the others; -1: this node */
    const int32_t *number_of;    /**< [group] on this node; -1: elsewhere */
    const int32_t *agent_of;     /**< [group] number of the rank's agent */
    const int32_t *source_index; /**< [group] its number there; -1: it is its own agent */
    const int32_t *num_sources;  /**< [ranks] sources of each agent */
    const int32_t *source_rank;  /**< [ranks, sources] the rank of each */
    const int32_t *by_node;      /**< [group] ranks by node, ascending on each: EP_NODE_BEGINS */
    const int32_t *members;      /**< [ranks] the rank of each number */
    const int32_t *first_expert; /**< [ranks + 1] first of its experts, among those of this node */
    const int32_t
        *order; /**< [ranks + nodes - 1] place in the order of summation: see EpNodeSums */
} EpRelayTables;

/* ---- routing ------------------------------------------------------------------------------- */

/** The start of a rank's message; its routing [num_tokens, K] follows. */
typedef struct EpRoutingHead {
    uint64_t facts; /**< of ep_prepare: see EpArrival */
    uint32_t epoch, digest;
    int32_t num_tokens;
    uint32_t reserved[11];
} EpRoutingHead;

/** The tables of counts, in device memory. R ranks of the group, m of this node, E experts of this
 *  node. Columns: entries [E]; rows to each rank by source [m], as flat rows are numbered; the same
 *  rows by chunk plan [m]; tokens that need this node [1]. */
typedef struct EpRouteCounts {
    int32_t *before; /**< [R, chunks, tiles, columns] count of a tile; then the sum before it */
    int32_t *message_slots; /**< [chunks, tiles, others] of this rank's tokens: those that need each
                                 other node; then the sum before, in the chunk or, with a limit, in
                                 all chunks */
    int32_t *filled;  /**< [chunks, others] slots of this rank's messages that have a record */
    int32_t *total;   /**< [E + m] of the first columns */
    int32_t *own;     /**< [chunks, m, m] rows of each agent's own chunk plan to each rank */
    int32_t *relayed; /**< [chunks, m, m] rows of each agent's relayed chunk plan to each rank */
    int32_t *needed;  /**< [R, chunks] tokens of a chunk that need this node */
    int32_t *lost;    /**< slots of this rank that the limit takes */
    int32_t *sent;    /**< rows of this rank to other ranks of the group */
} EpRouteCounts;

typedef struct EpRouteArgs {
    EpPrepareArgs p; /**< its group has this rank's number in the group, and all ranks */
    EpRelayTables t;
    EpRouteCounts counts;
    EpCudaPlan chunk_plan[2]; /**< of the first chunk; the others follow chunk_stride bytes after
                                 another */
    int64_t chunk_stride;
    char *messages; /**< [R, message_bytes] */
    int64_t message_bytes;
    int32_t team_shift;  /**< log2 of the lanes of a token */
    int32_t tile_tokens; /**< tokens of a tile, at most */
    int32_t tiles;       /**< of a chunk */
    int32_t columns;
} EpRouteArgs;

/** The arguments of ep_group_place: the route has the group, its tables and its messages alone. */
typedef struct EpMapArgs {
    EpRouteArgs route;
    EpCopySetup copies;
    const int32_t *map; /**< [P] */
} EpMapArgs;

/** Returns the bytes of a rank's message. */
int64_t ep_routing_message_bytes(const EpGroupConfig *config);

/** Returns the integers of EpRouteCounts. */
int64_t ep_route_counts(const EpGroupConfig *config, int32_t num_ranks, const EpNodeSizes *nodes);

/**
 * Checks the plan, the whole of it, that an operation on several nodes reads. Then the operation
 * begins: see ep_cuda_launch_begin. A wrong plan fails the group, and so this rank's stamp.
 */
typedef struct EpCheckArgs {
    EpMarkArgs mark;
    EpCudaPlan plan;
} EpCheckArgs;

#ifdef __cplusplus
extern "C" {
#endif

/** See ep_cuda_open_prepare. */
int ep_cuda_open_route(int shared_bytes);
int ep_cuda_collect_routes(const void *args, int blocks, void *stream);
int ep_cuda_limit_routes(const void *args, int blocks, void *stream);
int ep_cuda_count_routes(const void *args, int blocks, void *stream);
int ep_cuda_sum_routes(const void *args, int blocks, void *stream);
int ep_cuda_assign_routes(const void *args, int blocks, void *stream);
int ep_cuda_collect_map(const void *args, int blocks, void *stream); /* one block each */
int ep_cuda_take_map(const void *args, int blocks, void *stream);
int ep_cuda_open_check(int shared_bytes);
int ep_cuda_launch_check(const void *args, int blocks, void *stream);

#ifdef __cplusplus
}
#endif

/** Returns the shared memory of a block of the kernels that count and assign. */
static inline int64_t ep_route_shared(int64_t columns, int64_t others, int64_t experts) {
    return ep_round_up(EP_ROUTE_WARPS * (columns + others), 16) +
           4 * ep_max(columns + others, experts);
}

#endif
