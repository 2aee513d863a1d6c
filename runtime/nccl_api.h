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
    X(ncclCommInitRank)       \
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

#endif
