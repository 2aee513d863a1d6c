/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_ORDER_H
#define EP_RUNTIME_CUDA_ORDER_H

/**
 * Launches that are to run in the order of their calls, on whatever streams: each waits for the
 * event behind the one before. Within one stream that is so by itself. In a graph under capture the
 * event counts only if it was recorded there, too; between graphs and streams, order is the
 * caller's.
 */

#include <cuda_runtime_api.h>

#include "runtime/status.h"

struct EpGroup;

typedef struct EpCudaOrder {
    cudaEvent_t last; /**< behind the last launch */
    cudaStream_t stream;
    unsigned long long capture; /**< id of the capture it was in, 0: none */
    int has_last;
} EpCudaOrder;

EpStatus ep_cuda_order_open(const struct EpGroup *group, EpCudaOrder *order);
void ep_cuda_order_close(EpCudaOrder *order);

/** Before a launch on `stream`, and behind it; `launched` is its cudaError_t. */
EpStatus ep_cuda_order_enter(const struct EpGroup *group, EpCudaOrder *order, EpStream stream);
EpStatus ep_cuda_order_leave(const struct EpGroup *group, EpCudaOrder *order, EpStream stream,
                             int launched);

#endif
