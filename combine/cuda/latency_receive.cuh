/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_CUDA_LATENCY_RECEIVE_CUH
#define EP_COMBINE_CUDA_LATENCY_RECEIVE_CUH

/**
 * The receiving part of latency mode's combine: for each token of this rank, the sums of all ranks
 * that it went to, as they arrive, added in ascending rank.
 *
 * A part has no more steps than a warp loads at once, and parts are taken in the order of tokens,
 * in which they arrive. So all warps work on what has arrived last, and little is left to do when
 * the last token is here.
 */

#include "combine/cuda/latency_send.cuh"

#define AWAITED_AT_ONCE 3 /* ranks besides this one */
#define OWN_AT_ONCE 2     /* own terms, while awaited steps take registers, too */

/* Steps that a receiving warp reduces at a time, and this lane's units of them. A packed step has
 * twice the elements, or more. */
template <typename T, int PACKED> struct ReducedShape {
    static constexpr int STEPS = PACKED ? 1 : EP_REDUCED_AT_ONCE;
    static constexpr int PARTS = StepParts<T, PACKED>::COUNT;
    static constexpr int UNITS = STEPS * PARTS;
};

/* Up to this number of parts, waiting warps load all of their steps again until they have arrived,
 * which sees them soonest. With more parts they load only flags, to leave the cache to others. */
#define EAGER_PARTS 512

#define RANK_NONE INT32_MAX

/* ---- parts --------------------------------------------------------------------------------- */

__device__ __forceinline__ int count_parts(const EpLatencyGatherArgs &a) {
    return a.latency.received.rows * a.latency.received.each.by;
}

/* The plan's words for a token, while they are being loaded: in lane k the rank of entry k, -1 for
 * none, and the slots that the token has here. */
typedef struct TokenWords {
    int owner, slot;
} TokenWords;

/* Load the plan's words for a token; a row past this step's tokens has none. By a warp. */
__device__ __forceinline__ TokenWords load_token(const EpLatencyGatherArgs &a, int tokens,
                                                 int token) {
    int lane = threadIdx.x % 32;
    TokenWords w = {-1, -1};
    if (token >= tokens || token >= a.latency.received.rows) return w;
    if (lane < a.top_k) w.owner = __ldg(&a.plan.entries[token * a.top_k + lane].owner);
    if (a.latency.senders) w.slot = load_slot(a, a.group.rank, token);
    return w;
}

/* Some steps of a token. In lane k, `owner` is the rank of its entry k, -1 for none or this
 * rank. */
typedef struct TokenPart {
    int token, step, end, owner;
    int has_own; /* whether this rank has a sum to add */
} TokenPart;

/* Returns the lowest of a token's other ranks above `last`. By a warp. */
__device__ __forceinline__ int next_rank(int owner, int last) {
    return __reduce_min_sync(~0u, owner > last ? owner : RANK_NONE);
}

/* ---- this rank's own sum ------------------------------------------------------------------- */

/* Load this rank's own sum as the send phase has stored it. */
template <typename T, int UNITS>
__device__ __forceinline__ void load_own_sum(const EpLatencyGatherArgs &a, int token,
                                             const int unit[UNITS], uint64_t flag,
                                             EpVector<T> own[UNITS]) {
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        if (unit[u] < 0) continue;
        const uint4 *stored = own_sum_unit<T>(a, token, unit[u], flag);
#pragma unroll
        for (int i = 0; i < EpVector<T>::SIZE; i += 4) {
            EpVector<float> x = ep_unpack<float>(__ldg(stored + i / 4));
#pragma unroll
            for (int e = 0; e < 4; e++)
                own[u].at[i + e] = x.at[e];
        }
    }
}

template <typename T, int UNITS>
__device__ __forceinline__ void add_own(const EpVector<T> own[UNITS], EpVector<T> sum[UNITS]) {
#pragma unroll
    for (int i = 0; i < UNITS; i++)
        ep_add(&sum[i], own[i]);
}

/* ---- sums of other ranks ------------------------------------------------------------------- */

/* A part's steps from some ranks, in ascending order, RANK_NONE after the last. Step i from rank[r]
 * is awaited if incoming_bit(r, i) is set. */
template <int STEPS> struct Incoming {
    int rank[AWAITED_AT_ONCE];
    const char *from[AWAITED_AT_ONCE];
    unsigned awaited;
    ulonglong2 x[AWAITED_AT_ONCE][STEPS];
};

template <int STEPS> __device__ __forceinline__ unsigned incoming_bit(int r, int i) {
    return 1u << (r * STEPS + i);
}

/* List the steps of the next ranks above `last`. By a warp. */
template <int STEPS>
__device__ __forceinline__ void find_incoming(const EpLatencyGatherArgs &a, const TokenPart &s,
                                              int last, uint64_t flag, Incoming<STEPS> *c) {
    const EpCudaGroup &g = a.group;
    c->awaited = 0;
#pragma unroll
    for (int r = 0; r < AWAITED_AT_ONCE; r++) {
        c->rank[r] = last = next_rank(s.owner, last);
        if (last == RANK_NONE) continue;
        c->from[r] = latency_record(a.latency, a.latency.own, last, g.size, s.token, flag) +
                     s.step * EP_STEP_BYTES;
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            if (s.step + i < s.end) c->awaited |= incoming_bit<STEPS>(r, i);
    }
}

