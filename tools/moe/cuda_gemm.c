/* SPDX-License-Identifier: Apache-2.0 */

/** The layer's GEMMs on GPUs: cuBLAS, group by group. */

#include "tools/moe/cuda_state.h"

#if EP_WITH_CUDA

#include "tools/common/gpu.h"

/* It grows in the first step, which is not timed. */
static void *reserve(MoeDevice *d, int which, int64_t elements) {
    Scratch *scratch = &((CudaState *)d->state)->scratch[which];
    const size_t bytes = (size_t)elements * sizeof(float);
    if (scratch->data && bytes <= scratch->bytes) return scratch->data;
    if (!d->finish(d)) return NULL;
    cudaFree(scratch->data);
    scratch->data = d->alloc(d, bytes, "operands of a GEMM");
    scratch->bytes = scratch->data ? bytes : 0;
    return scratch->data;
}

/* `t` in fp32: itself, or a copy. */
static bool widen(MoeDevice *d, int which, const EpTensor *t, bool filled, EpTensor *out) {
    *out = *t;
    if (t->type == EP_TYPE_FP32) return true;
    out->type = EP_TYPE_FP32;
    out->data = reserve(d, which, tensor_elements(t));
    return out->data && (!filled || cuda_convert(d, t, out, 0));
}

typedef bool (*Product)(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                        bool transposed, const EpTensor *c);

static bool cublas_takes(const EpTensor *a, const EpTensor *b, const EpTensor *c) {
    return a->type == b->type && (c->type == a->type || c->type == EP_TYPE_FP32);
}

/* cuBLAS takes operands of one type. Others become fp32 first, and so does their product. */
static bool run_product(MoeDevice *d, Product product, const Groups *groups, const EpTensor *a,
                        const EpTensor *b, bool transposed, const EpTensor *c) {
    EpTensor wide_a, wide_b, wide_c;
    if (cublas_takes(a, b, c)) return product(d, groups, a, b, transposed, c);
    if (!widen(d, SCRATCH_A, a, true, &wide_a) || !widen(d, SCRATCH_B, b, true, &wide_b) ||
        !widen(d, SCRATCH_C, c, false, &wide_c) ||
        !product(d, groups, &wide_a, &wide_b, transposed, &wide_c))
        return false;
    return c->type == EP_TYPE_FP32 || cuda_convert(d, &wide_c, c, 0);
}

static CublasMatrix matrix(const EpTensor *t, int64_t at, bool transposed) {
    return (CublasMatrix){(const char *)t->data + (size_t)at * ep_type_bytes(t->type), t->type,
                          transposed};
}

static bool multiply_groups(MoeDevice *d, const Groups *groups, const EpTensor *a,
                            const EpTensor *b, bool transposed, const EpTensor *c) {
    CudaState *s = d->state;
    const int64_t k = a->shape[1], n = c->shape[1];
    for (int32_t g = 0; g < groups->num; g++) {
        const int64_t first = groups->first[g], rows = groups->count[g];
        if (rows > 0 &&
            !cublas_multiply(s->cublas, rows, n, k, matrix(a, first * k, false),
                             matrix(b, g * k * n, transposed), matrix(c, first * n, false)))
            return false;
    }
    return true;
}

/* A group without rows has a gradient of zero. */
static bool correlate_groups(MoeDevice *d, const Groups *groups, const EpTensor *a,
                             const EpTensor *b, bool transposed, const EpTensor *c) {
    CudaState *s = d->state;
    const int64_t m = a->shape[1], n = b->shape[1];
    const size_t bytes = (size_t)(m * n) * ep_type_bytes(c->type);
    (void)transposed;
    for (int32_t g = 0; g < groups->num; g++) {
        const int64_t first = groups->first[g], rows = groups->count[g];
        bool ok = rows > 0
                      ? cublas_multiply(s->cublas, m, n, rows, matrix(a, first * m, true),
                                        matrix(b, first * n, false), matrix(c, g * m * n, false))
                      : cuda_ok(cudaMemsetAsync((char *)c->data + (size_t)g * bytes, 0, bytes,
                                                cuda_stream_of(d)),
                                "cudaMemsetAsync");
        if (!ok) return false;
    }
    return true;
}

bool cuda_multiply(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                   bool transposed, const EpTensor *c) {
    return run_product(d, multiply_groups, groups, a, b, transposed, c);
}

bool cuda_correlate(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                    const EpTensor *c) {
    return run_product(d, correlate_groups, groups, a, b, false, c);
}

#endif
