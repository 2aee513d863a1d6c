/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PLAN_CUDA_H
#define EP_HANDLES_PLAN_CUDA_H

/**
 * The plan on the CUDA backend, and the launches of its kernels. Pointers are device memory unless
 * they say otherwise.
 */

#include "handles/plan.h"
#include "runtime/cuda.h"
#include "runtime/scales.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Locate the plan's arrays at `memory`; returns its bytes. */
int64_t ep_cuda_plan_map(const EpPlanShape *shape, void *memory, EpCudaPlan *plan);

/**
 * What routing tells the host, in pinned memory: step << 32 | number, each word stored at once. So
 * they need no order, and no fence, which takes microseconds: the step is complete when all words
 * are of it.
 */
enum EpInfoWord {
    EP_INFO_TOKENS,
    EP_INFO_ROWS, /**< received, needed, dropped */
    EP_INFO_NEEDED,
    EP_INFO_DROPPED,
    EP_INFO_SENT, /**< rows to other ranks, from them, and those that stay */
    EP_INFO_RECEIVED,
    EP_INFO_LOCAL,
    EP_INFO_EXPERTS /**< counts [L], padded [L], offsets [L + 1] */
};

static inline int64_t ep_info_words(const EpPlanShape *shape) {
    return EP_INFO_EXPERTS + 3 * (int64_t)shape->num_local + 1;
}

/** An optional vector of integers, in device or pinned memory. */
typedef struct EpCudaVector {
    void *data;
    int32_t is_int64;
} EpCudaVector;

typedef struct EpPrepareArgs {
    EpCudaGroup group;
    EpCudaPlan plan;
    EpPlanShape shape;
    EpOwners owners;
    int32_t top_k;
    int32_t num_rows;
    int32_t lane_tokens; /**< of each lane of ep_prepare, if num_rows count */
    const void *topk_idx;
    int32_t idx_is_int64;
    EpCudaVector num_tokens; /**< data NULL: all rows */
    EpCudaVector counts, padded, offsets, totals, source_counts;
    uint64_t *info;     /**< pinned [ep_info_words] */
    EpCudaNotes *notes; /**< pinned */
} EpPrepareArgs;

typedef struct EpScatterArgs {
    EpCudaGroup group;
    EpCudaPlan plan;
    EpPlanShape shape;
    EpRecord record;
    EpPipeShape send, fill;
    int32_t receivers; /**< blocks that fill; the others send */
    int32_t chunk;     /**< most tokens that a block claims at once */
    int32_t top_k;
    int32_t type; /**< of the rows, where they are multiplied; 0 where they are only copied */
    int64_t row_bytes, scale_bytes;
    const char *rows;
    const float *topk_weights;
    const char *scales; /**< of the tokens, each row's scale_stride bytes from the last one's */
    int64_t scale_stride;
    EpQuant quant;            /**< 0: rows are as they come */
    int32_t source_type;      /**< of the tokens, where they are quantised */
    int64_t source_row_bytes; /**< of a token; where it is not quantised, row_bytes */
    char *made_scales;        /**< then `scales`, which are made by the way */
    EpScaleMap scale_map;     /**< how out_scales lies */
    int32_t carries_weights, weighs, takes_dots;
    const float *slot_weights;
    const char *slot_rows;
    char *out_rows;
    int32_t lands;  /**< whether peers put rows into out_rows themselves */
    uint64_t where; /**< then: where that is, as an EpArrival says it; else 0 */
    float *out_weights;
    char *out_scales;
    void *out_idx;
    int32_t idx_is_int64;
    int64_t out_capacity;
} EpScatterArgs;

typedef struct EpGatherArgs {
    EpCudaGroup group;
    EpCudaPlan plan;
    EpPlanShape shape;
    EpRecord record;
    EpPipeShape pipe;
    int32_t receivers; /**< blocks that reduce; the others add up for other ranks */
    int32_t chunk;     /**< most tokens that a block claims at once */
    int32_t top_k;
    int32_t type;
    int64_t row_bytes;
    const char *rows;
    int32_t weighs, carries_values;
    const float *slot_weights;
    const float *slot_values;
    char *out_rows;
    int64_t out_num_rows;
    float *out_values;
} EpGatherArgs;

#ifdef __CUDACC__
/** Entry k of a row, as its source has sent it. */
__device__ __forceinline__ int32_t ep_route(const EpCudaPlan &plan, const EpCudaGroup &g, int top_k,
                                            int source, int row, int k) {
    return plan.routes[((int64_t)source * g.layout.max_tokens + row) * top_k + k];
}

/** Slot of entry k of a row, -1 for none. A flat row fills one slot, reported for k = 0. */
__device__ __forceinline__ int32_t ep_slot(const EpCudaPlan &plan, const EpCudaGroup &g,
                                           const EpPlanShape &shape, int top_k, int source, int row,
                                           int k) {
    if (shape.layout != EP_LAYOUT_FLAT) return ep_route(plan, g, top_k, source, row, k);
    int slot = plan.flat_begin[source] + row;
    return k == 0 && slot < plan.header->recv_rows ? slot : -1;
}
#endif

/** Before the first launch on a device: see ep_open_kernel. A cudaError_t, 0 for success. */
int ep_cuda_open_prepare(int shared_bytes);
int ep_cuda_open_scatter(int shared_bytes);
int ep_cuda_open_gather(int shared_bytes);

/** Launch on a cudaStream_t; a cudaError_t, 0 for success. */
int ep_cuda_launch_prepare(const EpPrepareArgs *args, void *stream);
int ep_cuda_launch_scatter(const EpScatterArgs *args, void *stream);
int ep_cuda_launch_gather(const EpGatherArgs *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif
