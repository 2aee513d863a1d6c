/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_CUDA_H
#define EP_RUNTIME_CUDA_CUDA_H

/**
 * The CUDA backend's state of a group, on the host, and what surrounds its calls to the CUDA
 * runtime.
 */

#include <cuda_runtime_api.h>
#include <pthread.h>

#include "runtime/cuda/device.h"
#include "runtime/cuda/nccl.h"
#include "runtime/cuda/notes.h"
#include "runtime/cuda/order.h"
#include "runtime/cuda/tuning.h"
#include "runtime/group.h"

/** How the ranks reach a window, which decides how it is released. */
typedef enum EpCudaWindowKind {
    EP_WINDOW_UNSHARED,  /**< no other rank reaches it */
    EP_WINDOW_NCCL,      /**< registered with NCCL */
    EP_WINDOW_ABANDONED, /**< NCCL did not answer and may still use the memory, which stays */
    EP_WINDOW_IPC,       /**< mapped by CUDA IPC */
    EP_WINDOW_PLACES,    /**< mapped by the driver: see bootstrap/memory/cuda/places.h */
    EP_WINDOW_ADOPTED    /**< part of the caller's own window */
} EpCudaWindowKind;

/** Device memory that all ranks of a group map. */
typedef struct EpCudaWindow {
    char *memory; /**< NULL: none */
    int64_t bytes;
    int64_t offset; /**< of `memory` from the start of the window that peers see */
    int owned;      /**< allocated with the window, and freed with it */
    int paired;     /**< see EP_WINDOW_PAIRED */
    EpCudaWindowKind kind;
    ncclWindow_t nccl; /**< of EP_WINDOW_NCCL */
    void **mapped;     /**< [ranks of the node] of EP_WINDOW_IPC: each rank's mapping, or NULL */
    struct EpCudaPlaces *places; /**< of EP_WINDOW_PLACES */
} EpCudaWindow;

#define EP_VALIDATED 2048 /* a step of 60 layers brings some 500 addresses */

typedef struct EpCuda {
    EpCudaGroup device;        /**< what kernels get */
    int ordinal;               /**< CUDA device of this rank */
    int pageable;              /**< whether the GPU reaches all memory of the process */
    int shared_bytes;          /**< shared memory that a block may have */
    EpCudaAsyncErrors *errors; /**< pinned */
    unsigned long long bad_reports, bad_total, lost; /**< what has been reported of `errors` */
    const EpNccl *nccl; /**< NULL in a group of one rank, and where ranks share GPUs */
    ncclComm_t comm;    /**< of the ranks on this node; NULL: there are no others */
    int owns_comm;
    ncclComm_t network; /**< of all ranks, by which NCCL moves data, the group's own; else NULL */
    int captured;       /**< whether calls on the communicator of all ranks lie in graphs */
    EpCudaWindow own;   /**< the library's own: rings and flags */
    EpCudaWindow windows[EP_WINDOW_NUMBERS]; /**< the caller's, by their number */
    int num_windows;                         /**< no window has a higher number */
    cudaStream_t adopting;       /**< for adopted windows, if a communicator was lent; else NULL */
    char **found;                /**< pinned, [size]: where its kernel finds a window's parts */
    EpCudaOrder order;           /**< of the group's operations */
    EpCudaNotes notes;           /**< of aborts */
    EpTuned tuned;               /**< constants of the division of blocks */
    int linked;                  /**< whether NVLink connects the GPUs of this node */
    int whole_lines;             /**< see runtime/cuda/latency.cuh */
    cudaStream_t stream;         /**< of the library's, which follows no other */
    char *workspace;             /**< of quantising dispatches in throughput mode: a
                                      step's scales. They follow each other */
    uint64_t *block_counters;    /**< see EpBlockCounters: of throughput mode, then of each set of
                                      latency mode */
    struct EpCudaOwn *spare;     /**< plans whose handles are gone: handles/cuda/plan.c */
    struct EpCudaWatch *watch;   /**< NULL on one node; see bootstrap/network/cuda/network.h */
    struct EpCudaRelay *relay;   /**< NULL on one node; see handles/nodes/cuda/relay.h */
    struct EpCudaSlices *slices; /**< NULL: none; see handles/weights/cuda/slices.h */
    struct EpMaskResult *masked; /**< pinned; NULL: no masks. handles/masks/cuda/mask.h */
    uint32_t incarnation[EP_CUDA_MAX_RANKS]; /**< masks: as in EpCudaState */
    EpMask chosen;                           /**< masks: cuts that the table of copies knows */
    EpMask reached; /**< the ranks of this node, by their numbers there, whose windows are mapped */
    struct EpCudaLatency *latency;       /**< NULL: none; see handles/cuda/latency.c */
    const void *validated[EP_VALIDATED]; /**< cache of validated pointers, by a hash of the
                                              address: steps of a model bring the same tensors */
} EpCuda;

