/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_LIMITS_H
#define EP_RUNTIME_CUDA_LIMITS_H

/**
 * What the CUDA backend needs of a GPU; also told by builds without it.
 */

#include "runtime/config.h"

#define EP_LEAST_CAPABILITY 90 /* 9.0: bulk copies between shared memory and peers */

#define EP_LEAST_STAGES 3           /* records in flight that a block needs room for */
#define EP_STATIC_SHARED_BYTES 9216 /* room for what kernels declare */

/** Shared memory of a block that the largest rows of a group need. */
static inline int64_t ep_cuda_least_shared(const EpGroupConfig *config) {
    EpRecord record = ep_record(config->max_row_bytes, config->max_top_k, config->max_scale_bytes);
    return EP_LEAST_STAGES * record.bytes + EP_STATIC_SHARED_BYTES;
}

#endif
