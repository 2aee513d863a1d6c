/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_LATENCY_REDUCE_CUH
#define EP_COMBINE_LATENCY_REDUCE_CUH

/**
 * The receiving part of latency mode's combine: for each token of this rank, the sums of all ranks
 * that it went to, as they come, added in ascending rank.
 *
 * A share is no more steps than a warp has in flight at once, and shares are taken in the order of
 * tokens, in which they come: so all warps work on what has come last, and when the last token is
 * here little is left to do.
 */

#include "combine/latency_sum.cuh"

#define AWAITED_AT_ONCE 3 /* ranks besides this one */
#define REDUCED_AT_ONCE EP_REDUCED_AT_ONCE
#define OWN_AT_ONCE 2 /* terms, while what is awaited has its registers, too */

/* While there are no more shares than these, warps that wait load everything anew until it is here,
 * which sees it soonest. Of many they load flags alone: the cache is kept busy, and others need it.
 */
#define EAGER_SHARES 512

#define RANK_NONE INT32_MAX

/* ---- shares -------------------------------------------------------------------------------- */

__device__ __forceinline__ int count_shares(const EpLatencyGatherArgs &a) {
    return a.latency.received.rows * a.latency.received.each.by;
}

/* What the plan says of a token, on its way: the rank of entry k in lane k, -1 for none, and the
 * slots that it has here. */
typedef struct TokenWords {
    int owner, slot;
} TokenWords;

/* Of a row past this step's tokens it says nothing. */
__device__ __forceinline__ TokenWords ask_token(const EpLatencyGatherArgs &a, int tokens,
                                                int token) {
    int lane = threadIdx.x % 32;
    TokenWords w = {-1, -1};
    if (token >= tokens || token >= a.latency.received.rows) return w;
    if (lane < a.top_k) w.owner = __ldg(&a.plan.entries[token * a.top_k + lane].owner);
    if (a.latency.senders) w.slot = ask_slot(a, a.group.rank, token);
    return w;
}

/* Some steps of a token; lane k knows the rank of its entry k, if that is another one than this. */
typedef struct Share {
    int token, step, end, owner;
    int adds; /* whether this rank adds something */
} Share;

/* The lowest of a token's other ranks above `last`. By a warp. */
__device__ __forceinline__ int next_rank(int owner, int last) {
    return __reduce_min_sync(~0u, owner > last ? owner : RANK_NONE);
}

/* ---- what this rank adds ------------------------------------------------------------------- */

/* As the first half has left it. */
template <typename T>
__device__ __forceinline__ void load_kept(const EpLatencyGatherArgs &a, int token,
                                          const int unit[REDUCED_AT_ONCE],
                                          EpVector<T> own[REDUCED_AT_ONCE]) {
#pragma unroll
    for (int u = 0; u < REDUCED_AT_ONCE; u++) {
        if (unit[u] < 0) continue;
        const uint4 *kept = kept_unit<T>(a, token, unit[u]);
#pragma unroll
        for (int i = 0; i < EpVector<T>::SIZE; i += 4) {
            EpVector<float> x = ep_unpack<float>(__ldg(kept + i / 4));
#pragma unroll
            for (int e = 0; e < 4; e++)
                own[u].at[i + e] = x.at[e];
        }
    }
}

template <typename T>
__device__ __forceinline__ void add_vector(const EpVector<T> &x, EpVector<T> *sum) {
#pragma unroll
    for (int i = 0; i < EpVector<T>::SIZE; i++)
        sum->at[i] += x.at[i];
}

template <typename T>
__device__ __forceinline__ void add_own(const EpVector<T> own[REDUCED_AT_ONCE],
                                        EpVector<T> sum[REDUCED_AT_ONCE]) {
#pragma unroll
    for (int i = 0; i < REDUCED_AT_ONCE; i++)
        add_vector(own[i], &sum[i]);
}

/* ---- what others add ----------------------------------------------------------------------- */

/* A share's steps from some ranks, in ascending order, RANK_NONE behind the last. Bit
 * r * REDUCED_AT_ONCE + i stands for its step i from rank[r]. */
typedef struct Coming {
    int rank[AWAITED_AT_ONCE];
    const char *from[AWAITED_AT_ONCE];
    unsigned awaited;
    ulonglong2 x[AWAITED_AT_ONCE][REDUCED_AT_ONCE];
} Coming;

__device__ __forceinline__ unsigned coming_bit(int r, int i) {
    return 1u << (r * REDUCED_AT_ONCE + i);
}

