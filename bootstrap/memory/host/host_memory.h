/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_MEMORY_HOST_HOST_MEMORY_H
#define EP_BOOTSTRAP_MEMORY_HOST_HOST_MEMORY_H

/** The host backend's part of bootstrap/memory/memory.h. */

#include "runtime/group.h"

/** Share POSIX memory, for bootstraps without `share`; see EpBootstrap.share. */
EpStatus ep_posix_share(EpGroup *group, size_t bytes, void **segments, void **memory);
void ep_posix_share_free(void *memory);

/** Entries of the backend's table; see EpBackendOps. */
EpStatus ep_host_open_window(EpGroup *group, const EpCall *call, EpWindow *window);
void ep_host_close_window(EpGroup *group, EpWindow *window, int together);

#endif
