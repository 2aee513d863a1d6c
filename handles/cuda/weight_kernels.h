/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_CUDA_WEIGHT_KERNELS_H
#define EP_HANDLES_CUDA_WEIGHT_KERNELS_H

/** Kernels of sharded weights (weight.cu); quantise.h has the one that quantises. */

#include "handles/cuda/relay_tables.h"
#include "handles/shards.h"
#include "runtime/cuda/device.h"
#include "runtime/quant.h"

/** The blocks of a launch that memory bounds. With `shared` bytes of shared memory, more than half
 * of a multiprocessor's, each has one of its own; 0: they share them. */
typedef struct EpGrid {
    int blocks, shared;
} EpGrid;

/** Copy shards that lie one after the other to their places in the whole, or back. */
typedef struct EpArrangeArgs {
    EpShards shards;
    const char *flat;
    char *whole;
    int32_t unit;    /**< bytes of an element */
    int32_t back;    /**< 1: from the whole to flat memory */
    int64_t without; /**< 1 + a shard that is left out; 0: none */
    int64_t stride;  /**< bytes from shard to shard in flat memory; 0: no gaps */
} EpArrangeArgs;

/** Add what all ranks have sent of a piece of a shard: by node, ascending on each. */
typedef struct EpSumArgs {
    int64_t elements; /**< of the piece */
    int32_t parts;
    EpType type, out_type; /**< out_type: any of FP32; else `type` or FP32 */
    int32_t accumulate;
    int32_t vectors;  /**< whether all parts and `out` allow accesses of 16 bytes */
    int32_t rank;     /**< whose part is `mine` */
    int32_t in_whole; /**< whether that lies in the whole gradient */
    EpShards shards;
    int64_t own_shard, own_begin; /**< its shard, and the piece's first element there */
    const void *mine;
    const char *received;   /**< the other parts, by rank */
    int64_t stride;         /**< bytes from one to the next */
    const int32_t *by_node; /**< device [parts]: ranks by node, with EP_NODE_BEGINS; NULL: as they
                                 are, on one node */
    void *out;
} EpSumArgs;

/** Find the amax of each block of the whole in what all shards have found, and its scale. */
typedef struct EpMergeArgs {
    EpQuantFormat format;
    EpShards shards;
    int64_t block[3], blocks[3], touched[3];
    const uint32_t *found;
    uint32_t *amaxes;
    void *scales;
} EpMergeArgs;

#ifdef __cplusplus
extern "C" {
#endif
/** For launches with shared memory. */
int ep_cuda_open_weight_kernels(int shared_bytes);
int ep_cuda_launch_arrange(const EpArrangeArgs *args, EpGrid grid, void *stream);
int ep_cuda_launch_sum(const EpSumArgs *args, EpGrid grid, void *stream);
int ep_cuda_launch_merge(const EpMergeArgs *args, int blocks, void *stream);
#ifdef __cplusplus
}
#endif

#endif
