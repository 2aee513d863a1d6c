/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EMULATOR_CUBLAS_V2_H
#define EMULATOR_CUBLAS_V2_H

/** What tools/moe/cublas.c uses of cuBLAS. dlopen finds it: see cublas.c. */

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cublasContext *cublasHandle_t;
typedef enum { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_INVALID_VALUE = 7 } cublasStatus_t;
typedef enum { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 } cublasOperation_t;
typedef enum { CUBLAS_COMPUTE_32F = 68 } cublasComputeType_t;
typedef enum { CUBLAS_GEMM_DEFAULT = -1 } cublasGemmAlgo_t;
typedef enum { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14 } cudaDataType;

cublasStatus_t cublasCreate_v2(cublasHandle_t *out);
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle);
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream);
cublasStatus_t cublasGetVersion_v2(cublasHandle_t handle, int *version);
cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b,
                            int m, int n, int k, const void *alpha, const void *a,
                            cudaDataType type_a, int lda, const void *b, cudaDataType type_b,
                            int ldb, const void *beta, void *c, cudaDataType type_c, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t algorithm);

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t op_a,
                                          cublasOperation_t op_b, int m, int n, int k,
                                          const void *alpha, const void *a, cudaDataType type_a,
                                          int lda, long long step_a, const void *b,
                                          cudaDataType type_b, int ldb, long long step_b,
                                          const void *beta, void *c, cudaDataType type_c, int ldc,
                                          long long step_c, int count, cublasComputeType_t compute,
                                          cublasGemmAlgo_t algorithm);

cublasStatus_t cublasGemmGroupedBatchedEx(cublasHandle_t handle, const cublasOperation_t *op_a,
                                          const cublasOperation_t *op_b, const int *m, const int *n,
                                          const int *k, const void *alpha, const void *const *a,
                                          cudaDataType type_a, const int *lda, const void *const *b,
                                          cudaDataType type_b, const int *ldb, const void *beta,
                                          void *const *c, cudaDataType type_c, const int *ldc,
                                          int groups, const int *sizes,
                                          cublasComputeType_t compute);

/** Returns the address of one of these functions, or NULL. */
void *emulated_cublas(const char *name);

#ifdef __cplusplus
}
#endif

#endif
