/* SPDX-License-Identifier: Apache-2.0 */
/* ep_group_place on several nodes: the head of a routing message takes the map's hash along. */
#include "handles/nodes/cuda/place.h"

#include "handles/nodes/cuda/relay.h"
#include "runtime/cuda/digest.h"

EpStatus ep_cuda_place_nodes(EpGroup *group, const int32_t *map, EpStream stream) {
    EpCuda *cuda = ep_cuda(group);
    const EpCudaRelay *relay = cuda->relay;
    EpRelayRun run;
    EpMapArgs args = {.route = {.p = {.group = cuda->device, .errors = cuda->errors},
                                .t = relay->tables,
                                .messages = relay->routing,
                                .message_bytes = relay->routing_bytes},
                      .copies = group->copies,
                      .map = map};
    EpRelayCall call = {.stream = stream, .digest = ep_digest_of(&ep_op_placement, 0, NULL, 0)};
    args.route.p.group.digest = call.digest, args.route.p.group.size = relay->tables.group;
    EP_TRY(ep_relay_begin_group(group, &call, &run));
    EP_TRY(ep_relay_launch(&run, ep_cuda_collect_map, &args, 1));
    EP_TRY(ep_relay_gather(&run));
    EP_TRY(ep_relay_launch(&run, ep_cuda_take_map, &args, 1));
    return ep_relay_end(&run);
}
