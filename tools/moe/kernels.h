/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_KERNELS_H
#define MOE_KERNELS_H

/** The layer's arithmetic on GPUs, apart from GEMMs: launched from C. See MoeDevice. */

#include <stdint.h>

#include <cuda_runtime_api.h>

#include "ep/ep.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ChooseArgs {
    float *p; /**< [tokens, experts] */
    int32_t *idx;
    float *weights; /**< [tokens, k] */
    int64_t tokens;
    int32_t experts, k; /**< k <= 32 */
} ChooseArgs;

cudaError_t moe_launch_choose(const ChooseArgs *args, cudaStream_t stream);

typedef struct ChooseBackwardArgs {
    const float *p, *grad_weights;
    const int32_t *idx;
    float *grad;
    int64_t tokens;
    int32_t experts, k;
} ChooseBackwardArgs;

cudaError_t moe_launch_choose_backward(const ChooseBackwardArgs *args, cudaStream_t stream);

/** to = from, or to += from, converted by way of fp32. */
typedef struct ConvertArgs {
    const void *from;
    void *to;
    EpType from_type, to_type;
    int64_t count;
    int add;
} ConvertArgs;

cudaError_t moe_launch_convert(const ConvertArgs *args, cudaStream_t stream);

typedef struct ActivateArgs {
    const void *z; /**< [rows, 2 * width] */
    const float *w;
    void *a;            /**< [rows, width] */
    const void *grad_a; /**< backward */
    void *grad_z;
    float *grad_w;
    int64_t rows, width;
} ActivateArgs;

cudaError_t moe_launch_activate(EpType type, const ActivateArgs *args, cudaStream_t stream);
cudaError_t moe_launch_activate_backward(EpType type, const ActivateArgs *args,
                                         cudaStream_t stream);

typedef struct DequantiseArgs {
    const uint8_t *q; /**< [matrices, height, width] */
    const void *scales;
    float *out;
    int64_t count, height, width;      /**< count: of all elements */
    int64_t block_rows, block_columns; /**< that share a scale */
    int64_t scales_per_matrix, scales_per_row;
    int bytes; /**< scales are UE8M0 rather than fp32 */
} DequantiseArgs;

cudaError_t moe_launch_dequantise(const DequantiseArgs *args, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
