/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_ELEMENTS_CUH
#define MOE_ELEMENTS_CUH

/** Elements of the types of rows, as floats. */

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ep/ep.h"

static __device__ __forceinline__ float load(const float *p) {
    return *p;
}
static __device__ __forceinline__ float load(const __nv_bfloat16 *p) {
    return __bfloat162float(*p);
}
static __device__ __forceinline__ float load(const __half *p) {
    return __half2float(*p);
}

static __device__ __forceinline__ void store(float *p, float x) {
    *p = x;
}
static __device__ __forceinline__ void store(__nv_bfloat16 *p, float x) {
    *p = __float2bfloat16_rn(x);
}
static __device__ __forceinline__ void store(__half *p, float x) {
    *p = __float2half_rn(x);
}

/* ---- types that are known when a kernel runs ---- */

static __device__ __forceinline__ float load_as(EpType type, const void *p, int64_t i) {
    if (type == EP_TYPE_BF16) return load((const __nv_bfloat16 *)p + i);
    if (type == EP_TYPE_FP16) return load((const __half *)p + i);
    return load((const float *)p + i);
}

static __device__ __forceinline__ void store_as(EpType type, void *p, int64_t i, float x) {
    if (type == EP_TYPE_BF16)
        store((__nv_bfloat16 *)p + i, x);
    else if (type == EP_TYPE_FP16)
        store((__half *)p + i, x);
    else
        store((float *)p + i, x);
}

#endif