template <int STEPS> __device__ __forceinline__ void load_incoming(Incoming<STEPS> *c) {
#pragma unroll
    for (int r = 0; r < AWAITED_AT_ONCE; r++)
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            if (c->awaited & incoming_bit<STEPS>(r, i))
                c->x[r][i] = step_load(c->from[r] + i * EP_STEP_BYTES);
}

/* Returns the steps that have not arrived. By a warp, like step_is_here. */
template <int STEPS>
__device__ __forceinline__ unsigned find_missing(const Incoming<STEPS> &c, uint64_t flag) {
    unsigned missing = 0;
#pragma unroll
    for (int r = 0; r < AWAITED_AT_ONCE; r++)
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            if (c.x[r][i].y != flag) missing |= incoming_bit<STEPS>(r, i);
    return __reduce_or_sync(~0u, has_flag() ? missing & c.awaited : 0u);
}

/* Load the flags of some missing steps alone, and return those still missing. By a warp. */
template <int STEPS>
__device__ __forceinline__ unsigned poll_missing(const Incoming<STEPS> &c, unsigned missing,
                                                 uint64_t flag) {
    uint64_t seen[AWAITED_AT_ONCE][STEPS];
    int at = (int)(threadIdx.x % 32) * 16 + 8;
    unsigned own = has_flag() ? missing : 0, still = 0;
#pragma unroll
    for (int r = 0; r < AWAITED_AT_ONCE; r++)
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            if (own & incoming_bit<STEPS>(r, i))
                seen[r][i] =
                    ep_load_relaxed_sys((const uint64_t *)(c.from[r] + i * EP_STEP_BYTES + at));
#pragma unroll
    for (int r = 0; r < AWAITED_AT_ONCE; r++)
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            if (seen[r][i] != flag) still |= incoming_bit<STEPS>(r, i);
    return __reduce_or_sync(~0u, still & own);
}

/* Load all steps together, again and again until all have arrived; returns those still missing
 * after many loads. Calls meanwhile() while the first loads are under way. There is one place that
 * loads, since then no load has to preserve what another has loaded: see sum_slots. By a warp. */
template <int STEPS, typename Meanwhile>
__device__ __forceinline__ unsigned receive_incoming(const EpLatencyGatherArgs &a,
                                                     Incoming<STEPS> *c, uint64_t flag,
                                                     Meanwhile meanwhile) {
    int arrived = 0;
#pragma unroll 1
    for (int polls = 0;; polls++) {
        load_incoming(c);
        if (polls == 0) meanwhile();
        if (arrived) return 0;
        unsigned missing = find_missing(*c, flag);
        arrived = !missing;
        if (arrived && a.latency.whole) return 0;
        if (arrived) {
            step_fence();
            __syncwarp();
            continue;
        }
        if (polls >= EP_POLLS_PER_CLOCK_READ) return missing;
        if (count_parts(a) <= EAGER_PARTS) continue;
#pragma unroll 1
        for (; missing && polls < EP_POLLS_PER_CLOCK_READ; polls++)
            missing = poll_missing(*c, missing, flag);
    }
}

/* ---- a part -------------------------------------------------------------------------------- */

/* Steps of a part that have not arrived: bits as in Incoming, for the ranks above `last`. */
typedef struct Missing {
    int last;
    unsigned bits;
} Missing;

/* Add the sums of other ranks, and this rank's own in its turn if *has_own, which is then
 * cleared. */
template <typename T, int PACKED, int STEPS, int UNITS>
__device__ __forceinline__ void add_incoming(const Incoming<STEPS> &c, int rank,
                                             const EpVector<T> own[UNITS], int *has_own,
                                             EpVector<T> sum[UNITS]) {
#pragma unroll
    for (int r = 0; r < AWAITED_AT_ONCE; r++) {
        if (*has_own && c.rank[r] > rank) add_own<T, UNITS>(own, sum), *has_own = 0;
        if (c.rank[r] == RANK_NONE) break;
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            add_step<T, PACKED>(sum + i * (UNITS / STEPS), step_unpack(c.x[r][i]));
    }
}

/* Sum up and write some steps of a token, or return those that have not arrived in time. This
 * rank's own sum is computed while other ranks' sums are loaded. Ranks beyond the first few have a
 * loop of their own, so that no total takes registers meanwhile. */
