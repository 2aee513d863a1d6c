/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_GPU_COMMUNICATOR_H
#define TESTS_GPU_COMMUNICATOR_H

/**
 * NCCL and a communicator, as a framework brings them.
 */

#include "ep/ep_nccl.h"
#include "tests/gpu/device_step.h"

/** Functions of NCCL, loaded at run time. */
typedef struct Nccl {
    ncclResult_t (*get_version)(int *version);
    ncclResult_t (*get_unique_id)(ncclUniqueId *id);
    ncclResult_t (*init_rank)(ncclComm_t *comm, int size, ncclUniqueId id, int rank,
                              ncclConfig_t *config);
    ncclResult_t (*async_error)(ncclComm_t comm, ncclResult_t *result);
    ncclResult_t (*all_reduce)(const void *from, void *to, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
    ncclResult_t (*mem_alloc)(void **out, size_t bytes);
    ncclResult_t (*mem_free)(void *memory);
    ncclResult_t (*window_register)(ncclComm_t comm, void *memory, size_t bytes, ncclWindow_t *out,
                                    int flags);
    ncclResult_t (*window_deregister)(ncclComm_t comm, ncclWindow_t window);
    ncclResult_t (*abort)(ncclComm_t comm);
    ncclResult_t (*destroy)(ncclComm_t comm);
} Nccl;

/** Load NCCL. Skips the test if NCCL cannot serve so many ranks here. */
void nccl_serves(Nccl *nccl, int ranks);

/** Likewise, if it cannot map the ranks' windows either. */
void nccl_maps(Nccl *nccl, int ranks);

/** Returns whether NCCL tells where a window begins, as it does from 2.29 on. */
bool nccl_locates(const Nccl *nccl);

/** One rank's communicator and a stream, as a framework makes them. */
typedef struct NcclRank {
    Nccl nccl;
    const EpBootstrap *harness; /**< of the same ranks */
    ncclComm_t comm;
    cudaStream_t stream;
} NcclRank;

/** Create a communicator of the bootstrap's ranks on their current devices. A nonblocking one may
 *  still be initializing when this returns. Skips the test if the machine cannot run it. */
void nccl_rank_open(NcclRank *rank, const EpBootstrap *harness, int blocking);
/** Check that the communicator still works: sum 1 + rank over all ranks. */
void nccl_rank_check(const NcclRank *rank);
/** Check it, and end it. */
void nccl_rank_close(NcclRank *rank);
/** End it at once, on ranks that are out of step. */
void nccl_rank_abort(NcclRank *rank);
/** Wait on the host until all ranks are here. */
void nccl_rank_meet(const NcclRank *rank);

/** A window that the framework has made, and its memory on this rank. */
typedef struct NcclWindow {
    char *memory;
    size_t bytes;
    ncclWindow_t window;
} NcclWindow;

/** Collective: allocate memory and register it with the communicator. */
NcclWindow nccl_window_open(const NcclRank *rank, size_t bytes);
void nccl_window_close(const NcclRank *rank, NcclWindow *window);

#endif
