/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_EP_NCCL_H
#define EP_EP_NCCL_H

/**
 * Interoperation with NCCL: lend a framework's communicator to a group on the CUDA backend.
 */

#include <nccl.h>

#include "ep/ep.h"

/**
 * Let the group use `comm` instead of creating its own communicator. Its ranks are the bootstrap's
 * ranks, in the same order. It stays the caller's and must outlive the group. Its device is the
 * rank's device (config.device is EP_DEFAULT or the same). Either all ranks lend one or none does.
 * A group on the host backend, or a build without CUDA, refuses it with EP_ERR_UNSUPPORTED.
 */
static inline void ep_group_config_set_nccl(EpGroupConfig *config, ncclComm_t comm) {
    config->nccl_comm = (void *)comm;
}

#endif
