/* SPDX-License-Identifier: Apache-2.0 */

/** The baseline's kernels: they pack, unpack and sum rows as a user would without libep. */

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ep/ep.h"
#include "tools/bench/kernels.h"

enum { THREADS = 256 };

/* ---- moving rows --------------------------------------------------------------------------- */

/* A row has `width` units and blockDim.x threads. */
template <typename Unit>
static __global__ void gather(Unit *to, const Unit *from, const int32_t *index, int64_t count,
                              int width) {
    int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= count) return;
    const Unit *source = from + (int64_t)index[row] * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        to[row * width + i] = source[i];
}

template <typename Unit>
static __global__ void scatter(Unit *to, const Unit *from, const int32_t *index, int64_t count,
                               int width) {
    int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= count || index[row] < 0) return;
    Unit *target = to + (int64_t)index[row] * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        target[i] = from ? from[row * width + i] : Unit{};
}

/* A short row gets few threads, so that a block handles many rows. */
static dim3 block_of(int width) {
    unsigned across = 1;
    while (across < THREADS && across < (unsigned)width)
        across *= 2;
    return dim3(across, THREADS / across);
}

static unsigned grid_of(int64_t count, dim3 block) {
    return (unsigned)((count + block.y - 1) / block.y);
}

template <typename Unit>
static cudaError_t move_rows(void (*kernel)(Unit *, const Unit *, const int32_t *, int64_t, int),
                             void *to, const void *from, const int32_t *index, int64_t count,
                             size_t row_bytes, cudaStream_t stream) {
    const int width = (int)(row_bytes / sizeof(Unit));
    const dim3 block = block_of(width);
    if (count == 0 || width == 0) return cudaSuccess;
    kernel<<<grid_of(count, block), block, 0, stream>>>((Unit *)to, (const Unit *)from, index,
                                                        count, width);
    return cudaGetLastError();
}

cudaError_t kernel_gather_rows(void *to, const void *from, const int32_t *index, int64_t count,
                               size_t row_bytes, cudaStream_t stream) {
    return row_bytes % sizeof(int4) == 0
               ? move_rows<int4>(gather<int4>, to, from, index, count, row_bytes, stream)
               : move_rows<int>(gather<int>, to, from, index, count, row_bytes, stream);
}

cudaError_t kernel_scatter_rows(void *to, const void *from, const int32_t *index, int64_t count,
                                size_t row_bytes, cudaStream_t stream) {
    return row_bytes % sizeof(int4) == 0
               ? move_rows<int4>(scatter<int4>, to, from, index, count, row_bytes, stream)
               : move_rows<int>(scatter<int>, to, from, index, count, row_bytes, stream);
}

/* ---- summing ------------------------------------------------------------------------------- */

__device__ static float to_float(__nv_bfloat16 x) {
    return __bfloat162float(x);
}

__device__ static float to_float(__half x) {
    return __half2float(x);
}

__device__ static float to_float(float x) {
    return x;
}

__device__ static void from_float(float x, __nv_bfloat16 *out) {
    *out = __float2bfloat16_rn(x);
}

__device__ static void from_float(float x, __half *out) {
    *out = __float2half_rn(x);
}

__device__ static void from_float(float x, float *out) {
    *out = x;
}

/* 16 bytes of a row. */
template <typename T> union Part {
    enum { COUNT = sizeof(int4) / sizeof(T) };
    int4 whole;
    T element[COUNT];
    __device__ Part() {}
};

/* Each block sums the rows of one token. */
template <typename T> static __global__ void sum(const __grid_constant__ SumArgs args) {
    const int64_t first = (int64_t)blockIdx.x * args.top_k;
    const int width = (int)(args.row_bytes / sizeof(int4));
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float total[Part<T>::COUNT] = {};
        for (int k = 0; k < args.top_k; k++) {
            int64_t row = args.at[first + k];
            if (row < 0) continue;
            float weight = args.weights ? args.weights[first + k] : 1.0f;
            Part<T> part;
            part.whole = ((const int4 *)args.rows)[row * width + i];
            for (int e = 0; e < Part<T>::COUNT; e++)
                total[e] = fmaf(weight, to_float(part.element[e]), total[e]);
        }
        Part<T> result;
        for (int e = 0; e < Part<T>::COUNT; e++)
            from_float(total[e], &result.element[e]);
        ((int4 *)args.out)[(int64_t)blockIdx.x * width + i] = result.whole;
    }
}

cudaError_t kernel_sum_rows(const SumArgs *args, cudaStream_t stream) {
    if (args->tokens == 0) return cudaSuccess;
    unsigned blocks = (unsigned)args->tokens;
    if (args->type == EP_TYPE_BF16)
        sum<__nv_bfloat16><<<blocks, THREADS, 0, stream>>>(*args);
    else if (args->type == EP_TYPE_FP16)
        sum<__half><<<blocks, THREADS, 0, stream>>>(*args);
    else
        sum<float><<<blocks, THREADS, 0, stream>>>(*args);
    return cudaGetLastError();
}
