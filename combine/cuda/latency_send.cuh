/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_CUDA_LATENCY_SEND_CUH
#define EP_COMBINE_CUDA_LATENCY_SEND_CUH

/**
 * The sending part of latency mode's combine: for each row that a rank has sent, the sum of its
 * slots here, rounded to the rows' type or packed (latency_packed.cuh), sent back to that rank.
 */

#include "combine/cuda/latency_packed.cuh"
#include "combine/cuda/latency_weights.cuh"

/* Steps that a sending warp sums at a time, and terms that it loads at once. */
template <typename T, int PACKED> struct SumShape {
    static constexpr int PARTS = StepParts<T, PACKED>::COUNT;
    static constexpr int STEPS = PACKED ? 1 : 2;
    static constexpr int UNITS = STEPS * PARTS;
    static constexpr int TERMS = UNITS > 2 ? 2 : 4;
};

/* ---- the slots of a row -------------------------------------------------------------------- */

/* The plan's words for a token that a source has, or may have; without the token they may be
 * anything. These functions begin loads and do not look at the words. */

__device__ __forceinline__ int load_row(const EpLatencyGatherArgs &a, int source, int token) {
    return __ldg(a.plan.begins + (source * (a.group.layout.max_tokens + 1) + token));
}

/* Load the slot of entry k in lane k. Where rows have one slot, lane 0 has it. By a warp. */
__device__ __forceinline__ int load_slot(const EpLatencyGatherArgs &a, int source, int token) {
    int lane = threadIdx.x % 32, index = source * a.group.layout.max_tokens + token;
    int flat = a.shape.has_rows;
    const int *at =
        flat ? a.plan.begins + (index + source) : a.plan.routes + (index * a.top_k + lane);
    return lane < (flat ? 1 : a.top_k) ? __ldg(at) : -1;
}

/* A row's slots, in a warp. */
typedef struct Terms {
    int slot;
    float weight;        /* if slots have weights, else anything */
    unsigned slot_lanes; /* lanes that have a slot */
} Terms;

/* Find the terms of a row. `own_token`: the token, if it is one of this rank's, else -1: then
 * weights that were given at its rank are still to come. */
__device__ __forceinline__ Terms find_terms(const EpLatencyGatherArgs &a, int slot, int own_token) {
    slot = ep_check_slot(a.plan, slot);
    int has_weight = a.t.weighs && slot >= 0, lane = threadIdx.x % 32;
    const float *weight = (const float *)a.plan.begins;
    if (has_weight && !awaits_weights(a)) weight = a.t.slot_weights + slot;
    if (has_weight && awaits_weights(a) && own_token >= 0)
        weight = a.t.topk_weights + (own_token * a.top_k + lane);
    return Terms{slot, __ldg(weight), __ballot_sync(~0u, slot >= 0)};
}

/* Sum units unit[] of a row's slots: ascending k, each term by one fused operation. By a warp;
 * skips a negative unit. No load is conditional: compilers would load to other registers there and
 * wait before they copy, so that one load waits for another. A load that is not needed repeats an
 * address that is. */
template <typename T, int UNITS, int AT_ONCE>
__device__ __forceinline__ void sum_slots(const EpLatencyGatherArgs &a, const Terms &t,
                                          const int unit[UNITS], EpVector<T> sum[UNITS]) {
    const char *from[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        from[u] = a.t.rows + 16 * max(unit[u], 0);
#pragma unroll 1
    for (unsigned left = t.slot_lanes; left;) {
        uint4 x[AT_ONCE][UNITS];
        int lane[AT_ONCE];
        bool valid[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            valid[i] = left != 0, lane[i] = valid[i] ? __ffs((int)left) - 1 : lane[0];
            uint64_t slot = (uint32_t)__shfl_sync(~0u, t.slot, lane[i]);
            left &= left - 1;
#pragma unroll
            for (int u = 0; u < UNITS; u++)
                x[i][u] = ep_load_unchanging(from[u] + slot * (uint32_t)a.t.row_bytes);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            float given = __shfl_sync(~0u, t.weight, lane[i]), weight = a.t.weighs ? given : 1;
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                if (!valid[i] || unit[u] < 0) continue;
                ep_add_weighted(&sum[u], weight, ep_unpack<T>(x[i][u]));
            }
        }
    }
}

/* Find this lane's units of COUNT / PARTS steps, `stride` steps apart; `sends` as in own_unit. */
template <typename T, int PACKED, int COUNT>
__device__ __forceinline__ void find_units(const EpLatencyGatherArgs &a, int step, int stride,
                                           int sends, int unit[COUNT]) {
    constexpr int PARTS = StepParts<T, PACKED>::COUNT;
#pragma unroll
    for (int u = 0; u < COUNT; u++)
        unit[u] = own_unit<T, PACKED>(a.row_units, step + u / PARTS * stride, u % PARTS, sends);
}

