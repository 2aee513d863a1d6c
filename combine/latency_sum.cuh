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

/* Of a token that a source has, or may have: then the plan's words may be anything. They are on
 * their way here, and nothing looks at them. */

__device__ __forceinline__ int ask_row(const EpLatencyGatherArgs &a, int source, int token) {
    return __ldg(a.plan.begins + (source * (a.group.layout.max_tokens + 1) + token));
}

/* Lane k of entry k. FLAT rows have one slot, in one lane. By a warp. */
__device__ __forceinline__ int ask_slot(const EpLatencyGatherArgs &a, int source, int token) {
    int lane = threadIdx.x % 32, index = source * a.group.layout.max_tokens + token;
    int flat = a.shape.layout == EP_LAYOUT_FLAT;
    const int *at =
        flat ? a.plan.begins + (index + source) : a.plan.routes + (index * a.top_k + lane);
    return lane < (flat ? 1 : a.top_k) ? __ldg(at) : -1;
}

/* What a warp knows of a row's slots. */
typedef struct Terms {
    int slot;
    float weight;    /* if slots have weights, else anything */
    unsigned filled; /* lanes that have a slot */
} Terms;

__device__ __forceinline__ Terms find_terms(const EpLatencyGatherArgs &a, int slot) {
    int has_weight = a.weighs && slot >= 0;
    const float *weight = has_weight ? a.slot_weights + slot : (const float *)a.plan.begins;
    return Terms{slot, __ldg(weight), __ballot_sync(~0u, slot >= 0)};
}

/* Units `unit` and so on of a sum: ascending k, each term by one fused operation. By a warp; a unit
 * past the row is not touched. No load is in an `if`: compilers load to some other registers there,
 * and wait for that before they copy, so that one load waits for another. What is loaded and not
 * needed is part of what is. */
