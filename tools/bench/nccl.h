/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_NCCL_H
#define BENCH_NCCL_H

/** NCCL, loaded at run time: what ep_bench compares with. */

#include <nccl.h>

#include "tools/common/gpu.h"

typedef struct Nccl {
    void *library;
    __typeof__(&ncclGetErrorString) error_string;
    __typeof__(&ncclGetUniqueId) unique_id;
    __typeof__(&ncclCommInitRankConfig) init;
    __typeof__(&ncclCommDestroy) destroy;
    ncclComm_t comm; /**< of all ranks */
} Nccl;

/** True for ncclSuccess. Else false, with a message that names the call. */
bool nccl_ok(const Nccl *nccl, ncclResult_t result, const char *call);

/** Set *function to that of a library. False, with a message, if there is none. */
bool library_find(void *library, const char *name, void *function);

/** Collective. Call nccl_close even after a failure; *nccl is zero before. */
bool nccl_open(World *world, Nccl *nccl);
void nccl_close(Nccl *nccl);

#endif
