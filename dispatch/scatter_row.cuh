/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_SCATTER_ROW_CUH
#define EP_DISPATCH_SCATTER_ROW_CUH

/**
 * What sending and filling blocks of dispatch_nvlink.cu share: how what lies beside a row goes to
 * the row's slots.
 */

#include "handles/plan_cuda.h"
#include "runtime/pipe.cuh"

/* Is there anything beside rows? */
__device__ __forceinline__ int has_side(const EpScatterArgs &a) {
    return a.carries_weights || a.scale_bytes || a.out_idx;
}

/* A flat row tells all its local experts, and their weights. */
__device__ __forceinline__ void describe_flat_row(const EpScatterArgs &a, int64_t row, int expert,
                                                  float weight, int lane) {
    int64_t at = row * a.top_k + lane;
    if (row < 0 || lane >= a.top_k) return;
    if (a.carries_weights) a.out_weights[at] = expert >= 0 ? weight : 0;
    if (a.out_idx && a.idx_is_int64)
        ((int64_t *)a.out_idx)[at] = expert;
    else if (a.out_idx)
        ((int32_t *)a.out_idx)[at] = expert;
}

/* Weights and scales of a row, to its slots. By a warp, of which lane k has what is said of entry
 * k: its slot (FLAT: the row's, in one lane) and local expert, -1 for none, and its weight. */
__device__ __forceinline__ void fill_side(const EpScatterArgs &a, int slot, int expert,
                                          float weight, const uint32_t *scales) {
    int lane = threadIdx.x % 32;
    unsigned filled = __ballot_sync(~0u, slot >= 0);
    if (!filled) return;
    if (a.shape.layout == EP_LAYOUT_FLAT)
        describe_flat_row(a, __shfl_sync(~0u, slot, __ffs(filled) - 1), expert, weight, lane);
    else if (a.carries_weights && slot >= 0)
        a.out_weights[slot] = weight;
    for (; filled && a.scale_bytes; filled &= filled - 1) {
        int64_t to = __shfl_sync(~0u, slot, __ffs(filled) - 1);
        for (int i = lane; i < a.scale_bytes / 4; i += 32)
            ((uint32_t *)(a.out_scales + to * a.scale_bytes))[i] = __ldcg(scales + i);
    }
}

#endif
