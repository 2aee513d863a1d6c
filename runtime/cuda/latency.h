/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_LATENCY_H
#define EP_RUNTIME_CUDA_LATENCY_H

/**
 * Latency mode on the CUDA backend: a handle's buffers and the partition of work, shared by host
 * code and kernels.
 *
 * A group has some sets of buffers, mapped by all its ranks. A buffer holds everything that all
 * ranks may send to one: a head, and for each token a record and weights. So a sender stores
 * without asking. A set has two buffers, and its operations alternate. A rank that begins operation
 * n + 2 of a set has received something of every rank's operation n + 1, and by then every rank had
 * finished operation n. For this, every operation sends a head to every rank, and none ends before
 * all heads have arrived.
 *
 * Operations sent alone take the sets in turn. They run in the same order on all ranks, so all
 * ranks find the same set in their own device memory, whatever the order is in which they receive.
 * A whole operation uses the set whose turn is next and leaves it free. A kernel that finds its set
 * in use fails the group. A receive phase finds its set by a token, which the host gives to both
 * phases (EpInFlight).
 *
 * Device memory counts each set's operations, so graphs may be replayed. That number, with the
 * set's, is the flag of all lines (latency.cuh).
 *
 * There is no circular wait. A receive phase waits for the peers' send phases, which come earlier
 * in the order that all ranks have in common. Send phases wait for no rank, except in a combine
 * whose weights are at the tokens' ranks: there sums wait for the peers' weights. In an operation
 * with both phases the first blocks send. Blocks that send and then receive claim what they send,
 * one item after another, and receive only when no item is left, so not all of them need to be
 * resident. Blocks that only send, and wait for no weights, always end, so blocks behind them get
 * to run; the first item of each need not be claimed.
 *
 * Where sums wait for weights, all items are claimed in one order: first those that push weights,
 * then the heads, then the sums. An item that pushes weights or heads waits for nothing, and the
 * block that has claimed it runs. So once any block of each rank runs, all weights and heads
 * arrive. Then no sum waits any longer, and what follows is as above. Blocks that do not run yet
 * have claimed nothing, and nothing waits for them.
 */

#include "runtime/cuda/plan.h"
#include "runtime/movement.h"

/** A step: the unit that a warp moves at once; see latency.cuh. */
#define EP_STEP_BYTES 512
#define EP_STEP_UNITS 30 /* of 16 bytes */

/** With sums by entry an entry's row travels in steps of 29 units; unit 29 of each has the entry's
 * weight, and a word that is 0 if the entry is lost. */
#define EP_ENTRY_STEP_UNITS 29

/** A line, and the floats in the units that belong to one line alone. */
#define EP_LINE_BYTES 128
#define EP_LINE_WEIGHTS 28

/** Returns the lines that hold the weights of a token's K entries. */
EP_HOST_DEVICE static inline int32_t ep_weight_lines(int32_t top_k) {
    return top_k > EP_LINE_WEIGHTS ? 2 : 1;
}

/** Offsets in the window of all sets; equal on all ranks. */
typedef struct EpBufferLayout {
    int64_t state;   /**< EpLatencyState: this rank's own */
    int64_t heads;   /**< [2 * sets, R] heads, by buffer (EP_FLAG_BUFFER) and by source; several
                          nodes: see ep_head_of */
    int64_t records; /**< [2 * sets, R, max_tokens] records; several nodes: of the node's ranks */
    int64_t entries; /**< [2 * sets, K, max_tokens] entry_bytes: sums by entry: what comes of each
                          entry of this rank's tokens in a combine */
    int64_t weights; /**< [2 * sets, R, max_tokens] topk_weights of each source's tokens, for a
                          combine: one or two lines of EP_LINE_WEIGHTS floats each */
    int64_t sums;    /**< float [sets, max_tokens, sum_bytes]: between the phases of a combine, this
                          rank's partial sums of its own tokens, unrounded; with sums by entry, the
                          tokens' topk_weights */
    int64_t messages; /**< several nodes: [2 * sets, others] messages of the other nodes: of a
                           dispatch for all ranks of this node, of a combine for this one */
    int64_t partials; /**< [2 * sets, others, ranks of the node, node_rows] records: what each rank
                           of this node adds to the sums that this rank returns as a relay; sums by
                           entry: [2 * sets, others, node_rows, K] records of entries */
    int64_t outgoing, landing; /**< [others] messages that NCCL sends and receives. A stamp is right
                                    before each of them */
    int64_t message_bytes;     /**< from one to the next */
    int64_t weights_out, weights_in; /**< likewise, [node_rows] topk_weights, as `weights`; sums by
                                          entry: 0 */
    int32_t message_heads; /**< bytes before a message's first place: a head for each rank of the
                                node that receives it */
    int32_t node_rows;     /**< places of a message */
    int32_t num_heads;     /**< of a buffer: ranks of the group */
    int64_t bytes;
    int32_t head_bytes, record_bytes, weight_bytes, sum_bytes;
    int32_t max_tokens;
    int32_t entry_bytes, entry_places; /**< sums by entry: of a record of one entry; K */
} EpBufferLayout;

