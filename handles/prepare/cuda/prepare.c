/* SPDX-License-Identifier: Apache-2.0 */
/* Launches the kernels of ep_prepare on one node. */
#include "handles/prepare/cuda/prepare.h"

#include "handles/cuda/handle.h"

EpStatus ep_cuda_prepare(EpHandle *handle, const EpRouting *routing) {
    EpPrepareArgs args;
    int64_t facts[EP_OP_FACTS];
    if (handle->shape.nodes.nodes > 1) return ep_cuda_route_nodes(handle, routing);
    ep_cuda_describe_routing(handle, routing, &args, facts);
    args.group.digest = ep_cuda_digest(handle, &ep_op_prepare, facts, EP_OP_FACTS);
    EpCudaLauncher launch =
        ep_cuda_variant(handle->group, ep_cuda_launch_prepare, ep_cuda_launch_prepare_masked);
    return ep_cuda_launch(handle, &(EpCudaLaunch){.launch = launch,
                                                  .args = &args,
                                                  .blocks = args.group.partitions + 1,
                                                  .stream = routing->stream,
                                                  .routing = routing});
}

EpStatus ep_cuda_publish(EpHandle *handle, const EpRouting *routing) {
    EpPrepareArgs args;
    int64_t facts[EP_OP_FACTS];
    ep_cuda_describe_routing(handle, routing, &args, facts);
    args.plan = ep_cuda_plan(handle, routing->plan, routing->top_k, -1, INT64_MAX, 0);
    return ep_cuda_launch(handle, &(EpCudaLaunch){.launch = ep_cuda_launch_numbers,
                                                  .args = &args,
                                                  .blocks = 1,
                                                  .stream = routing->stream});
}
