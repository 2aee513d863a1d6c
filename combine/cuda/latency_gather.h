/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_CUDA_LATENCY_GATHER_H
#define EP_COMBINE_CUDA_LATENCY_GATHER_H

/**
 * The CUDA backend's combine in latency mode: its kernel's arguments and launch.
 */

#include "runtime/cuda/latency.h"
#include "runtime/movement.h"

#define EP_SENT_STEPS 4      /* most steps of a part that a sending warp moves */
#define EP_REDUCED_AT_ONCE 2 /* steps that a receiving warp reduces at a time */

/**
 * Where sums are quantised (EpHandleConfig.sum_quant), units 0 .. 27 of a step are codes, 16
 * elements each, and unit 28 has the scales of the four blocks of 128 elements that they belong to.
 * Two steps have seven blocks; both have the scale of the one in their middle. That is 448
 * elements, where a step has 240 of bf16: rows of 7,168 take 16 steps instead of 30.
 */
#define EP_PACKED_STEP_UNITS 28
#define EP_PACKED_STEP_ELEMENTS (EP_PACKED_STEP_UNITS * 16)

typedef struct EpLatencyGatherArgs {
    EpCudaGroup group;
    EpCudaPlan plan;
    EpPlanShape shape;
    EpLatency latency;
    EpGatherTensors t;
    int32_t top_k;
    int32_t row_units, steps; /**< of a row */
    EpPartition sent;  /**< among the sending warps, if no rank has more rows than this one */
    EpDivisor targets; /**< ranks that sums are sent to or kept for, at least 1 */
    EpStatistics stats;
    int32_t counts;          /**< whether there are any */
    int32_t carries_weights; /**< sums by entry: whether weights come with rows */
} EpLatencyGatherArgs;

/** Returns whether a kernel adds up what the `ranks` of a node have for the tokens of others. A
 * rank that is alone on its node has the node's sums, and sends them. But packed sums are unpacked
 * and packed once more on their way. */
EP_HOST_DEVICE static inline int ep_latency_relays(int32_t ranks, int packs) {
    return ranks > 1 || packs;
}

#ifdef __cplusplus
extern "C" {
#endif

/** See ep_cuda_open_prepare. At least 2 blocks. */
int ep_cuda_open_latency_gather(int shared_bytes);
int ep_cuda_open_latency_gather_masked(int shared_bytes);
int ep_cuda_launch_latency_gather(const void *args, int blocks, void *stream);
int ep_cuda_launch_latency_gather_masked(const void *args, int blocks, void *stream);

/** On several nodes: between the launches that send and receive, the relays add up sums. Weights
 *  that are given at the tokens' ranks are put into messages, and given to the ranks of the node,
 *  before the sums. */
int ep_cuda_launch_latency_weights(const void *args, int blocks, void *stream);
int ep_cuda_launch_latency_spread(const void *args, int blocks, void *stream);
int ep_cuda_open_latency_gather_nodes(int shared_bytes);
int ep_cuda_launch_latency_gather_nodes(const void *args, int blocks, void *stream);
int ep_cuda_launch_latency_relay(const void *args, int blocks, void *stream);

#ifdef __cplusplus
}
#endif

#endif
