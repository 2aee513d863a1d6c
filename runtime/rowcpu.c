/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/rowmath.h"

extern const EpRowMath ep_rowmath_base, ep_rowmath_v3, ep_rowmath_v4;

const EpRowMath *ep_rowmath(void) {
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return &ep_rowmath_v4;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("bmi2"))
        return &ep_rowmath_v3;
#endif
    return &ep_rowmath_base;
}
