/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_PLAN_H
#define EP_RUNTIME_CUDA_PLAN_H

/**
 * The plan on the CUDA backend, and the launch of the kernel that writes it. Pointers are to device
 * memory unless marked otherwise.
 */

#include "runtime/cuda/device.h"
#include "runtime/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/** One (token, k), on the token's rank. In latency mode on several nodes `owner` is a rank of the
 *  group; for an expert of another node that node's lowest rank, and `row` the place in the message
 *  there. */
typedef struct EpEntry {
    int32_t slot;   /**< in the owner's receive buffer; -1: none. FLAT: the leader has the row's */
    int32_t row;    /**< number of its (token, rank) row among the rows to that rank */
    int16_t owner;  /**< rank of its expert; -1: no expert */
    int16_t expert; /**< local number on the owner */
    int32_t leader; /**< 1 for one entry of each row: the first that has a slot, if any has */
} EpEntry;

/** What a kernel that reads a plan expects of it. Nothing beyond these numbers is read or written
 *  through a plan, whatever its memory holds. */
typedef struct EpPlanUse {
    EpPlanMark mark;
    int32_t is_read; /**< 0: the kernel writes the plan, whose memory may hold anything */
    int32_t top_k;
    int64_t num_rows;    /**< rows of the token tensors; -1: none is given */
    int64_t num_slots;   /**< rows of the shortest tensor of slots */
    int32_t most_tokens; /**< of a chunk plan: that its tensors of tokens have; -1: it is a whole
                            plan */
    int32_t block_rows;  /**< blocks of sources: rows of a block in the tensors of slots; else 0 */
    int32_t plan_block_rows; /**< likewise of a block by which the plan counts slots */
    int32_t fills_rest; /**< whether this launch also writes the rows that have no token: padding,
                             and those past the last token */
} EpPlanUse;

/** How a plan stores the entries of the rows that arrive. */
typedef enum EpRouteForm {
    EP_ROUTES_DENSE,   /**< [R, max_tokens, K]: the slot of each entry of each row; where rows have
                            one slot (latency mode), its local expert */
    EP_ROUTES_FLAT,    /**< [slots, K]: the local experts of each row that has a slot */
    EP_ROUTES_CHAINED, /**< for each row its first slot, for each slot the row's next one */
    EP_ROUTES_LISTED   /**< several nodes, flat: as FLAT, and for each row its slot: the rows of a
                            chunk plan come from several sources */
} EpRouteForm;

/** The form of a plan's routes, which follows from its shape alone. */
typedef struct EpRouteSizes {
    EpRouteForm form;
    int32_t slots; /**< FLAT, LISTED: that have routes; CHAINED: that have a next one; else 0 */
} EpRouteSizes;

/** A row's slots as a chain, by ascending k. */
typedef struct __attribute__((aligned(8))) EpChain {
    int32_t slot;  /**< the first one, which leads to the others */
    uint32_t mask; /**< bit k: entry k has a slot */
} EpChain;

/**
 * The plan in device memory.
 *
 * On several nodes a rank works on its node as it does on one: it has tokens, and sends each to the
 * ranks of the node that need it. But its tokens are its own and those of its sources on other
 * nodes, and they come in chunks. So such a plan has *chunk plans*: one of each kind (EpChunkPlan)
 * for each chunk. A chunk plan is a plan of the node's ranks, with arrays of its own for tokens and
 * rows; header, experts and flat routes are the whole plan's. In it "rank" is a rank's number on
 * the node, and R their number. A token of a relayed chunk plan is a row that a source has sent;
 * ascending by source, and by token of each.
 */
typedef enum EpChunkPlan {
    EP_CHUNK_OWN,    /**< this rank's tokens of the chunk, for the node's experts. The owner of an
                         entry of an expert elsewhere is R + the number of its node among the
                         others, and its row is the message slot there. With a limit a message
                         has rows of other chunks, too: then its row also tells the message, see
                         ep_message_row */
    EP_CHUNK_RELAYED /**< the rows that this rank's sources have sent: sources * message of them */
} EpChunkPlan;

typedef struct EpCudaPlan {
    EpPlanUse use;
    EpRouteSizes sizes;
    EpPlanHeader *header;
    int32_t *expert_counts;  /**< [L] */
    int32_t *expert_padded;  /**< [L] */
    int32_t *expert_offsets; /**< [L + 1] */
    EpEntry *entries;        /**< [max_tokens, K] */
    int32_t *own_token;      /**< [max_tokens] token of each row that stays on this rank */
    int32_t *tokens;         /**< [R] number of tokens of each rank */
    int32_t *flat_begin;     /**< [R] FLAT: where each rank's rows begin in the receive buffer */
    int32_t *begins;         /**< [R, max_tokens + 1] rows produced here by the tokens before each
                                  token of a rank; at the end, by all of them */
    int32_t *routes;         /**< DENSE, FLAT: see EpRouteForm; -1: none */
    EpChain *chains;         /**< CHAINED: [R, max_tokens] */
    int32_t *next;           /**< CHAINED: [slots] of each slot but the last of its row */
    int32_t *row_slots;      /**< LISTED: [R, max_tokens] slot of each row */
    int32_t *rows_to;        /**< [R] rows of this rank to each rank. Own chunk plan: [R + others],
                                  also records to the other nodes. Relayed one: [R + sources], also
                                  sums back to the sources. Latency mode: not set */
    int32_t *rows_from;      /**< [R] rows of each rank to this one */
    int16_t *relay_owners; /**< latency mode on several nodes: [others, node_rows, K] of each place
                                in the messages to this rank: number of each entry's rank on this
                                node; -1: none here */
    char *chunk_plans;     /**< several nodes: see ep_cuda_chunk_plan */
    int64_t chunk_plan_bytes[2]; /**< of each kind */
    uint64_t *tail;              /**< repeats the magic */
} EpCudaPlan;

