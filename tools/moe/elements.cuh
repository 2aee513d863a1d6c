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

/** 1 / (1 + e^-x), within 2^-21 of it. */
static __device__ __forceinline__ float sigmoid(float x) {
#ifdef __CUDA_ARCH__
    float power, out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -0x1.715476p0f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(1 + power));
    return out;
#else
    return 1 / (1 + expf(-x));
#endif
}

/* 4 bits of exponent with bias 7, 3 of mantissa; 0x7f is NaN. The product moves the exponent to
 * fp32's bias, and makes numbers below 2^-6 normal. */
static __device__ __forceinline__ float value_of(uint8_t code) {
    const uint32_t magnitude = code & 0x7f;
    const float value = magnitude == 0x7f ? NAN : __uint_as_float(magnitude << 20) * 0x1p120f;
    return code & 0x80 ? -value : value;
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
