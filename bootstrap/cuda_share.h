/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_CUDA_SHARE_H
#define EP_BOOTSTRAP_CUDA_SHARE_H

/**
 * Windows of a group whose ranks share GPUs. NCCL has no communicator for these: each process maps
 * the memory of all others by CUDA IPC.
 */

#include "runtime/cuda_host.h"

/** Collective: peers[size] become the addresses here of each rank's part of the window. What has
 *  been mapped is the window's to give back, after a failure too. EP_ERR_UNSUPPORTED: memory that
 *  cannot be shared so. */
EpStatus ep_cuda_share(EpGroup *group, const EpCall *call, EpCudaWindow *window, char **peers);

/** Collective: give back what is mapped of the others' parts. 0: not all have, so that this rank's
 *  part must stay; the group is lost then. */
int ep_cuda_unshare(EpGroup *group, EpCudaWindow *window);

#endif
