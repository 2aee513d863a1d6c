/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_CUDA_SCATTER_METADATA_CUH
#define EP_DISPATCH_CUDA_SCATTER_METADATA_CUH

/**
 * What sending and receiving blocks of scatter.cu share: metadata (weights, scales, local experts)
 * on the way to a row's slots.
 */

#include "dispatch/cuda/scatter.h"
#include "handles/cuda/scheduler.cuh"

/* What becomes of rows. Each form has a kernel of its own: code that does not run is not free. */
enum Form { COPIED, MULTIPLIED };

/* Whether rows have metadata. */
__device__ __forceinline__ int has_metadata(const EpScatterArgs &a) {
    return a.t.carries_weights || a.t.scale_bytes || a.t.out_idx;
}

/* Store the experts and weights of a flat row. By a warp. */
__device__ __forceinline__ void store_flat_metadata(const EpScatterArgs &a, int64_t row, int expert,
                                                    float weight, int lane) {
    int64_t at = row * a.top_k + lane;
    if (row < 0 || lane >= a.top_k) return;
    if (a.t.carries_weights) a.t.out_weights[at] = expert >= 0 ? weight : 0;
    int id = expert >= 0 ? expert + a.t.first_id : -1;
    if (a.t.out_idx && a.t.idx_type == EP_TYPE_INT64)
        ((int64_t *)a.t.out_idx)[at] = id;
    else if (a.t.out_idx)
        ((int32_t *)a.t.out_idx)[at] = id;
}

/* Copy a row of scales, in words, to the target `to` of each lane where that is not NULL. Word i
 * goes offset_of(i) bytes behind a target. By a warp. */
template <typename Word, typename Offset>
__device__ __forceinline__ void spread_words(char *to, const char *from, int words,
                                             Offset offset_of) {
    int lane = threadIdx.x % 32;
    unsigned targets = __ballot_sync(~0u, to != NULL);
    for (int base = 0; base < words; base += 32) {
        int at = base + lane, valid = at < words;
        Word word;
        if (valid) word = __ldcg((const Word *)from + at);
        for (unsigned left = targets; left; left &= left - 1) {
            char *out = (char *)__shfl_sync(~0u, (unsigned long long)to, __ffs(left) - 1);
            if (valid) *(Word *)(out + offset_of(at)) = word;
        }
    }
}

template <typename Word>
__device__ __forceinline__ void spread_row(char *to, const char *from, int64_t bytes) {
    spread_words<Word>(to, from, (int)(bytes / sizeof(Word)),
                       [](int i) { return i * (int64_t)sizeof(Word); });
}

/* Copy a row of scales to rows, in words as large as all addresses allow: bytes where a row has an
 * odd number of UE8M0. By a warp. */
__device__ __forceinline__ void spread_scales(char *to, const char *from, int64_t bytes) {
    uintptr_t all = (uintptr_t)to | (uintptr_t)from | (uintptr_t)bytes;
    if (!__any_sync(~0u, all % sizeof(uint4) != 0))
        spread_row<uint4>(to, from, bytes);
    else if (!__any_sync(~0u, all % sizeof(uint32_t) != 0))
        spread_row<uint32_t>(to, from, bytes);
    else
        spread_row<uint8_t>(to, from, bytes);
}

/* Copy a row of scales to columns; `to` is where the first scale goes. An element is `per` words.
 * By a warp. */
template <typename Word>
__device__ __forceinline__ void spread_column(const EpScaleMap &map, char *to, const char *from,
                                              int per) {
    int64_t step = ep_scale_step(&map);
    spread_words<Word>(to, from, (int)map.count * per,
                       [=](int i) { return i / per * step + i % per * (int64_t)sizeof(Word); });
}

/* Copy a row of scales to columns. These are aligned to 4 bytes and no more: an element of 8 bytes
 * is two words. By a warp. */
__device__ __forceinline__ void spread_columns(const EpScaleMap &map, char *to, const char *from) {
    if (map.element_bytes == 1)
        spread_column<uint8_t>(map, to, from, 1);
    else if (map.element_bytes == 2)
        spread_column<uint16_t>(map, to, from, 1);
    else
        spread_column<uint32_t>(map, to, from, map.element_bytes / 4);
}

/* Entry k of a row, in lane k of a warp. */
typedef struct MetadataEntry {
    int slot;   /* that receives the row here, -1: none. has_rows: the row's, in one lane */
    int expert; /* among this rank's, -1: none */
    float weight;
    char *record; /* of another rank that gets the row, in one lane for each rank */
} MetadataEntry;

/* Copy the weights and scales of a row to its slots and records. By a warp. */
__device__ __forceinline__ void spread_metadata(const EpScatterArgs &a, const MetadataEntry &e,
                                                const char *scales) {
    int lane = threadIdx.x % 32;
    unsigned slot_lanes = __ballot_sync(~0u, e.slot >= 0),
             record_lanes = __ballot_sync(~0u, e.record != NULL);
    if (slot_lanes && a.shape.has_rows)
        store_flat_metadata(a, __shfl_sync(~0u, e.slot, __ffs(slot_lanes) - 1), e.expert, e.weight,
                            lane);
    else if (a.t.carries_weights && e.slot >= 0)
        a.t.out_weights[e.slot] = e.weight;
    for (unsigned left = record_lanes; left && a.t.carries_weights; left &= left - 1) {
        char *record = (char *)__shfl_sync(~0u, (unsigned long long)e.record, __ffs(left) - 1);
        if (lane < a.top_k) ((float *)(record + a.record.weights))[lane] = e.weight;
    }
    if (!a.t.scale_bytes) return;
    char *to = e.record ? e.record + a.record.scales : NULL, *out = NULL;
    if (e.slot >= 0) out = a.t.out_scales + ep_scale_at(&a.t.scale_map, e.slot, 0);
    if (!a.t.scale_map.by_column) {
        spread_scales(out ? out : to, scales, a.t.scale_bytes);
        return;
    }
    if (record_lanes) spread_scales(to, scales, a.t.scale_bytes);
    if (slot_lanes) spread_columns(a.t.scale_map, out, scales);
}

#endif
