/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_NODES_CUDA_LATENCY_NODES_H
#define EP_HANDLES_NODES_CUDA_LATENCY_NODES_H

/**
 * Latency mode on several nodes of GPUs: the host's part.
 *
 *     dispatch   send ── exchange ── receive
 *     combine    send ── relay ── exchange ── receive
 *                weights ── exchange ── spread, before that: topk_weights at the tokens' ranks
 *
 * Kernels send within the node as on one node, and fill a message of a fixed size for each other
 * node. NCCL exchanges the messages, between ranks of equal number, in one group of calls. So
 * nothing waits on the host, and all of it can be captured. A combine's relays add up what their
 * node's ranks have for a row before they send it; a rank that is alone on its node has nothing to
 * relay (ep_latency_relays). The receiving kernel is that of one node's receive phase: it waits for
 * ranks of its node alone. It reads messages where NCCL has put them. Of a send phase a kernel
 * copies them to the operation's own buffer before (forward.h).
 *
 * A whole operation runs on the caller's stream. A send phase leaves what follows its first kernel
 * to a stream of the group, unless it is captured.
 *
 * There is no circular wait. Operations are in one order on all ranks. One block of a kernel that
 * sends waits until the ranks of its node have begun the operation; all others wait for nothing, and
 * blocks that say that it has begun are the first ones. A relay's kernel waits for these, an exchange for the relays' kernels of the same
 * operation, and all of them precede on each rank what later operations send. So they end in the
 * order of operations, on whatever multiprocessors are free: a receiving kernel that holds them
 * waits for earlier ones alone.
 */

#include "handles/nodes/cuda/forward.h"
#include "handles/nodes/cuda/relay.h"

/** Returns the bytes of a group's tables; 0: it has none. */
int64_t ep_latency_tables_bytes(const EpGroupConfig *config, int32_t num_ranks,
                                const EpNodeSizes *nodes);

/** Open and close what a group on several nodes has for latency mode. Local. */
EpStatus ep_latency_nodes_open(EpGroup *group);
void ep_latency_nodes_close(EpGroup *group);

/** Set what the kernels of an operation on several nodes need besides, of a `phase`, and the blocks
 *  that they may have. */
void ep_latency_nodes_describe(const EpHandle *handle, EpPhase phase, int32_t token, int64_t steps,
                               EpCudaGroup *launch, EpLatency *latency);

/** A kernel of an operation. launch NULL: none. */
typedef struct EpNodesKernel {
    int (*launch)(const void *args, int blocks, void *stream);
    const void *args;
    int blocks;
} EpNodesKernel;

/** An operation, or one of its phases. */
typedef struct EpNodesLaunch {
    EpCudaLaunch order;            /**< its place: stream, phase, own, routing */
    EpNodesKernel weights, spread; /**< an exchange of weights between them, first of all */
    EpNodesKernel send, relay, receive;
    const EpCudaGroup *group;
    const EpLatency *latency; /**< of any of its kernels */
    EpForwardArgs forward;    /**< all but group and latency */
} EpNodesLaunch;

EpStatus ep_latency_nodes_launch(const EpHandle *handle, const EpNodesLaunch *launch);

#endif
