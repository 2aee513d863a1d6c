/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_DEVICE_H
#define EP_RUNTIME_CUDA_DEVICE_H

/**
 * The CUDA backend's memory and words, shared by host code and kernels.
 *
 * Every rank owns one window: memory that all ranks of the group can load and store over NVLink. A
 * rank stores only into its peers' windows and loads only from its own: pushing beats pulling.
 *
 * The group's epoch numbers the operations. Every rank counts it in its own device memory. At the
 * start of an operation each rank sends each other rank one word, its arrival: which operation it
 * has entered, and where its rows may be put. The arrival also says that the rank has finished the
 * operation before, so that all of its window may be written again. No rank ends an operation
 * before all ranks have arrived in it, so no rank is more than one operation ahead of another.
 *
 * A source numbers the rows that go to a receiver, in the order of its tokens. Each source has a
 * ring of records in each receiver's window: row n takes entry n % depth. Each entry has two words.
 * `head`, beside the ring, holds the row that has been put there. `credit`, in the sender's window,
 * holds the row that has been taken out. Both carry the epoch in their upper half, so they need no
 * reset.
 *
 * Each GPU assigns rows to its own blocks. Sending blocks claim tokens, a few at a time and in
 * ascending order, from a counter in their own device memory. Receiving blocks claim the rows
 * produced by every rank's tokens in the same way; those of this rank's own, which wait for nobody,
 * from a counter of their own. (In gather the two change sides: sending blocks claim rows,
 * receiving blocks tokens.) So slow blocks do less, ranks may have different numbers of blocks, and
 * not all blocks need to be resident.
 *
 * There is no circular wait if on each rank a sending and a receiving block are resident until
 * nothing of their kind is left to claim. Blocks 0 and 1 are that pair (ep_receivers_before): GPUs
 * start blocks in the order of their numbers, and a block stays until it can claim no more. Block 0
 * sends the rank's arrival, without waiting. Now take the lowest unfinished token t of all ranks:
 *
 *   - Each ring has room for the rows of tokens t to t + depth - 1, since a token has at most one
 *     row in it and all before t have left it. No claim has more tokens than that.
 *   - At t's source, and at each of its receivers, a block of either kind has claimed t or will
 *     claim it: one is resident, and it waits only for tokens before those that it claims next.
 *     Where two warps of a block claim, this holds for each: neither waits for the other's tokens.
 *   - That block, or warp, does nothing before t but tokens of the same claim, for which there is
 *     room as well, and rows of its own rank's tokens, which need no ring. So t is sent, and where
 *     it is waited for it arrives.
 *
 * Blocks that are not resident have claimed nothing. Where fewer than two blocks can be resident,
 * or a GPU starts blocks in another order, senders may fill the rings of receivers that do not run:
 * the operation then ends at its deadline. (ep_prepare needs all its blocks: half of num_sms and
 * one.)
 *
 * A rank that is aborted stores its sentence, and then a word that names it, into all windows, from
 * a stream of its own. A wait that has become long looks at the word in its rank's own window.
 *
 * Memory order: a sender waits until a record's copies are complete, then stores the head with
 * release semantics at system scope. (That a bulk copy is complete is not enough: a head without a
 * release has been seen to overtake it.) A receiver loads the head with acquire semantics before it
 * reads the record, and stores the credit after its last read.
 */

#include "runtime/layout.h"
#include "runtime/movement.h"

#define EP_ABORT_WORDS 32 /* of 8 bytes, of an abort's sentence */

/* Some kernels are compiled several times: as they are; those of latency mode for several nodes
 * (EP_SEVERAL_NODES); those that wait for ranks for groups with masks (EP_MASKED). So kernels of
 * one kind have no code of another. Their functions differ in their names. */
#ifndef EP_SEVERAL_NODES
#define EP_SEVERAL_NODES 0
#endif
#ifndef EP_MASKED
#define EP_MASKED 0
#endif
#if EP_SEVERAL_NODES
#define EP_VARIANT(name) name##_nodes
#define EP_VARIANT_BEGIN namespace several_nodes {
#define EP_VARIANT_END }
#elif EP_MASKED
#define EP_VARIANT(name) name##_masked
#define EP_VARIANT_BEGIN namespace masked {
#define EP_VARIANT_END }
#else
#define EP_VARIANT(name) name
#define EP_VARIANT_BEGIN
#define EP_VARIANT_END
#endif

