/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_CUDA_GATHER_H
#define EP_COMBINE_CUDA_GATHER_H

/**
 * The CUDA backend's gather in throughput mode: its kernel's arguments and launch.
 */

#include "runtime/cuda/plan.h"
#include "runtime/movement.h"

/** Where a token's sum and values go: bytes from one token's to the next one's, behind t.out_rows
 * and t.out_values. Of a relayed chunk plan they are records, on their way to the source. */
typedef struct EpTarget {
    int64_t row_stride, value_stride;
} EpTarget;

/** Sums of other nodes, which come as records over the network: terms of a token's sum. */
typedef struct EpNodeSums {
    const char *records;   /**< [others, message_slots] records; NULL: there are none. With a limit
                                (node_rows) such messages follow one another: see ep_message_row */
    int32_t message_slots; /**< of a node: the places of a message */
    int32_t rows; /**< that entries may name: message_slots; with a limit in all messages */
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
                         sums are packed: that one is, and the total travels packed. Sums by entry:
                         whether rows are passed on to another node */
    EpTarget target;
    EpStamp *stamp; /**< where records are filled for other nodes: this rank's, which goes with
                       them; else NULL */
    EpNodeSums nodes;
    EpMarks marks; /**< of the messages that these lie in; watch NULL: there are none */
    int32_t top_k;
    int32_t carries_weights; /**< sums by entry: whether the values that travel are weights; then no
                                  launch has t.weighs, since rows travel as they are */
    int32_t
        packed_stride; /**< where sums are quantised: bytes from one packed fragment to the next */
    EpStatistics stats;
    const int32_t *sources; /**< device [num_sources]: ranks of the group that get the records which
                               this launch fills for other nodes */
    int32_t num_sources;
} EpGatherArgs;

/* ---- quantised sums ------------------------------------------------------------------------ */

/*
 * How a partial sum that is quantised (EpHandleConfig.sum_quant) lies in a ring of throughput mode.
 *
 *     | 4 scales | codes of 512 elements | 4 scales | codes of 512 elements | ...
 *       16 bytes   512 bytes
 *
 * A bulk copy moves multiples of 16 bytes, and a row may be cut into fragments. So four scales, of
 * 128 elements each, precede the codes that they belong to: each fragment of whole groups is one
 * copy, and its place does not depend on the number of fragments. 528 bytes take the place of 1,024
 * of bf16. The last group may be shorter; it has all four scales.
 *
 * A unit is 16 elements, and 16 bytes of codes: what a thread packs or unpacks at a time.
 */

#define EP_PACKED_ELEMENTS 512 /* of a group */
#define EP_PACKED_UNITS 32     /* of a group */
#define EP_PACKED_BYTES 528    /* of a group */

/** Returns the bytes of a packed row, or of a fragment of whole groups. `elements`: a multiple
 * of 16.
 */
EP_HOST_DEVICE static inline int64_t ep_packed_bytes(int64_t elements) {
    return elements + (elements + EP_PACKED_ELEMENTS - 1) / EP_PACKED_ELEMENTS * 16;
}

/** Return the offset of a unit's codes, and that of the scale of its block. */
EP_HOST_DEVICE static inline int32_t ep_packed_codes(int32_t unit) {
    return unit * 16 + (unit / EP_PACKED_UNITS + 1) * 16;
}

EP_HOST_DEVICE static inline int32_t ep_packed_scale(int32_t unit) {
    return unit / EP_PACKED_UNITS * EP_PACKED_BYTES + unit % EP_PACKED_UNITS / 8 * 4;
}

/* ---- launch -------------------------------------------------------------------------------- */

struct EpTuning;

#ifdef __cplusplus
extern "C" {
#endif

/** See ep_cuda_open_prepare. */
int ep_cuda_open_gather(int shared_bytes);
int ep_cuda_open_gather_masked(int shared_bytes);
int ep_cuda_launch_gather(const void *args, int blocks, void *stream);
int ep_cuda_launch_gather_masked(const void *args, int blocks, void *stream);

/** Divide the work: sets receivers, schedulers, chunk and the pipeline's shape from the other
 * fields. Blocks have `shared_bytes` of shared memory. Returns 0 if that is too small. */
int ep_partition_gather(const struct EpTuning *tuning, EpGatherArgs *args, int32_t shared_bytes);

#ifdef __cplusplus
}
#endif

/** Run a gather on several nodes: combine/cuda/gather_nodes.c. `args` describes it as if the plan
 * had no chunk plans. */
EpStatus ep_cuda_gather_nodes(EpHandle *handle, const EpGather *call, const EpGatherArgs *args);

#endif
