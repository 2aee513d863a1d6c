/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_LATENCY_CUDA_H
#define EP_DISPATCH_LATENCY_CUDA_H

/**
 * The CUDA backend's movements in latency mode: whole, or one half.
 */

#include "runtime/backend.h"

EpStatus ep_cuda_latency_scatter(EpHandle *handle, const EpScatter *scatter);
EpStatus ep_cuda_latency_gather(EpHandle *handle, const EpGather *gather);

#endif
