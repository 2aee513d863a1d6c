/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_ORDER_H
#define EP_RUNTIME_CUDA_ORDER_H

/**
 * Makes launches run in the order of their calls, on any streams: each waits for an event behind
 * the launch before. Within one stream no event is needed. A captured launch follows launches of
 * the same capture; a plain launch follows plain launches, whatever was captured in between. The
 * caller orders graphs and streams.
 */

#include <cuda_runtime_api.h>

#include "runtime/status.h"

struct EpGroup;

/** A stream at the time of a launch. The driver is queried once for all orders that the launch is
 *  in. */
typedef struct EpCudaStream {
    cudaStream_t stream;
    unsigned long long id; /**< of the capture, or, where there is none, of the stream: its handle
                              may belong to another stream later */
    int captures;          /**< whether it is under capture */
} EpCudaStream;

/** The latest launch of a sequence. */
typedef struct EpCudaLast {
    cudaEvent_t event; /**< behind the last launch */
    EpCudaStream at;   /**< stream of that launch */
    int set;           /**< whether there is a launch to follow */
} EpCudaLast;

typedef struct EpCudaOrder {
    EpCudaLast plain, captured;
} EpCudaOrder;

EpStatus ep_cuda_order_open(const struct EpGroup *group, EpCudaOrder *order);
void ep_cuda_order_close(EpCudaOrder *order);

EpStatus ep_cuda_stream(const struct EpGroup *group, EpStream stream, EpCudaStream *out);

/** Call these before and after a launch; `launched` is its cudaError_t. */
EpStatus ep_cuda_order_enter(const struct EpGroup *group, EpCudaOrder *order,
                             const EpCudaStream *stream);
EpStatus ep_cuda_order_leave(const struct EpGroup *group, EpCudaOrder *order,
                             const EpCudaStream *stream, int launched);

/** Call this instead of ep_cuda_order_leave where another order makes the next launch follow. */
void ep_cuda_order_forget(EpCudaOrder *order, const EpCudaStream *stream);

#endif
