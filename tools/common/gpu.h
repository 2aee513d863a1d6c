/* SPDX-License-Identifier: Apache-2.0 */
#ifndef COMMON_GPU_H
#define COMMON_GPU_H

/** The GPU of a rank. Builds without CUDA have none. */

#include "tools/common/util.h"
#include "tools/common/world.h"

/** Whether this build has CUDA. */
bool gpu_built(void);

/** Collective, before a group exists: select this rank's GPU by its index on the node, if any. */
bool gpu_select(World *world);

/** Name of the selected GPU, or "". */
void gpu_name(char *out, size_t bytes);

/** Stands in for functions of builds with CUDA. */
static inline bool gpu_missing(const void *first, ...) {
    (void)first;
    bench_fail("%s was built without CUDA", bench_program);
    return false;
}

#if EP_WITH_CUDA

#include <cuda_runtime_api.h>

/** True for cudaSuccess. Else false, with a message that names the call. */
bool cuda_ok(cudaError_t status, const char *call);

/** Of the selected GPU: 90 is 9.0. 0 if it cannot be asked. */
int gpu_capability(void);

/** Set *out to the number of multiprocessors of the selected GPU. Returns as cuda_ok does. */
bool gpu_multiprocessors(int *out);

#endif

#endif
