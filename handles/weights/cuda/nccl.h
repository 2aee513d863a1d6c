/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_WEIGHTS_CUDA_NCCL_H
#define EP_HANDLES_WEIGHTS_CUDA_NCCL_H

/**
 * A weight's operation in its group, around the calls of NCCL that move its bytes.
 *
 *     begin   ranks tell each other what they are in, and compare: ranks in different operations
 *             never send rows of different sizes. On one node a kernel stores that into the
 *             peers' windows. On several a kernel writes a stamp of fixed size, NCCL gathers the
 *             stamps, and a kernel compares them
 *     ...     NCCL and kernels move the bytes
 *     end     a kernel tells this rank's watcher that the operation has ended
 *
 * NCCL has no deadline. The group's watcher (bootstrap/network/cuda/network.h) knows by these
 * kernels that an operation is under way, also in replayed graphs, and ends it if a rank fails,
 * ends or stays away.
 */

#include "bootstrap/network/cuda/mark.h"
#include "runtime/cuda/cuda.h"
#include "runtime/cuda/order.h"
#include "runtime/op.h"

typedef struct EpWeightWork {
    EpGroup *group;
    EpCuda *cuda;
    ncclComm_t comm;     /**< of all ranks; NULL in a group of one, and where kernels move all */
    EpCudaStream stream; /**< the caller's */
    cudaStream_t wire;   /**< of the calls of NCCL that move the weight: see slices.h */
    int pushes; /**< whether kernels alone move the weight, and tell the ranks themselves */
    EpMarkArgs mark;
} EpWeightWork;

/** What an operation is: ranks that differ in it get EP_ERR_ORDER. */
typedef struct EpWeightFacts {
    const EpOp *op;
    int32_t number; /**< of the weight */
    int64_t form;   /**< by which it is moved */
    int64_t bytes;  /**< that each rank sends of it */
} EpWeightFacts;

/** Begin an operation that push.cu's kernels do: w->mark.group is what they get of the group. */
EpStatus ep_weight_enter(EpGroup *group, const EpWeightFacts *facts, EpStream stream,
                         EpWeightWork *w);

/** Likewise, where ranks of the group may share GPUs: NCCL has no part in it. */
EpStatus ep_weight_enter_alone(EpGroup *group, uint32_t digest, EpStream stream, EpWeightWork *w);

/** Begin an operation on the caller's stream. Operations of a group follow each other, on any
 *  streams. EP_ERR_UNSUPPORTED: NCCL cannot connect the ranks. */
EpStatus ep_weight_begin(EpGroup *group, const EpWeightFacts *facts, EpStream stream,
                         EpWeightWork *w);

/** Surround calls of NCCL that move the weight; `what` names them. */
EpStatus ep_weight_group_start(const EpWeightWork *w);
EpStatus ep_weight_group_end(const EpWeightWork *w, const char *what);

/** End an operation of which `status` is known. An error fails the group, since the other ranks
 *  have begun it. Returns `status`, or what fails here. */
EpStatus ep_weight_end(EpWeightWork *w, EpStatus status);

#endif
