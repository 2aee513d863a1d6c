/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_CUDA_BACKEND_H
#define EP_COMBINE_CUDA_BACKEND_H

#include "runtime/backend.h"

/** The CUDA backend's gather, in either mode; see EpBackendOps. */
EpStatus ep_cuda_gather(EpHandle *handle, const EpGather *gather);

/** The CUDA backend's gather in latency mode. */
EpStatus ep_cuda_latency_gather(EpHandle *handle, const EpGather *gather);

#endif
