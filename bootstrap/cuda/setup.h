/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_CUDA_SETUP_H
#define EP_BOOTSTRAP_CUDA_SETUP_H

/**
 * What the CUDA backend sets up with the peers.
 *
 *     gpus.c             this process's GPUs, before any is used
 *     comm.c             NCCL communicators: the group's own, or a borrowed one
 *     make_comm.c        makes one of them
 *     nccl_bootstrap.c   ep_bootstrap_nccl: a bootstrap over the caller's communicator
 *     windows.c          windows: device memory that all ranks map
 *     adopt.c            windows of the borrowed communicator that the caller made
 *     ipc.c              windows where ranks share GPUs, which NCCL does not support
 *     probe.cu           kernels that find a window's addresses and probe whether peers reach it
 *     links.c, nvml.c    what connects the GPUs
 *     watch.c, mark.cu   on several nodes: who fails, and what is late
 *     setup.c            the group's device memory; opening and closing all of these
 */

#include "bootstrap/gpus.h"
#include "runtime/cuda/cuda.h"

/** Entries of the backend's table; see EpBackendOps. */
void ep_cuda_find_gpus(const EpGroupConfig *config, int32_t num_ranks, EpGpuReport *out);
void ep_cuda_measure(const EpGroupConfig *config, const EpNodeSizes *nodes,
                     const EpSettings *settings, int64_t *shared_bytes, int64_t *private_bytes);
EpStatus ep_cuda_open(EpGroup *group);
/** Frees memory: the device is idle. */
void ep_cuda_close(EpGroup *group, int together);
EpStatus ep_cuda_open_window(EpGroup *group, const EpCall *call, EpWindow *window);
void ep_cuda_close_window(EpGroup *group, EpWindow *window, int together);
EpStatus ep_cuda_adopt_window(EpGroup *group, const EpCall *call, const EpWindow *window);
EpStatus ep_cuda_release_window(EpGroup *group, const EpCall *call, const EpWindow *window);
EpStatus ep_cuda_locate_window(EpGroup *group, const EpCall *call, void *window, void **memory,
                               size_t *bytes);

/* ---- the communicator ---------------------------------------------------------------------- */

/* Communicators for windows and weights do not block: NCCL works in a thread of its own while the
 * rank waits with a timeout, so a rank that stays away is an error. For that NCCL starts a thread
 * for each group of calls, which takes the host some 60 us. The network's communicator blocks: each
 * operation has calls on it, which hold no thread for long once the ranks are connected. A thread
 * of the library's connects them (EpNcclCall). A borrowed communicator may be of either kind. */

/** Returns whether calls on the communicator of all ranks hold the thread that makes them. */
static inline int ep_cuda_network_blocks(const EpGroup *group) {
    return group->purpose == EP_FOR_TOKENS && group->nodes.sizes.nodes > 1;
}

/** Collective: create the group's communicators, from the borrowed one or from unique ids that
 *  travel over the bootstrap, or check the borrowed one. */
EpStatus ep_cuda_comm_open(EpGroup *group);

/** A communicator to make: this rank's number in it and how many it has; from an id or, if one was
 *  lent, split from that, with the ranks of one color. */
typedef struct EpNewComm {
    int32_t first; /**< the lowest rank of the group in it, which makes its id */
    int32_t rank, size;
    ncclUniqueId id;
    int32_t color; /**< NCCL_SPLIT_NOCOLOR: none for this rank */
    int blocks;    /**< whether its calls hold the thread that makes them */
} EpNewComm;

/** Collective: make a communicator. After a failure the borrowed one can only be aborted, and
 *  bootstraps over it refuse all gathers; an own one in `out` the group is to abort. */
EpStatus ep_cuda_comm_make(EpGroup *group, const EpNewComm *new, ncclComm_t *out);

/** Blocks of a kernel of NCCL that moves weights on one node. With what NCCL takes by itself, 24 on
 *  two H100s, a gather is not bound by the wire, and takes a fifth longer. Ranks may differ in
 *  num_sms, but must not in this. */
#define EP_WEIGHT_CTAS 48

/** What the group's own communicators are made with. */
ncclConfig_t ep_cuda_comm_config(const EpGroup *group, int blocks);

