/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moe/blas.h"

#include <stdio.h>
#include <string.h>

#if MOE_WITH_OPENBLAS

#include <cblas.h>
#include <pthread.h>

/* Ranks may be threads of one process, which has one number of threads for OpenBLAS. */
static void set_threads(int threads) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&mutex);
    openblas_set_num_threads(threads);
    pthread_mutex_unlock(&mutex);
}

void blas_start(int threads, char *name, size_t bytes) {
    /* "OpenBLAS 0.3.21 ...": the name and the version. */
    int version = 0, begin = 0;
    const char *config = openblas_get_config();
    sscanf(config, "OpenBLAS %n%*s%n", &begin, &version);
    set_threads(threads);
    snprintf(name, bytes, "OpenBLAS %.*s, %d thread%s", version - begin, config + begin, threads,
             threads == 1 ? "" : "s");
}

static void multiply(bool transposed_a, bool transposed_b, int64_t m, int64_t n, int64_t k,
                     const float *a, const float *b, float *c) {
    cblas_sgemm(CblasRowMajor, transposed_a ? CblasTrans : CblasNoTrans,
                transposed_b ? CblasTrans : CblasNoTrans, (int)m, (int)n, (int)k, 1, a,
                (int)(transposed_a ? m : k), b, (int)(transposed_b ? k : n), 0, c, (int)n);
}

#else

#include "tools/common/data.h"

void blas_start(int threads, char *name, size_t bytes) {
    (void)threads;
    snprintf(name, bytes, "built-in loops, since this build has no OpenBLAS, 1 thread");
}

static float dot(const float *a, int64_t stride, const float *b, int64_t count) {
    float sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += a[i * stride] * b[i];
    return sum;
}

static void multiply(bool transposed_a, bool transposed_b, int64_t m, int64_t n, int64_t k,
                     const float *a, const float *b, float *c) {
    const int64_t row = transposed_a ? 1 : k, column = transposed_a ? m : 1;
    memset(c, 0, (size_t)(m * n) * sizeof(float));
    for (int64_t i = 0; i < m; i++) {
        for (int64_t p = 0; !transposed_b && p < k; p++)
            data_fma(c + i * n, a[i * row + p * column], b + p * n, n);
        for (int64_t j = 0; transposed_b && j < n; j++)
            c[i * n + j] = dot(a + i * row, column, b + j * k, k);
    }
}

#endif

void blas_multiply(bool transposed_a, bool transposed_b, int64_t m, int64_t n, int64_t k,
                   const float *a, const float *b, float *c) {
    if (m == 0 || n == 0) return;
    if (k == 0)
        memset(c, 0, (size_t)(m * n) * sizeof(float));
    else
        multiply(transposed_a, transposed_b, m, n, k, a, b, c);
}
