/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_SCATTER_ROW_CUH
#define EP_DISPATCH_SCATTER_ROW_CUH

/**
 * What sending and filling blocks of dispatch_nvlink.cu share: how what lies beside a row goes to
 * the row's slots.
 */

#include "handles/planner.cuh"

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

/* One row of scales to the places that lanes of the warp have, where they have one; in words as
 * large as all addresses allow. */
template <typename Word>
__device__ __forceinline__ void spread_words(char *to, const char *from, int words) {
    int lane = threadIdx.x % 32;
    unsigned places = __ballot_sync(~0u, to != NULL);
    for (int base = 0; base < words; base += 32) {
        int at = base + lane, valid = at < words;
        Word word;
        if (valid) word = __ldcg((const Word *)from + at);
        for (unsigned left = places; left; left &= left - 1) {
            Word *out = (Word *)__shfl_sync(~0u, (unsigned long long)to, __ffs(left) - 1);
            if (valid) out[at] = word;
        }
    }
}

__device__ __forceinline__ void spread_scales(char *to, const char *from, int64_t bytes) {
    int odd = ((uintptr_t)to | (uintptr_t)from | (uintptr_t)bytes) % sizeof(uint4) != 0;
    if (__any_sync(~0u, odd))
        spread_words<uint32_t>(to, from, (int)(bytes / sizeof(uint32_t)));
    else
        spread_words<uint4>(to, from, (int)(bytes / sizeof(uint4)));
}

/* What a warp knows of the entries of a row, lane k of entry k. */
typedef struct SideEntry {
    int slot;   /* to fill here; -1: none. FLAT: the row's, in one lane */
    int expert; /* among this rank's, -1: none */
    float weight;
    char *record; /* of another rank, that takes the row; in one lane for each */
} SideEntry;

/* Weights and scales of a row, to its slots and records. By a warp. */
__device__ __forceinline__ void spread_side(const EpScatterArgs &a, const SideEntry &e,
                                            const char *scales) {
    int lane = threadIdx.x % 32;
    unsigned filled = __ballot_sync(~0u, e.slot >= 0),
             records = __ballot_sync(~0u, e.record != NULL);
    if (filled && a.shape.layout == EP_LAYOUT_FLAT)
        describe_flat_row(a, __shfl_sync(~0u, e.slot, __ffs(filled) - 1), e.expert, e.weight, lane);
    else if (a.carries_weights && e.slot >= 0)
        a.out_weights[e.slot] = e.weight;
    for (unsigned left = records; left && a.carries_weights; left &= left - 1) {
        char *record = (char *)__shfl_sync(~0u, (unsigned long long)e.record, __ffs(left) - 1);
        if (lane < a.top_k) ((float *)(record + a.record.weights))[lane] = e.weight;
    }
    if (!a.scale_bytes) return;
    char *to = e.record ? e.record + a.record.scales : NULL;
    if (e.slot >= 0) to = a.out_scales + e.slot * a.scale_bytes;
    spread_scales(to, scales, a.scale_bytes);
}

#endif