#define EP_ALIVE_WORDS ((EP_CUDA_MAX_RANKS + 31) / 32)

#define EP_MAX_PARTITIONS 64 /* of a rank's tokens, each the work of one block of prepare */

/** What a rank sends each other rank when it enters an operation. All words carry the epoch, and
 *  each is stored at once, so no order between them is needed. */
typedef struct EpArrival {
    uint64_t what;  /**< epoch << 32 | digest of operation and sizes */
    uint64_t where; /**< epoch << 48 | window + 1 << 40 | offset / 16 of the receive rows, where
                         senders may store into them; 0 in place of window + 1: they may not;
                         EP_PAIRED: the window of the sender's own receive rows.
                         Of ep_prepare: epoch << 48 | facts, see ep_facts_pack */
    uint64_t rows;  /**< epoch << 32 | rows there, where senders may store into them */
    uint64_t plan;  /**< epoch << 32 | generation of the plan that is read. The digest covers it;
                         this word serves the sentence */
    uint64_t gone;  /**< epoch << 32 | 1 + rank of the group to blame, once the rank has given up.
                       `what` says so,  too, but block 0 may store its arrival over that: another
                       block may fail  before block 0 has sent all arrivals */
} EpArrival;

#define EP_PAIRED 255 /* above all window + 1 */

#define EP_RING_UNIT 128

/** Offsets in a window; equal on all ranks of a node, whose number is R. */
typedef struct EpWindowLayout {
    int64_t arrival; /**< EpArrival [2, R], by parity of the epoch */
    int64_t sent;    /**< u64 [R, EP_SENT_WORDS]: number n of an operation of latency mode that rank
                          s has sent << 32 | its digest, at n % EP_SENT_WORDS */
    int64_t head;    /**< u64 [R, depth]: epoch << 32 | 1 + row that rank s has put there */
    int64_t credit;  /**< u64 [R, depth]: epoch << 32 | 1 + row that rank d has taken out */
    int64_t counts; /**< u64 [2, R, E + R + 1]: epoch << 32 | rank s's entries for every expert, its
                         rows to each rank, its tokens */
    int64_t begins; /**< u64 [2, R, max_tokens]: epoch << 32 | rows that the tokens before each of
                         rank s's tokens send here */
    int64_t routes; /**< u32 [2, R, max_tokens, K]: for each row and k, 2 + its slot here, or 1 for
                         none. 0 until it arrives; its reader sets it to 0 again */
    int64_t aborted; /**< u64: 1 + a rank that is aborted; 0: none. With masks ballots say so. Then,
                          EP_ABORT_BYTES further, the sentences [R, EP_ABORT_BYTES] */
    int64_t ring;    /**< [R - 1, depth] records */
    int64_t bytes;
    int32_t depth; /**< records of a ring: a power of two */
    int32_t max_tokens;
    int64_t record_bytes;  /**< of the largest record */
    int32_t entries_depth; /**< sums by entry: in a gather the rings have as many records */
    int32_t entries_bytes; /**< of this size, each with the rows of all of a token's entries */
    int32_t peer_depth;    /**< masks: heads, and credits, of each peer, whatever `depth` is: a rank
                                that is masked meanwhile may still store into an earlier division */
    int32_t peer_lines;    /**< masks: likewise of its ring, in EP_RING_UNIT bytes */
} EpWindowLayout;

/**
 * Masks: what a rank tells another one in ep_group_mask, in that rank's window. The ballots [R] lie
 * behind the sentences of aborts. The kernel of ep_group_mask (mask.cu) says what ranks do with
 * them.
 */
