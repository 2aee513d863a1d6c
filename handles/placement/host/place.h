/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PLACEMENT_HOST_PLACE_H
#define EP_HANDLES_PLACEMENT_HOST_PLACE_H

/** ep_group_place on the host backend: see EpBackendOps. */

#include "runtime/backend.h"

EpStatus ep_host_place(EpGroup *group, const int32_t *map, EpStream stream);

#endif
