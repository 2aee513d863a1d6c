/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_CUDA_CHECK_PLAN_H
#define EP_HANDLES_CUDA_CHECK_PLAN_H

/**
 * Checks the plan, the whole of it, that an operation on several nodes reads. Then the operation
 * begins: see ep_cuda_launch_begin. A wrong plan fails the group, and so this rank's stamp.
 */

#include "bootstrap/network/cuda/mark.h"
#include "handles/cuda/plan.h"

typedef struct EpCheckArgs {
    EpMarkArgs mark;
    EpCudaPlan plan;
} EpCheckArgs;

#ifdef __cplusplus
extern "C" {
#endif

/** See ep_cuda_open_prepare. */
int ep_cuda_open_check(int shared_bytes);
int ep_cuda_launch_check(const void *args, int blocks, void *stream);

#ifdef __cplusplus
}
#endif

#endif