typedef struct EpCudaBallot {
    uint64_t word;    /**< ticket << 2 | EpBallotState */
    uint64_t seen;    /**< the digest of tickets for which it was ready last, in this call */
    uint64_t done;    /**< that of its last call that has succeeded; 0: none */
    uint64_t masked;  /**< 1: the voter has masked the reader, or cut it */
    uint64_t aborted; /**< the voter's incarnation (EpCudaState): it was aborted. A masked one must
                           hide no other */
    uint64_t alive[EP_ALIVE_WORDS]; /**< the new set */
    uint64_t cuts;                  /**< 1: some of them do not take part for the voter so far */
    uint64_t epoch, sent, turn;     /**< as in EpCudaState and EpLatencyState */
    uint64_t sets[EP_MAX_LATENCY_SETS]; /**< operations that each set has sent */
} EpCudaBallot;

enum EpBallotState { EP_BALLOT_NONE, EP_BALLOT_CAST, EP_BALLOT_READY, EP_BALLOT_DONE };
#define EP_BALLOT_STATE_BITS 2

/** Returns whether a ballot's word is of a rendezvous that is under way: `past` is the ticket of
 *  the last one in which this rank and the voter were. */
EP_HOST_DEVICE static inline int ep_is_voting(uint64_t word, uint32_t past) {
    int state = (int)(word & 3), is_open = state == EP_BALLOT_CAST || state == EP_BALLOT_READY;
    return is_open && (uint32_t)(word >> EP_BALLOT_STATE_BITS) != past;
}

/** The flag of an operation of latency mode: the number of the operation among those of its set,
 * then the set. */
#define EP_FLAG_SET_BITS 4
#define EP_FLAG(number, set) ((uint64_t)(number) << EP_FLAG_SET_BITS | (uint64_t)(set))
#define EP_FLAG_SET(flag) ((int)(flag) & ((1 << EP_FLAG_SET_BITS) - 1))
#define EP_FLAG_NUMBER(flag) ((flag) >> EP_FLAG_SET_BITS)

#define EP_SENT_WORDS 64

/** A ring has at least as many records, or one for each of max_tokens: no claim may have more
 *  tokens. */
#define EP_MIN_RING_DEPTH 32

/** Words of a row of counts, padded to whole sectors. */
#define EP_COUNT_WORDS(experts, ranks) ((experts) + (ranks) + 1)
#define EP_COUNT_STRIDE(experts, ranks) ((EP_COUNT_WORDS(experts, ranks) + 3) / 4 * 4)

#define EP_PARTITIONS_BEFORE 0x80000000u /* in a word of partition_counts */

/** Returns the offset of the ballots, in a group with masks of so many ranks. */
EP_HOST_DEVICE static inline int64_t ep_ballots_at(const EpWindowLayout *w, int64_t ranks) {
    return w->aborted + (1 + ranks) * 8 * EP_ABORT_WORDS;
}

/** `nodes`: of the group. On several nodes ep_prepare gets its routing over the network, so the
 *  window has no room for counts, begins and routes. */
EpWindowLayout ep_window_layout(const EpGroupConfig *config, const EpNodeSizes *nodes);

/** Why a kernel gave up. */
enum EpCudaFault {
    EP_FAULT_LATE = 1, /**< a wait has expired */
    EP_FAULT_ORDER,    /**< another rank has entered another operation, or one of other sizes */
    EP_FAULT_PEER,     /**< another rank has given up; `seen` is the rank that it blames */
    EP_FAULT_PLAN,     /**< the named memory does not hold the expected plan: see EpPlanFault */
    EP_FAULT_FLIGHT,   /**< latency mode: the set of buffers is in other use */
    EP_FAULT_WINDOW,   /**< rank `seen` receives in the adopted window `row`, unknown here; -1: in a
                            paired one */
    EP_FAULT_ENDED,    /**< several nodes: an exchange ended before another rank's data was here */
    EP_FAULT_GLOBAL,   /**< the call's global scale, whose bits are in `seen`, is none */
    EP_FAULT_LEFT,     /**< masks: another rank has left the operation to call ep_group_mask */
    EP_FAULT_MASKED,   /**< masks: another rank has masked this one */
    EP_FAULT_ABSENT    /**< masks: the launch was described for a rank that is masked now */
};

