/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_LATENCY_SUM_CUH
#define EP_COMBINE_LATENCY_SUM_CUH

/**
 * The sending part of latency mode's combine: for each row that a rank had sent, the sum of the
 * slots that it fills here, rounded to the rows' type, back to that rank.
 */

#include "handles/latency.cuh"
#include "runtime/rows.cuh"

#define SUMMED_AT_ONCE 2 /* steps of a warp */
#define TERMS_AT_ONCE 4

/* ---- the slots of a row -------------------------------------------------------------------- */

/* What a warp knows of a row: lane k of entry k. FLAT rows have one slot, in one lane. */
typedef struct Terms {
    int slot;
    float weight;
    unsigned filled; /* lanes that have a slot */
    int comes;       /* whether the source sends it at all */
} Terms;

/* By a warp; of a token that the source has. */
__device__ __forceinline__ Terms find_terms(const EpLatencyGatherArgs &a, int source, int token) {
    int lane = threadIdx.x % 32, flat = a.shape.layout == EP_LAYOUT_FLAT;
    int64_t index = (int64_t)source * a.group.layout.max_tokens + token;
    int row = a.plan.begins[index + source], slot = -1;
    if (flat && lane == 0) slot = row;
    if (!flat && lane < a.top_k) slot = a.plan.routes[index * a.top_k + lane];
    Terms t = {slot, 1, __ballot_sync(~0u, slot >= 0), row != EP_ROW_NONE};
    if (a.weighs && slot >= 0) t.weight = a.slot_weights[slot];
    return t;
}

/* Units `unit` and so on of a sum: ascending k, each term by one fused operation. By a warp; a unit
 * past the row is not touched. */
template <typename T, int UNITS>
__device__ __forceinline__ void add_terms(const EpLatencyGatherArgs &a, const Terms &t,
                                          const int unit[UNITS], EpVector<T> sum[UNITS]) {
#pragma unroll 1
    for (unsigned left = t.filled; left;) {
        uint4 x[TERMS_AT_ONCE][UNITS];
        int lane[TERMS_AT_ONCE];
        bool is[TERMS_AT_ONCE];
#pragma unroll
        for (int i = 0; i < TERMS_AT_ONCE; i++) {
            lane[i] = left ? __ffs((int)left) - 1 : 0, is[i] = left != 0;
            int64_t slot = __shfl_sync(~0u, t.slot, lane[i]);
            left &= left - 1;
#pragma unroll
            for (int u = 0; u < UNITS; u++)
                if (is[i] && unit[u] >= 0)
                    x[i][u] = __ldg((const uint4 *)(a.rows + slot * a.row_bytes) + unit[u]);
        }
#pragma unroll
        for (int i = 0; i < TERMS_AT_ONCE; i++) {
            float weight = __shfl_sync(~0u, t.weight, lane[i]);
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                if (!is[i] || unit[u] < 0) continue;
                EpVector<T> term = ep_unpack<T>(x[i][u]);
#pragma unroll
                for (int e = 0; e < EpVector<T>::SIZE; e++)
                    sum[u].at[e] = fmaf(weight, term.at[e], sum[u].at[e]);
            }
        }
    }
}

/* This lane's unit of a step, -1: none. */
__device__ __forceinline__ int own_unit(const EpLatencyGatherArgs &a, int step) {
    int unit = step * EP_STEP_UNITS + step_unit();
    return step_unit() >= 0 && unit < a.row_units ? unit : -1;
}

/* ---- rows of other ranks ------------------------------------------------------------------- */