template <typename T, int UNITS, int AT_ONCE>
__device__ __forceinline__ void sum_slots(const EpLatencyGatherArgs &a, const Terms &t,
                                          const int unit[UNITS], EpVector<T> sum[UNITS]) {
    const char *from[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        from[u] = a.rows + 16 * max(unit[u], 0);
#pragma unroll 1
    for (unsigned left = t.filled; left;) {
        uint4 x[AT_ONCE][UNITS];
        int lane[AT_ONCE];
        bool is[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            is[i] = left != 0, lane[i] = is[i] ? __ffs((int)left) - 1 : lane[0];
            uint64_t slot = (uint32_t)__shfl_sync(~0u, t.slot, lane[i]);
            left &= left - 1;
#pragma unroll
            for (int u = 0; u < UNITS; u++)
                x[i][u] = ep_load_unchanging(from[u] + slot * (uint32_t)a.row_bytes);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            float given = __shfl_sync(~0u, t.weight, lane[i]), weight = a.weighs ? given : 1;
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

/* A warp's share of what is sent, and its row as the plan has it. */
typedef struct Sum {
    int source, token, step;
    int row, slot;
} Sum;

template <typename T>
__device__ void send_sum(const EpLatencyGatherArgs &a, const Sum &s, int stride, uint64_t flag) {
    const EpCudaGroup &g = a.group;
    const EpLatency &l = a.latency;
    Terms t = find_terms(a, s.slot);
    if (s.row == EP_ROW_NONE) return;
    char *to = latency_record(l, l.window[s.source], g.rank, g.size, s.token, flag);
#pragma unroll 1
    for (int step = s.step; step < a.steps; step += SUMMED_AT_ONCE * stride) {
        EpVector<T> sum[SUMMED_AT_ONCE] = {};
        int unit[SUMMED_AT_ONCE];
#pragma unroll
        for (int i = 0; i < SUMMED_AT_ONCE; i++)
            unit[i] = own_unit(a, step + i * stride);
        sum_slots<T, SUMMED_AT_ONCE, TERMS_AT_ONCE>(a, t, unit, sum);
#pragma unroll
        for (int i = 0; i < SUMMED_AT_ONCE; i++) {
            int at = step + i * stride;
            ulonglong2 packed = step_pack(ep_pack(sum[i]), flag);
            if (at < a.steps) step_store(to + at * EP_STEP_BYTES, packed, l.whole);
        }
        if (l.whole) continue;
        step_fence();
#pragma unroll 1
        for (int i = 0; i < SUMMED_AT_ONCE; i++)
            if (step + i * stride < a.steps)
                step_store_flag(to + (step + i * stride) * EP_STEP_BYTES, flag);
    }
}

/* ---- own rows ------------------------------------------------------------------------------ */

/* A unit of what this rank adds to a token of its own. */
template <typename T>
__device__ __forceinline__ uint4 *kept_unit(const EpLatencyGatherArgs &a, int token, int unit) {
    const EpLatency &l = a.latency;
    char *kept = l.own + l.layout.sums + (int64_t)token * l.layout.sum_bytes;
    return (uint4 *)(kept + unit * (int)sizeof(EpVector<T>));
}

/* What this rank adds to a token of its own is not rounded. Between halves it is kept. */
template <typename T>
__device__ void keep_sum(const EpLatencyGatherArgs &a, const Sum &s, int stride) {
    Terms t = find_terms(a, s.slot);
#pragma unroll 1
    for (int step = s.step; step < a.steps; step += stride) {
        EpVector<T> sum[1] = {};
        int unit[1] = {own_unit(a, step)};
        sum_slots<T, 1, 2>(a, t, unit, sum);
        if (unit[0] < 0) continue;
        uint4 *to = kept_unit<T>(a, s.token, unit[0]);
#pragma unroll
        for (int i = 0; i < EpVector<T>::SIZE; i += 4)
            to[i / 4] = ep_pack(EpVector<float>{
                {sum[0].at[i], sum[0].at[i + 1], sum[0].at[i + 2], sum[0].at[i + 3]}});
    }
}

/* ---- all ----------------------------------------------------------------------------------- */

/* Heads are an item of their own, the last: no sum waits for them. So whoever has nothing else to
 * send sends them, or else the block that is done first; and those of its warps do that come last
 * to receive. */
__device__ void send_heads(const EpLatencyGatherArgs &a, const Turn &turn) {
    int warp = WARPS - 1 - (int)(threadIdx.x / 32);
#pragma unroll 1
    for (int r = warp; r < a.group.size; r += WARPS)
        send_head(a.group, a.latency, r, 1, turn.flag,
                  [&](int) { return make_uint4(a.group.digest, 0, 0, 0); });
    if (warp == WARPS - 1) announce_operation(a.group, a.latency, turn);
}

/* A share is found by an item and a warp. Items are as many shares as the block's warps take at
 * once. Own rows come last of each token's, and only where they are to be kept. */
__device__ __forceinline__ Sum find_sum(const EpLatencyGatherArgs &a, int item,
                                        const EpDivisor &stride) {
    const EpCudaGroup &g = a.group;
    int i = item * WARPS + (int)(threadIdx.x / 32), row = ep_quotient(i, stride);
    int token = ep_quotient(row, a.kinds), source = g.rank + 1 + row - token * a.kinds.by;
    return Sum{source - (source < g.size ? 0 : g.size), token, i - row * stride.by, EP_ROW_NONE,
               -1};
}

__device__ __forceinline__ void ask_sum(const EpLatencyGatherArgs &a, Sum *s) {
    s->row = ask_row(a, s->source, s->token);
    s->slot = ask_slot(a, s->source, s->token);
}

/* Whether blocks wait after they have sent: then all that they send is claimed. */
__device__ __forceinline__ int claims_all(const EpLatency &l) {
    return l.receives && l.first_receiver < l.senders;
}

/* What a block sends first is known before anything has been looked up, where it is not claimed and
 * there are as many rows as the host expects. */
__device__ __forceinline__ Sum ask_first_sum(const EpLatencyGatherArgs &a) {
    Sum s = find_sum(a, (int)blockIdx.x, a.sent.each);
    int sends = (int)blockIdx.x < a.latency.senders;
    if (sends && !claims_all(a.latency) && s.token * a.kinds.by < a.sent.rows) ask_sum(a, &s);
    return s;
}

/* Rows of all ranks that are sent or kept here, as if all had as many tokens as one has at most. */
__device__ __forceinline__ int count_sums(const EpLatencyGatherArgs &a, const int *tokens) {
    const EpCudaGroup &g = a.group;
    int most = 0;
#pragma unroll 1
    for (int r = threadIdx.x % 32; r < g.size; r += 32)
        if (r != g.rank || !a.latency.receives) most = max(most, tokens[r]);
    return __reduce_max_sync(~0u, most) * (g.size - a.latency.receives);
}

/* tokens[R]: of each rank. */
template <typename T>
__device__ void send_sums(const EpLatencyGatherArgs &a, const int *tokens, const Sum &first,
                          const Turn &turn) {
    int rows = count_sums(a, tokens), expected = rows <= a.sent.rows;
    int warps = max(1, a.latency.senders) * WARPS;
    EpShares shares = expected ? a.sent : ep_shares(rows, a.steps, EP_SUMMED_STEPS, warps);
    int items = (rows * shares.each.by + WARPS - 1) / WARPS, stride = shares.each.by;
    int claims = claims_all(a.latency), begin = claims ? claimed_items()[0] : (int)blockIdx.x;
    int claimed = claims ? 0 : a.latency.senders;
    int known = claims || !expected ? -1 : begin; /* what `first` is of */
    claims_work_from(a.latency, begin, claimed, items + 1, [&](int item) {
        if (item == items) return send_heads(a, turn);
        Sum s = first;
        if (item != known) s = find_sum(a, item, shares.each);
        if (s.token * a.kinds.by >= rows || s.token >= tokens[s.source]) return;
        if (item != known) ask_sum(a, &s);
        if (s.source != a.group.rank)
            send_sum<T>(a, s, stride, turn.flag);
        else
            keep_sum<T>(a, s, stride);
    });
}

#endif