template <typename T, int PACKED>
__device__ __forceinline__ Missing receive_steps(const EpLatencyGatherArgs &a, const TokenPart &s,
                                                 int slot, uint64_t flag) {
    constexpr int STEPS = ReducedShape<T, PACKED>::STEPS, UNITS = ReducedShape<T, PACKED>::UNITS;
    EpVector<T> own[UNITS] = {};
    Terms t = find_terms(a, slot, s.token);
    Incoming<STEPS> c;
    int unit[UNITS], last = -1, has_own = s.has_own;
    find_units<T, PACKED, UNITS>(a, s.step, 1, unit);
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (s.step + u / (UNITS / STEPS) >= s.end) unit[u] = -1;
    find_incoming(a, s, last, flag, &c);
    if (s.has_own && !a.latency.senders) load_own_sum<T, UNITS>(a, s.token, unit, flag, own);
    unsigned missing =
        receive_incoming(a, &c, flag, [&]() { sum_slots<T, UNITS, OWN_AT_ONCE>(a, t, unit, own); });
    if (missing) return Missing{last, missing};
    EpVector<T> sum[UNITS] = {};
    add_incoming<T, PACKED, STEPS, UNITS>(c, a.group.rank, own, &has_own, sum);
    last = c.rank[AWAITED_AT_ONCE - 1];
#pragma unroll 1
    while (__any_sync(~0u, s.owner > last)) {
        find_incoming(a, s, last, flag, &c);
        missing = receive_incoming(a, &c, flag, [] {});
        if (missing) return Missing{last, missing};
        add_incoming<T, PACKED, STEPS, UNITS>(c, a.group.rank, own, &has_own, sum);
        last = c.rank[AWAITED_AT_ONCE - 1];
    }
    if (has_own) add_own<T, UNITS>(own, sum);
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (unit[u] >= 0)
            *((uint4 *)a.t.out_rows + ((int64_t)s.token * a.row_units + unit[u])) = ep_pack(sum[u]);
    return Missing{last, 0};
}

/* Wait for the first missing step. By a warp, which keeps nothing in registers meanwhile: what had
 * arrived is loaded again. Returns 0 on timeout. */
template <int STEPS>
__device__ __noinline__ int await_missing(const EpLatencyGatherArgs &a, TokenPart s,
                                          Missing missing, uint64_t flag) {
    const EpCudaGroup &g = a.group;
    int at = __ffs((int)missing.bits) - 1, rank = missing.last;
#pragma unroll 1
    for (int r = 0; r <= at / STEPS; r++)
        rank = next_rank(s.owner, rank);
    int step = s.step + at % STEPS;
    const char *from = latency_record(a.latency, a.latency.own, rank, g.size, s.token, flag) +
                       step * EP_STEP_BYTES;
    ulonglong2 x = step_load(from);
    return step_await(g, a.latency, from, flag, &x, StepOrigin{rank, EP_AWAIT_LINES, s.token});
}

/* Receive a part of a token. It has more steps than are reduced at a time only if rows are so long
 * that the host has made longer parts. By a warp. Returns 0 on timeout. */
template <typename T, int PACKED>
__device__ __forceinline__ int receive_part(const EpLatencyGatherArgs &a, int token, int step,
                                            const TokenWords &w, uint64_t flag) {
    constexpr int STEPS = ReducedShape<T, PACKED>::STEPS;
    int owner = w.owner < a.group.size ? w.owner : -1;
    int has_own = __any_sync(~0u, owner == a.group.rank);
    int end = min(step + a.latency.received.steps, a.steps);
    TokenPart s = {token, step, end, owner == a.group.rank ? -1 : owner, has_own};
#pragma unroll 1
    while (s.step < s.end) {
        Missing missing = receive_steps<T, PACKED>(a, s, w.slot, flag);
        if (!missing.bits)
            s.step += STEPS;
        else if (!await_missing<STEPS>(a, s, missing, flag))
            return 0;
    }
    return 1;
}

/* ---- all tokens ---------------------------------------------------------------------------- */

/* Wait for all heads, which show that every rank has sent its sums and is in the same operation. By
 * one block, beginning with the warps that have the fewest parts. */
__device__ void take_heads(const EpLatencyGatherArgs &a, uint64_t flag) {
#pragma unroll 1
    for (int r = LATENCY_WARPS - 1 - (int)(threadIdx.x / 32); r < a.group.size; r += LATENCY_WARPS)
        if (!take_head(a.group, a.latency, r, 1, flag, a.plan.use.is_read,
                       [](int, const uint4 &) {}))
            return;
}

/* Receive all tokens. By the receiving blocks. A warp loads the plan's words for its next part
 * while it works on one. */
template <typename T, int PACKED>
__device__ void receive_sums(const EpLatencyGatherArgs &a, const LatencyRole &role, int tokens,
                             uint64_t flag) {
    int warps = role.blocks * LATENCY_WARPS, i = (int)(threadIdx.x / 32) * role.blocks + role.block;
    const EpPartition &partition = a.latency.received;
    TokenWords next = load_token(a, tokens, ep_quotient(i, partition.each));
#pragma unroll 1
    for (; i < count_parts(a); i += warps) {
        int token = ep_quotient(i, partition.each), part = i - token * partition.each.by;
        TokenWords words = next;
        next = load_token(a, tokens, ep_quotient(i + warps, partition.each));
        if (!receive_part<T, PACKED>(a, token, part * a.latency.received.steps, words, flag)) break;
    }
    if (role.block == role.blocks - 1) take_heads(a, flag);
}

#endif
