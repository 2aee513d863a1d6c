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

/* One row of scales to the places that lanes of the warp have, where they have one, in words; word
 * i goes offset_of(i) bytes behind a place. */
template <typename Word, typename Offset>
__device__ __forceinline__ void spread_words(char *to, const char *from, int words,
                                             Offset offset_of) {
    int lane = threadIdx.x % 32;
    unsigned places = __ballot_sync(~0u, to != NULL);
    for (int base = 0; base < words; base += 32) {
        int at = base + lane, valid = at < words;
        Word word;
        if (valid) word = __ldcg((const Word *)from + at);
        for (unsigned left = places; left; left &= left - 1) {
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

/* In words as large as all addresses allow: that is a byte where a row has an odd number of UE8M0.
 */
__device__ __forceinline__ void spread_scales(char *to, const char *from, int64_t bytes) {
    uintptr_t all = (uintptr_t)to | (uintptr_t)from | (uintptr_t)bytes;
    if (!__any_sync(~0u, all % sizeof(uint4) != 0))
        spread_row<uint4>(to, from, bytes);
    else if (!__any_sync(~0u, all % sizeof(uint32_t) != 0))
        spread_row<uint32_t>(to, from, bytes);
    else
        spread_row<uint8_t>(to, from, bytes);
}

/* The same to places in columns: `to` is that of the first scale. An element is `per` words. */
template <typename Word>
__device__ __forceinline__ void spread_column(const EpScaleMap &map, char *to, const char *from,
                                              int per) {
    int64_t step = ep_scale_step(&map);
    spread_words<Word>(to, from, (int)map.count * per,
                       [=](int i) { return i / per * step + i % per * (int64_t)sizeof(Word); });
}

/* Scales by column start on 4 bytes, and on no more than that: an element of 8 is two words. */
__device__ __forceinline__ void spread_columns(const EpScaleMap &map, char *to, const char *from) {
    if (map.element_bytes == 1)
        spread_column<uint8_t>(map, to, from, 1);
    else if (map.element_bytes == 2)
        spread_column<uint16_t>(map, to, from, 1);
    else
        spread_column<uint32_t>(map, to, from, map.element_bytes / 4);
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
    char *to = e.record ? e.record + a.record.scales : NULL, *out = NULL;
    if (e.slot >= 0) out = a.out_scales + ep_scale_at(&a.scale_map, e.slot, 0);
    if (!a.scale_map.by_column) {
        spread_scales(out ? out : to, scales, a.scale_bytes);
        return;
    }
    if (records) spread_scales(to, scales, a.scale_bytes);
    if (filled) spread_columns(a.scale_map, out, scales);
}

#endif
