/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_HOST_GATHER_H
#define EP_COMBINE_HOST_GATHER_H

#include "runtime/backend.h"

/** The host backend's gather; see EpBackendOps. */
EpStatus ep_host_gather(EpHandle *handle, const EpGather *gather);

#endif
