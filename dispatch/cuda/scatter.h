/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_CUDA_SCATTER_H
#define EP_DISPATCH_CUDA_SCATTER_H

/**
 * The CUDA backend's scatter in throughput mode: its kernel's arguments and launch.
 */

#include "runtime/cuda/plan.h"
#include "runtime/movement.h"

/** Where a token's row, weights and scales lie behind t.rows, t.topk_weights and t.scales: bytes
 * from one token's to the next one's. The tokens of a relayed chunk plan are records. */
typedef struct EpSource {
    int64_t row_stride, weight_stride, scale_stride;
} EpSource;

typedef struct EpScatterArgs {
    EpCudaGroup group;
    EpCudaPlan plan;
    EpPlanShape shape;
    EpScatterTensors t; /**< if rows are quantised, `scales` is made_scales */
    EpRecord record;
    EpPipelineShape send, receive; /**< of sending and of receiving blocks */
    int32_t receivers;             /**< blocks that receive; the others send */
    int32_t schedulers;            /**< warps of a block that schedule */
    int32_t chunk;                 /**< most tokens that each of them claims at a time */
    int32_t owners;                /**< ranks; entries of other owners are left to others */
    int32_t top_k;
    int32_t multiplied; /**< type of rows that are multiplied; 0: rows are only copied */
    EpSource source;
    char *made_scales; /**< workspace for the scales of quantised rows */
    int32_t zero_copy; /**< whether senders store rows into t.out_rows directly */
    uint64_t where;    /**< zero copy: address of t.out_rows, as in an EpArrival; else 0 */
    EpMarks marks;     /**< of the messages that records lie in; watch NULL: rows are no records */
    int32_t paired;    /**< number of the paired window that t.out_rows are in; -1: in none */
    EpStatistics stats;
    EpBlockCounters blocks; /**< of t.ready */
} EpScatterArgs;

struct EpTuning;

#ifdef __cplusplus
extern "C" {
#endif

/** See ep_cuda_open_prepare. */
int ep_cuda_open_scatter(int shared_bytes);
int ep_cuda_open_scatter_masked(int shared_bytes);
int ep_cuda_launch_scatter(const void *args, int blocks, void *stream);
int ep_cuda_launch_scatter_masked(const void *args, int blocks, void *stream);

/** Divide the work: sets receivers, schedulers, chunk and the pipelines' shapes from the other
 * fields. Blocks have `shared_bytes` of shared memory; tokens are cut into fragments of multiples
 * of `unit` bytes. Returns 0 if shared memory is too small. */
int ep_partition_scatter(const struct EpTuning *tuning, EpScatterArgs *args, int32_t shared_bytes,
                         int64_t unit);

#ifdef __cplusplus
}
#endif

/** Run a scatter on several nodes: dispatch/cuda/scatter_nodes.c. `args` describes it as if the
 * plan had no chunk plans; `unit` is ep_partition_scatter's. */
EpStatus ep_cuda_scatter_nodes(EpHandle *handle, const EpScatter *call, const EpScatterArgs *args,
                               int64_t unit);

#endif
