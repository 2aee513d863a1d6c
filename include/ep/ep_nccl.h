/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_EP_NCCL_H
#define EP_EP_NCCL_H

/**
 * Interoperation with NCCL: make a bootstrap from a framework's communicator, and lend the
 * communicator to a group on the CUDA backend.
 */

#include <nccl.h>

#include "ep/ep.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Make a bootstrap whose ranks are the ranks of `comm`, in the same order. Local: the ranks need
 * not call it together. *out must be initialized (EP_BOOTSTRAP_INIT) and is written only on
 * success.
 *
 * The communicator stays the caller's and must outlive the bootstrap's last use. It may be blocking
 * or nonblocking, and a nonblocking one may still be initializing; then this call waits for it, for
 * LIBEP_TIMEOUT or a minute, whichever is longer. NCCL must be libnccl.so.2, the one that the
 * process has loaded, of version 2.28.3 or newer. After 2.32 libep warns once that it was not
 * tested with that version.
 *
 * allgather and barrier are ncclAllGather on `comm`, on a stream and in buffers of the bootstrap's
 * own, on the communicator's device: 4 KiB for each rank on the device, and as much pinned host
 * memory. Therefore:
 *
 * - One thread at a time uses a communicator, and all ranks use it in the same order. Calls that
 *   use the bootstrap (creating and destroying groups; ep_mem_alloc, ep_mem_free,
 *   ep_window_register, ep_window_deregister) count as uses, like the caller's own collectives.
 * - If a rank stays away, the others get EP_ERR_TIMEOUT at the deadline. NCCL does not tell which
 *   rank is missing, unless there are only two. Prefer a nonblocking communicator: the first gather
 *   over a blocking one connects the ranks, and NCCL sets no deadline for that.
 * - libep never aborts the communicator. After a timeout its gather still waits on the device, and
 *   later gathers over the communicator are refused with the same status. Abort the communicator
 *   (ncclCommAbort) before you destroy other groups or bootstraps on that device, or create handles
 *   with plans of their own: CUDA frees memory only when the device is idle. What libep cannot free
 *   without waiting stays allocated.
 * - Give each rank a process of its own. In a process with several GPUs, CUDA calls that free or
 *   allocate memory may wait for kernels of all of them, so also for the gather of a rank that has
 *   gone ahead and waits for this one. Where ranks are threads, they meet on the host after they
 *   create or destroy a group, or handles with plans of their own.
 *
 * The bootstrap has no share and no messages: ranks on several nodes connect over TCP. A group's
 * device does not follow from its bootstrap: call ep_group_config_set_nccl too, or set
 * config.device.
 *
 * Destroy the groups first, then the bootstrap, then the communicator. Several bootstraps may use
 * one communicator, and several groups one bootstrap.
 *
 * EP_ERR_UNSUPPORTED: this build has no CUDA, or the process has no NCCL that libep can use.
 * EP_ERR_BOOTSTRAP: NCCL reports an error. EP_ERR_TIMEOUT: the communicator is not initialized in
 * time. EP_ERR_NO_MEMORY.
 */
EpStatus ep_bootstrap_nccl(ncclComm_t comm, EpBootstrap *out);

/**
 * Let the group use `comm` instead of creating its own communicator. Its ranks are the bootstrap's
 * ranks, in the same order. It stays the caller's and must outlive the group. Its device is the
 * rank's device (config.device is EP_DEFAULT or the same). Either all ranks lend one or none does.
 * Its windows can be adopted: see ep_window_adopt.
 *
 * A group on several nodes splits its own communicators from `comm` (ncclCommSplit). Therefore:
 *
 * - `comm` is idle while ep_group_create runs: no operation on it is under way on any rank's
 *   streams, and no other thread uses it. NCCL may deadlock otherwise.
 * - It was created with splitShare = 0, NCCL's default: where communicators share resources, the
 *   end of one ends the others, and libep aborts its own when a rank fails. Then `comm` goes on.
 * - If NCCL does not complete a split on some rank, ep_group_create returns EP_ERR_SYSTEM with
 *   NCCL's reason there, EP_ERR_TIMEOUT on the ranks that waited. Then abort `comm`
 *   (ncclCommAbort): NCCL may still be waiting in it, and bootstraps over it refuse all gathers.
 *
 * A group on the host backend, or a build without CUDA, refuses it with EP_ERR_UNSUPPORTED.
 */
static inline void ep_group_config_set_nccl(EpGroupConfig *config, ncclComm_t comm) {
    config->nccl_comm = (void *)comm;
}

#ifdef __cplusplus
}
#endif

#endif
