/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_CUBLAS_H
#define MOE_CUBLAS_H

/** cuBLAS, loaded when a layer runs on GPUs, so that ep_moe needs it nowhere else. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ep/ep.h"

typedef struct Cublas Cublas;

/** False, with a message, if it is not there. Products go to `stream`. */
bool cublas_open(EpStream stream, Cublas **out);
/** NULL is allowed. */
void cublas_close(Cublas *cublas);

/** "cuBLAS 13.0.2" */
void cublas_name(const Cublas *cublas, char *out, size_t bytes);

typedef struct CublasMatrix {
    const void *data;
    EpType type;
    bool transposed;
} CublasMatrix;

/** c[m, n] = a * b, row-major and contiguous: a is [m, k], or [k, m] transposed, and so is b. `a`
 *  and `b` have one type, `c` that or FP32. Sums are in fp32. */
bool cublas_multiply(Cublas *cublas, int64_t m, int64_t n, int64_t k, CublasMatrix a,
                     CublasMatrix b, CublasMatrix c);

#endif
