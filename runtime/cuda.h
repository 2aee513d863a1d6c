/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_H
#define EP_RUNTIME_CUDA_H

/**
 * The CUDA backend's memory and words, shared by host code and kernels.
 *
 * Every rank owns one window, memory that all ranks of the group can load and store over NVLink. A
 * rank only ever stores into its peers' windows and loads from its own: pushing beats pulling.
 *
 * Operations are numbered by the group's epoch, which every rank counts in its own device memory.
 * An operation begins with a word from each rank to each other, its arrival: which operation it
 * has entered, and where its rows may be put. It tells that the rank is done with the operation
 * before, and so that all of its window may be written anew; and since no rank ends an operation
 * before all have arrived in it, no rank is ever more than one ahead of another.
 *
 * A source numbers the rows that go to a receiver, in order of its tokens. From each source to each
 * receiver there is a ring of records in the receiver's window: row n takes place n % depth. Each
 * place has two words: `head`, beside the ring, says which row has been put there, and `credit`, in
 * the sender's window, which row has been taken out. Both carry the epoch in their upper half, so
 * that they need no reset.
 *
 * Who moves a row is nobody's business but the GPU's that does it. Blocks claim tokens, a few at a
 * time and in ascending order, from a counter in their own device memory; those that receive claim
 * the rows that come of every rank's tokens likewise. So slow blocks do less, ranks may have
 * different numbers of blocks, and not all blocks need be running. Nobody waits in a circle: of all
 * tokens, of whatever rank, that are unfinished, take the lowest. All before it are finished, so
 * that there is room in the rings, and whoever claims it does nothing else first.
 *
 * Memory order: a sender waits until a record's copies are complete, and stores the head with
 * release semantics for the whole system; a receiver loads it with acquire semantics before it
 * reads the record, and stores the credit after its last read.
 */

#include "runtime/config.h"

#define EP_MAX_LANES 64 /* blocks of prepare */
#define EP_CUDA_MAX_RANKS 72

/** What a rank tells each other as it enters an operation. Both words carry the epoch, each is
 *  stored at once: no order between them is needed. */
typedef struct EpArrival {
    uint64_t what;  /**< epoch << 32 | digest of operation and sizes */
    uint64_t where; /**< epoch << 48 | window + 1 << 40 | offset / 16 of the rows; window 0: none.
                         Of ep_prepare: epoch << 48 | facts, see ep_facts_pack */
} EpArrival;

/** Offsets in a window; equal on all ranks. */
typedef struct EpWindowLayout {
    int64_t arrival; /**< EpArrival [2, R], by parity of the epoch */
    int64_t sent;    /**< u64 [R, EP_SENT_WORDS]: number of an operation of latency mode at rank s
                          << 32 | digest: by the number */
    int64_t head;    /**< u64 [R, depth]: epoch << 32 | 1 + row that rank s has put there */
    int64_t credit;  /**< u64 [R, depth]: epoch << 32 | 1 + row taken out at rank d */
    int64_t counts;  /**< u64 [2, R, E + R + 1]: epoch << 32 | entries of rank s for every expert,
                          rows for each rank, tokens */
    int64_t begins;  /**< u64 [2, R, max_tokens]: epoch << 32 | rows that come of the tokens before
                          each of rank s's */
    int64_t routes;  /**< u32 [2, R, max_tokens, K]: where its rows go here, 1 for nowhere,
                          place + 2; 0 until it comes and, once read, again */
    int64_t ring;    /**< [R - 1, depth] records */
    int64_t bytes;
    int32_t depth; /**< records of a ring: a power of two */
    int32_t max_tokens;
    int64_t record_bytes; /**< of the largest record */
} EpWindowLayout;

#define EP_SENT_WORDS 64

/** Words of a row of counts, padded to whole sectors. */
#define EP_COUNT_WORDS(experts, ranks) ((experts) + (ranks) + 1)
#define EP_COUNT_STRIDE(experts, ranks) ((EP_COUNT_WORDS(experts, ranks) + 3) / 4 * 4)

#define EP_LANES_BEFORE 0x80000000u /* in a word of lane_counts */

EpWindowLayout ep_window_layout(const EpGroupConfig *config, int32_t num_ranks);

/** Why a kernel gave up. */
enum EpCudaFault {
    EP_FAULT_LATE = 1, /**< a wait has expired */
    EP_FAULT_ORDER,    /**< another rank has entered another operation, or with other sizes */
    EP_FAULT_PEER,     /**< another rank has given up; `seen` is the one that it blames */
    EP_FAULT_MEMORY    /**< handle memory does not hold the plan */
};

/** What a wait waits for. */
enum EpPhase {
    EP_PHASE_ARRIVAL = 1,
    EP_PHASE_ROUTES,
    EP_PHASE_RECORD,
    EP_PHASE_CREDIT,
    EP_PHASE_GRID,
    EP_PHASE_HEAD, /**< of here on: latency mode, where nobody waits before it has sent */
    EP_PHASE_LINES
};

/** What a plan says of itself in its header and in its last word; see EpPlanHeader. */
typedef struct EpPlanMark {
    uint64_t magic, group;
    int64_t bytes;
    int32_t handle;
    uint64_t tail;
} EpPlanMark;

