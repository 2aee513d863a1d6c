/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_HOST_SCATTER_H
#define EP_DISPATCH_HOST_SCATTER_H

#include "runtime/backend.h"

/** The host backend's scatter; see EpBackendOps. */
EpStatus ep_host_scatter(EpHandle *handle, const EpScatter *scatter);

#endif