/** What a wait waits for. */
enum EpAwait {
    EP_AWAIT_ARRIVAL = 1,
    EP_AWAIT_ROUTES,
    EP_AWAIT_RECORD,
    EP_AWAIT_CREDIT,
    EP_AWAIT_GRID,
    EP_AWAIT_HEAD, /**< from here on: latency mode; see ep_find_unsent for the rank to blame */
    EP_AWAIT_LINES,
    EP_AWAIT_WEIGHTS,
    EP_AWAIT_DONE /**< in either mode: the word of a block of rows; `row` is the block */
};

/** What is wrong with a plan. */
enum EpPlanFault {
    EP_PLAN_RIGHT,
    EP_PLAN_MARK,   /**< it is none, or another one's */
    EP_PLAN_TOP_K,  /**< it has another K than the handle: it is damaged */
    EP_PLAN_TOKENS, /**< it has another T than the token tensors */
    EP_PLAN_ROWS,   /**< it has more receive rows than the tensors */
    EP_PLAN_BLOCKS  /**< a source has more tokens than the tensors have rows for it */
};

/** The words of a plan that identify it; see EpPlanHeader. */
typedef struct EpPlanMark {
    uint64_t magic, group, config, tail;
} EpPlanMark;

/** A failure that ends the group. Kernels write it into pinned memory. */
typedef struct EpCudaFailure {
    int32_t fault;              /**< EpCudaFault; written last */
    int32_t op;                 /**< which operation, by its EpOp code */
    int32_t peer, awaited, row; /**< awaited: EpAwait */
    uint32_t expected, seen;    /**< counters, or digests */
    uint64_t facts, peer_facts; /**< what each rank has, where ranks disagree: of ep_prepare the
                                     facts, else the plan's generation */
    EpPlanMark mark;            /**< of EP_FAULT_PLAN: as found */
    uint64_t expected_config;
    uint64_t why[EP_ABORT_WORDS]; /**< of EP_FAULT_PEER: the blamed rank's sentence; 0: none */
    uint64_t cut[EP_ALIVE_WORDS]; /**< no failure: once an operation has cut ranks, all that do
                                       not take part */
    int32_t cut_op;               /**< the latest one that has */
} EpCudaFailure;

/**
 * The digest in an arrival: 4 bits of the operation's code, 12 bits of the handle's id, and 16 bits
 * of a hash of the sizes, to which the kernel adds the generation of the plan that it reads. So two
 * plans differ unless 65,536 operations lie between them.
 */
#define EP_DIGEST(op, handle, sizes) \
    ((uint32_t)(op) | (uint32_t)(handle) << 4 | (uint32_t)(sizes) << 16)
#define EP_DIGEST_OP(digest) ((int32_t)((digest)&15))
#define EP_DIGEST_HANDLE(digest) ((int32_t)((digest) >> 4 & EP_MAX_HANDLE_ID))
#define EP_DIGEST_SIZES(digest) ((uint32_t)(digest) >> 16)

/** Returns whether two ranks' digests are of the same operation. A handle without an id matches any
 *  handle. */
EP_HOST_DEVICE static inline int ep_same_operation(uint32_t a, uint32_t b) {
    const uint32_t id = EP_MAX_HANDLE_ID << 4;
    return a == b || (((a ^ b) & ~id) == 0 && (!(a & id) || !(b & id)));
}

/** Returns whether two ranks' digests are of the same operation and handle, with any sizes. */
EP_HOST_DEVICE static inline int ep_same_call(uint32_t a, uint32_t b) {
    return ep_same_operation(a & 0xffff, b & 0xffff);
}

/** Stands for an operation's code once a rank has given up for good. The sizes are then the rank
 *  that it blames. */
#define EP_OP_GONE 15

/** A report of a routing with indices >= E. */
typedef struct EpCudaBadIndices {
    unsigned long long total; /**< such entries since the group was created */
    unsigned long long entry; /**< the lowest one of this routing */
    long long index, top_k;   /**< its index; K of this routing, 0: of a map of ep_group_place */
} EpCudaBadIndices;

