/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_CUDA_NCCL_BOOTSTRAP_H
#define EP_BOOTSTRAP_CUDA_NCCL_BOOTSTRAP_H

/** What the library must know of a bootstrap over the caller's communicator (ep_nccl.h). */

#include "ep/ep.h"
#include "runtime/cuda/nccl.h"

/** Returns 1 if the bootstrap is one of ep_bootstrap_nccl, whose ranks meet on their GPUs. */
int ep_nccl_bootstrap_is(const EpBootstrap *bootstrap);

/**
 * Returns 1 if the bootstrap is one of ep_bootstrap_nccl and a failed gather of it may still be on
 * the device. Until the caller aborts its communicator, what waits for the device (cudaFree, for
 * example) would not return: leave the memory allocated instead.
 */
int ep_nccl_bootstrap_is_pending(const EpBootstrap *bootstrap);

/** Refuse all further gathers over the communicator, with this status and its sentence. */
void ep_nccl_bootstrap_refuse(ncclComm_t comm, EpStatus status);

#endif
