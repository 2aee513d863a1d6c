/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_MEMORY_CUDA_CUDA_MEMORY_H
#define EP_BOOTSTRAP_MEMORY_CUDA_CUDA_MEMORY_H

/** The CUDA backend's part of bootstrap/memory/memory.h. */

#include "runtime/cuda/cuda.h"

/** Entries of the backend's table; see EpBackendOps. */
EpStatus ep_cuda_open_window(EpGroup *group, const EpCall *call, EpWindow *window);
void ep_cuda_close_window(EpGroup *group, EpWindow *window, int together);
EpStatus ep_cuda_adopt_window(EpGroup *group, const EpCall *call, const EpWindow *window);
EpStatus ep_cuda_release_window(EpGroup *group, const EpCall *call, const EpWindow *window);
EpStatus ep_cuda_locate_window(EpGroup *group, const EpCall *call, void *window, void **memory,
                               size_t *bytes);

/**
 * Collective: make a window of the given memory or, if it is `owned`, of new, zeroed memory.
 * peers[size] become the addresses of its parts on this rank. On success every rank has stored into
 * every other rank's part; on failure no rank has a window.
 */
EpStatus ep_cuda_window_open(EpGroup *group, const EpCall *call, EpCudaWindow *window,
                             char **peers);

/** Local: make a window of new, zeroed memory, with a part for each place of a group that processes
 *  may join. peers[size] become the parts' addresses. Nothing is mapped into those of others yet:
 * see bootstrap/memory/cuda/places.h. On failure there is no window. */
EpStatus ep_cuda_window_reserve(EpGroup *group, const EpCall *call, EpCudaWindow *window,
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

#endif
