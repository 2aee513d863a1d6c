/* SPDX-License-Identifier: Apache-2.0 */

/** Filling and comparing tensors on GPUs: contents.c has what they mean. */

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#ifndef EP_WITH_CUDA
#define EP_WITH_CUDA 1
#endif
extern "C" {
#include "tools/common/gpu.h"
#include "tools/moe/cuda_state.h"
}
#include "tools/moe/elements.cuh"

#define THREADS 256

static int blocks_of(const MoeDevice *d, int64_t count) {
    const int64_t most = 8 * d->multiprocessors, blocks = (count + THREADS - 1) / THREADS;
    return (int)(blocks < most ? blocks : most);
}

/* ---- filling ------------------------------------------------------------------------------- */

struct FillArgs {
    Contents contents;
    Part part;
    EpType type;
    void *out;
    int64_t count;
};

static __global__ void __launch_bounds__(THREADS) fill(const __grid_constant__ FillArgs a) {
    const int64_t width = a.part.shape[2], step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < a.count; i += step) {
        const int64_t at = part_at(&a.part, i / width) + i % width;
        store_as(a.type, a.out, i,
                 contents_value(&a.contents, at, contents_magnitude(&a.contents, at)));
    }
}

bool cuda_fill(MoeDevice *d, const Contents *contents, const Part *part, const EpTensor *out) {
    const FillArgs args = {*contents, *part, out->type, out->data, tensor_elements(out)};
    if (args.count == 0) return true;
    fill<<<blocks_of(d, args.count), THREADS, 0, cuda_stream_of(d)>>>(args);
    return cuda_ok(cudaGetLastError(), "filling a tensor");
}

/* ---- comparing ----------------------------------------------------------------------------- */

struct DifferArgs {
    const void *got, *want;
    EpType type;
    int64_t count;
    double *sums; /* [3, threads]: squares, norm, elements */
};

static __device__ bool same_bits(EpType type, const void *a, const void *b, int64_t i) {
    if (type == EP_TYPE_FP32) return ((const uint32_t *)a)[i] == ((const uint32_t *)b)[i];
    return ((const uint16_t *)a)[i] == ((const uint16_t *)b)[i];
}

static __global__ void __launch_bounds__(THREADS) differ(const __grid_constant__ DifferArgs a) {
    const int64_t threads = (int64_t)gridDim.x * THREADS;
    const int64_t thread = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    double squares = 0, norm = 0, elements = 0;
    for (int64_t i = thread; i < a.count; i += threads) {
        const double want = load_as(a.type, a.want, i);
        const double difference = load_as(a.type, a.got, i) - want;
        squares += difference * difference, norm += want * want;
        if (!same_bits(a.type, a.got, a.want, i)) elements += 1;
    }
    a.sums[thread] = squares, a.sums[threads + thread] = norm;
    a.sums[2 * threads + thread] = elements;
}

/* Each thread's sums are added on the host, in one order: the result is the same each time. */
static bool add_sums(MoeDevice *d, const DifferArgs &args, int64_t threads, Difference *out) {
    const size_t bytes = (size_t)threads * 3 * sizeof(double);
    double *sums = (double *)bench_alloc(1, bytes, "sums of differences");
    bool ok = sums && d->download(d, sums, args.sums, bytes);
    for (int64_t i = 0; ok && i < threads; i++) {
        out->squares += sums[i], out->norm += sums[threads + i];
        out->elements += (int64_t)sums[2 * threads + i];
    }
    free(sums);
    return ok;
}

bool cuda_differ(MoeDevice *d, const EpTensor *got, const EpTensor *want, Difference *out) {
    DifferArgs args = {got->data, want->data, got->type, tensor_elements(got), nullptr};
    const int blocks = blocks_of(d, args.count);
    const int64_t threads = (int64_t)blocks * THREADS;
    *out = {0, 0, 0};
    if (args.count == 0) return true;
    args.sums = (double *)d->alloc(d, (size_t)threads * 3 * sizeof(double), "sums of differences");
    if (!args.sums) return false;
    differ<<<blocks, THREADS, 0, cuda_stream_of(d)>>>(args);
    bool ok = cuda_ok(cudaGetLastError(), "comparing tensors") && add_sums(d, args, threads, out);
    d->release(d, args.sums);
    return ok;
}
