/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moe/cublas.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/common/util.h"

/* CUDA may be installed without it. */
#if EP_WITH_CUDA && __has_include(<cublas_v2.h>)

#include <cublas_v2.h>
#include <dlfcn.h>

struct Cublas {
    void *library;
    cublasHandle_t handle;
    __typeof__(&cublasCreate_v2) create;
    __typeof__(&cublasDestroy_v2) destroy;
    __typeof__(&cublasSetStream_v2) set_stream;
    __typeof__(&cublasGetVersion_v2) get_version;
    __typeof__(&cublasGemmEx) gemm;
};

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
bool cublas_open(EpStream stream, Cublas **out) {
    Cublas *c = *out = bench_alloc(1, sizeof(Cublas), "cuBLAS");
    return c && load(c) && cublas_ok(c->create(&c->handle), "cublasCreate") &&
           cublas_ok(c->set_stream(c->handle, (cudaStream_t)stream), "cublasSetStream");
}

void cublas_close(Cublas *cublas) {
    if (!cublas) return;
    if (cublas->handle) cublas->destroy(cublas->handle);
    free(cublas);
}

void cublas_name(const Cublas *cublas, char *out, size_t bytes) {
    int version = 0;
    cublas->get_version(cublas->handle, &version);
    snprintf(out, bytes, "cuBLAS %d.%d.%d", version / 10000, version / 100 % 100, version % 100);
}

static cudaDataType type_of(EpType type) {
    return type == EP_TYPE_BF16 ? CUDA_R_16BF : type == EP_TYPE_FP16 ? CUDA_R_16F : CUDA_R_32F;
}

/* cuBLAS has columns where the layer has rows: it computes the transposed product, b^T * a^T. */
bool cublas_multiply(Cublas *cublas, int64_t m, int64_t n, int64_t k, CublasMatrix a,
                     CublasMatrix b, CublasMatrix c) {
    const float one = 1, zero = 0;
    return cublas_ok(cublas->gemm(cublas->handle, b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                                  a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N, (int)n, (int)m, (int)k,
                                  &one, b.data, type_of(b.type), (int)(b.transposed ? k : n),
                                  a.data, type_of(a.type), (int)(a.transposed ? m : k), &zero,
                                  (void *)(uintptr_t)c.data, type_of(c.type), (int)n,
                                  CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                     "cublasGemmEx");
}

#else

bool cublas_open(EpStream stream, Cublas **out) {
    (void)stream;
    *out = NULL;
    return bench_refuse("--backend: expected host, got cuda, but this ep_moe was built without "
                        "cuBLAS");
}

void cublas_close(Cublas *cublas) {
    (void)cublas;
}

void cublas_name(const Cublas *cublas, char *out, size_t bytes) {
    (void)cublas;
    if (bytes) out[0] = 0;
}

bool cublas_multiply(Cublas *cublas, int64_t m, int64_t n, int64_t k, CublasMatrix a,
                     CublasMatrix b, CublasMatrix c) {
    (void)cublas;
    (void)m;
    (void)n;
    (void)k;
    (void)a;
    (void)b;
    (void)c;
    return bench_fail("this ep_moe was built without cuBLAS");
}

#endif