/**
 * Returns the form of a plan's routes. A capacity bounds them: FLAT rows without a slot have none,
 * and chains take 8 bytes for each row and 4 for each slot. Who reads a chain waits for each slot
 * in turn, so there are chains only where they take half of what dense routes do, or less.
 */
EpRouteSizes ep_route_sizes(const EpPlanShape *shape);

/** Locate the arrays of the plan at `memory` (NULL: none). Returns the plan's bytes. */
int64_t ep_cuda_plan_map(const EpPlanShape *shape, void *memory, EpCudaPlan *plan);

/** Returns the number of chunks of a step of max_tokens, and the most tokens of a chunk plan. */
static inline int32_t ep_plan_chunks(const EpPlanShape *s) {
    return (s->max_tokens + s->nodes.chunk - 1) / s->nodes.chunk;
}

EP_HOST_DEVICE static inline int32_t ep_chunk_plan_tokens(const EpPlanShape *s, EpChunkPlan kind) {
    return kind == EP_CHUNK_OWN ? s->nodes.chunk : s->nodes.sources * s->nodes.message;
}

/** Returns where record `row` of all that a rank sends to another node lies, with a limit: messages
 *  follow one another, each with `message` places for each of `others` nodes. The first node's. */
EP_HOST_DEVICE static inline int32_t ep_message_row(const EpNodeSizes *n, int32_t row) {
    return row / n->message * (n->nodes - 1) * n->message + row % n->message;
}

/** Locate a chunk plan. */
EpCudaPlan ep_cuda_chunk_plan(const EpPlanShape *shape, const EpCudaPlan *whole, EpChunkPlan kind,
                              int32_t chunk);

/**
 * The numbers that routing kernels report to the host, in pinned memory: step << 32 | number. Each
 * word is one store, so the words need no order and no fence, which takes microseconds. The step is
 * complete once all words carry it.
 */
enum EpInfoWord {
    EP_INFO_TOKENS,
    EP_INFO_ROWS, /**< received, needed, dropped */
    EP_INFO_NEEDED,
    EP_INFO_DROPPED,
    EP_INFO_SENT, /**< rows to other ranks, from them, and rows that stay */
    EP_INFO_RECEIVED,
    EP_INFO_LOCAL,
    EP_INFO_EXPERTS /**< counts [L], padded [L], offsets [L + 1]. On several nodes then the words
                         from ep_info_chunks on */
};

/** Returns the word with the number of chunks that any rank has tokens in. The message slots that
 * are filled in each chunk's messages follow: [chunks, others + sources], to the other nodes and
 * from the sources. */
EP_HOST_DEVICE static inline int64_t ep_info_chunks(const EpPlanShape *shape) {
    return EP_INFO_EXPERTS + 3 * (int64_t)shape->num_local + 1;
}

/** Returns the number of words that routing kernels report. */
int64_t ep_info_words(const EpPlanShape *shape);

/** An optional vector of integers, in device or pinned memory. */
typedef struct EpCudaVector {
    void *data;
    int32_t is_int64;
} EpCudaVector;

/** The arguments of a routing kernel. */
typedef struct EpPrepareArgs {
    EpCudaGroup group;
    EpCudaPlan plan;
    EpPlanShape shape;
    EpOwners owners;
    int32_t top_k;
    int32_t num_rows;
    int32_t partition_tokens; /**< tokens of each partition of ep_prepare, if all rows count */
    const void *topk_idx;
    int32_t idx_is_int64;
    EpCudaVector num_tokens; /**< data NULL: all rows */
    EpCudaVector counts, padded, offsets, totals, source_counts;
    EpCudaVector recv_rows, needed_rows, dropped_slots, source_rows;
    int32_t has_offset_end;    /**< whether offsets has L + 1 elements */
    uint64_t *info;            /**< pinned [ep_info_words] of a handle's own plan; else NULL */
    EpCudaAsyncErrors *errors; /**< pinned */
    EpStatistics stats;
    EpCopyTable copies; /**< of: NULL in a group without a placement */
} EpPrepareArgs;

#ifdef __cplusplus
}
#endif

#endif
