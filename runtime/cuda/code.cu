/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/cuda/code.h"

/* nvcc lists what all of a build's kernels are compiled for, in ascending order. A GPU runs the
 * newest that is not newer than itself, compiled before or by its driver. Where that has no PTX it
 * is an older one: of releases, 9.0, which differs in nothing that this tells. */
extern "C" int32_t ep_cuda_code(int32_t capability) {
    static const int32_t compiled[] = {__CUDA_ARCH_LIST__};
    int32_t found = 0;
    for (int32_t code : compiled)
        if (code / 10 <= capability) found = code / 10;
    return found;
}
