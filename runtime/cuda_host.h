/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_HOST_H
#define EP_RUNTIME_CUDA_HOST_H

/**
 * The CUDA backend's state of a group, on the host.
 */

#include <cuda_runtime_api.h>

#include "runtime/cuda.h"
#include "runtime/cuda_order.h"
#include "runtime/group.h"
#include "runtime/nccl_api.h"

/** Device memory that all ranks of a group map. */
typedef struct EpCudaWindow {
    char *memory; /**< NULL: none */
    int64_t bytes;
    ncclWindow_t nccl; /**< NULL in a group without NCCL */
    int unanswered;    /**< NCCL may still be at work on the memory, which stays then */
    int shared;        /**< ep_cuda_share was called, on all ranks: so will be ep_cuda_unshare */
    void **mapped;     /**< [size] then: what was mapped of each, or NULL */
    int owned;         /**< allocated with the window, and freed with it */
} EpCudaWindow;

/** Places for tensors that need not be looked at again. A model's steps bring the same ones. */
#define EP_REACHED 256

typedef struct EpCuda {
    EpCudaGroup device; /**< what kernels get */
    int ordinal;        /**< CUDA device of this rank */
    int pageable;       /**< whether the GPU reaches all memory of the process */
    int shared_bytes;   /**< of shared memory that a block may have */
    EpCudaNotes *notes; /**< pinned */
    const EpNccl *nccl; /**< NULL in a group of one rank, and where ranks share GPUs */
    ncclComm_t comm;
    int owns_comm;
    EpCudaWindow own;                     /**< the library's own: rings and flags */
    EpCudaWindow windows[EP_MAX_WINDOWS]; /**< of the caller, by their number */
    int num_windows;                      /**< none is numbered higher */
    EpCudaOrder order;                    /**< of the group's operations */
    int whole_lines;                      /**< see runtime/lines.cuh */
    const void *reached[EP_REACHED]; /**< tensors that were found good, by a hash of the address */
} EpCuda;

static inline EpCuda *ep_cuda(const EpGroup *group) {
    return group->backend_state;
}

/** Is a stream under capture, and in which? The runtime's function has changed its form. */
static inline cudaError_t ep_cuda_capture_info(cudaStream_t stream,
                                               enum cudaStreamCaptureStatus *status,
                                               unsigned long long *id) {
#if CUDART_VERSION >= 13000
    return cudaStreamGetCaptureInfo(stream, status, id, NULL, NULL, NULL, NULL);
#else
    return cudaStreamGetCaptureInfo_v2(stream, status, id, NULL, NULL, NULL);
#endif
}

/*
 * Each call of the runtime's is meant for the group's device, whatever the caller's thread has as
 * its current one:
 *
 *     int before = ep_cuda_use(cuda->ordinal);
 *     ...
 *     ep_cuda_restore(before);
 *
 * The operations and the calls on handles have this from the layers above them, by way of the
 * backend's `enter` and `leave`.
 */
/** Make a device current that is not; returns the one to go back to, or EP_STAY. */
int ep_cuda_switch(int device, int before);
void ep_cuda_switch_back(int before);

static inline int ep_cuda_use(int device) {
    int current = -1;
    if (cudaGetDevice(&current) == cudaSuccess && current == device) return EP_STAY;
    return ep_cuda_switch(device, current);
}

static inline void ep_cuda_restore(int before) {
    if (before != EP_STAY) ep_cuda_switch_back(before);
}

/** Where the allocation begins that a GPU's memory is part of, or NULL. */
void *ep_cuda_allocation(const void *memory);

/** The backend's enter, leave and check_pointer. */
int ep_cuda_enter(const EpGroup *group, const char *call);
void ep_cuda_leave(const EpGroup *group, int before);
EpStatus ep_cuda_check_pointer(const EpGroup *group, const EpCall *call, const char *argument,
                               const void *data);

/** EP_OK, or EP_ERR_SYSTEM with what failed and why. */
EpStatus ep_cuda_check(const EpGroup *group, const char *what, int error);

/** Host memory into a GPU's, where it is when this returns: cudaMemcpy alone may leave the last of
 *  pageable memory under way, and streams of callers do not wait for it. */
EpStatus ep_cuda_put(const EpGroup *group, void *to, const void *from, size_t bytes);

/** Blocks of kernels that move rows: each takes a multiprocessor of its own. */
int32_t ep_cuda_blocks(const EpSettings *settings);

void ep_cuda_measure(const EpGroupConfig *config, int32_t num_ranks, const EpSettings *settings,
                     int64_t *shared_bytes, int64_t *private_bytes);
EpStatus ep_cuda_open(EpGroup *group);
void ep_cuda_close(EpGroup *group, int together);
EpStatus ep_cuda_finish(EpGroup *group);
EpStatus ep_cuda_open_window(EpGroup *group, const EpCall *call, EpWindow *window);
void ep_cuda_close_window(EpGroup *group, EpWindow *window, int together);

/**
 * Collective: make a window of the memory and size given, or, where it is `owned`, of new and
 * zeroed memory; peers[size] become its addresses here. On failure there is none, on any rank. It
 * has been tried: every rank has stored into every other's part.
 */
EpStatus ep_cuda_window_open(EpGroup *group, const EpCall *call, EpCudaWindow *window,
                             char **peers);
void ep_cuda_window_close(EpGroup *group, EpCudaWindow *window, int together);

/** Number of the caller's window that wholly contains [data, data + bytes), and its offset from the
 *  window's beginning; or -1. Whether peers' tensors lie in theirs is theirs to find out. */
int ep_cuda_window_find(const EpCuda *cuda, const void *data, int64_t bytes, int64_t *offset);

#endif
