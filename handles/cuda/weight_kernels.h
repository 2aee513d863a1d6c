/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_CUDA_WEIGHT_KERNELS_H
#define EP_HANDLES_CUDA_WEIGHT_KERNELS_H

/** Kernels of sharded weights: weight.cu copies and adds, weight_quant.cu quantises. */

#include "handles/shards.h"
#include "runtime/cuda/device.h"

/** Copy shards that lie one after the other to their places in the whole, or back. */
typedef struct EpArrangeArgs {
    EpShards shards;
    const char *flat;
    char *whole;
    int32_t unit;   /**< bytes of an element */
    int32_t back;   /**< 1: from the whole to flat memory */
    int64_t stride; /**< bytes from shard to shard in flat memory; 0: no gaps */
} EpArrangeArgs;

/** Add the shards that all ranks have sent, in the order of `part`. */
typedef struct EpSumArgs {
    int64_t elements; /**< of a shard */
    int32_t parts;
    EpType type, out_type; /**< out_type: `type` or FP32 */
    int32_t accumulate;
    int32_t vectors; /**< whether all parts and `out` allow accesses of 16 bytes */
    int32_t own;     /**< the part that lies in the whole gradient, or -1 */
    EpShards shards;
    int64_t own_shard;
    const void *part[EP_CUDA_MAX_RANKS];
    void *out;
} EpSumArgs;

/** What a launch quantises: all, or only what goes before or after ranks agree on amaxes. */
typedef enum EpQuantPhase { EP_QUANT_WHOLE, EP_QUANT_FIND, EP_QUANT_CONVERT } EpQuantPhase;

/**
 * Quantise a shard. Dimensions are those of the gathered weight in its form.
 */
typedef struct EpShardQuantArgs {
    EpQuant quant;
    EpQuantPhase phase;
    EpType type;
    int32_t tiles;  /**< EP_BLOCKS_TILES */
    int64_t number; /**< of pieces of 128 x 128 that the shard touches */
    int64_t begin[3], part[3];
    const void *shard;
    int64_t step[3]; /**< between elements of the shard */
    uint8_t *out;    /**< of the shard's first element; rows follow each other by out_step */
    int64_t out_step[2];
    void *scales; /**< of the shard's first block; FIND: the amaxes found; CONVERT: all amaxes */
    int64_t scale_step[2];
} EpShardQuantArgs;

/** Find the amax of each block of the whole in what all shards have found, and its scale. */
typedef struct EpMergeArgs {
    EpQuant quant;
    EpShards shards;
    int64_t block[3], blocks[3], touched[3];
    const uint32_t *found;
    uint32_t *amaxes;
    void *scales;
} EpMergeArgs;

#ifdef __cplusplus
extern "C" {
#endif
int ep_cuda_launch_arrange(const EpArrangeArgs *args, int blocks, void *stream);
int ep_cuda_launch_sum(const EpSumArgs *args, int blocks, void *stream);
int ep_cuda_open_shard_quant(int shared_bytes);
int ep_cuda_launch_shard_quant(const EpShardQuantArgs *args, int blocks, void *stream);
int ep_cuda_launch_merge(const EpMergeArgs *args, int blocks, void *stream);
#ifdef __cplusplus
}
#endif

#endif
