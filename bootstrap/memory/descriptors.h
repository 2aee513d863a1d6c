/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_MEMORY_DESCRIPTORS_H
#define EP_BOOTSTRAP_MEMORY_DESCRIPTORS_H

/**
 * File descriptors that ranks of a node give each other: over Unix sockets, which need no common
 * file system and leave nothing behind.
 */

#include "bootstrap/bootstrap.h"

/**
 * Collective over the group's bootstrap: give `mine` to each rank of this node with which this one
 * connects (ep_group_connects), and get theirs: found[size], -1 where there is none. The caller
 * closes them, also after a failure. `status`: of this rank, whose failure is one on all ranks.
 */
EpStatus ep_descriptors_exchange(EpGroup *group, const EpCall *call, EpStatus status, int mine,
                                 int *found);

#endif