/**
 * Asynchronous errors of ep_prepare that are data: the group lives on. In pinned memory. Only
 * kernels write here, and numbers only grow; the host remembers what it has reported (EpCuda). So
 * no word needs an atomic operation of a GPU and a CPU together, which not all machines have.
 */
typedef struct EpCudaAsyncErrors {
    unsigned long long bad_reports; /**< number of reports; written after the last of them */
    EpCudaBadIndices bad[2];        /**< the last two reports: number n is at n % 2 */
    unsigned long long lost;        /**< slots lost to the capacity, under EP_OVERFLOW_ERROR, since
                                         the group was created */
    unsigned long long overflow;    /**< of a latest loss: rows needed << 32 | capacity */
} EpCudaAsyncErrors;

#define EP_FIRST_INCARNATION 1 /* of newcomers it is larger */
#define EP_NO_INCARNATION ~0u  /* of an empty place: no process has it */
#define EP_CLAIMERS 3          /* scheduler.cuh names them */

/** Device memory of a group that no peer sees. Zeroed at create. `claimed` is in the same sector as
 *  `finished`: so a block's claims have reached its memory before its count there, though a block
 * may end before it has seen what it claimed last. */
typedef struct __attribute__((aligned(32))) EpCudaState {
    uint32_t epoch;    /**< completed operations of the group */
    uint32_t finished; /**< blocks that have finished the operation: see ep_end_operation */
    uint32_t failed;   /**< the operation in which this rank has failed, 0: none */
    uint32_t sent;     /**< operations of latency mode that have been sent */
    int32_t claimed[EP_CLAIMERS];     /**< chunks of tokens or rows */
    unsigned long long bad_count;     /**< bad indices found by the prepare under way */
    unsigned long long bad_entry;     /**< ~ of the lowest entry that has one; 0: none */
    unsigned long long lost;          /**< as in EpCudaAsyncErrors, counted here first */
    uint32_t ticket, unused;          /**< masks: of this rank's last ballot */
    uint32_t alive[EP_ALIVE_WORDS];   /**< masks: bit r % 32 of word r / 32: whether rank r, of this
                                           node, takes part; aligned to 16 bytes */
    uint32_t late_us;                 /**< masks: see EpLateRanks; 0: no rank is cut */
    uint32_t past[EP_CUDA_MAX_RANKS]; /**< masks: each rank's ticket in the last rendezvous */
    uint32_t incarnation[EP_CUDA_MAX_RANKS]; /**< masks: number of the process at each place. An
                                                  abort of a process that was replaced carries
                                                  another one */
} EpCudaState;

/**
 * What is there of each block of receive rows, while a dispatch whose caller has words for them
 * runs (EpExtras.ready): units << 32 | rows with a token. A row has one unit, or in latency mode as
 * many as it has parts. Who adds the last unit of a block sets the counter to 0 and stores the
 * word.
 *
 * Memory order: whoever adds has written the rows before it, and its addition releases them. The
 * addition that completes a block is ordered behind the others by the counter itself; a fence makes
 * an acquire of that, and a release of the store behind it. Rows that bulk copies have written are
 * waited for first, with a proxy fence behind that.
 */
typedef struct EpBlockCounters {
    uint64_t *counter; /**< device [EP_MAX_BLOCK_WORDS], in latency mode for each set */
    int32_t clears;    /**< whether this launch is the operation's last: a damaged plan may have
                            left something */
} EpBlockCounters;

/** What every kernel gets from its group. */
typedef struct EpCudaGroup {
    int32_t rank, size;     /**< on this node: several nodes' ranks are numbered on each */
    const int32_t *members; /**< device [size]: each one's number in the group; NULL: the same */
    uint32_t digest;        /**< of the operation under way */
    int32_t early;          /**< whether kernels may be launched early: see ep_launch_early */
    uint64_t facts;         /**< of ep_prepare: see EpArrival */
    int32_t num_experts;
    int32_t partitions;  /**< of the rank's tokens in prepare, each the work of one block */
    int32_t blocks;      /**< of the kernels that move rows */
    int32_t most_blocks; /**< where they have the whole GPU */
    EpWindowLayout layout;
    char *window[EP_CUDA_MAX_RANKS]; /**< of each rank, as mapped here */
    EpCudaState *state;
    uint64_t *partition_counts; /**< [partitions, EP_COUNT_STRIDE]: first epoch << 32 | count, in
                                     the order of `counts`; then epoch << 32 | EP_PARTITIONS_BEFORE
                                     | sum over the partitions before */
    EpCudaFailure *failure;     /**< pinned */
    uint64_t timeout_ns;
    char *const *peers; /**< device [EP_WINDOW_NUMBERS, EP_CUDA_MAX_RANKS]: where each window of
                             each rank is mapped here; NULL where none was adopted */
} EpCudaGroup;

