/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_HANDLE_CUDA_H
#define EP_HANDLES_HANDLE_CUDA_H

/**
 * A handle on the CUDA backend, on the host.
 */

#include "handles/handle.h"
#include "handles/plan_cuda.h"
#include "runtime/cuda_host.h"

typedef struct EpCudaHandle {
    EpCudaInfo *info;               /**< pinned: numbers of the last prepare that has finished */
    int64_t prepares;               /**< issued so far */
    int64_t num_rows, top_k, exact; /**< of the last one issued */
} EpCudaHandle;

static inline EpCudaPlan ep_cuda_plan(const EpHandle *handle) {
    EpCudaPlan plan;
    ep_cuda_plan_map(&handle->shape, handle->memory, &plan);
    return plan;
}

int64_t ep_cuda_plan_bytes(const EpPlanShape *shape, const EpSettings *settings);
EpStatus ep_cuda_format_plan(EpHandle *handle);
EpStatus ep_cuda_check_plan(const EpHandle *handle, const char *call, void *memory);
void ep_cuda_retire_plan(EpHandle *handle);
EpStatus ep_cuda_adopt_plan(EpHandle *handle);
void ep_cuda_poll(EpGroup *group);
EpStatus ep_cuda_read_plan(const EpHandle *handle, EpStep *out);

#endif
