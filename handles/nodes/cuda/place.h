/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_NODES_CUDA_PLACE_H
#define EP_HANDLES_NODES_CUDA_PLACE_H

/** ep_group_place on several nodes of GPUs. */

#include "runtime/backend.h"

EpStatus ep_cuda_place_nodes(EpGroup *group, const int32_t *map, EpStream stream);

#endif