/** Destroy the group's own communicators if all ranks do so (`together`), else abort them. */
void ep_cuda_comm_close(EpGroup *group, int together);

/** Destroy or abort a communicator. NCCL waits until the graphs are gone that its calls lie in:
 * then that is left to a thread of its own. */
void ep_cuda_comm_end(const EpCuda *cuda, ncclComm_t comm, int aborts);

/** ep_group_agree after a call of NCCL. Its timeout is longer, since NCCL may keep other ranks
 *  waiting where this rank failed at once. */
EpStatus ep_cuda_comm_agree(EpGroup *group, const EpCall *call, EpStatus mine);

/** Returns the seconds to wait for NCCL, which may need longer than the group's timeout. */
double ep_cuda_comm_timeout(const EpGroup *group);

/** Returns EP_OK if `call` has ended well, EP_ERR_SYSTEM if NCCL failed, another error if it has
 *  not answered (ncclInProgress): at the deadline, or because the group was aborted. */
EpStatus ep_cuda_comm_check(const EpGroup *group, const char *call, ncclResult_t result,
                            double seconds);

/** Wait until a communicator of the group has finished `call`, which returned `result`; see
 *  ep_cuda_comm_check. */
EpStatus ep_cuda_comm_settle(EpGroup *group, ncclComm_t comm, const char *call,
                             ncclResult_t result);

/** Returns 1 if the bootstrap is one of ep_bootstrap_nccl, whose ranks meet on their GPUs. */
int ep_nccl_bootstrap_is(const EpBootstrap *bootstrap);

/**
 * Returns 1 if the bootstrap is one of ep_bootstrap_nccl and a failed gather of it may still be on
 * the device. Until the caller aborts its communicator, what waits for the device (cudaFree, for
 * example) would not return: leave the memory allocated instead.
 */
int ep_nccl_bootstrap_is_pending(const EpBootstrap *bootstrap);

/** Refuse all further gathers over the communicator, with this status and its sentence. */
void ep_nccl_bootstrap_refuse(ncclComm_t comm, EpStatus status);

/* ---- windows ------------------------------------------------------------------------------- */

/**
 * Collective: make a window of the given memory or, if it is `owned`, of new, zeroed memory.
 * peers[size] become the addresses of its parts on this rank. On success every rank has stored into
 * every other rank's part; on failure no rank has a window.
 */
EpStatus ep_cuda_window_open(EpGroup *group, const EpCall *call, EpCudaWindow *window,
                             char **peers);

/** Close a window. Unless all ranks do so now (`together`), a window that peers can reach stays. */
void ep_cuda_window_close(EpGroup *group, EpCudaWindow *window, int together);

/** Collective: map the parts of a window that the ranks of this node have, by CUDA IPC. peers[ranks
 *  of the node] become their addresses, NULL where a rank has none, which then fails. The caller
 *  must call ep_cuda_ipc_unmap even after a failure. EP_ERR_UNSUPPORTED: CUDA IPC cannot share the
 *  memory. EP_ERR_BOOTSTRAP: a rank's part is not in its allocation. */
EpStatus ep_cuda_ipc_map(EpGroup *group, const EpCall *call, EpCudaWindow *window, char **peers);

/** Collective: unmap the peers' parts. Returns 0 if some rank did not: then this rank's part must
 *  stay allocated, and the group is lost. */
int ep_cuda_ipc_unmap(EpGroup *group, EpCudaWindow *window);

/** What adopting windows needs later: its private bytes, opening and closing it. Nothing, unless
 * the group borrows a communicator. */
int64_t ep_cuda_adopting_bytes(const EpGroupConfig *config, int32_t num_ranks);
EpStatus ep_cuda_adopting_open(EpGroup *group);
void ep_cuda_adopting_close(EpGroup *group);

/* ---- links --------------------------------------------------------------------------------- */

/** Collective: find out whether NVLink connects the GPUs of this rank's node. Then set the group's
 *  whole_lines (runtime/cuda/latency.cuh): as LIBEP_LINES says or, for auto, 1 if NVLink connects
 * every two of the ranks' GPUs. */
EpStatus ep_cuda_choose_lines(EpGroup *group);

/** Say what connects the ranks. See EpBackendOps. */
void ep_cuda_describe(const EpGroup *group, EpGroupInfo *out);

#endif
