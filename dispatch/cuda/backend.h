/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_CUDA_BACKEND_H
#define EP_DISPATCH_CUDA_BACKEND_H

#include "runtime/backend.h"

/** The CUDA backend's scatter, in either mode; see EpBackendOps. */
EpStatus ep_cuda_scatter(EpHandle *handle, const EpScatter *scatter);

/** Returns the bytes of a group's workspace: see EpCuda. */
int64_t ep_cuda_workspace_bytes(const EpGroupConfig *config);

/** The CUDA backend's scatter in latency mode. */
EpStatus ep_cuda_latency_scatter(EpHandle *handle, const EpScatter *scatter);

#endif
