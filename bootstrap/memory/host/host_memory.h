/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_MEMORY_HOST_HOST_MEMORY_H
#define EP_BOOTSTRAP_MEMORY_HOST_HOST_MEMORY_H

/** The host backend's part of bootstrap/memory/memory.h. */

#include "runtime/group.h"

/** Share POSIX memory, for bootstraps without `share`; see EpBootstrap.share. */
EpStatus ep_posix_share(EpGroup *group, size_t bytes, void **segments, void **memory);
void ep_posix_share_free(void *memory);

/**
 * The same in groups that processes may join, in three steps. `reserve`, local: create this rank's
 * segment. `connect`, collective: map those of the ranks on this node with which this one connects
 * (ep_group_connects); `segments` gets them, else NULL. The status is this rank's alone, and *found
 * is to be freed with ep_posix_share_free. `adopt`, once all ranks have succeeded: let *found have
 * what `memory` had of the places that have changed, and the other way round.
 */
EpStatus ep_posix_reserve(EpGroup *group, size_t bytes, void **segment, void **memory);
EpStatus ep_posix_connect(EpGroup *group, const void *memory, void **segments, void **found);
/** Returns the random number of this rank's segment. */
uint64_t ep_posix_proof(const void *memory);
void ep_posix_adopt(void *memory, void *found, const EpMask *changed);

/** Entries of the backend's table; see EpBackendOps. */
EpStatus ep_host_open_window(EpGroup *group, const EpCall *call, EpWindow *window);
void ep_host_close_window(EpGroup *group, EpWindow *window, int together);

#endif