/* ---- rows of other ranks ------------------------------------------------------------------- */

/* A warp's part of what is sent, and the plan's words for its row. */
typedef struct SumPart {
    int source, token, step;
    int row, slot;
} SumPart;

/* Send a part of a sum. Returns 0 if the row's weights do not come. */
template <typename T, int PACKED>
__device__ int send_sum(const EpLatencyGatherArgs &a, const SumPart &s, int stride, uint64_t flag) {
    const EpCudaGroup &g = a.group;
    const EpLatency &l = a.latency;
    FetchedWeights f;
    if (awaits_weights(a)) f = fetch_weights(a, s.source, s.token, flag);
    Terms t = find_terms(a, s.slot, -1);
    if (s.row == EP_ROW_NONE) return 1;
    if (awaits_weights(a)) {
        AwaitedWeights w = await_weights(a, s.source, s.token, flag, f);
        if (!w.alive) return 0;
        t.weight = w.weight;
    }
    char *to = latency_record(l, l.window[s.source], g.rank, g.size, s.token, flag);
    constexpr int STEPS = SumShape<T, PACKED>::STEPS, PARTS = SumShape<T, PACKED>::PARTS;
    constexpr int UNITS = SumShape<T, PACKED>::UNITS;
#pragma unroll 1
    for (int step = s.step; step < a.steps; step += STEPS * stride) {
        EpVector<T> sum[UNITS] = {};
        int unit[UNITS];
        find_units<T, PACKED, UNITS>(a, step, stride, 1, unit);
        sum_slots<T, UNITS, SumShape<T, PACKED>::TERMS>(a, t, unit, sum);
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            int at = step + i * stride;
            uint4 own = step_sum<T, PACKED>(sum + i * PARTS, at, unit[i * PARTS] >= 0);
            ulonglong2 packed = step_pack(own, flag);
            if (at < a.steps) step_store(to + at * EP_STEP_BYTES, packed, l.whole);
        }
        if (l.whole) continue;
        step_fence();
#pragma unroll 1
        for (int i = 0; i < STEPS; i++)
            if (step + i * stride < a.steps)
                step_store_flag(to + (step + i * stride) * EP_STEP_BYTES, flag);
    }
    return 1;
}

/* ---- own rows ------------------------------------------------------------------------------ */

/* Returns the address of a unit of this rank's own sum for one of its tokens. */
template <typename T>
__device__ __forceinline__ uint4 *own_sum_unit(const EpLatencyGatherArgs &a, int token, int unit,
                                               uint64_t flag) {
    const EpLatency &l = a.latency;
    int row = EP_FLAG_SET(flag) * l.layout.max_tokens + token;
    char *stored = l.own + l.layout.sums + (int64_t)row * l.layout.sum_bytes;
    return (uint4 *)(stored + unit * (int)sizeof(EpVector<T>));
}

/* Store this rank's own sum for one of its tokens, not rounded, for the receive phase. */
template <typename T, int PACKED>
__device__ void store_own_sum(const EpLatencyGatherArgs &a, const SumPart &s, int stride,
                              uint64_t flag) {
    constexpr int PARTS = StepParts<T, PACKED>::COUNT;
    Terms t = find_terms(a, s.slot, s.token);
#pragma unroll 1
    for (int step = s.step; step < a.steps; step += stride) {
        EpVector<T> sum[PARTS] = {};
        int unit[PARTS];
        find_units<T, PACKED, PARTS>(a, step, stride, 0, unit);
        sum_slots<T, PARTS, 2>(a, t, unit, sum);
#pragma unroll
        for (int u = 0; u < PARTS; u++) {
            if (unit[u] < 0) continue;
            uint4 *to = own_sum_unit<T>(a, s.token, unit[u], flag);
#pragma unroll
            for (int i = 0; i < EpVector<T>::SIZE; i += 4)
                to[i / 4] = ep_pack(EpVector<float>{
                    {sum[u].at[i], sum[u].at[i + 1], sum[u].at[i + 2], sum[u].at[i + 3]}});
        }
    }
}

/* ---- all ----------------------------------------------------------------------------------- */

/* Send the heads. They are the last work item, since no sum waits for them: a block without other
 * work sends them, or else the block that finishes first. Its warps that receive last begin. Where
 * sums await weights, the heads come before them: ranks that disagree find that while they wait. */
__device__ void send_heads(const EpLatencyGatherArgs &a, const LatencyOp &op) {
    int warp = LATENCY_WARPS - 1 - (int)(threadIdx.x / 32);
    const EpOwnOperation own = *ep_own_operation();
#pragma unroll 1
    for (int r = warp; r < a.group.size; r += LATENCY_WARPS)
        send_head(a.group, a.latency, r, 1, op.flag,
                  [&](int) { return make_uint4(own.digest, own.generation, 0, 0); });
    if (warp == LATENCY_WARPS - 1) store_operation_number(a.group, a.latency, op);
}

