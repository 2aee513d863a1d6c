/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_BLAS_H
#define MOE_BLAS_H

/** Products of fp32 matrices on the host: OpenBLAS, or loops in builds without it. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** c[m, n] = A * B, row-major and contiguous; A is a[m, k], or a[k, m] transposed, and so is B. */
void blas_multiply(bool transposed_a, bool transposed_b, int64_t m, int64_t n, int64_t k,
                   const float *a, const float *b, float *c);

/** Set the threads of each product, and say what multiplies. */
void blas_start(int threads, char *name, size_t bytes);

#endif