/* ---- stamps of messages between nodes ------------------------------------------------------ */

/*
 * What kernels do at the ends of an operation that crosses the network. They tell the watcher how
 * far this rank has come. And they compare what ranks are in: a stamp goes with each message, and
 * is compared before anything reads the rows. Ranks of a node compare their operations themselves,
 * so no two ranks of the group differ unnoticed. A rank that has failed still sends messages, which
 * others wait for, but their rows are not what they should be. The kernels that fill them let the
 * stamp say so.
 */

/** In pinned memory. One store each, so their order does not matter. */
typedef struct EpWatchMarks {
    uint64_t begun; /**< operations that cross the network << 32 | digest of the latest one */
    uint64_t moved; /**< marks so far << 1 | whether an operation is under way */
} EpWatchMarks;

/** What a rank says of the operation that it has entered. */
typedef struct EpStamp {
    uint32_t digest, number; /**< as in EpWatchMarks.begun; EP_OP_GONE: the rank has failed */
    uint32_t generation;     /**< of the plan that it reads; 0: none */
    uint32_t blamed; /**< EP_OP_GONE: 1 + the rank of the group because of which; 0: itself */
} EpStamp;

/** What kernels at an operation's begin, at an exchange or after one need for these. */
typedef struct EpMarks {
    EpWatchMarks *watch;
    uint64_t *counts;      /**< device [2]: operations, marks */
    EpStamp *own;          /**< device: this rank's stamp */
    const EpStamp *theirs; /**< device [num_peers]: those that have come */
    const int32_t *peers;  /**< device [num_peers]: their ranks in the group; NULL: 0, 1 .. */
    int32_t num_peers;
    int32_t last; /**< whether the operation has no further exchange */
} EpMarks;

typedef struct EpMarkArgs {
    EpCudaGroup group; /**< begin: with the operation's digest */
    EpMarks marks;
} EpMarkArgs;

/* ---- pipelines ----------------------------------------------------------------------------- */

#define EP_MAX_ACTIVE 20 /* work items of a pipeline under way: see runtime/cuda/pipeline.cuh */
#define EP_MAX_STAGES 40 /* few items are under way at a time, and one may hold 33 stages */

/**
 * Returns how many of the blocks before `block` receive, where `receivers` of all `blocks` do, 1 ..
 * blocks - 1. The two kinds alternate, as far as their numbers allow. Block 0 sends, block 1
 * receives.
 */
EP_HOST_DEVICE static inline int32_t ep_receivers_before(int32_t block, int32_t blocks,
                                                         int32_t receivers) {
    int32_t ahead = blocks - 2 * receivers; /* else the first of few receivers came late */
    return (block * receivers + (ahead > 0 ? ahead : 0)) / blocks;
}

/** Returns the lanes of a scheduler warp that schedule a row together, one for each expert. */
EP_HOST_DEVICE static inline int32_t ep_team_width(int32_t top_k) {
    return top_k < 4 ? 4 : top_k;
}

/** How a block of a kernel divides its shared memory: see runtime/cuda/pipeline.cuh. */
typedef struct EpPipelineShape {
    int32_t stages, stage_bytes;
    int32_t width;     /**< largest number of loads or stores of a work item */
    int32_t fragments; /**< work items per row, each of at most stage_bytes */
    int32_t active;    /**< largest number of work items under way, up to EP_MAX_ACTIVE */
    int32_t shrink;    /**< a store has 1 / 2^shrink of a load's bytes */
} EpPipelineShape;

#endif
