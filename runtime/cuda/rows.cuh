/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_ROWS_CUH
#define EP_RUNTIME_CUDA_ROWS_CUH

/**
 * Convert elements to floats and back, rounding to nearest even: the same bits as runtime/dtype.h.
 */

#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ __forceinline__ float ep_float(__nv_bfloat16 x) {
    return __bfloat162float(x);
}
__device__ __forceinline__ float ep_float(__half x) {
    return __half2float(x);
}
__device__ __forceinline__ float ep_float(float x) {
    return x;
}

/** 16 bytes of a row, as floats. */
template <typename T> struct EpVector {
    static constexpr int SIZE = 16 / sizeof(T);
    float at[SIZE];
};

template <typename T> __device__ __forceinline__ EpVector<T> ep_unpack(const uint4 &x) {
    EpVector<T> v;
    const T *from = (const T *)&x;
#pragma unroll
    for (int i = 0; i < EpVector<T>::SIZE; i++)
        v.at[i] = ep_float(from[i]);
    return v;
}

/** A bf16 element is the upper half of its float: one instruction each. */
template <>
__device__ __forceinline__ EpVector<__nv_bfloat16> ep_unpack<__nv_bfloat16>(const uint4 &x) {
    const uint32_t words[] = {x.x, x.y, x.z, x.w};
    EpVector<__nv_bfloat16> v;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v.at[2 * i] = __uint_as_float(words[i] << 16);
        v.at[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
    return v;
}

__device__ __forceinline__ uint4 ep_pack(const EpVector<__nv_bfloat16> &v) {
    uint4 x;
    __nv_bfloat162 *to = (__nv_bfloat162 *)&x;
#pragma unroll
    for (int i = 0; i < 4; i++)
        to[i] = __floats2bfloat162_rn(v.at[2 * i], v.at[2 * i + 1]);
    return x;
}
__device__ __forceinline__ uint4 ep_pack(const EpVector<__half> &v) {
    uint4 x;
    __half2 *to = (__half2 *)&x;
#pragma unroll
    for (int i = 0; i < 4; i++)
        to[i] = __floats2half2_rn(v.at[2 * i], v.at[2 * i + 1]);
    return x;
}
__device__ __forceinline__ uint4 ep_pack(const EpVector<float> &v) {
    return make_uint4(__float_as_uint(v.at[0]), __float_as_uint(v.at[1]), __float_as_uint(v.at[2]),
                      __float_as_uint(v.at[3]));
}

/** Add a weighted term to a sum, one fused multiply-add per element. Every weighted sum of the
 *  library uses this function, so that the bits are those that the API specifies. */
template <typename T>
__device__ __forceinline__ void ep_add_weighted(EpVector<T> *sum, float weight,
                                                const EpVector<T> &term) {
#pragma unroll
    for (int e = 0; e < EpVector<T>::SIZE; e++)
        sum->at[e] = fmaf(weight, term.at[e], sum->at[e]);
}

/** Add a vector to a sum. */
template <typename T>
__device__ __forceinline__ void ep_add(EpVector<T> *sum, const EpVector<T> &x) {
#pragma unroll
    for (int e = 0; e < EpVector<T>::SIZE; e++)
        sum->at[e] += x.at[e];
}

#endif
