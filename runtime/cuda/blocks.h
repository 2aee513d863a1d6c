/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_BLOCKS_H
#define EP_RUNTIME_CUDA_BLOCKS_H

/**
 * Launch heuristics of the kernels that move rows in throughput mode: how many blocks send and how
 * many receive, how many of a block's warps schedule, how many tokens each claims at a time, and
 * how a block divides its shared memory. dispatch/cuda/scatter.c and combine/cuda/gather.c say what
 * each kernel moves. The constants are found by experiment, for many blocks and for few: tuning.h
 * has their table.
 */

#include "runtime/cuda/device.h"
#include "runtime/cuda/tuning.h"

/** How finely blocks divide the work. */
typedef struct EpGranularity {
    int32_t chunk;  /**< most tokens that a scheduler warp claims at a time */
    int32_t active; /**< work items of a block under way */
} EpGranularity;

/** Returns the granularity for rows of `row_bytes`; `large` is that of
 *  tuning->full_blocks blocks for rows of 16 KiB. */
EpGranularity ep_granularity(const EpTuning *tuning, int32_t blocks, int64_t row_bytes,
                             EpFineness large);

/** A token's entries under uniform routing. */
typedef struct EpSpread {
    double own;   /**< entries of experts on this rank */
    double other; /**< entries of experts on other ranks */
    double ranks; /**< number of other ranks with an entry */
    double stays; /**< whether any expert is on this rank */
    double row;   /**< entries of a row, that is, entries with the same rank */
} EpSpread;

EpSpread ep_spread(const EpCudaGroup *group, int32_t top_k);

/** What a token takes of each kind of block, and of the wire. */
typedef struct EpTraffic {
    const EpTuning *tuning;
    double sent, received;          /**< loads and stores of rows */
    double send_us, receive_us;     /**< a block's time */
    int32_t busy;                   /**< whether blocks are busy all that time, and do not wait */
    double wire_us;                 /**< the wire's time, 0 without other ranks */
    double spare;                   /**< senders for each that the wire needs */
    double ranks;                   /**< number of other ranks that it goes to */
    double least_send, most_send;   /**< limits of the fraction of blocks that sends */
    double scheduled;               /**< rows that scheduler warps pass on */
    int32_t scheduled_by_receivers; /**< of receiving blocks, or of sending ones */
    int32_t ordered;                /**< whether it helps if rows move in the order of tokens */
} EpTraffic;

/** Set the times of rows that are copied, where t->sent and t->ranks are known: a sending block has
 *  `active` items under way and stores `stored` rows for a token. A receiving block stores `copied`
 *  of the rows that arrive. */
void ep_copy_times(int32_t blocks, int32_t active, int32_t top_k, int64_t row_bytes, double stored,
                   double copied, EpTraffic *t);

/** Set the times of rows that are multiplied, and the limits of what is sent: likewise, and
 *  t->received is known, too. */
void ep_multiply_times(int32_t blocks, int32_t active, int32_t top_k, int64_t row_bytes,
                       EpTraffic *t);

/** Set the times of sums, which travel as `sum_bytes`, with a value for each expert if
 *  `carries_values`. */
void ep_sum_times(int32_t blocks, EpSpread spread, int64_t row_bytes, int64_t sum_bytes,
                  int carries_values, EpTraffic *t);

/** Set the times of sums by entry: senders copy rows, receivers add them. */
void ep_entry_times(EpSpread spread, int64_t row_bytes, EpTraffic *t);

/** How blocks divide the work. */
typedef struct EpDivision {
    int32_t receivers;  /**< blocks; the others send */
    int32_t schedulers; /**< warps of a block: 1 or 2 */
    int32_t claim;      /**< tokens that each of them claims at a time */
} EpDivision;

/** Divide the blocks. Their warps claim `chunk` tokens together, if that suffices. */
EpDivision ep_divide(int32_t blocks, int32_t top_k, int64_t row_bytes, int32_t chunk,
                     EpTraffic traffic);

/** What the work items of a pipeline require of its shape. */
typedef struct EpWorkNeeds {
    int64_t width;  /**< most loads or stores of one item */
    int64_t held;   /**< most stages that one item holds at a time */
    int64_t wanted; /**< stages that let items overlap, if fragments can be made that small */
    int32_t active; /**< items under way */
} EpWorkNeeds;

/**
 * Divide `room` bytes of shared memory. A stage holds a whole row if that makes enough stages,
 * else a fragment of a multiple of `unit` bytes. Keeps shape->shrink. Returns 0 if shared memory is
 * too small, which it is not in a group that could be created (ep_cuda_least_shared).
 */
int ep_shape_pipeline(const EpTuning *tuning, int64_t room, int64_t row_bytes, int64_t unit,
                      EpWorkNeeds needs, EpPipelineShape *shape);

#endif
