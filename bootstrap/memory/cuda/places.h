/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_MEMORY_CUDA_PLACES_H
#define EP_BOOTSTRAP_MEMORY_CUDA_PLACES_H

/**
 * Windows of groups that processes may join. The window is an address range with a part for each
 * place of the group. The driver maps the memory of the rank at a place into the part, and other
 * memory once another process stands there. So addresses that kernels and captured graphs hold stay
 * valid. NCCL has no part in it: its communicators end with a rank.
 */

#include "bootstrap/memory/cuda/cuda_memory.h"

typedef struct EpCudaPlaces EpCudaPlaces;

/** Local: reserve the range, and allocate this rank's memory, `bytes` zeroed bytes, in its part. */
EpStatus ep_cuda_places_open(const EpGroup *group, const EpCall *call, int64_t bytes,
                             EpCudaPlaces **out);

/** Unmap and free everything. Waits for nobody; NULL is allowed. */
void ep_cuda_places_close(EpCudaPlaces *places);

/** Returns the part of a place, which does not move. */
char *ep_cuda_places_part(const EpCudaPlaces *places, int32_t place);

/**
 * Collective over the group's bootstrap: get the memory of the ranks with which this one connects
 * (ep_group_connects), all on its node, and try to map it. The parts stay as they are until
 * ep_cuda_places_adopt; after another ep_cuda_places_find what was found before is dropped.
 */
EpStatus ep_cuda_places_find(EpGroup *group, const EpCall *call, EpCudaPlaces *places);

/** Local, once all ranks have found: map what was found into its parts, in place of what is there,
 *  and unmap the parts of places in `changed` of which nothing was found. No kernel uses these
 *  parts, since their ranks are masked. */
EpStatus ep_cuda_places_adopt(const EpGroup *group, EpCudaPlaces *places, const EpMask *changed);

#endif
