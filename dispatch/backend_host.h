/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_BACKEND_HOST_H
#define EP_DISPATCH_BACKEND_HOST_H

/**
 * The host backend's two movements, entries of its table.
 */

#include "handles/handle.h"
#include "runtime/host.h"

EpStatus ep_host_scatter(EpHandle *handle, const EpScatter *scatter);
EpStatus ep_host_gather(EpHandle *handle, const EpGather *gather);

#endif
