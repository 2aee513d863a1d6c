/* SPDX-License-Identifier: Apache-2.0 */
/* Launches the kernel of ep_group_place on one node; keeps the table in device memory. */
#include "handles/placement/cuda/place.h"

#include <stdlib.h>

#include "handles/cuda/handle.h"
#include "handles/nodes/cuda/place.h"
#include "handles/placement/place.h"
#include "runtime/cuda/cuda.h"
#include "runtime/cuda/digest.h"

EpStatus ep_cuda_open_copies(EpGroup *group) {
    EpCopyMemory host;
    void *block = NULL;
    size_t bytes = (size_t)ep_config_copies_bytes(&group->config, group->size);
    if (!bytes) return EP_OK;
    EP_TRY(ep_copies_create(group, &host));
    EpStatus status = ep_cuda_check(group, "cudaMalloc", cudaMalloc(&block, bytes));
    if (status == EP_OK) {
        ep_copies_map(group->copies.placement, group->copies.num_logical, block,
                      &group->copies.memory);
        status = ep_cuda_put(group, block, host.of, bytes);
    }
    free(host.of);
    return status;
}

void ep_cuda_close_copies(EpGroup *group) {
    (void)cudaFree(group->copies.memory.of);
}

EpStatus ep_cuda_place(EpGroup *group, const int32_t *map, EpStream on) {
    EpCuda *cuda = ep_cuda(group);
    EpCudaStream stream;
    EpPlaceArgs args = {.group = cuda->device,
                        .copies = group->copies,
                        .map = map,
                        .errors = cuda->errors};
    if (group->nodes.sizes.nodes > 1) return ep_cuda_place_nodes(group, map, on);
    args.group.digest = ep_digest_of(&ep_op_placement, 0, NULL, 0);
    EP_TRY(ep_cuda_stream(group, on, &stream));
    EP_TRY(ep_cuda_order_enter(group, &cuda->order, &stream));
    EpCudaLauncher launch =
        ep_cuda_variant(group, ep_cuda_launch_place, ep_cuda_launch_place_masked);
    return ep_cuda_order_leave(group, &cuda->order, &stream, launch(&args, 1, stream.stream));
}
