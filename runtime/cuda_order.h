/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_ORDER_H
#define EP_RUNTIME_CUDA_ORDER_H

/**
 * Launches that are to run in the order of their calls, on whatever streams: each waits for the
 * event behind the one before. Within one stream that is so by itself. Launches of a capture follow
 * those of the same capture, plain ones follow plain ones, whatever has been captured in between;
 * between graphs and streams, order is the caller's.
 */

#include <cuda_runtime_api.h>

#include "runtime/status.h"

struct EpGroup;

/** Launches that follow each other. */
typedef struct EpCudaTrail {
    cudaEvent_t last; /**< behind the last one */
    cudaStream_t stream;
    unsigned long long id; /**< of the capture it was in, or, where none was, of its stream: a
                              handle may be another stream's by now */
    int set;               /**< whether there is one to follow */
} EpCudaTrail;

typedef struct EpCudaOrder {
    EpCudaTrail plain, captured;
    EpCudaTrail *now;          /**< of the launch under way */
    unsigned long long now_id; /**< its id */
} EpCudaOrder;

EpStatus ep_cuda_order_open(const struct EpGroup *group, EpCudaOrder *order);
void ep_cuda_order_close(EpCudaOrder *order);

/** Before a launch on `stream`, and behind it; `launched` is its cudaError_t. */
EpStatus ep_cuda_order_enter(const struct EpGroup *group, EpCudaOrder *order, EpStream stream);
EpStatus ep_cuda_order_leave(const struct EpGroup *group, EpCudaOrder *order, EpStream stream,
                             int launched);

/** Instead of ep_cuda_order_leave: another order sees to it that what is next follows. */
static inline void ep_cuda_order_forget(EpCudaOrder *order) {
    order->now->set = 0;
}

/** Whether the launch that entered last is in a capture. */
static inline int ep_cuda_order_captures(const EpCudaOrder *order) {
    return order->now == &order->captured;
}

#endif