static inline EpCuda *ep_cuda(const EpGroup *group) {
    return group->backend_state;
}

/** Returns the communicator of all ranks of the group, or NULL. */
static inline ncclComm_t ep_cuda_group_comm(const EpCuda *cuda) {
    return cuda->network ? cuda->network : cuda->comm;
}

/** Query a stream's capture status and the capture's id. The runtime's function has changed its
 *  form. */
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
 * Each call to the CUDA runtime is meant for the group's device, whatever device is current on the
 * caller's thread:
 *
 *     int before = ep_cuda_use(cuda->ordinal);
 *     ...
 *     ep_cuda_restore(before);
 *
 * Operations and calls on handles get this from the layers above them, through the backend's
 * `enter` and `leave`.
 */
/** Make another device current. Returns the device to restore, or EP_STAY. */
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

/** Returns the start of the allocation that contains this device memory, and its size, or NULL. */
void *ep_cuda_allocation(const void *memory, int64_t *bytes);

/** What lies behind mapped memory: the driver's handle of the allocation, 0 if none is mapped
 * there, and the place in it, both equal for two mappings of the same byte; and the bytes from
 * there on. */
typedef struct EpCudaBacking {
    unsigned long long handle;
    int64_t at, left;
} EpCudaBacking;

EpCudaBacking ep_cuda_backing(const void *memory);

/** The backend table's parts; see EpBackendOps. */
EpStatus ep_cuda_captures(const EpGroup *group, EpStream stream, int32_t *captured);
int ep_cuda_enter(const EpGroup *group, const EpActivity *activity);
void ep_cuda_leave(const EpGroup *group, int before);
EpStatus ep_cuda_check_pointer(const EpGroup *group, const EpCall *call, const char *argument,
                               const void *data);
EpStatus ep_cuda_finish(EpGroup *group);
EpDeviceOf ep_cuda_find_device_of(void);

/** Returns EP_OK, or an error that says what failed and why. */
EpStatus ep_cuda_check(const EpGroup *group, const char *what, int error);

/** Returns the bytes of EpCuda.block_counters, with so many sets of latency mode. */
static inline int64_t ep_cuda_counter_bytes(int32_t sets) {
    return (1 + sets) * (int64_t)sizeof(uint64_t) * EP_MAX_BLOCK_WORDS;
}

/** Copy host memory to a GPU, and wait until it is there. cudaMemcpy alone may return while the end
 *  of pageable memory is still being copied, and callers' streams do not wait for it. */
EpStatus ep_cuda_put(const EpGroup *group, void *to, const void *from, size_t bytes);

/** Create a stream whose priority is so many steps below the highest, as far as there are. Those of
 *  the highest, 0, end kernels that wait: with few hardware queues, their copies must not queue up
 *  behind work that waits for such kernels. */
EpStatus ep_cuda_open_stream(const EpGroup *group, int below, cudaStream_t *out);

/** Create, record and wait for an event that orders streams. */
EpStatus ep_cuda_open_event(const EpGroup *group, cudaEvent_t *out);
EpStatus ep_cuda_record(const EpGroup *group, cudaEvent_t event, cudaStream_t stream);
EpStatus ep_cuda_await(const EpGroup *group, cudaStream_t stream, cudaEvent_t event);

/** Multiprocessors of the current device. */
int32_t ep_cuda_multiprocessors(void);

/** Number of blocks of the kernels that move rows, for a group of this configuration on the current
 *  device. Each takes a multiprocessor of its own. On several nodes some are left to NCCL, unless
 * the caller says how many there may be. */
int32_t ep_cuda_blocks(const EpGroupConfig *config, const EpNodeSizes *nodes,
                       const EpSettings *settings);

/** Number of token partitions of prepare, in a launch that may use so many multiprocessors. */
int32_t ep_cuda_partitions(int32_t blocks);

/** Returns the number of the caller's window that contains all of [data, data + bytes), and its
 *  offset from the start of the window as peers see it; or -1. Each peer looks up its own
 *  tensors. */
int ep_cuda_window_find(const EpCuda *cuda, const void *data, int64_t bytes, int64_t *offset);

/** Start a thread of the library's, which takes none of the program's signals. Returns 0 or an
 *  error of pthread_create. */
int ep_thread_start(pthread_t *out, void *(*body)(void *context), void *context);

#endif
