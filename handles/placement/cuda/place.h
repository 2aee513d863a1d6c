/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PLACEMENT_CUDA_PLACE_H
#define EP_HANDLES_PLACEMENT_CUDA_PLACE_H

/** ep_group_place on the CUDA backend: its kernel's arguments and launch. */

#include "runtime/cuda/device.h"

typedef struct EpPlaceArgs {
    EpCudaGroup group;
    EpCopySetup copies;
    const int32_t *map;        /**< [P] */
    EpCudaAsyncErrors *errors; /**< pinned */
} EpPlaceArgs;

#ifdef __cplusplus
extern "C" {
#endif

/** See ep_cuda_open_prepare. One block. */
int ep_cuda_open_place(int shared_bytes);
int ep_cuda_open_place_masked(int shared_bytes);
int ep_cuda_launch_place(const void *args, int blocks, void *stream);
int ep_cuda_launch_place_masked(const void *args, int blocks, void *stream);

#ifdef __cplusplus
}
#endif

/** Allocate the table of a group that has one, and free it. */
EpStatus ep_cuda_open_copies(EpGroup *group);
void ep_cuda_close_copies(EpGroup *group);

/** See EpBackendOps. */
EpStatus ep_cuda_place(EpGroup *group, const int32_t *map, EpStream stream);

#endif
