/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_H
#define EP_RUNTIME_CUDA_H

/**
 * The CUDA backend's memory and words, shared by host code and kernels.
 *
 * Every rank owns one window, memory that all ranks of the group can load and store over NVLink. A
 * rank only ever stores into its peers' windows and loads from its own: pushing beats pulling.
 *
 * Data moves through lanes. Lane l of source s is a first-in-first-out ring of records from s to
 * each rank, in the receiver's window; it carries the rows of the l-th share of s's tokens, in
 * order of token. Two counters steer it: `head`, in the receiver's window, counts the records ever
 * put into the lane, and `credit`, in the sender's window, those ever taken out. They only grow and
 * are compared by their difference, so they never need a reset, across operations, steps and graph
 * replays; and since a lane is a queue, no barrier is needed between operations.
 *
 * Memory order: a sender waits for a record's copy to complete, then stores `head` with release
 * semantics at system scope; a receiver loads it with acquire semantics before it reads the record,
 * and stores `credit` after its last read.
 */

#include "runtime/config.h"

#define EP_LANES 128
#define EP_CUDA_MAX_RANKS 72

/** Offsets in a window; equal on all ranks. */
typedef struct EpWindowLayout {
    int64_t head;       /**< u32 [R, LANES]: records that rank s has put into its lanes to here */
    int64_t credit;     /**< u32 [R, LANES]: records of this rank's lanes taken out at rank d */
    int64_t count_flag; /**< u32 [R]: step whose counts rank s has stored */
    int64_t route_flag; /**< u32 [R, LANES]: step whose routes rank s has stored */
    int64_t counts;     /**< i32 [2, R, E]: entries of rank s for every expert, by parity of step */
    int64_t route_rows; /**< i32 [2, R, LANES]: rows of each lane */
    int64_t routes;     /**< i32 [2, R, LANES, lane_tokens, K]: their slots here, -1 where none */
    int64_t ring;       /**< [R, LANES, depth] records */
    int64_t bytes;
    int32_t depth;        /**< records of a ring */
    int32_t lane_tokens;  /**< tokens of a lane, at most */
    int64_t record_bytes; /**< of the largest record */
} EpWindowLayout;

EpWindowLayout ep_window_layout(const EpGroupConfig *config, int32_t num_ranks);

/** A wait that expired, as kernels report it into pinned memory. */
typedef struct EpCudaFailure {
    int32_t failed; /**< 1 once the rest is written */
    int32_t op;     /**< which operation, by its EpOp code */
    int32_t peer, phase, lane;
    uint32_t expected, seen;
} EpCudaFailure;

/** Findings of ep_prepare that are data, in pinned memory. */
typedef struct EpCudaNotes {
    unsigned long long bad_entry; /**< lowest entry with an index >= E; all ones where none */
    long long bad_index;
    unsigned long long bad_count;
    long long top_k;         /**< of the prepare that found them */
    unsigned long long lost; /**< slots lost to the capacity, under EP_OVERFLOW_ERROR */
    long long capacity, needed;
} EpCudaNotes;

/** Device memory of a group that no peer sees. Zeroed at create. */
typedef struct EpCudaState {
    uint32_t sent[EP_CUDA_MAX_RANKS][EP_LANES];     /**< records ever put into each lane */
    uint32_t received[EP_CUDA_MAX_RANKS][EP_LANES]; /**< records ever taken out of each lane */
    uint32_t step;                                  /**< completed prepares of the group */
    uint32_t arrivals;                              /**< of the grid barrier */
    uint32_t finished;                              /**< blocks that are done with a prepare */
    int32_t failed;                                 /**< 1 after a wait has expired: hurry out */
} EpCudaState;

/** What every kernel gets of its group. */
typedef struct EpCudaGroup {
    int32_t rank, size;
    int32_t op; /**< code of the operation under way, for reports */
    int32_t num_experts;
    EpWindowLayout layout;
    char *window[EP_CUDA_MAX_RANKS]; /**< of each rank, as mapped here */
    EpCudaState *state;
    int32_t *lane_counts;   /**< i32 [LANES, E] scratch of prepare */
    EpCudaFailure *failure; /**< pinned */
    uint64_t timeout_ns;
    char *const *peers; /**< device [EP_MAX_WINDOWS, EP_CUDA_MAX_RANKS]: where each registered
                             window of each rank is mapped here */
} EpCudaGroup;

/** The plan in device memory. */
typedef struct EpCudaPlan {
    struct EpPlanHeader *header;
    int32_t *expert_counts;  /**< [L] */
    int32_t *expert_padded;  /**< [L] */
    int32_t *expert_offsets; /**< [L + 1] */
    int16_t *owner;          /**< [max_tokens, K] */
    int32_t *send_rows;      /**< [R, LANES] rows that go to each rank by each lane */
    int32_t *lane_rows;      /**< [R, LANES] rows that come from each rank by each lane */
    int32_t *lane_begin;     /**< [R, LANES] FLAT: first row of each, in the receive buffer */
    int32_t *routes; /**< [R, LANES, lane_tokens, K] entries of each row: its slot, or in the FLAT
                          layout its local expert; -1 where there is none */
} EpCudaPlan;

#endif
