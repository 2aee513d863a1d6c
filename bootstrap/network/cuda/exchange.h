/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_NETWORK_CUDA_EXCHANGE_H
#define EP_BOOTSTRAP_NETWORK_CUDA_EXCHANGE_H

/**
 * The network as operations on several nodes use it: messages that go at once, between begin and
 * end, on a stream. Both ends know the size. Messages between two ranks come in the order of the
 * calls. When what follows on the stream runs, this rank's messages have left their memory, and
 * those for it are in theirs. Nothing waits on the host, and all of it can be captured.
 *
 *     EP_TRY(ep_exchange_begin(&x, group, &stream, wire));
 *     ep_exchange_send(&x, peer, message, bytes);
 *     ep_exchange_receive(&x, peer, message, bytes);
 *     return ep_exchange_end(&x);
 *
 * Behind it is NCCL. docs/notes/network.md says what a device-initiated network would do instead.
 */

#include "bootstrap/network/cuda/network.h"

typedef struct EpExchange {
    EpGroup *group;
    const EpNccl *nccl;
    ncclComm_t comm; /**< of all ranks */
    cudaStream_t wire;
} EpExchange;

/** Begin an exchange on `wire`, of an operation on `stream`. If that fails, something is lost, and
 *  there is no end. */
EpStatus ep_exchange_begin(EpExchange *x, EpGroup *group, const EpCudaStream *stream,
                           cudaStream_t wire);
EpStatus ep_exchange_end(const EpExchange *x);

/** Likewise outside of any operation, for the first calls of a group: these connect the ranks, and
 *  hold the thread until all are there. */
void ep_exchange_begin_first(EpExchange *x, EpGroup *group, cudaStream_t wire);
ncclResult_t ep_exchange_end_first(const EpExchange *x);

/* What is wrong with a call, the end returns. */
void ep_exchange_send(const EpExchange *x, int32_t peer, const void *message, size_t bytes);
void ep_exchange_receive(const EpExchange *x, int32_t peer, void *message, size_t bytes);
/** Give all ranks this rank's `bytes`: `all` has those of all ranks, by rank, and `own` may lie in
 *  its place there. */
void ep_exchange_gather(const EpExchange *x, const void *own, void *all, size_t bytes);

#endif