/* Returns a warp's part of an item. An item is as many parts as a block has warps. This rank's own
 * row comes last of each token's, and only where its sum is to be stored. */
__device__ __forceinline__ SumPart find_sum(const EpLatencyGatherArgs &a, int item,
                                            const EpDivisor &stride) {
    const EpCudaGroup &g = a.group;
    int i = item * LATENCY_WARPS + (int)(threadIdx.x / 32), row = ep_quotient(i, stride);
    int token = ep_quotient(row, a.targets), source = g.rank + 1 + row - token * a.targets.by;
    return SumPart{source - (source < g.size ? 0 : g.size), token, i - row * stride.by, EP_ROW_NONE,
                   -1};
}

__device__ __forceinline__ void load_sum(const EpLatencyGatherArgs &a, SumPart *s) {
    s->row = load_row(a, s->source, s->token);
    s->slot = load_slot(a, s->source, s->token);
}

/* Whether all items are claimed: where blocks wait after they have sent something, so that not all
 * of them need to be resident. */
__device__ __forceinline__ int is_all_claimed(const EpLatencyGatherArgs &a) {
    const EpLatency &l = a.latency;
    return (l.receives && l.first_receiver < l.senders) || awaits_weights(a);
}

/* Load the words of this block's first item, before anything else is known. Only if items are not
 * all claimed and the row is one that the host expects. */
__device__ __forceinline__ SumPart load_first_sum(const EpLatencyGatherArgs &a) {
    SumPart s = find_sum(a, (int)blockIdx.x, a.sent.each);
    int sends = (int)blockIdx.x < a.latency.senders;
    if (sends && !is_all_claimed(a) && s.token * a.targets.by < a.sent.rows) load_sum(a, &s);
    return s;
}

/* Returns the number of rows of all ranks whose sums are sent or stored here, as if each rank had
 * as many tokens as the largest has. */
__device__ __forceinline__ int count_sums(const EpLatencyGatherArgs &a, const int *tokens) {
    const EpCudaGroup &g = a.group;
    int most = 0;
#pragma unroll 1
    for (int r = threadIdx.x % 32; r < g.size; r += 32)
        if (r != g.rank || !a.latency.receives) most = max(most, tokens[r]);
    return __reduce_max_sync(~0u, most) * (g.size - a.latency.receives);
}

/* Returns the number of items before the sums, if these await weights: one for the weights of as
 * many tokens as a block has warps, and one for the heads. */
__device__ __forceinline__ int count_pushes(const EpLatencyGatherArgs &a, const int *tokens) {
    if (!awaits_weights(a)) return 0;
    return (tokens[a.group.rank] + LATENCY_WARPS - 1) / LATENCY_WARPS + 1;
}

/* Push the weights of an item's tokens: one for each warp of the block. */
__device__ __forceinline__ void push_item(const EpLatencyGatherArgs &a, const int *tokens, int item,
                                          uint64_t flag) {
    int token = item * LATENCY_WARPS + (int)(threadIdx.x / 32);
    if (token < tokens[a.group.rank]) push_weights(a, token, flag);
}

/* Send or store the sums of all rows. tokens[R]: of each rank. */
template <typename T, int PACKED>
__device__ void send_sums(const EpLatencyGatherArgs &a, const int *tokens, const SumPart &first,
                          const LatencyOp &op) {
    int rows = count_sums(a, tokens), expected = rows <= a.sent.rows;
    int warps = max(1, a.latency.senders) * LATENCY_WARPS;
    EpPartition partition = expected ? a.sent : ep_partition(rows, a.steps, EP_SENT_STEPS, warps);
    int items = (rows * partition.each.by + LATENCY_WARPS - 1) / LATENCY_WARPS,
        stride = partition.each.by;
    int all_claimed = is_all_claimed(a), begin = all_claimed ? claimed_items()[0] : (int)blockIdx.x;
    int claimed = all_claimed ? 0 : a.latency.senders;
    int known = all_claimed || !expected ? -1 : begin; /* item that `first` belongs to */
    int pushes = count_pushes(a, tokens), heads = pushes ? pushes - 1 : items, alive = 1;
    claims_work_from(a.latency, begin, claimed, items + max(1, pushes), [&](int item) {
        if (item == heads) return send_heads(a, op);
        if (item < pushes) return push_item(a, tokens, item, op.flag);
        SumPart s = first;
        if (item != known) s = find_sum(a, item - pushes, partition.each);
        if (!alive || s.token * a.targets.by >= rows || s.token >= tokens[s.source]) return;
        if (item != known) load_sum(a, &s);
        if (s.source != a.group.rank)
            alive = send_sum<T, PACKED>(a, s, stride, op.flag);
        else
            store_own_sum<T, PACKED>(a, s, stride, op.flag);
    });
}

#endif
