/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/cuda/code.h"

#include "runtime/cuda/device.h"

#ifndef EP_HAS_PTX
#define EP_HAS_PTX 1
#endif

/* nvcc lists what all of a build's kernels are compiled for, or those for masks, in ascending
 * order. A GPU runs the newest that is not newer than itself, compiled before or by its driver.
 * Where that has no PTX it is an older one: of releases, 10.0, which differs in nothing that this
 * tells. Without any PTX a GPU runs code of its own major capability alone. */
extern "C" int32_t EP_VARIANT(ep_cuda_code)(int32_t capability) {
    static const int32_t compiled[] = {__CUDA_ARCH_LIST__};
    int32_t found = 0;
    for (int32_t code : compiled)
        if (code / 10 <= capability && (EP_HAS_PTX || code / 100 == capability / 10))
            found = code / 10;
    return found;
}
