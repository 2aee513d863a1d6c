/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_HOST_H
#define EP_RUNTIME_CUDA_HOST_H

/**
 * The CUDA backend's state of a group, on the host.
 */

#include <cuda_runtime_api.h>

#include "runtime/cuda.h"
#include "runtime/group.h"
#include "runtime/nccl_api.h"

typedef struct EpCuda {
    EpCudaGroup device; /**< what kernels get */
    int ordinal;        /**< CUDA device of this rank */
    int pageable;       /**< whether the GPU reaches all memory of the process */
    int num_sms;        /**< multiprocessors that operations may use */
    int shared_bytes;   /**< of shared memory that a block may have */
    EpCudaNotes *notes; /**< pinned */
    const EpNccl *nccl; /**< NULL in a group of one rank */
    ncclComm_t comm;
    int owns_comm;
    ncclWindow_t window;
    void *window_memory;
    cudaEvent_t last; /**< end of the last operation: operations of a group keep their order, also
                           on different streams */
    cudaStream_t last_stream;
} EpCuda;

static inline EpCuda *ep_cuda(const EpGroup *group) {
    return group->backend_state;
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

/** The backend's enter, leave and check_pointer. */
int ep_cuda_enter(const EpGroup *group, const char *call);
void ep_cuda_leave(const EpGroup *group, int before);
EpStatus ep_cuda_check_pointer(const EpGroup *group, const EpCall *call, const char *argument,
                               const void *data);

/** EP_OK, or EP_ERR_SYSTEM with what failed and why. */
EpStatus ep_cuda_check(const EpGroup *group, const char *what, int error);

void ep_cuda_measure(const EpGroupConfig *config, int32_t num_ranks, const EpSettings *settings,
                     int64_t *shared_bytes, int64_t *private_bytes);
EpStatus ep_cuda_open(EpGroup *group);
void ep_cuda_close(EpGroup *group, int together);

#endif
