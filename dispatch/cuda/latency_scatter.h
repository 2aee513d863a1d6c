/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_CUDA_LATENCY_SCATTER_H
#define EP_DISPATCH_CUDA_LATENCY_SCATTER_H

/**
 * The CUDA backend's dispatch in latency mode: its kernel's arguments and launch.
 */

#include "runtime/cuda/latency.h"
#include "runtime/movement.h"

/**
 * A token's record on its way to the ranks of its experts, in units of 16 bytes: the header, the
 * row, its scales. The header has a word for each k, the same for all ranks. Its lower bits hold
 * the expert plus 1. The bits above hold the number of the source's earlier entries for that
 * expert, or, where rows have one slot, of its earlier rows to that rank. If weights travel, each
 * follows its word.
 */
typedef struct EpRecordShape {
    int32_t header_units, row_units, scale_units;
    int32_t expert_bits;
    int32_t steps; /**< of the whole record */
} EpRecordShape;

#define EP_RECEIVED_AT_ONCE 4 /* steps that a receiving warp loads at a time */

typedef struct EpLatencyScatterArgs {
    EpPrepareArgs route; /**< has group, plan and shape */
    EpLatency latency;
    EpRecordShape record;
    EpWorkspaceLayout workspace;
    int32_t first_expert; /**< of this rank */
    int32_t lost_slot;    /**< what the plan has as the slot of a lost entry: -1 or EP_SLOT_LOST */
    int32_t team_shift;   /**< 1 << team_shift lanes hold a token's entries */
    EpScatterTensors t;
    uint64_t *block_counters; /**< [sets, EP_MAX_BLOCK_WORDS]: see EpBlockCounters */
} EpLatencyScatterArgs;

#ifdef __cplusplus
extern "C" {
#endif

/** See ep_cuda_open_prepare. At least 2 blocks. */
int ep_cuda_open_latency_scatter(int shared_bytes);
int ep_cuda_open_latency_scatter_masked(int shared_bytes);
int ep_cuda_launch_latency_scatter(const void *args, int blocks, void *stream);
int ep_cuda_launch_latency_scatter_masked(const void *args, int blocks, void *stream);

/** On several nodes; it sends or receives. */
int ep_cuda_open_latency_scatter_nodes(int shared_bytes);
int ep_cuda_launch_latency_scatter_nodes(const void *args, int blocks, void *stream);

#ifdef __cplusplus
}
#endif

#endif
