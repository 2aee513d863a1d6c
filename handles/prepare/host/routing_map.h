/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PREPARE_HOST_ROUTING_MAP_H
#define EP_HANDLES_PREPARE_HOST_ROUTING_MAP_H

#include "handles/prepare/routing_map.h"

struct EpCall;

EpStatus ep_host_read_routing_map(const struct EpCall *call, const EpRoutingMap *map);
EpStatus ep_host_write_routing_map(const struct EpCall *call, const EpRoutingMap *map);

#endif
