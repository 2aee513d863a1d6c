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

/** Steps of a row that a warp of a combine adds up at once, as many as its shares are to have. */
#define EP_REDUCED_STEPS 2

/** Offsets in a handle's window; equal on all ranks. */
typedef struct EpBufferLayout {
    int64_t state;   /**< EpLatencyState: this rank's own */
    int64_t heads;   /**< [2, R] heads, by parity of the operation and by source */
    int64_t records; /**< [2, R, max_tokens] records */
    int64_t sums;    /**< float [max_tokens, sum_bytes]: between halves of a combine, what this rank
                          adds to its own tokens, unrounded */
    int64_t head_bytes, record_bytes, sum_bytes;
    int64_t bytes;
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

/** Many rows of equal length, shared by many warps: several of them to a row where there are
 *  enough, each with every `stride`th step. */
typedef struct EpShares {
    int32_t rows;
    EpDivisor stride; /**< warps to a row */
} EpShares;

EP_HOST_DEVICE static inline EpShares ep_shares(int32_t rows, int32_t steps, int32_t warps) {
    int32_t most = rows > 0 ? warps / rows : warps;
    int32_t stride = most < 1 ? 1 : most < steps ? most : steps > 0 ? steps : 1;
    EpShares shares = {rows, ep_divisor(stride)};
    return shares;
}

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
} EpLatency;

/**
 * A token's record on its way to the ranks of its experts, in units of 16 bytes: the header, the
 * row, its scales. The header has a word for each k, which says the same to all ranks: the expert,
 * plus 1, in its lower bits; above these, how many entries of the source's for that expert come
 * before, or, in the flat layout, how many rows to its rank. Then the weights, if these travel.
 */
typedef struct EpRecordShape {
    int32_t header_units, row_units, scale_units;
    int32_t expert_bits;
    int32_t steps; /**< of all */
} EpRecordShape;

typedef struct EpLatencyScatterArgs {
    EpPrepareArgs route; /**< with group, plan and shape */
    EpLatency latency;
    EpRecordShape record;
    int32_t keeps_routing; /**< whether blocks have room for the entries in shared memory */
    int32_t carries_weights;
    int32_t quant;       /**< EpQuant; EP_QUANT_NONE or 0: rows are copied */
    int32_t source_type; /**< of rows that are quantised */
    int64_t source_row_bytes, row_elements;
    int64_t row_bytes, scale_bytes; /**< as they travel */
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
    EpShares sent;           /**< what warps share, if no rank has more rows than this one */
    EpDivisor sent_coarsely; /**< warps to a row, if one has */
    int32_t received_steps;  /**< of a share of what is received, which are neighbours */
    EpDivisor kinds;         /**< of ranks whose rows are sent, or at least 1 */
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

/** Dynamic shared memory of the scatter kernel, with what it keeps of the routing there if
 *  `keeps_routing`. */
size_t ep_cuda_latency_scatter_bytes(const EpLatencyScatterArgs *args, int keeps_routing);

#ifdef __cplusplus
}
#endif

#endif