/* Those from the ranks above `last`. */
__device__ __forceinline__ void find_coming(const EpLatencyGatherArgs &a, const Share &s, int last,
                                            uint64_t flag, Coming *c) {
    const EpCudaGroup &g = a.group;
    c->awaited = 0;
#pragma unroll
    for (int r = 0; r < AWAITED_AT_ONCE; r++) {
        c->rank[r] = last = next_rank(s.owner, last);
        if (last == RANK_NONE) continue;
        c->from[r] = latency_record(a.latency, a.latency.own, last, g.size, s.token, flag) +
                     s.step * EP_STEP_BYTES;
#pragma unroll
        for (int i = 0; i < REDUCED_AT_ONCE; i++)
            if (s.step + i < s.end) c->awaited |= coming_bit(r, i);
    }
}

__device__ __forceinline__ void load_coming(Coming *c) {
#pragma unroll
    for (int r = 0; r < AWAITED_AT_ONCE; r++)
#pragma unroll
        for (int i = 0; i < REDUCED_AT_ONCE; i++)
            if (c->awaited & coming_bit(r, i))
                c->x[r][i] = step_load(c->from[r] + i * EP_STEP_BYTES);
}

/* Which of them are not here. By a warp, as step_is_here. */
__device__ __forceinline__ unsigned find_missing(const Coming &c, uint64_t flag) {
    unsigned missing = 0;
#pragma unroll
    for (int r = 0; r < AWAITED_AT_ONCE; r++)
#pragma unroll
        for (int i = 0; i < REDUCED_AT_ONCE; i++)
            if (c.x[r][i].y != flag) missing |= coming_bit(r, i);
    return __reduce_or_sync(~0u, has_flag() ? missing & c.awaited : 0u);
}

/* The same of flags alone, of some that were missing. */
__device__ __forceinline__ unsigned poll_missing(const Coming &c, unsigned missing, uint64_t flag) {
    uint64_t seen[AWAITED_AT_ONCE][REDUCED_AT_ONCE];
    int at = (int)(threadIdx.x % 32) * 16 + 8;
    unsigned own = has_flag() ? missing : 0, still = 0;
#pragma unroll
    for (int r = 0; r < AWAITED_AT_ONCE; r++)
#pragma unroll
        for (int i = 0; i < REDUCED_AT_ONCE; i++)
            if (own & coming_bit(r, i))
                seen[r][i] =
                    ep_load_relaxed_sys((const uint64_t *)(c.from[r] + i * EP_STEP_BYTES + at));
#pragma unroll
    for (int r = 0; r < AWAITED_AT_ONCE; r++)
#pragma unroll
        for (int i = 0; i < REDUCED_AT_ONCE; i++)
            if (seen[r][i] != flag) still |= coming_bit(r, i);
    return __reduce_or_sync(~0u, still & own);
}

/* Everything is asked for together, and again until all of it is here; what is not after many
 * loads. meanwhile() is done while the first ones are under way. There is one place that loads,
 * since then no load has to leave alone what another one has brought: see sum_slots. By a warp. */
template <typename Meanwhile>
__device__ __forceinline__ unsigned take_coming(const EpLatencyGatherArgs &a, Coming *c,
                                                uint64_t flag, Meanwhile meanwhile) {
    int are_here = 0;
#pragma unroll 1
    for (int polls = 0;; polls++) {
        load_coming(c);
        if (polls == 0) meanwhile();
        if (are_here) return 0;
        unsigned missing = find_missing(*c, flag);
        are_here = !missing;
        if (are_here && a.latency.whole) return 0;
        if (are_here) {
            step_fence();
            __syncwarp();
            continue;
        }
        if (polls >= EP_POLLS_PER_CLOCK_READ) return missing;
        if (count_shares(a) <= EAGER_SHARES) continue;
#pragma unroll 1
        for (; missing && polls < EP_POLLS_PER_CLOCK_READ; polls++)
            missing = poll_missing(*c, missing, flag);
    }
}

/* ---- a share ------------------------------------------------------------------------------- */

/* What has not come of a share: bits as in Coming, of the ranks above `last`. */
typedef struct Missing {
    int last;
    unsigned bits;
} Missing;

/* What other ranks add, and this one in its turn, unless it has had that. */
template <typename T>
__device__ __forceinline__ void add_coming(const Coming &c, int rank,
                                           const EpVector<T> own[REDUCED_AT_ONCE], int *adds,
                                           EpVector<T> sum[REDUCED_AT_ONCE]) {
#pragma unroll
    for (int r = 0; r < AWAITED_AT_ONCE; r++) {
        if (*adds && c.rank[r] > rank) add_own<T>(own, sum), *adds = 0;
        if (c.rank[r] == RANK_NONE) break;
#pragma unroll
        for (int i = 0; i < REDUCED_AT_ONCE; i++)
            add_vector(ep_unpack<T>(step_unpack(c.x[r][i])), &sum[i]);
    }
}

/* Some steps of a token, unless something is late. What others send is on its way while this rank's
 * part is summed up. The ranks beyond the first few are code of their own, so that no sum takes up
 * registers while that is done. */
