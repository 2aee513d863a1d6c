/* SPDX-License-Identifier: Apache-2.0 */
/* ep_group_place: checks the map's tensor, then calls the backend. */
#include "handles/placement/place.h"

#include <stdlib.h>

#include "handles/operation.h"

EpStatus ep_copies_create(const EpGroup *group, EpCopyMemory *memory) {
    EpCopySetup setup = group->copies;
    size_t bytes = (size_t)ep_config_copies_bytes(&group->config, group->size);
    void *block = calloc(1, bytes);
    if (!block)
        return ep_fail(EP_ERR_NO_MEMORY,
                       "rank %d: %s: memory: expected %zu bytes for a placement, got none",
                       group->rank, group->call, bytes);
    ep_copies_map(setup.placement, setup.num_logical, block, &setup.memory);
    for (int32_t r = 0; r < group->size; r++) {
        setup.memory.node_of[r] = group->nodes.of[r];
        setup.memory.alive[r / 32] |= 1u << r % 32;
    }
    for (int32_t p = 0; p < setup.placement.num_experts; p++)
        setup.memory.logical_of[p] = p < setup.num_logical ? p : -1;
    ep_copies_build(&setup);
    *memory = setup.memory;
    return EP_OK;
}

EpStatus ep_group_place(EpGroup *group, const EpTensor *map, EpStream stream) {
    EpCall call = {"ep_group_place", -1};
    EP_TRY(ep_object_check(&call, "group", group, EP_OBJECT_GROUP));
    call.rank = group->rank;
    EP_TRY(ep_group_usable(group));
    call.group = group;
    if (group->config.num_physical == EP_DEFAULT)
        return ep_refuse(&call, EP_ERR_UNSUPPORTED, "group",
                         "expected one with config.num_physical, got one without");
    EP_TRY(ep_arg_tensor(&call, "map", map, 1));
    EP_TRY(ep_arg_type(&call, "map", map, EP_TYPE_INT32));
    EP_TRY(ep_arg_dim(&call, "map", map, 0, group->placement.num_experts,
                      "P, the group's num_physical"));
    EP_TRY(ep_arg_alignment(&call, "map", map, sizeof(int32_t)));
    EP_TRY(ep_arg_memory(&call, group, "map", map));
    int before = ep_group_start(group, &(EpActivity){call.name, "group", 0, -1});
    EpStatus status = group->backend->place(group, map->data, stream);
    ep_group_stop(group, before, status);
    return status;
}
