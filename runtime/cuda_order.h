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

/** Where a launch is made: the driver is asked once for all the orders that it is in. */
typedef struct EpCudaPlace {
    cudaStream_t stream;
    unsigned long long id; /**< of the capture it is in, or, where none is, of the stream: a handle
                              may be another stream's by now */
    int captures;          /**< whether it is in a capture */
} EpCudaPlace;

/** Launches that follow each other. */
typedef struct EpCudaTrail {
    cudaEvent_t last;  /**< behind the last one */
    EpCudaPlace place; /**< of the last one */
    int set;           /**< whether there is one to follow */
} EpCudaTrail;

typedef struct EpCudaOrder {
    EpCudaTrail plain, captured;
} EpCudaOrder;

EpStatus ep_cuda_order_open(const struct EpGroup *group, EpCudaOrder *order);
void ep_cuda_order_close(EpCudaOrder *order);

EpStatus ep_cuda_place(const struct EpGroup *group, EpStream stream, EpCudaPlace *out);

/** Before a launch, and behind it; `launched` is its cudaError_t. */
EpStatus ep_cuda_order_enter(const struct EpGroup *group, EpCudaOrder *order,
                             const EpCudaPlace *place);
EpStatus ep_cuda_order_leave(const struct EpGroup *group, EpCudaOrder *order,
                             const EpCudaPlace *place, int launched);

/** Instead of ep_cuda_order_leave: another order sees to it that what is next follows. */
void ep_cuda_order_forget(EpCudaOrder *order, const EpCudaPlace *place);

#endif