template <typename T>
__device__ __forceinline__ Missing reduce_steps(const EpLatencyGatherArgs &a, const Share &s,
                                                int slot, uint64_t flag) {
    EpVector<T> own[REDUCED_AT_ONCE] = {};
    Terms t = find_terms(a, slot);
    Coming c;
    int unit[REDUCED_AT_ONCE], last = -1, adds = s.adds;
#pragma unroll
    for (int i = 0; i < REDUCED_AT_ONCE; i++)
        unit[i] = s.step + i < s.end ? own_unit(a, s.step + i) : -1;
    find_coming(a, s, last, flag, &c);
    if (s.adds && !a.latency.senders) load_kept(a, s.token, unit, own);
    unsigned missing = take_coming(
        a, &c, flag, [&]() { sum_slots<T, REDUCED_AT_ONCE, OWN_AT_ONCE>(a, t, unit, own); });
    if (missing) return Missing{last, missing};
    EpVector<T> sum[REDUCED_AT_ONCE] = {};
    add_coming<T>(c, a.group.rank, own, &adds, sum);
    last = c.rank[AWAITED_AT_ONCE - 1];
#pragma unroll 1
    while (__any_sync(~0u, s.owner > last)) {
        find_coming(a, s, last, flag, &c);
        missing = take_coming(a, &c, flag, [] {});
        if (missing) return Missing{last, missing};
        add_coming<T>(c, a.group.rank, own, &adds, sum);
        last = c.rank[AWAITED_AT_ONCE - 1];
    }
    if (adds) add_own<T>(own, sum);
#pragma unroll
    for (int i = 0; i < REDUCED_AT_ONCE; i++)
        if (unit[i] >= 0)
            *((uint4 *)a.out_rows + ((int64_t)s.token * a.row_units + unit[i])) = ep_pack(sum[i]);
    return Missing{last, 0};
}

/* Until the first that is late is here; 0: it will not come. While warps wait here, they hold
 * nothing: what had come is loaded anew. */
__device__ __noinline__ int await_late(const EpLatencyGatherArgs &a, Share s, Missing late,
                                       uint64_t flag) {
    const EpCudaGroup &g = a.group;
    int at = __ffs((int)late.bits) - 1, rank = late.last;
#pragma unroll 1
    for (int r = 0; r <= at / REDUCED_AT_ONCE; r++)
        rank = next_rank(s.owner, rank);
    int step = s.step + at % REDUCED_AT_ONCE;
    const char *from = latency_record(a.latency, a.latency.own, rank, g.size, s.token, flag) +
                       step * EP_STEP_BYTES;
    ulonglong2 x = step_load(from);
    return step_await(g, a.latency, from, flag, &x, StepOrigin{rank, EP_PHASE_LINES, s.token});
}

/* More steps than are reduced at once only of rows so long that the host has made shares of more.
 */
template <typename T>
__device__ __forceinline__ int reduce_share(const EpLatencyGatherArgs &a, int token, int step,
                                            const TokenWords &w, uint64_t flag) {
    int adds = __any_sync(~0u, w.owner == a.group.rank);
    int end = min(step + a.latency.received.steps, a.steps);
    Share s = {token, step, end, w.owner == a.group.rank ? -1 : w.owner, adds};
#pragma unroll 1
    while (s.step < s.end) {
        Missing late = reduce_steps<T>(a, s, w.slot, flag);
        if (!late.bits)
            s.step += REDUCED_AT_ONCE;
        else if (!await_late(a, s, late, flag))
            return 0;
    }
    return 1;
}

/* ---- all ----------------------------------------------------------------------------------- */

/* By one block: every rank has sent its part, and of the same operation. Its warps that have the
 * least to reduce begin. */
__device__ void take_heads(const EpLatencyGatherArgs &a, uint64_t flag) {
#pragma unroll 1
    for (int r = WARPS - 1 - (int)(threadIdx.x / 32); r < a.group.size; r += WARPS)
        if (!take_head(a.group, a.latency, r, 1, flag, [](int, const uint4 &) {})) return;
}

/* By the blocks that receive. The plan's words of a warp's next share are on their way while it
 * works on one. */
template <typename T>
__device__ void reduce_all(const EpLatencyGatherArgs &a, const Duty &duty, int tokens,
                           uint64_t flag) {
    int warps = duty.blocks * WARPS, i = (int)(threadIdx.x / 32) * duty.blocks + duty.block;
    const EpShares &shares = a.latency.received;
    TokenWords next = ask_token(a, tokens, ep_quotient(i, shares.each));
#pragma unroll 1
    for (; i < count_shares(a); i += warps) {
        int token = ep_quotient(i, shares.each), part = i - token * shares.each.by;
        TokenWords words = next;
        next = ask_token(a, tokens, ep_quotient(i + warps, shares.each));
        if (!reduce_share<T>(a, token, part * a.latency.received.steps, words, flag)) break;
    }
    if (duty.block == duty.blocks - 1) take_heads(a, flag);
}

#endif
