/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_CUDA_GATHER_H
#define EP_COMBINE_CUDA_GATHER_H

/**
 * The CUDA backend's gather in throughput mode: its kernel's arguments and launch.
 */

#include "handles/cuda/plan.h"
#include "runtime/movement.h"

typedef struct EpGatherArgs {
    EpCudaGroup group;
    EpCudaPlan plan;
    EpPlanShape shape;
    EpGatherTensors t;
    EpRecord record;
    EpPipelineShape pipeline;
    int32_t receivers; /**< blocks that receive; the others send */
    int32_t chunk;     /**< most tokens that a block claims at a time */
    int32_t top_k;
    int32_t packed_stride; /**< where sums are quantised: bytes from one packed piece to the next */
} EpGatherArgs;

#ifdef __cplusplus
extern "C" {
#endif

/** See ep_cuda_open_prepare. */
int ep_cuda_open_gather(int shared_bytes);
int ep_cuda_launch_gather(const void *args, int blocks, void *stream);

/** Divide the work: sets receivers, chunk and the pipeline's shape from the other fields. Blocks
 *  have `shared_bytes` of shared memory. Returns 0 if that is too small. */
int ep_partition_gather(EpGatherArgs *args, int32_t shared_bytes);

#ifdef __cplusplus
}
#endif

#endif