/** Returns the bytes from one of the messages of weights to the next. */
EP_HOST_DEVICE static inline int64_t ep_weights_stride(const EpBufferLayout *b) {
    return (int64_t)b->node_rows * b->weight_bytes + EP_LINE_BYTES;
}

/** Returns the layout for a group of this configuration. */
EpBufferLayout ep_latency_layout(const EpGroupConfig *config, int32_t num_ranks,
                                 const EpNodeSizes *nodes);

/** Returns what the backend offers of latency mode on these nodes: see ep_config_latency_sets. */
unsigned ep_latency_offers(const EpNodeSizes *nodes);

/** Words of a head. A combine's head has only the first one. */
enum EpHeadWord {
    EP_HEAD_DIGEST,     /**< as in an EpArrival */
    EP_HEAD_FACTS,      /**< two words: see ep_facts_pack */
    EP_HEAD_TOKENS = 3, /**< of the source */
    EP_HEAD_ROWS,       /**< from the source to this receiver */
    EP_HEAD_SENT,       /**< from the source to all ranks but itself */
    EP_HEAD_ALL_TOKENS, /**< of a source on another node: EP_HEAD_TOKENS has the places that it
                             fills in its message */
    EP_HEAD_DROPPED,    /**< likewise: slots here of its tokens that found no place */
    EP_HEAD_COUNTS = 8  /**< [L] entries for each of the receiver's experts */
};

/** The buffer of an operation: a set's operations alternate. */
#define EP_FLAG_BUFFER(flag) (EP_FLAG_SET(flag) * 2 + (int)((flag) >> EP_FLAG_SET_BITS & 1))

/** How far a set's operations are. Every block loads all sets' at once. */
typedef struct __attribute__((aligned(16))) EpLatencyCount {
    uint64_t sent; /**< operations whose send phase has finished */
    uint64_t done; /**< completed operations: sent, or one less while one is in flight */
} EpLatencyCount;

/** What else a rank knows of one set. */
typedef struct EpLatencySet {
    uint64_t number; /**< lower half of the flag << 32 | number of the operation last sent, among
                          all operations of the group: see ep_sent */
    uint32_t passed; /**< blocks of a kernel that only receives which no longer need this */
    uint32_t left;   /**< receiving blocks that have finished */
} EpLatencySet;

/**
 * Masks, where late ranks are cut (EP_LATE_MASK): who is late in the operation of a set. A wait
 * that has lasted late_us, counted from the first long wait of its kind in the operation, says so,
 * and waits elsewhere then end, too. The last receiving block makes the outcome the same for all:
 * it zeroes rows that are missing in part, or adds up all tokens again without the late ranks.
 * Then it cuts them: from the next operation on they are not alive.
 *
 * A head may come while some blocks have given it up and others have not. Or an operation beside
 * this one cuts a rank while this kernel's blocks begin. Then they do not agree on slots, and the
 * last block, which finds that by their number, suspends the group. In a combine it takes the rank
 * for late.
 */
typedef struct EpLateRanks {
    uint64_t since[3]; /**< ~ of the time when the first wait became long, for a head, lines,
                            weights; 0: none has */
    uint32_t absent[EP_ALIVE_WORDS];     /**< ranks whose heads are late, or that cut this one */
    uint32_t lost[EP_ALIVE_WORDS];       /**< ranks of whose rows, sums or weights some are late */
    uint32_t skipped[EP_CUDA_MAX_RANKS]; /**< blocks that have done without a rank */
    uint32_t left;                       /**< receiving blocks that have ended, and NOTES_LATE */
} EpLateRanks;

/** Device memory of latency mode that no peer touches. Kernels that send follow each other; those
 *  that only receive may run beside them, one for each set. */
