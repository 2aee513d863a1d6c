/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_LATENCY_SEND_CUH
#define EP_DISPATCH_LATENCY_SEND_CUH

/**
 * The sending part of latency mode's dispatch: a block takes a token, reads its row once, and
 * stores the record to each rank that has one of its experts. All other ranks get the record's
 * first step, which has the header, so that each knows of each token whether it comes.
 */

#include "dispatch/latency_route.cuh"

#define SENT_AT_ONCE 2 /* steps of a warp */

/* ---- header -------------------------------------------------------------------------------- */

/* How many halves of a word are 0: those in which neither the upper bit is set nor a carry out of
 * the others. */
__device__ __forceinline__ int count_zeros(uint32_t x) {
    return __popc(~(((x & 0x7fff7fffu) + 0x7fff7fffu) | x | 0x7fff7fffu));
}

/* Entries for an expert before one of them. By a warp, eight at a time. */
__device__ __forceinline__ int count_entries_before(const EpLatencyScatterArgs &a, int entry,
                                                    int expert) {
    int lane = threadIdx.x % 32, rest = entry / 8 * 8 + lane, count = 0;
    uint32_t both = (uint32_t)expert * 0x10001u;
#pragma unroll 1
    for (int i = lane; i < entry / 8; i += 32) {
        uint4 x = ((const uint4 *)desk_experts(a))[i];
        count += count_zeros(x.x ^ both) + count_zeros(x.y ^ both) + count_zeros(x.z ^ both) +
                 count_zeros(x.w ^ both);
    }
    if (rest < entry && lane < 8) count += desk_experts(a)[rest] == expert;
    return warp_sum(count);
}

/* Rows to a rank before a token's. By a warp. */
__device__ __noinline__ int count_rows_before(const EpLatencyScatterArgs &a, int token, int owner) {
    int count = 0, k = a.route.top_k;
#pragma unroll 1
    for (int t = (int)(threadIdx.x % 32); t < token; t += 32) {
        int goes = 0;
#pragma unroll 1
        for (int i = t * k; i < (t + 1) * k; i++)
            goes |= owner_of(a, desk_experts(a)[i]) == owner;
        count += goes;
    }
    return warp_sum(count);
}

/* The record's header, but for its weights. The block's warps have an entry each. */
__device__ __forceinline__ void write_header(const EpLatencyScatterArgs &a, int token) {
    int k = a.route.top_k, flat = a.route.shape.layout == EP_LAYOUT_FLAT;
#pragma unroll 1
    for (int i = (int)(threadIdx.x / 32); i < k; i += WARPS) {
        int entry = token * k + i, expert = desk_experts(a)[entry], before = 0;
        if (expert >= 0)
            before = flat ? count_rows_before(a, token, owner_of(a, expert))
                          : count_entries_before(a, entry, expert);
        if (threadIdx.x % 32 == 0)
            desk()->header[i] = (uint32_t)max(0, expert + 1) | (uint32_t)before
                                                                   << a.record.expert_bits;
    }
}

/* ---- units --------------------------------------------------------------------------------- */

