/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_NODES_CUDA_FORWARD_H
#define EP_HANDLES_NODES_CUDA_FORWARD_H

/**
 * Latency mode on several nodes: the kernel that takes what has come from the other nodes.
 *
 * NCCL receives into one place, which the host knows. Only the device knows the operation's buffer
 * (runtime/cuda/latency.h), so messages of a send phase are copied there. There the ranks of this
 * node read the rows of a dispatch, and this rank the sums of a combine. After a dispatch's rows
 * each rank gets its heads, which say that the rows are here.
 *
 * A whole operation is received before the next one is sent. So its kernel that receives reads
 * messages where they are, and gives the heads itself. Kernels that send wait until all ranks of
 * the node have begun the same operation (await_node), before NCCL brings other messages.
 */

#include "runtime/cuda/latency.h"

typedef struct EpForwardArgs {
    EpCudaGroup group;
    EpLatency latency;
    int32_t gives_heads;   /**< of a dispatch */
    EpRelayedRows relayed; /**< likewise */
} EpForwardArgs;

#define EP_FORWARD_BLOCKS 96 /* most of a launch */

#ifdef __cplusplus
extern "C" {
#endif

int ep_cuda_open_forward(int shared_bytes);
int ep_cuda_launch_forward(const void *args, int blocks, void *stream);

#ifdef __cplusplus
}
#endif

#endif