typedef struct EpLatencyState {
    EpLatencyCount count[EP_MAX_LATENCY_SETS];
    uint32_t turn;    /**< the set that the next operation uses */
    uint32_t passed;  /**< blocks of the kernel that sends which no longer need this: see
                           latency_pass */
    uint32_t claimed; /**< work items that its blocks have claimed to send */
    EpLatencySet set[EP_MAX_LATENCY_SETS];
    uint32_t set_of[EP_MAX_LATENCY_SETS + EP_CAPTURED_TOKENS + 1]; /**< by token */
    EpLateRanks late[EP_MAX_LATENCY_SETS];
} EpLatencyState;

/** The token of whole operations on several nodes, which are sent and received by two kernels. */
#define EP_WHOLE_TOKEN (EP_MAX_LATENCY_SETS + EP_CAPTURED_TOKENS)

/** Many rows of equal length, divided among many warps: each row into `each` parts, of `steps`
 *  consecutive steps. */
typedef struct EpPartition {
    int32_t rows;
    int32_t steps;
    EpDivisor each;
} EpPartition;

/**
 * Rows arrive one after another, and many warps should work on the last one. So a part has at most
 * `most` steps, what a warp moves at once, even if each warp gets several parts. It has fewer where
 * there are warps enough. It has more only where kernels could not count the parts (see EpDivisor).
 */
EP_HOST_DEVICE static inline EpPartition ep_partition(int32_t rows, int32_t steps, int32_t most,
                                                      int32_t warps) {
    int32_t least = (steps + most - 1) / most, each = rows > 0 ? warps / rows : warps;
    each = each < least ? least : each < steps ? each : steps;
    while (each > 1 && (int64_t)rows * each * each >= 1 << 29)
        each /= 2;
    int32_t part = each > 0 ? (steps + each - 1) / each : 1;
    EpPartition partition = {rows, part, ep_divisor(part > 0 ? (steps + part - 1) / part : 1)};
    return partition;
}

/** A rank of the group: the number of its node among the others (-1: this node), and its own number
 *  there. */
typedef struct EpRankPlace {
    int16_t other, number;
} EpRankPlace;

/** Another node: its lowest rank, by which its sum is ordered, and the rank that has this rank's
 *  number there, its relay and its source. */
typedef struct EpOtherNode {
    int16_t first, peer;
} EpOtherNode;

/** Several nodes. */
typedef struct EpLatencyNodes {
    const EpRankPlace *places; /**< device [R] */
    const EpOtherNode *others; /**< device [num_others] */
    int32_t num_others;        /**< 0: one node */
    int32_t begins;            /**< the operation's first kernel */
    int32_t keeps_turn;        /**< a send phase that the same call receives */
    int32_t reads_landing;     /**< a kernel that receives: messages are where NCCL has put them */
    int32_t record_steps;      /**< of a place, in this operation */
    EpMarks marks;             /**< of the exchange; send phase: for ep_mark_begin */
    uint32_t *forwarded;       /**< device: blocks of the kernel that forwards which have ended */
} EpLatencyNodes;

/** Returns the place of a rank's head among those of the group: this node's ranks come first. */
EP_HOST_DEVICE static inline int32_t ep_head_of(EpRankPlace at, int32_t ranks) {
    return (at.other + 1) * ranks + at.number;
}

/** What counting a dispatch's relayed rows takes. */
typedef struct EpRelayedRows {
    EpStatistics stats;
    EpOwners owners;
    int32_t top_k, expert_bits, carries_weights; /**< of records */
} EpRelayedRows;

/** The arguments that the latency-mode kernels of dispatch and combine share. */
typedef struct EpLatency {
    EpBufferLayout layout;
    EpLatencyState *state;
    int32_t sets;
    int32_t token;          /**< of an operation with two phases */
    int32_t whole;          /**< whether lines arrive whole */
    int32_t receives;       /**< whether this launch receives */
    int32_t senders;        /**< blocks that send: the first ones */
    int32_t first_receiver; /**< this block and later ones receive; those that also send receive
                               afterwards */
    int32_t releases;       /**< whether blocks of the next kernel may start: see latency_begin */
    int32_t awaits_weights; /**< whether ranks wait for others before they have sent all */
    EpPartition received; /**< among the receiving warps, if no rank has more rows than this one */
    EpDivisor ranks;      /**< of the group */
    char *window[EP_CUDA_MAX_RANKS];
    char *own; /**< this rank's window */
    EpLatencyNodes nodes;
} EpLatency;

