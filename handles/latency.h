/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_LATENCY_H
#define EP_HANDLES_LATENCY_H

/**
 * Latency mode on the CUDA backend: a handle's buffers, shared by host code and kernels.
 *
 * Each rank has, in memory that all ranks of the group map, a place for what every rank may send
 * it: a head, and a record for each token. So a sender asks nobody before it stores. All of it is
 * there twice, for operations in turn: who begins operation n + 2 has had something of everyone's
 * operation n + 1, and they had finished n before. For this, every operation sends a head to every
 * rank, and none ends before all heads are here.
 *
 * Operations of a handle are numbered in its own device memory, so graphs may be replayed; the
 * number is the flag of all lines (runtime/lines.cuh).
 *
 * Nobody waits in a circle. First halves never wait for a rank. What a second half waits for, the
 * others' first halves, comes earlier in the order that all ranks have in common. In a whole
 * operation the first blocks send, and claim what is to be sent one after another, so that not all
 * of them need be running; they wait, if they receive as well, when nothing of that is left. Blocks
 * that only send never wait, so that those behind them get to run: what each of them sends first
 * need not be claimed.
 */

#include "handles/plan_cuda.h"
#include "runtime/placement.h"
#include "runtime/scales.h"

/** Lines: see runtime/lines.cuh. What a warp moves at once. */
#define EP_STEP_BYTES 512
#define EP_STEP_UNITS 30 /* of 16 bytes */

/** Offsets in a handle's window; equal on all ranks. */
typedef struct EpBufferLayout {
    int64_t state;   /**< EpLatencyState: this rank's own */
    int64_t heads;   /**< [2, R] heads, by parity of the operation and by source */
    int64_t records; /**< [2, R, max_tokens] records */
    int64_t sums;    /**< float [max_tokens, sum_bytes]: between halves of a combine, what this rank
                          adds to its own tokens, unrounded */
    int64_t bytes;
    int32_t head_bytes, record_bytes, sum_bytes;
    int32_t max_tokens;
} EpBufferLayout;

/** Words of a head. A combine's has the first alone. */
enum EpHeadWord {
    EP_HEAD_DIGEST,     /**< as in an EpArrival */
    EP_HEAD_FACTS,      /**< two words: see ep_facts_pack */
    EP_HEAD_TOKENS = 3, /**< of the source */
    EP_HEAD_ROWS,       /**< that come from it */
    EP_HEAD_SENT,       /**< that it sends to all ranks but itself */
    EP_HEAD_COUNTS = 8  /**< [L] entries for each of the receiver's experts */
};

/** A handle's device memory that no peer touches. */
typedef struct EpLatencyState {
    uint64_t done;    /**< operations */
    uint32_t passed;  /**< blocks of the kernel that need no more of this: see latency_pass */
    uint32_t left;    /**< blocks that have left it */
    uint64_t number;  /**< lower half of the flag << 32 | number of the operation last sent, among
                         all  of the group's: see ep_sent */
    uint32_t claimed; /**< items of it that blocks have taken to send */
} EpLatencyState;

/** Many rows of equal length, shared by many warps: each row by `each` shares, of `steps` steps
 * that are neighbours. */
typedef struct EpShares {
    int32_t rows;
    int32_t steps;
    EpDivisor each;
} EpShares;

/** Rows come one after another: the last is to be the work of many warps. So a share has no more
 *  steps than a warp takes at once, `most`, even if each warp has several shares, and fewer where
 *  there are warps enough; more only where kernels could not count them (see runtime/divide.h). */
EP_HOST_DEVICE static inline EpShares ep_shares(int32_t rows, int32_t steps, int32_t most,
                                                int32_t warps) {
    int32_t least = (steps + most - 1) / most, each = rows > 0 ? warps / rows : warps;
    each = each < least ? least : each < steps ? each : steps;
    while (each > 1 && (int64_t)rows * each * each >= 1 << 29)
        each /= 2;
    int32_t share = each > 0 ? (steps + each - 1) / each : 1;
    EpShares shares = {rows, share, ep_divisor(share > 0 ? (steps + share - 1) / share : 1)};
    return shares;
}

#define EP_FILLED_AT_ONCE 4  /* steps of a warp that receives in a dispatch */
#define EP_SUMMED_STEPS 4    /* most of a share that sends in a combine */
#define EP_REDUCED_AT_ONCE 2 /* steps of a warp that receives in one */

