/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PREPARE_CUDA_ROUTING_MAP_H
#define EP_HANDLES_PREPARE_CUDA_ROUTING_MAP_H

/** ep_read_routing_map and ep_write_routing_map on GPUs: one launch of routing_map.cu. */

#include "handles/prepare/routing_map.h"

struct EpCall;

#ifdef __cplusplus
extern "C" {
#endif
int ep_cuda_launch_read_map(const EpRoutingMap *map);
int ep_cuda_launch_write_map(const EpRoutingMap *map);
EpStatus ep_cuda_read_routing_map(const EpCall *call, const EpRoutingMap *map);
EpStatus ep_cuda_write_routing_map(const EpCall *call, const EpRoutingMap *map);
#ifdef __cplusplus
}
#endif

#endif
