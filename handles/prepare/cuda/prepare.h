/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PREPARE_CUDA_PREPARE_H
#define EP_HANDLES_PREPARE_CUDA_PREPARE_H

/**
 * The kernels of ep_prepare on one node: prepare.cu routes a step, numbers.cu copies a plan's
 * numbers to the caller.
 */

#include "runtime/cuda/plan.h"
#include "runtime/movement.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Each kernel has two functions of this kind, in its .cu file. The first one is called once per
 * device, before the first launch: it loads the kernel and lets it have `shared_bytes` of shared
 * memory. The second one launches `blocks` blocks on a cudaStream_t with its EpPrepareArgs,
 * EpScatterArgs, ... Both return a cudaError_t, 0 for success. */
int ep_cuda_open_prepare(int shared_bytes);
int ep_cuda_open_prepare_masked(int shared_bytes);
int ep_cuda_launch_prepare(const void *args, int blocks, void *stream);
int ep_cuda_launch_prepare_masked(const void *args, int blocks, void *stream);
int ep_cuda_open_numbers(int shared_bytes);
int ep_cuda_launch_numbers(const void *args, int blocks, void *stream);

#ifdef __cplusplus
}
#endif

/** Parts of the backend table; see EpBackendOps. */
EpStatus ep_cuda_prepare(EpHandle *handle, const EpRouting *routing);
EpStatus ep_cuda_publish(EpHandle *handle, const EpRouting *routing);

#endif