/** What kernels get of it. */
typedef struct EpLatency {
    EpBufferLayout layout;
    EpLatencyState *state;
    int32_t whole;          /**< whether lines arrive whole */
    int32_t receives;       /**< whether this launch receives */
    int32_t senders;        /**< blocks that send, the first ones */
    int32_t first_receiver; /**< this block and those behind it receive, if they send, then
                               afterwards */
    EpShares received; /**< what the warps of these share, if no rank has more rows than this one */
    EpDivisor ranks;   /**< of the group */
    char *window[EP_CUDA_MAX_RANKS];
    char *own; /**< this rank's */
} EpLatency;

/**
 * A token's record on its way to the ranks of its experts, in units of 16 bytes: the header, the
 * row, its scales. The header has a word for each k, which says the same to all ranks: the expert,
 * plus 1, in its lower bits; above these, how many entries of the source's for that expert come
 * before, or, in the flat layout, how many rows to its rank. If weights travel, each follows its
 * word.
 */
typedef struct EpRecordShape {
    int32_t header_units, row_units, scale_units;
    int32_t expert_bits;
    int32_t steps; /**< of all */
} EpRecordShape;

/** What a block of a dispatch has in shared memory: offsets, behind what has a fixed size. */
typedef struct EpDeskLayout {
    int32_t
        experts;    /**< i16 [tokens, K] of this rank's entries: expert, or see latency_route.cuh */
    int32_t counts; /**< i32. Sending heads: [E] entries, then [R] rows. Receiving: [R, L] entries
                         of the sources before for each local expert */
    int32_t total;  /**< i32 [L] entries of all sources */
    int32_t offset; /**< i32 [L] where slabs begin */
    int32_t staged; /**< a quantised row and its scales */
    int32_t bytes;
} EpDeskLayout;

typedef struct EpLatencyScatterArgs {
    EpPrepareArgs route; /**< with group, plan and shape */
    EpLatency latency;
    EpRecordShape record;
    EpDeskLayout desk;
    int32_t first_expert; /**< of this rank */
    int32_t team_shift;   /**< 1 << that many lanes have a token's entries */
    int32_t carries_weights;
    int32_t quant;       /**< EpQuant; EP_QUANT_NONE or 0: rows are copied */
    int32_t source_type; /**< of rows that are quantised */
    int32_t source_row_bytes, row_elements;
    int32_t row_bytes, scale_bytes; /**< as they travel */
    const char *rows;
    const float *topk_weights;
    const char *scales;
    char *out_rows;
    float *out_weights;
    char *out_scales;
    EpScaleMap scale_map;
    EpCudaVector out_idx; /**< data NULL: not asked for */
    int64_t out_capacity;
} EpLatencyScatterArgs;

typedef struct EpLatencyGatherArgs {
    EpCudaGroup group;
    EpCudaPlan plan;
    EpPlanShape shape;
    EpLatency latency;
    int32_t top_k;
    int32_t type;
    int32_t row_units, steps;
    EpShares sent;   /**< what warps share, if no rank has more rows than this one */
    EpDivisor kinds; /**< of ranks whose rows are sent, or at least 1 */
    int64_t row_bytes;
    const char *rows;
    int32_t weighs;
    const float *slot_weights;
    char *out_rows;
    int64_t out_num_rows;
} EpLatencyGatherArgs;

/** What a plan's begins say of a row in latency mode, where they have one word for each token of a
 *  rank: its slot (FLAT) or 0; or one of these. */
#define EP_ROW_NONE (-1)
#define EP_ROW_LOST (-2) /* it comes, and the capacity has no slot for it */

EP_HOST_DEVICE static inline int64_t ep_units(int64_t bytes) {
    return (bytes + 15) / 16;
}

EP_HOST_DEVICE static inline int64_t ep_steps(int64_t units) {
    return (units + EP_STEP_UNITS - 1) / EP_STEP_UNITS;
}

#ifdef __cplusplus
extern "C" {
#endif

/** As those in handles/plan_cuda.h. `blocks`: of the kernel, at least 2. */
int ep_cuda_open_latency_scatter(int shared_bytes);
int ep_cuda_open_latency_gather(int shared_bytes);
int ep_cuda_launch_latency_scatter(const EpLatencyScatterArgs *args, int blocks, void *stream);
int ep_cuda_launch_latency_gather(const EpLatencyGatherArgs *args, int blocks, void *stream);

/** Dynamic shared memory of the scatter kernel for so many entries of this rank's, and rows with
 *  their scales that it quantises. */
EpDeskLayout ep_cuda_desk_layout(const EpPlanShape *shape, int64_t entries, int64_t staged_bytes);

#ifdef __cplusplus
}
#endif

#endif
