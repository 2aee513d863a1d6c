/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_CODE_H
#define EP_RUNTIME_CUDA_CODE_H

/**
 * Which of this build's code GPUs run. Code of capability 8.0 differs from all newer code: see
 * EP_HAS_BULK (runtime/cuda/ptx.cuh).
 */

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EP_EARLY_CODE 90 /* such code and newer waits for the kernel before it */

/** Returns the capability that the code was compiled for which a GPU of this capability runs, both
 *  as 90 for 9.0; 0: this build has none for it. */
int32_t ep_cuda_code(int32_t capability);

/** Likewise of the kernels for groups with masks, which releases have for fewer GPUs. */
int32_t ep_cuda_code_masked(int32_t capability);

#ifdef __cplusplus
}
#endif

#endif
