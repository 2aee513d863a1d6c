/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_CUDA_GATHER_H
#define EP_COMBINE_CUDA_GATHER_H

/**
 * The CUDA backend's gather in throughput mode: its kernel's arguments and launch.
 */

#include "bootstrap/network/cuda/mark.h"
#include "handles/cuda/plan.h"
#include "runtime/movement.h"

/** Where a token's sum and values go: bytes from one token's to the next one's, behind t.out_rows
 * and t.out_values. Of a relayed part they are records, on their way to the source. */
typedef struct EpTarget {
    int64_t row_stride, value_stride;
} EpTarget;

/** Sums of other nodes, which come as records over the network: terms of a token's sum. */
typedef struct EpNodeSums {
    const char *records; /**< [others, places] records; NULL: there are none */
    int32_t places;      /**< of a node: the tokens of a chunk */
    const int32_t
        *order; /**< device [R + others]: the place of each rank and other node in the order of
                     summation, which is that of the group's ranks; NULL: as numbered */
} EpNodeSums;

typedef struct EpGatherArgs {
    EpCudaGroup group;
    EpCudaPlan plan;
    EpPlanShape shape;
    EpGatherTensors t;
    EpRecord record;
    EpPipelineShape pipeline;
    int32_t receivers;  /**< blocks that receive; the others send */
    int32_t schedulers; /**< warps of a block that schedule */
    int32_t chunk;      /**< most tokens that each of them claims at a time */
    int32_t owners;     /**< ranks, and nodes if their sums are terms; entries of others are none */
    int32_t rounds; /**< whether this rank's own partial sum is rounded to the rows' type, too, as
                         those of the other ranks are: the sum of a node for another one. Where
                         sums are packed: that one is, and the total travels packed */
    EpTarget target;
    EpStamp *stamp; /**< where records are filled for other nodes: this rank's, which goes with
                       them; else NULL */
    EpNodeSums nodes;
    EpMarks marks; /**< of the messages that these lie in; watch NULL: there are none */
    int32_t top_k;
    int32_t packed_stride; /**< where sums are quantised: bytes from one packed piece to the next */
} EpGatherArgs;

#ifdef __cplusplus
extern "C" {
#endif

/** See ep_cuda_open_prepare. */
int ep_cuda_open_gather(int shared_bytes);
int ep_cuda_launch_gather(const void *args, int blocks, void *stream);

/** Divide the work: sets receivers, schedulers, chunk and the pipeline's shape from the other
 * fields. Blocks have `shared_bytes` of shared memory. Returns 0 if that is too small. */
int ep_partition_gather(EpGatherArgs *args, int32_t shared_bytes);

#ifdef __cplusplus
}
#endif

/** Run a gather on several nodes: combine/cuda/gather_nodes.c. `args` describes it as if the plan
 * had no parts. */
EpStatus ep_cuda_gather_nodes(EpHandle *handle, const EpGather *call, const EpGatherArgs *args);

#endif