/* Of scales that the caller brings, which may end within a unit, on any multiple of four. */
__device__ __noinline__ uint4 load_scales(const EpLatencyScatterArgs &a, int token, int unit) {
    const char *from = a.scales + (int64_t)token * a.scale_bytes;
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int at = unit * 16 + i * 4;
        word[i] = at < a.scale_bytes ? *(const uint32_t *)(from + at) : 0;
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

/* Of a header: the weights in it, each behind the word of its entry. */
__device__ __forceinline__ uint4 load_weights(const EpLatencyScatterArgs &a, int token, int unit) {
    const float *weights = a.topk_weights + (int64_t)token * a.route.top_k + 2 * unit;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (a.carries_weights && 2 * unit < a.route.top_k) x.y = __float_as_uint(__ldg(weights));
    if (a.carries_weights && 2 * unit + 1 < a.route.top_k)
        x.w = __float_as_uint(__ldg(weights + 1));
    return x;
}

/* A unit of the record as far as it is known before the header is. */
__device__ __forceinline__ uint4 load_unit(const EpLatencyScatterArgs &a, int token, int unit) {
    int at = unit - a.record.header_units, scale = at - a.record.row_units;
    if (at < 0) return load_weights(a, token, unit);
    if (scale >= a.record.scale_units) return make_uint4(0, 0, 0, 0);
    if (a.quant > EP_QUANT_NONE) return *((const uint4 *)(desk_memory() + a.desk.staged) + at);
    if (scale < 0) return __ldg((const uint4 *)(a.rows + (int64_t)token * a.row_bytes) + at);
    return load_scales(a, token, scale);
}

__device__ __forceinline__ uint32_t entry_word(const EpLatencyScatterArgs &a, int k) {
    return k < a.route.top_k ? desk()->header[k] : 0;
}

/* And what was missing. */
__device__ __forceinline__ uint4 header_unit(const EpLatencyScatterArgs &a, int unit, uint4 x) {
    if (a.carries_weights)
        return make_uint4(entry_word(a, 2 * unit), x.y, entry_word(a, 2 * unit + 1), x.w);
    return make_uint4(entry_word(a, 4 * unit), entry_word(a, 4 * unit + 1),
                      entry_word(a, 4 * unit + 2), entry_word(a, 4 * unit + 3));
}

/* Some of a warp's steps, from `step` on: units that were there before the header was. */
__device__ __forceinline__ void load_steps(const EpLatencyScatterArgs &a, int token, int step,
                                           uint4 x[SENT_AT_ONCE]) {
#pragma unroll
    for (int i = 0; i < SENT_AT_ONCE; i++) {
        int at = step + i, unit = at * EP_STEP_UNITS + step_unit();
        x[i] = make_uint4(0, 0, 0, 0);
        if (at < a.record.steps && step_unit() >= 0) x[i] = load_unit(a, token, unit);
    }
}

/* ---- receivers ----------------------------------------------------------------------------- */

/* Ranks, a bit for each: word w of the set in lane w of a warp, whose lanes have a rank each to
 * add, or -1. */
__device__ __forceinline__ unsigned rank_set(const EpLatencyScatterArgs &a, int rank) {
    int lane = threadIdx.x % 32;
    unsigned own = 0;
#pragma unroll
    for (int w = 0; w < RANK_WORDS; w++)
        if (a.route.group.size > 32 * w) {
            unsigned word = __reduce_or_sync(~0u, rank >> 5 == w ? 1u << rank % 32 : 0);
            own = lane == w ? word : own;
        }
    return own;
}

__device__ __forceinline__ int has_rank(unsigned set, int rank) {
    return __shfl_sync(~0u, set, rank / 32) >> rank % 32 & 1;
}

/* Where a token's record goes: the ranks that its row goes to come first, the others get its first
 * step, with the header. Each token begins with another rank. By a warp. */
__device__ __forceinline__ void list_receivers(const EpLatencyScatterArgs &a, int token,
                                               uint64_t flag) {
    const EpCudaGroup &g = a.route.group;
    int lane = threadIdx.x % 32, k = a.route.top_k;
    int owner = lane < k ? owner_of(a, desk_experts(a)[token * k + lane]) : -1;
    unsigned set = rank_set(a, owner), below = (1u << lane) - 1;
    int num_to = __reduce_add_sync(~0u, __popc(set)), listed = 0, others = num_to;
    int first = g.rank + 1 + ep_remainder(token, a.latency.ranks);
#pragma unroll 1
    for (int base = 0; base < g.size; base += 32) {
        int is = base + lane < g.size, r = first - (first < g.size ? 0 : g.size);
        r += is ? base + lane : 0;
        r -= r < g.size ? 0 : g.size;
        unsigned all = __ballot_sync(~0u, is), going = __ballot_sync(~0u, has_rank(set, r) & is);
        int at = going >> lane & 1 ? listed + __popc(going & below)
                                   : others + __popc(all & ~going & below);
        if (is)
            desk()->to[at] =
                latency_record(a.latency, a.latency.window[r], g.rank, g.size, token, flag);
        listed += __popc(going), others += __popc(all & ~going);
    }
    if (lane == 0) desk()->num_to = num_to;
    if (lane < k) a.route.plan.entries[(int64_t)token * k + lane].owner = (int16_t)owner;
}

/* store(where it goes, i) for those of a warp's steps that each receiver gets. */
template <typename Store>
__device__ __forceinline__ void each_step(const EpLatencyScatterArgs &a, int step, Store store) {
    int num_to = desk()->num_to;
#pragma unroll 1
    for (int j = 0; j < num_to; j++) {
        char *to = desk()->to[j] + step * EP_STEP_BYTES;
#pragma unroll
        for (int i = 0; i < SENT_AT_ONCE; i++)
            if (step + i < a.record.steps) store(to + i * EP_STEP_BYTES, i);
    }
#pragma unroll 1
    for (int j = num_to; step == 0 && j < a.route.group.size; j++)
        store(desk()->to[j], 0);
}

__device__ __forceinline__ void store_steps(const EpLatencyScatterArgs &a, int step,
                                            const uint4 x[SENT_AT_ONCE], uint64_t flag) {
    ulonglong2 packed[SENT_AT_ONCE];
    int whole = a.latency.whole;
#pragma unroll
    for (int i = 0; i < SENT_AT_ONCE; i++) {
        int unit = (step + i) * EP_STEP_UNITS + step_unit();
        bool is_header = step_unit() >= 0 && unit < a.record.header_units;
        packed[i] = step_pack(is_header ? header_unit(a, unit, x[i]) : x[i], flag);
    }
    each_step(a, step, [&](char *to, int i) { step_store(to, packed[i], whole); });
    if (whole) return;
    step_fence();
    each_step(a, step, [&](char *to, int) { step_store_flag(to, flag); });
}

/* ---- a token ------------------------------------------------------------------------------- */

__device__ __noinline__ void stage_quantised(const EpLatencyScatterArgs &a, int token) {
    char *staged = desk_memory() + a.desk.staged;
    ep_quantise_row((EpQuant)a.quant, a.source_type, a.rows + (int64_t)token * a.source_row_bytes,
                    a.row_elements, (uint8_t *)staged, staged + 16 * a.record.row_units,
                    (int)threadIdx.x, THREADS);
}

/* By a block. */
__device__ __forceinline__ void send_token(const EpLatencyScatterArgs &a, int token,
                                           uint64_t flag) {
    int warp = threadIdx.x / 32, step = warp * SENT_AT_ONCE, quantises = a.quant > EP_QUANT_NONE;
    uint4 x[SENT_AT_ONCE];
    if (quantises)
        stage_quantised(a, token);
    else
        load_steps(a, token, step, x);
    write_header(a, token);
    if (warp == WARPS - 1) list_receivers(a, token, flag);
    __syncthreads();
    if (quantises) load_steps(a, token, step, x);
#pragma unroll 1
    while (step < a.record.steps) {
        store_steps(a, step, x, flag);
        step += SENT_AT_ONCE * WARPS;
        load_steps(a, token, step, x);
    }
}

/* The heads are the first block's, which runs if any does: everyone waits for them. It claims
 * nothing before. */
__device__ __forceinline__ void send_all(const EpLatencyScatterArgs &a, const Turn &turn) {
    if (__builtin_expect(blockIdx.x == 0, 0)) {
        send_heads(a, turn.flag);
        if (threadIdx.x / 32 == WARPS - 1) announce_operation(a.route.group, a.latency, turn);
        claims_begin(a.latency);
        __syncthreads();
    }
    claims_work(a.latency, desk()->tokens, [&](int token) { send_token(a, token, turn.flag); });
}

#endif
