/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_CUDA_BACKEND_H
#define EP_COMBINE_CUDA_BACKEND_H

#include "runtime/backend.h"

/** Receive a dropped operation's heads and nothing else, in a stream of the library's; see
 *  EpBackendOps. */
void ep_cuda_drop(EpHandle *handle);

/** The CUDA backend's gather, in either mode; see EpBackendOps. */
EpStatus ep_cuda_gather(EpHandle *handle, const EpGather *gather);

/** The CUDA backend's gather in latency mode. */
EpStatus ep_cuda_latency_gather(EpHandle *handle, const EpGather *gather);

#endif