template <typename T>
__device__ void send_sum(const EpLatencyGatherArgs &a, int source, int token, int step, int stride,
                         uint64_t flag) {
    const EpCudaGroup &g = a.group;
    const EpLatency &l = a.latency;
    Terms t = find_terms(a, source, token);
    if (!t.comes) return;
    char *to = latency_record(l, l.window[source], g.rank, g.size, token, flag);
#pragma unroll 1
    for (; step < a.steps; step += SUMMED_AT_ONCE * stride) {
        EpVector<T> sum[SUMMED_AT_ONCE] = {};
        int unit[SUMMED_AT_ONCE];
#pragma unroll
        for (int i = 0; i < SUMMED_AT_ONCE; i++)
            unit[i] = own_unit(a, step + i * stride);
        add_terms<T, SUMMED_AT_ONCE>(a, t, unit, sum);
#pragma unroll
        for (int i = 0; i < SUMMED_AT_ONCE; i++) {
            int at = step + i * stride;
            ulonglong2 packed = step_pack(ep_pack(sum[i]), flag);
            if (at < a.steps) step_store(to + at * EP_STEP_BYTES, packed, l.whole);
        }
        if (l.whole) continue;
        step_fence();
#pragma unroll
        for (int i = 0; i < SUMMED_AT_ONCE; i++)
            if (step + i * stride < a.steps)
                step_store_flag(to + (step + i * stride) * EP_STEP_BYTES, flag);
    }
}

/* ---- own rows ------------------------------------------------------------------------------ */

__device__ __forceinline__ float *kept_sum(const EpLatencyGatherArgs &a, int token) {
    const EpLatency &l = a.latency;
    return (float *)(l.own + l.layout.sums + (int64_t)token * l.layout.sum_bytes);
}

/* What this rank adds to a token of its own is not rounded. Between halves it is kept. */
template <typename T>
__device__ void keep_sum(const EpLatencyGatherArgs &a, int token, int step, int stride) {
    Terms t = find_terms(a, a.group.rank, token);
    float *to = kept_sum(a, token);
#pragma unroll 1
    for (; step < a.steps; step += stride) {
        EpVector<T> sum[1] = {};
        int unit[1] = {own_unit(a, step)};
        add_terms<T, 1>(a, t, unit, sum);
        if (unit[0] < 0) continue;
#pragma unroll
        for (int i = 0; i < EpVector<T>::SIZE; i++)
            to[unit[0] * EpVector<T>::SIZE + i] = sum[0].at[i];
    }
}

/* ---- all ----------------------------------------------------------------------------------- */

__device__ void send_heads(const EpLatencyGatherArgs &a, uint64_t flag) {
#pragma unroll 1
    for (int r = (int)threadIdx.x / 32; r < a.group.size; r += WARPS)
        send_head(a.group, a.latency, r, 1, flag,
                  [&](int) { return make_uint4(a.group.digest, 0, 0, 0); });
}

/* Items are as many rows as the block's warps take at once. Own rows come last of each token's, and
 * only where they are to be kept. tokens[R]: of each rank. */
template <typename T>
__device__ void send_sums(const EpLatencyGatherArgs &a, const int *tokens, const Turn &turn) {
    const EpCudaGroup &g = a.group;
    int kinds = g.size - a.latency.receives, most = 0;
#pragma unroll 1
    for (int r = 0; r < g.size; r++)
        if (r != g.rank || kinds == g.size) most = max(most, tokens[r]);
    EpShares shares = most * kinds <= a.sent.rows
                          ? a.sent
                          : ep_shares(most * kinds, a.steps, a.steps, (int)gridDim.x * WARPS);
    int items = (shares.rows * shares.each.by + WARPS - 1) / WARPS;
    if (blockIdx.x == 0) {
        send_heads(a, turn.flag);
        if (threadIdx.x / 32 == WARPS - 1) announce_operation(g, a.latency, turn);
    }
    claims_work(a.latency, items, [&](int item) {
        int i = item * WARPS + (int)threadIdx.x / 32, row = ep_quotient(i, shares.each);
        int step = i - row * shares.each.by, token = ep_quotient(row, a.kinds);
        int source = g.rank + 1 + row - token * a.kinds.by;
        source -= source < g.size ? 0 : g.size;
        if (row >= shares.rows || token >= tokens[source]) return;
        if (source != g.rank)
            send_sum<T>(a, source, token, step, shares.each.by, turn.flag);
        else
            keep_sum<T>(a, token, step, shares.each.by);
    });
}

#endif
