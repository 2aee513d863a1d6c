/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_NCCL_H
#define EP_RUNTIME_CUDA_NCCL_H

/**
 * NCCL, loaded when a group first needs it. libep runs without it, and with any version from
 * 2.28.3 on that the process has already loaded or finds first. It warns once of versions after
 * 2.32, which it was not tested with. NCCL has a CUDA runtime of its own, and gets addresses and
 * streams alone, which are the driver's. So it may be built for another major version of CUDA than
 * libep.
 */

#include <nccl.h>

#include "runtime/status.h"

#define EP_NCCL_MAP(X)        \
    X(ncclGetVersion)         \
    X(ncclGetErrorString)     \
    X(ncclGetUniqueId)        \
    X(ncclCommInitRankConfig) \
    X(ncclCommSplit)          \
    X(ncclCommGetAsyncError)  \
    X(ncclCommCount)          \
    X(ncclCommUserRank)       \
    X(ncclCommCuDevice)       \
    X(ncclAllGather)          \
    X(ncclAllReduce)          \
    X(ncclSend)               \
    X(ncclRecv)               \
    X(ncclGroupStart)         \
    X(ncclGroupEnd)           \
    X(ncclCommAbort)          \
    X(ncclCommDestroy)        \
    X(ncclMemAlloc)           \
    X(ncclMemFree)            \
    X(ncclCommWindowRegister) \
    X(ncclCommWindowDeregister)

typedef struct EpNccl {
#define NCCL_FIELD(function) __typeof__(&function) function;
    EP_NCCL_MAP(NCCL_FIELD)
#undef NCCL_FIELD
    /** Where a window begins in this rank's memory. NULL before NCCL 2.29. */
    ncclResult_t (*ncclWinGetUserPtr)(ncclComm_t comm, ncclWindow_t window, void **out);
    /** What the process's last error was, in words. May be NULL. */
    const char *(*ncclGetLastError)(ncclComm_t comm);
    int version;
} EpNccl;

/** Returns the library, or NULL with a sentence in `reason`. */
const EpNccl *ep_nccl_load(char *reason, size_t reason_bytes);

/** Returns what a failed call says of itself. Where CUDA or the system has failed in it, that is
 * its last error: so an NCCL that was built for a newer CUDA than the driver's says so. Valid until
 *  this thread's next call. */
const char *ep_nccl_explain(const EpNccl *nccl, ncclResult_t result);

/** The least timeout, in seconds, of what NCCL sets up: it examines the whole machine first. */
#ifndef EP_NCCL_SECONDS
#define EP_NCCL_SECONDS 60
#endif

/**
 * A call that holds its thread until all ranks have come, without a deadline: so a thread of its
 * own makes it. It is part of a struct that `make` knows, and of the heap.
 */
typedef struct EpNcclCall {
    ncclResult_t (*make)(struct EpNcclCall *call);
    int device; /**< of the rank: NCCL opens what is current, in a new thread the first one */
    ncclResult_t result;
    int returned; /**< stored with release, last */
} EpNcclCall;

/** Make a call. Returns 1 if it has returned within `seconds`, with `result`; 0 at the deadline, or
 *  because the group was aborted. Then the thread and the struct stay: NCCL may still write there.
 */
int ep_nccl_call(EpNcclCall *call, double seconds);

/**
 * Wait until what a call has started in a non-blocking communicator is complete; `result` is what
 * the call returned. Returns ncclInProgress if it is not complete within `seconds`.
 */
ncclResult_t ep_nccl_settle(const EpNccl *nccl, ncclComm_t comm, ncclResult_t result,
                            double seconds);

#endif