/** A failure, as kernels report it into pinned memory. */
typedef struct EpCudaFailure {
    int32_t fault;                  /**< EpCudaFault, once the rest is written */
    int32_t op;                     /**< which operation, by its EpOp code */
    int32_t peer, phase, row;       /**< phase: EpPhase */
    uint32_t expected, seen;        /**< counters, or digests */
    uint64_t facts, peer_facts;     /**< where ranks disagree about ep_prepare: what each has */
    EpPlanMark expected_mark, mark; /**< of EP_FAULT_MEMORY */
} EpCudaFailure;

/** What an arrival says: the operation's code, the handle's ordinal, and a hash of the sizes. */
#define EP_DIGEST(op, handle, sizes) \
    ((uint32_t)(op) | ((uint32_t)(handle)&0xff) << 4 | (uint32_t)(sizes) << 12)
#define EP_DIGEST_OP(digest) ((int32_t)((digest)&15))
#define EP_DIGEST_HANDLE(digest) ((int32_t)((digest) >> 4 & 0xff))
#define EP_DIGEST_SIZES(digest) ((uint32_t)(digest) >> 12)

/** In place of an operation's code: this rank has given up for good. The sizes are the rank that it
 *  blames. */
#define EP_OP_GONE 15

/** Findings of ep_prepare that are data, in pinned memory. */
typedef struct EpCudaNotes {
    unsigned long long bad_entry; /**< lowest entry with an index >= E */
    long long bad_index;
    unsigned long long bad_count;
    long long top_k;         /**< of the prepare that found them */
    unsigned long long lost; /**< slots lost to the capacity, under EP_OVERFLOW_ERROR */
    long long capacity, needed;
} EpCudaNotes;

/** Device memory of a group that no peer sees. Zeroed at create. */
typedef struct EpCudaState {
    uint32_t epoch;               /**< completed operations of the group */
    uint32_t finished;            /**< blocks that are done with an operation: see ep_leave */
    uint32_t failed;              /**< the operation in which this rank has failed, 0: none */
    uint32_t sent;                /**< operations of latency mode that have been sent */
    int32_t claimed[2];           /**< chunks of tokens that senders, receivers have taken */
    unsigned long long bad_count; /**< bad indices of the prepare under way */
    unsigned long long bad_entry; /**< ~ of the lowest entry that has one; 0: none */
} EpCudaState;

/** What every kernel gets of its group. */
typedef struct EpCudaGroup {
    int32_t rank, size;
    uint32_t digest; /**< of the operation under way */
    uint64_t facts;  /**< of ep_prepare: see EpArrival */
    int32_t num_experts;
    int32_t lanes;  /**< blocks of prepare, each with a share of the tokens */
    int32_t blocks; /**< of the kernels that move rows */
    EpWindowLayout layout;
    char *window[EP_CUDA_MAX_RANKS]; /**< of each rank, as mapped here */
    EpCudaState *state;
    uint64_t *lane_counts;  /**< [lanes, EP_COUNT_STRIDE]: epoch << 32 | count, as in `counts`; then
                                 epoch << 32 | EP_LANES_BEFORE | that of the lanes before */
    EpCudaFailure *failure; /**< pinned */
    uint64_t timeout_ns;
    char *const *peers; /**< device [EP_MAX_WINDOWS, EP_CUDA_MAX_RANKS]: where each registered
                             window of each rank is mapped here */
} EpCudaGroup;

#define EP_MOST_AHEAD 20  /* jobs of a pipe under way: see runtime/pipe.cuh */
#define EP_MOST_STAGES 40 /* few jobs are under way, and one may hold 33 */

/** How a block of a kernel divides its shared memory: see runtime/pipe.cuh. */
typedef struct EpPipeShape {
    int32_t stages, stage_bytes;
    int32_t width;  /**< most loads or stores of a job */
    int32_t pieces; /**< jobs that a row is divided into, each of at most stage_bytes */
    int32_t ahead;  /**< most jobs under way, up to EP_MOST_AHEAD */
    int32_t shrink; /**< what is stored of a load's bytes: one of 2^shrink */
} EpPipeShape;

/** One (token, k), on the token's rank. */
typedef struct EpEntry {
    int32_t slot;   /**< in the owner's receive buffer; -1: none. FLAT: the row's, at the carrier */
    int32_t row;    /**< number of its (token, rank) row among those to that rank */
    int16_t owner;  /**< rank of its expert, -1 where there is no expert */
    int16_t expert; /**< among the owner's */
    int32_t carrier; /**< 1 for one entry of each row: the first that has a slot, if any */
} EpEntry;

/** The plan in device memory. */
typedef struct EpCudaPlan {
    EpPlanMark mark; /**< what it says of itself where it is whole */
    struct EpPlanHeader *header;
    int32_t *expert_counts;  /**< [L] */
    int32_t *expert_padded;  /**< [L] */
    int32_t *expert_offsets; /**< [L + 1] */
    EpEntry *entries;        /**< [max_tokens, K] */
    int32_t *own_token;      /**< [max_tokens] token of each row that stays on this rank */
    int32_t *tokens;         /**< [R] of each rank */
    int32_t *flat_begin;     /**< [R] FLAT: where each rank's rows begin in the receive buffer */
    int32_t *begins;         /**< [R, max_tokens + 1] rows that come of the tokens before each of a
                                  rank's; behind the last, of all */
    int32_t *routes;         /**< [R, max_tokens, K] entries of each row: its slot, or in the FLAT
                                  layout its local expert; -1 where there is none */
    uint64_t *tail;          /**< repeats the magic */
} EpCudaPlan;

#endif
