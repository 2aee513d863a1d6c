/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_LIMITS_H
#define EP_RUNTIME_CUDA_LIMITS_H

/**
 * What the CUDA backend needs of a GPU; also told by builds without it.
 */

#include "runtime/config.h"

#define EP_LEAST_CAPABILITY 90 /* 9.0: bulk copies between shared memory and peers */

#define EP_STATIC_SHARED_BYTES 9216 /* room for what kernels declare */
#define EP_JOB_TABLE_BYTES 1024     /* of a pipe's tables, for each load or store of a job */
#define EP_LEAST_PIECE_BYTES 1024   /* of a row, that a stage holds */

/** Shared memory of a block that a group needs: a stage for a row, and for each of its slots. */
static inline int64_t ep_cuda_least_shared(const EpGroupConfig *config) {
    int64_t piece = ep_min(config->max_row_bytes, EP_LEAST_PIECE_BYTES);
    return EP_STATIC_SHARED_BYTES + (1 + config->max_top_k) * (EP_JOB_TABLE_BYTES + piece);
}

#endif
