/* SPDX-License-Identifier: Apache-2.0 */

/** The layer's GEMMs on GPUs: cuBLAS, group by group. It is loaded when a layer runs on GPUs, so
 * that ep_moe needs it nowhere else. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/common/gpu.h"
#include "tools/moe/cuda_state.h"

/* CUDA may be installed without it. */
#if EP_WITH_CUDA && __has_include(<cublas_v2.h>)

#include <cublas_v2.h>
#include <dlfcn.h>

/** Scratch for operands and products that cuBLAS cannot take or give as they are. */
typedef struct Scratch {
    void *data;
    size_t bytes;
} Scratch;

enum { SCRATCH_A, SCRATCH_B, SCRATCH_C, NUM_SCRATCH };

typedef struct Cublas {
    void *library;
    cublasHandle_t handle;
    __typeof__(&cublasCreate_v2) create;
    __typeof__(&cublasDestroy_v2) destroy;
    __typeof__(&cublasSetStream_v2) set_stream;
    __typeof__(&cublasGetVersion_v2) get_version;
    __typeof__(&cublasGemmEx) gemm;
    Scratch scratch[NUM_SCRATCH];
} Cublas;

static bool cublas_ok(cublasStatus_t status, const char *call) {
    return status == CUBLAS_STATUS_SUCCESS || bench_fail("%s: status %d", call, (int)status);
}

/* Look up a function. memcpy, since ISO C has no cast from void * to a function pointer. */
static bool find(const Cublas *cublas, const char *name, void *function) {
    void *address = dlsym(cublas->library, name);
    memcpy(function, &address, sizeof(address));
    return address || bench_fail("cuBLAS has no %s", name);
}

static bool load(Cublas *c) {
    static const char *const names[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so"};
    for (int i = 0; i < 3 && !c->library; i++)
        c->library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!c->library) return bench_fail("--backend cuda: expected cuBLAS, got: %s", dlerror());
    return find(c, "cublasCreate_v2", &c->create) && find(c, "cublasDestroy_v2", &c->destroy) &&
           find(c, "cublasSetStream_v2", &c->set_stream) &&
           find(c, "cublasGetVersion_v2", &c->get_version) && find(c, "cublasGemmEx", &c->gemm);
}

/* The library stays loaded: its threads may outlive the handle. */
bool cublas_open(MoeDevice *d, char *name, size_t bytes) {
    int version = 0;
    Cublas *c = bench_alloc(1, sizeof(Cublas), "cuBLAS");
    cuda_state(d)->cublas = c;
    if (!c || !load(c) || !cublas_ok(c->create(&c->handle), "cublasCreate") ||
        !cublas_ok(c->set_stream(c->handle, cuda_stream_of(d)), "cublasSetStream"))
        return false;
    c->get_version(c->handle, &version);
    snprintf(name, bytes, "cuBLAS %d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    return true;
}

void cublas_close(MoeDevice *d) {
    Cublas *c = cuda_state(d)->cublas;
    for (int i = 0; c && i < NUM_SCRATCH; i++)
        cudaFree(c->scratch[i].data);
    if (c && c->handle) c->destroy(c->handle);
    free(c);
}

static cudaDataType type_of(EpType type) {
    return type == EP_TYPE_BF16 ? CUDA_R_16BF : type == EP_TYPE_FP16 ? CUDA_R_16F : CUDA_R_32F;
}

/** A matrix, row-major and contiguous. */
typedef struct Matrix {
    const void *data;
    EpType type;
    bool transposed;
} Matrix;

/* c[m, n] = a * b: a is [m, k], or [k, m] transposed, and so is b. `a` and `b` have one type, `c`
 * that or FP32. Sums are in fp32. cuBLAS has columns where the layer has rows: it computes the
 * transposed product, b^T * a^T. */
static bool gemm(const Cublas *cublas, int64_t m, int64_t n, int64_t k, Matrix a, Matrix b,
                 Matrix c) {
    const float one = 1, zero = 0;
    return cublas_ok(cublas->gemm(cublas->handle, b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                                  a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N, (int)n, (int)m, (int)k,
                                  &one, b.data, type_of(b.type), (int)(b.transposed ? k : n),
                                  a.data, type_of(a.type), (int)(a.transposed ? m : k), &zero,
                                  (void *)(uintptr_t)c.data, type_of(c.type), (int)n,
                                  CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                     "cublasGemmEx");
}

/* ---- groups -------------------------------------------------------------------------------- */

/* It grows in the first step, which is not timed. */
static void *reserve(MoeDevice *d, int which, int64_t elements) {
    Scratch *scratch = &((Cublas *)cuda_state(d)->cublas)->scratch[which];
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

static Matrix matrix(const EpTensor *t, int64_t at, bool transposed) {
    return (Matrix){(const char *)t->data + (size_t)at * ep_type_bytes(t->type), t->type,
                    transposed};
}

static bool multiply_groups(MoeDevice *d, const Groups *groups, const EpTensor *a,
                            const EpTensor *b, bool transposed, const EpTensor *c) {
    const Cublas *cublas = cuda_state(d)->cublas;
    const int64_t k = a->shape[1], n = c->shape[1];
    for (int32_t g = 0; g < groups->num; g++) {
        const int64_t first = groups->first[g], rows = groups->count[g];
        if (rows > 0 && !gemm(cublas, rows, n, k, matrix(a, first * k, false),
                              matrix(b, g * k * n, transposed), matrix(c, first * n, false)))
            return false;
    }
    return true;
}

/* A group without rows has a gradient of zero. */
static bool correlate_groups(MoeDevice *d, const Groups *groups, const EpTensor *a,
                             const EpTensor *b, bool transposed, const EpTensor *c) {
    const Cublas *cublas = cuda_state(d)->cublas;
    const int64_t m = a->shape[1], n = b->shape[1];
    const size_t bytes = (size_t)(m * n) * ep_type_bytes(c->type);
    (void)transposed;
    for (int32_t g = 0; g < groups->num; g++) {
        const int64_t first = groups->first[g], rows = groups->count[g];
        bool ok = rows > 0 ? gemm(cublas, m, n, rows, matrix(a, first * m, true),
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

#elif EP_WITH_CUDA

bool cublas_open(MoeDevice *d, char *name, size_t bytes) {
    (void)d, (void)name, (void)bytes;
    return bench_refuse("--backend: expected host, got cuda, but this ep_moe was built without "
                        "cuBLAS");
}

void cublas_close(MoeDevice *d) {
    (void)d;
}

bool cuda_multiply(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                   bool transposed, const EpTensor *c) {
    (void)groups, (void)a, (void)b, (void)transposed, (void)c;
    return gpu_missing(d);
}

bool cuda_correlate(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                    const EpTensor *c) {
    return cuda_multiply(d, groups, a, b, false, c);
}

#endif
