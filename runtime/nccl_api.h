/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_NCCL_API_H
#define EP_RUNTIME_NCCL_API_H

/**
 * NCCL, loaded when a group first needs it: libep runs without it, and with whichever of its
 * versions 2.28 to 2.30 the process has already loaded or finds first.
 */

#include <nccl.h>

#include "runtime/status.h"

#define EP_NCCL_MAP(X)        \
    X(ncclGetVersion)         \
    X(ncclGetErrorString)     \
    X(ncclGetUniqueId)        \
    X(ncclCommInitRankConfig) \
    X(ncclCommGetAsyncError)  \
    X(ncclCommCount)          \
    X(ncclCommUserRank)       \
    X(ncclCommCuDevice)       \
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
    int version;
} EpNccl;

/** The library, or NULL with a sentence in `reason`. */
const EpNccl *ep_nccl_load(char *reason, size_t reason_bytes);

/** What NCCL sets up takes its time: it looks at the whole machine first. Seconds it has at least.
 */
#ifndef NCCL_SECONDS
#define NCCL_SECONDS 60
#endif

/**
 * Wait for what a call has started in a communicator, where that does not block; `result` is what
 * the call returned. ncclInProgress: it was not over within `seconds`.
 */
ncclResult_t ep_nccl_settle(const EpNccl *nccl, ncclComm_t comm, ncclResult_t result,
                            double seconds);

#endif
