/* SPDX-License-Identifier: Apache-2.0 */
/* cuBLAS: plain loops on a stream, with cuBLAS's columns. */
#include <cublas_v2.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tests/emulator/launch.h"

struct cublasContext {
    cudaStream_t stream;
};

cublasStatus_t cublasCreate_v2(cublasHandle_t *out) {
    *out = calloc(1, sizeof(**out));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
    handle->stream = stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetVersion_v2(cublasHandle_t handle, int *version) {
    (void)handle;
    *version = 120000;
    return CUBLAS_STATUS_SUCCESS;
}

/* ---- elements ---- */

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static float load(const void *data, cudaDataType type, int64_t i) {
    if (type == CUDA_R_32F) return ((const float *)data)[i];
    const uint16_t bits = ((const uint16_t *)data)[i];
    if (type == CUDA_R_16BF) return float_of((uint32_t)bits << 16);
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float magnitude =
        exponent ? ldexpf((float)(1024 + mantissa), exponent - 25) : ldexpf((float)mantissa, -24);
    return bits & 0x8000 ? -magnitude : magnitude;
}

static uint16_t bf16_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Numbers that half can hold; the layers of tests have no others. */
static uint16_t half_of(float value) {
    const float magnitude = fabsf(value);
    int exponent = magnitude < 0x1p-14f ? -14 : ilogbf(magnitude);
    const int units = (int)nearbyintf(ldexpf(magnitude, 10 - exponent));
    const int bits = ((exponent + 14) << 10) + units; /* a leading one carries into the exponent */
    return (uint16_t)(bits | (signbit(value) ? 0x8000 : 0));
}

static void store(void *data, cudaDataType type, int64_t i, float value) {
    if (type == CUDA_R_32F)
        ((float *)data)[i] = value;
    else
        ((uint16_t *)data)[i] = type == CUDA_R_16BF ? bf16_of(value) : half_of(value);
}

/* ---- products ---- */

typedef struct Product {
    int adds, m, n, k, transposed_a, transposed_b, lda, ldb, ldc;
    const void *a, *b;
    void *c;
    cudaDataType type, type_c;
} Product;

static void multiply(void *arguments) {
    const Product *p = arguments;
    for (int64_t j = 0; j < p->n; j++) {
        for (int64_t i = 0; i < p->m; i++) {
            float sum = 0;
            const int64_t at = i + j * p->ldc;
            for (int64_t l = 0; l < p->k; l++)
                sum += load(p->a, p->type, p->transposed_a ? l + i * p->lda : i + l * p->lda) *
                       load(p->b, p->type, p->transposed_b ? j + l * p->ldb : l + j * p->ldb);
            store(p->c, p->type_c, at, p->adds ? sum + load(p->c, p->type_c, at) : sum);
        }
    }
}

/* Operands are in memory that the GPU reaches, as large as their leading dimensions say. */
static void check_reach(const void *data, cudaDataType type, int64_t lines, int64_t stride,
                        int64_t width) {
    const int64_t elements = lines > 0 ? (lines - 1) * stride + width : 0;
    const size_t bytes = (size_t)elements * (type == CUDA_R_32F ? 4 : 2);
    if (!emulated_reaches(data, bytes)) emulated_die("cublasGemmEx: memory out of reach");
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b,
                            int m, int n, int k, const void *alpha, const void *a,
                            cudaDataType type_a, int lda, const void *b, cudaDataType type_b,
                            int ldb, const void *beta, void *c, cudaDataType type_c, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
    (void)algorithm;
    if (type_a != type_b || (type_c != type_a && type_c != CUDA_R_32F) ||
        compute != CUBLAS_COMPUTE_32F || *(const float *)alpha != 1 ||
        (*(const float *)beta != 0 && *(const float *)beta != 1) || lda < (op_a ? k : m) ||
        ldb < (op_b ? n : k) || ldc < m)
        return CUBLAS_STATUS_INVALID_VALUE;
    check_reach(a, type_a, op_a ? m : k, lda, op_a ? k : m);
    check_reach(b, type_b, op_b ? k : n, ldb, op_b ? n : k);
    check_reach(c, type_c, n, ldc, m);
    const Product p = {
        *(const float *)beta == 1, m, n, k, op_a, op_b, lda, ldb, ldc, a, b, c, type_a, type_c};
    emulated_enqueue(handle->stream, multiply, NULL, &p, sizeof(p));
    return CUBLAS_STATUS_SUCCESS;
}

static char *matrix_at(const void *first, cudaDataType type, long long elements) {
    return (char *)(uintptr_t)first + elements * (type == CUDA_R_32F ? 4 : 2);
}

cublasStatus_t cublasGemmStridedBatchedEx(
    cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k,
    const void *alpha, const void *a, cudaDataType type_a, int lda, long long step_a, const void *b,
    cudaDataType type_b, int ldb, long long step_b, const void *beta, void *c, cudaDataType type_c,
    int ldc, long long step_c, int count, cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < count; i++)
        status = cublasGemmEx(handle, op_a, op_b, m, n, k, alpha, matrix_at(a, type_a, i * step_a),
                              type_a, lda, matrix_at(b, type_b, i * step_b), type_b, ldb, beta,
                              matrix_at(c, type_c, i * step_c), type_c, ldc, compute, algorithm);
    return status;
}

/* Addresses of matrices are in the GPU's memory, where they do not change. */
cublasStatus_t cublasGemmGroupedBatchedEx(cublasHandle_t handle, const cublasOperation_t *op_a,
                                          const cublasOperation_t *op_b, const int *m, const int *n,
                                          const int *k, const void *alpha, const void *const *a,
                                          cudaDataType type_a, const int *lda, const void *const *b,
                                          cudaDataType type_b, const int *ldb, const void *beta,
                                          void *const *c, cudaDataType type_c, const int *ldc,
                                          int groups, const int *sizes,
                                          cublasComputeType_t compute) {
    cublasStatus_t status = type_c == type_a ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
    const size_t bytes = (size_t)groups * sizeof(void *);
    if (!emulated_reaches(a, bytes) || !emulated_reaches(b, bytes) || !emulated_reaches(c, bytes))
        emulated_die("cublasGemmGroupedBatchedEx: addresses out of reach");
    for (int g = 0; status == CUBLAS_STATUS_SUCCESS && g < groups; g++)
        status = sizes[g] != 1 ? CUBLAS_STATUS_INVALID_VALUE
                               : cublasGemmEx(handle, op_a[g], op_b[g], m[g], n[g], k[g],
                                              (const float *)alpha + g, a[g], type_a, lda[g], b[g],
                                              type_b, ldb[g], (const float *)beta + g, c[g], type_c,
                                              ldc[g], compute, CUBLAS_GEMM_DEFAULT);
    return status;
}

void *emulated_cublas(const char *name) {
    static const struct {
        const char *name;
        void *function;
    } functions[] = {{"cublasCreate_v2", (void *)cublasCreate_v2},
                     {"cublasDestroy_v2", (void *)cublasDestroy_v2},
                     {"cublasSetStream_v2", (void *)cublasSetStream_v2},
                     {"cublasGetVersion_v2", (void *)cublasGetVersion_v2},
                     {"cublasGemmEx", (void *)cublasGemmEx},
                     {"cublasGemmStridedBatchedEx", (void *)cublasGemmStridedBatchedEx},
                     {"cublasGemmGroupedBatchedEx", (void *)cublasGemmGroupedBatchedEx}};
    for (size_t i = 0; i < sizeof(functions) / sizeof(*functions); i++)
        if (strcmp(functions[i].name, name) == 0) return functions[i].function;
    return NULL;
}
