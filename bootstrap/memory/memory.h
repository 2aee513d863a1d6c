/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_MEMORY_MEMORY_H
#define EP_BOOTSTRAP_MEMORY_MEMORY_H

/**
 * Memory of a rank that other ranks reach.
 *
 *     windows.c              windows that ranks make together: ep_mem_alloc, ep_window_register
 *     adopt.c                windows that the caller has made, which each rank adopts alone
 *     descriptors.c          file descriptors that ranks of a node give each other
 *     host/posix_memory.c    shared segments of the host backend, if the bootstrap offers none
 *     host/windows.c         windows of the host backend: plain memory
 *     cuda/windows.c         windows of the CUDA backend: device memory that NCCL maps
 *     cuda/ipc.c             likewise, where ranks share GPUs: mapped by CUDA IPC
 *     cuda/places.c          memory that the driver maps into parts of places, for ranks that join
 *     cuda/adopt.c, probe.cu adopted windows; kernels that find addresses and try them
 */

#include "bootstrap/bootstrap.h"

/** Begin a call about windows: check that the group can be used and have any, and set the call's
 *  rank. */
EpStatus ep_window_enter(EpCall *call, EpGroup *group);

/** Check that memory does not overlap the group's other windows. */
EpStatus ep_window_apart(const EpCall *call, const EpGroup *group, const EpWindow *window);

#endif
