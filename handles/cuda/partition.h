/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_CUDA_PARTITION_H
#define EP_HANDLES_CUDA_PARTITION_H

/**
 * Launch heuristics of the kernels that move rows in throughput mode: how many blocks send and how
 * many receive, how many tokens a block claims at a time, and how a block divides its shared
 * memory. dispatch/cuda/scatter.c and combine/cuda/gather.c say what each kernel moves. The
 * constants were found by experiment (docs/tuning.md).
 */

#include "runtime/cuda/device.h"

/** How finely blocks divide the work. */
typedef struct EpGranularity {
    int32_t chunk;  /**< most tokens that a block claims at a time */
    int32_t active; /**< work items of a block under way */
} EpGranularity;

/** Returns the granularity of blocks that copy rows, and of blocks that sum them. */
EpGranularity ep_copy_granularity(int32_t blocks, int64_t row_bytes);
EpGranularity ep_sum_granularity(int32_t blocks, int64_t row_bytes);

/** A token's entries under uniform routing. */
typedef struct EpSpread {
    double own;   /**< entries of experts on this rank */
    double other; /**< entries of experts on other ranks */
    double ranks; /**< number of other ranks with an entry */
    double row;   /**< entries of a row, that is, entries with the same rank */
} EpSpread;

EpSpread ep_spread(const EpCudaGroup *group, int32_t top_k);

/** Rows that a token moves through each kind of block, counted in loads and stores. */
typedef struct EpTraffic {
    double sent, received;
    double stores; /**< of a sender, per row that leaves, where rows are only copied; else 0 */
} EpTraffic;

/** Returns how many of the blocks receive. */
int32_t ep_receiving_blocks(int32_t blocks, EpTraffic traffic, int64_t row_bytes);

/** What the work items of a pipeline require of its shape. */
typedef struct EpWorkNeeds {
    int64_t width;  /**< most loads or stores of one item */
    int64_t held;   /**< most stages that one item holds at a time */
    int64_t wanted; /**< stages that let items overlap, if pieces can be made that small */
    int32_t active; /**< items under way */
} EpWorkNeeds;

/**
 * Divide `shared_bytes` of shared memory. A stage holds a whole row if that makes enough stages,
 * else a piece of a multiple of `unit` bytes. Keeps shape->shrink. Returns 0 if shared memory is
 * too small, which it is not in a group that could be created (ep_cuda_least_shared).
 */
int ep_shape_pipeline(int32_t shared_bytes, int64_t row_bytes, int64_t unit, EpWorkNeeds needs,
                      EpPipelineShape *shape);

#endif
