/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/prepare/cuda/routing_map.h"

#include "handles/prepare/cuda/count.h"

EpStatus ep_cuda_read_routing_map(const EpCall *call, const EpRoutingMap *m) {
    return ep_cuda_launched(call, ep_cuda_launch_read_map(m));
}

EpStatus ep_cuda_write_routing_map(const EpCall *call, const EpRoutingMap *m) {
    return ep_cuda_launched(call, ep_cuda_launch_write_map(m));
}
