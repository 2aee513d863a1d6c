/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_CUDA_STATE_H
#define MOE_CUDA_STATE_H

/** The layer's arithmetic on GPUs: what cuda.c, cublas.c and kernels.cu share. See MoeDevice. */

#include "tools/moe/device.h"

#if EP_WITH_CUDA

#include <cuda_runtime_api.h>

enum { MAX_GRAPHS = 4 };

/** The last two have no time. */
enum { BEGIN, END, FORKED, JOINED, NUM_EVENTS };

typedef struct CudaState {
    void *cublas; /**< of cublas.c */
    cudaEvent_t events[NUM_EVENTS];
    cudaGraphExec_t graphs[MAX_GRAPHS];
    int num_graphs;
    cudaEvent_t *points;
    int num_points;
    uint32_t *drawn; /**< [2] in the GPU's memory, of products of e4m3 (ScaledArgs), which run one
                          after another */
} CudaState;

static inline CudaState *cuda_state(const MoeDevice *d) {
    return (CudaState *)d->state;
}

static inline cudaStream_t cuda_stream_of(const MoeDevice *d) {
    return (cudaStream_t)d->stream;
}

/** to = from, converted by way of fp32. */
bool cuda_convert(MoeDevice *d, const EpTensor *from, const EpTensor *to);

/** Load cuBLAS for the device's stream, and say its name and version. False, with a message. */
bool cublas_open(MoeDevice *d, char *name, size_t bytes);
void cublas_close(MoeDevice *d);

bool cuda_fill(MoeDevice *d, const Contents *contents, const Part *part, const EpTensor *out);
bool cuda_differ(MoeDevice *d, const EpTensor *got, const EpTensor *want, Difference *out);
bool cuda_multiply(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                   bool transposed, const EpTensor *c);
bool cuda_correlate(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                    const EpTensor *c);
/** out = the sum of `parts` tensors of its size, FP32, one after the other. */
bool cuda_add_parts(MoeDevice *d, const float *in, int parts, const EpTensor *out);

/** See MoeDevice.limit. */
bool cublas_limit(MoeDevice *d, int product_sms);

bool cuda_multiply_narrow(MoeDevice *d, const EpTensor *a, const EpTensor *b, const EpTensor *c);
bool cuda_accumulate(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                     bool transposed, const EpTensor *c);
bool cuda_multiply_scaled(MoeDevice *d, const Groups *groups, const Scaled *a, const Scaled *b,
                          const EpTensor *c);
bool cuda_correlate_scaled(MoeDevice *d, const Groups *groups, const Scaled *a, const Scaled *b,
                           const EpTensor *c);
bool cuda_choose(MoeDevice *d, const EpTensor *p, const EpTensor *idx, const EpTensor *weights);
bool cuda_choose_backward(MoeDevice *d, const EpTensor *p, const EpTensor *idx,
                          const EpTensor *grad_weights, const EpTensor *grad);
bool cuda_activate(MoeDevice *d, const Groups *groups, const EpTensor *z, const EpTensor *w,
                   const EpTensor *a);
bool cuda_activate_backward(MoeDevice *d, const Groups *groups, const EpTensor *z,
                            const EpTensor *w, const EpTensor *grad_a, const EpTensor *grad_z,
                            const EpTensor *grad_w);
bool cuda_quantise(MoeDevice *d, EpQuant quant, const EpTensor *in, const Scaled *rows,
                   const Scaled *transposed);
bool cuda_requantise(MoeDevice *d, EpQuant quant, EpType type, const Scaled *rows,
                     const Scaled *transposed);
bool cuda_activate_scaled(MoeDevice *d, EpQuant quant, const EpTensor *z, const EpTensor *w,
                          const EpTensor *a, const Scaled *rows, const Scaled *transposed);
bool cuda_activate_backward_scaled(MoeDevice *d, EpQuant quant, const EpTensor *z,
                                   const EpTensor *grad_a, const EpTensor *grad_z,
                                   const Scaled *rows, const Scaled *transposed);
bool cuda_transpose(MoeDevice *d, const EpTensor *in, const EpTensor *out);
bool cuda_dequantise(MoeDevice *d, const EpTensor *q, const EpTensor *scales, int64_t rows,
                     int64_t columns, const EpTensor *out);

#endif

#endif
