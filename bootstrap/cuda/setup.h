/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_CUDA_SETUP_H
#define EP_BOOTSTRAP_CUDA_SETUP_H

/**
 * What the CUDA backend sets up with the peers. Its memory is in bootstrap/memory/cuda/, its
 * communicators are in bootstrap/network/cuda/.
 *
 *     gpus.c             this process's GPUs, before any is used
 *     links.c, nvml.c    what connects the GPUs
 *     nccl_bootstrap.c   ep_bootstrap_nccl: a bootstrap over the caller's communicator
 *     setup.c            the group's device memory; opens and closes all that the group has
 */

#include "bootstrap/gpus.h"
#include "runtime/cuda/cuda.h"

/** Entries of the backend's table; see EpBackendOps. */
void ep_cuda_find_gpus(const EpGroupConfig *config, int32_t num_ranks, EpGpuReport *out);
void ep_cuda_measure(const EpGroupConfig *config, const EpNodeSizes *nodes,
                     const EpSettings *settings, int64_t *shared_bytes, int64_t *private_bytes);
EpStatus ep_cuda_open(EpGroup *group);
/** Local: the same for a group that processes may join, without its peers. */
EpStatus ep_cuda_reserve(EpGroup *group);
/** Frees memory: the device is idle. */
void ep_cuda_close(EpGroup *group, int together);

/* ---- links --------------------------------------------------------------------------------- */

/** Collective: find out whether NVLink connects the GPUs of this rank's node. Then set the group's
 *  whole_lines (runtime/cuda/latency.cuh): as LIBEP_LINES says or, for auto, 1 if NVLink connects
 * every two of the ranks' GPUs. */
EpStatus ep_cuda_choose_lines(EpGroup *group);

/** Local, for a group that processes may join: the same by this rank's GPU alone. Then, collective
 *  among members and newcomers, on these: they have the whole_lines of those in `alive`, or choose
 * it if there are none. EP_ERR_UNSUPPORTED: NVLink does not connect all of them, and they need it.
 */
void ep_cuda_find_links(EpGroup *group);
EpStatus ep_cuda_admit_lines(EpGroup *group, const EpCall *call, const EpMask *alive, int *whole);

/** Say what connects the ranks. See EpBackendOps. */
void ep_cuda_describe(const EpGroup *group, EpGroupInfo *out);

#endif
