/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_CUDA_REPLAY_H
#define EP_BOOTSTRAP_CUDA_REPLAY_H

/**
 * Exchanges between nodes, and replays of those that repeat.
 *
 * For each group of calls on a nonblocking communicator NCCL starts a thread, which takes the host
 * some 130 us. Launching a graph takes some 10. A group's buffers stay where they are, and where
 * sizes are static, so do the lengths of its messages. So an exchange is captured when it comes for
 * the second time, on the stream that all exchanges take, and is replayed from then on.
 *
 * NCCL demands that an exchange is captured on all ranks that take part, or on none, and that all
 * replay what they have captured together. Nobody asks: the same facts decide on every rank. These
 * are the order of the exchanges, their keys, and the limit (LIBEP_NODE_GRAPHS). So exchanges whose
 * lengths only their two ends know, those of exact sizing, have no key.
 *
 * The kernels at an exchange's ends go with it. Their arguments are those of the operation that was
 * captured, so they take from device memory what differs (mark.h).
 *
 * Nothing is given up for what comes when the table is full: NCCL frees memory of a graph that is
 * gone in one of its next calls, which may wait for the device.
 *
 * A capture is relaxed: other threads may allocate memory meanwhile. As with any capture, they
 * would break it if they synchronised the whole device at that moment, and NCCL with it.
 */

#include "runtime/cuda/cuda.h"

#define EP_MOST_REPLAYS 64
#define EP_EXCHANGE_KEY 4

typedef struct EpExchange {
    const char *what; /**< NCCL's last call, for sentences */
    cudaStream_t stream;
    ncclResult_t (*call)(const void *context); /**< makes the calls: one group of them */
    int (*after)(const void *context);         /**< launches a kernel after them */
    const void *context;
    int64_t
        key[EP_EXCHANGE_KEY]; /**< all that the calls and the kernels' arguments follow from;
                                   equal on all ranks. The first is not 0, unless there is none */
} EpExchange;

/** The exchanges that have come so far, in that order. */
typedef struct EpReplays {
    int32_t count;
    int has_graphs;   /**< whether graphs were made, which NCCL's communicator then waits for */
    int64_t launches; /**< of graphs; for tests */
    struct EpReplay {
        int64_t key[EP_EXCHANGE_KEY];
        cudaGraphExec_t graph; /**< NULL: it has come once */
    } of[EP_MOST_REPLAYS];
} EpReplays;

/** Make an exchange on the communicator of all ranks, or replay it. `stream`: the operation's; what
 *  is captured there gets the calls themselves. */
EpStatus ep_cuda_exchange(EpGroup *group, const EpCudaStream *stream, const EpExchange *exchange);

/** Destroy the graphs. Those that are still running go when they have ended. */
void ep_cuda_replays_close(EpReplays *replays);

#endif
