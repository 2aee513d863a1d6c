/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PLACEMENT_PLACE_H
#define EP_HANDLES_PLACEMENT_PLACE_H

/** The table of copies of a new group: see EpCopyMemory. */

#include "runtime/group.h"

/** Allocate a table in host memory, in one block that begins with memory->of: that of a group's
 *  first map, which places expert p at p. Returns EP_OK, or EP_ERR_NO_MEMORY. */
EpStatus ep_copies_create(const EpGroup *group, EpCopyMemory *memory);

#endif
