/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_ROWS_CUH
#define EP_RUNTIME_ROWS_CUH

/**
 * Elements as floats and back, rounding to nearest even: the same bits as runtime/dtype.h.
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

template <typename T> __device__ __forceinline__ T ep_round(float x);
template <> __device__ __forceinline__ __nv_bfloat16 ep_round<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}
template <> __device__ __forceinline__ __half ep_round<__half>(float x) {
    return __float2half_rn(x);
}
template <> __device__ __forceinline__ float ep_round<float>(float x) {
    return x;
}

#endif