#define EP_SLOT_LOST (-2) /* in routes, with sums by entry: the capacity has no slot */

/** In latency mode, a plan's begins hold one word for each token of a rank: the row's slot (FLAT,
 *  RANK_MAJOR), 0, or one of these. */
#define EP_ROW_NONE (-1)
#define EP_ROW_LOST (-2) /* the row arrives, and the capacity has no slot for it */

/** Returns the 16-byte units, and the steps, that hold so many bytes or units. */
EP_HOST_DEVICE static inline int64_t ep_units(int64_t bytes) {
    return (bytes + 15) / 16;
}

EP_HOST_DEVICE static inline int64_t ep_entry_steps(int64_t units) {
    return (units + EP_ENTRY_STEP_UNITS - 1) / EP_ENTRY_STEP_UNITS;
}

EP_HOST_DEVICE static inline int64_t ep_steps(int64_t units) {
    return (units + EP_STEP_UNITS - 1) / EP_STEP_UNITS;
}

/* ---- a block's shared memory in a dispatch ------------------------------------------------- */

/** The fixed part of a block's workspace in shared memory. */
typedef struct EpWorkspace {
    int tokens; /**< of this rank; only sending blocks set it */
    int32_t source_tokens[EP_CUDA_MAX_RANKS], source_rows[EP_CUDA_MAX_RANKS];
    int32_t flat_begin[EP_CUDA_MAX_RANKS];
    int32_t most_tokens;           /**< of any source */
    int32_t heads;                 /**< taken so far */
    int32_t sent;                  /**< rows to other ranks */
    uint32_t header[EP_MAX_TOP_K]; /**< of the record being sent, without its weights */
    char *to[EP_CUDA_MAX_RANKS + EP_MAX_TOP_K]; /**< where it goes in each rank's window; the ranks
                                      that get its row come first. Behind all ranks: places in
                                      messages to other nodes */
    int32_t num_to;                             /**< how many ranks get its row */
    int32_t num_places;                         /**< in how many messages it goes */
    int32_t longest; /**< several nodes: tokens of any source, also those that do not come
                        here */
} EpWorkspace;

/** Offsets of the arrays behind the fixed part of a workspace. */
typedef struct EpWorkspaceLayout {
    int32_t experts; /**< i16 [tokens, K]: expert of each of this rank's entries, or a negative
                          value, see publish.cuh */
    int32_t counts;  /**< i32. While heads are sent: [E] entries, then [R] rows. While receiving:
                          [R, L] entries of the sources before, for each local expert */
    int32_t total;   /**< i32 [L] entries of all sources */
    int32_t offset;  /**< i32 [L] where slabs begin */
    int32_t staged;  /**< a quantised row and its scales */
    int32_t sources; /**< several nodes: i32 [3, R] of the sources, in place of the arrays above */
    int32_t
        needs; /**< likewise: u32 [tokens, words] a bit for each other node that a token needs */
    int32_t dropped; /**< likewise: i32 [R] slots of tokens that find no place */
    int32_t bytes;
} EpWorkspaceLayout;

/** Returns the workspace for `entries` entries of this rank and `staged_bytes` for a row that the
 *  block quantises and its scales. */
EpWorkspaceLayout ep_workspace_layout(const EpPlanShape *shape, int64_t entries,
                                      int64_t staged_bytes);

/** Returns the words of a token's set of other nodes. */
EP_HOST_DEVICE static inline int32_t ep_need_words(int32_t others) {
    return (others + 31) / 32;
}

/* ---- blocks -------------------------------------------------------------------------------- */

#define EP_LATENCY_WARPS 16 /* of a block */
#define EP_ALL_SEND 100     /* percent: all blocks send, and receive afterwards */

/** Returns a fraction of the blocks, as EpTuning has it, in percent. */
static inline int ep_latency_percent(double fraction) {
    return (int)(100 * fraction + .5);
}

/**
 * Returns the number of blocks of an operation of latency mode: those with something to send, those
 * with something to receive, if all ranks have as many tokens as this one, and one that publishes
 * the routing. `steps`: of each row. `percent` of the blocks send while the others receive. Sets
 * receives, first_receiver, senders and ranks of `latency`.
 */
int ep_latency_blocks(const EpCudaGroup *group, EpPhase phase, int64_t tokens, int64_t steps,
                      int percent, EpLatency *latency);

#endif
