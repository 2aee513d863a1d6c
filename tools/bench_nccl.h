/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_NCCL_H
#define BENCH_NCCL_H

/** What the baseline needs of NCCL, which is loaded when the baseline is asked for. */

#include <nccl.h>
#include <stdbool.h>

#include "bench_world.h"

typedef struct Nccl {
    void *library;
    __typeof__(&ncclGetErrorString) error_string;
    __typeof__(&ncclGetUniqueId) unique_id;
    __typeof__(&ncclCommInitRank) init;
    __typeof__(&ncclCommDestroy) destroy;
    __typeof__(&ncclGroupStart) group_start;
    __typeof__(&ncclGroupEnd) group_end;
    __typeof__(&ncclSend) send;
    __typeof__(&ncclRecv) recv;
    ncclComm_t comm;
} Nccl;

/** Collective. Close it whether or not it opened; zero it before. */
bool nccl_open(World *world, Nccl *nccl);
void nccl_close(Nccl *nccl);

/** True for ncclSuccess; else a sentence that names the call. */
bool nccl_ok(const Nccl *nccl, ncclResult_t result, const char *call);

#endif
