/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_LATENCY_REDUCE_CUH
#define EP_COMBINE_LATENCY_REDUCE_CUH

/**
 * The receiving part of latency mode's combine: for each token of this rank, the sums of all ranks
 * that it went to, as they come, added in ascending rank.
 */

#include "combine/latency_sum.cuh"

#define AWAITED_AT_ONCE 4 /* ranks */
#define REDUCED_AT_ONCE 1 /* steps of a warp */

/* The ranks of a token's experts in ascending order, into list[K]; how many. By a warp. */
__device__ __forceinline__ int list_ranks(const EpLatencyGatherArgs &a, int token, int *list) {
    int lane = threadIdx.x % 32, owner = -1, at = 0, count = 0;
    if (lane < a.top_k) owner = a.plan.entries[(int64_t)token * a.top_k + lane].owner;
    unsigned same = __match_any_sync(~0u, owner);
    int opens = owner >= 0 && __ffs((int)same) - 1 == lane;
#pragma unroll 1
    for (int i = 0; i < a.top_k; i++) {
        int other = __shfl_sync(~0u, opens ? owner : -1, i);
        at += other >= 0 && other < owner, count += other >= 0;
    }
    __syncwarp();
    if (opens) list[at] = owner;
    __syncwarp();
    return count;
}

/* This rank's part of some units of one of its tokens. */
template <typename T>
__device__ __forceinline__ void sum_own(const EpLatencyGatherArgs &a, const Terms &t, int token,
                                        const int unit[REDUCED_AT_ONCE],
                                        EpVector<T> own[REDUCED_AT_ONCE]) {
    if (a.latency.senders) return add_terms<T, REDUCED_AT_ONCE>(a, t, unit, own);
#pragma unroll
    for (int u = 0; u < REDUCED_AT_ONCE; u++) {
        const float *kept = kept_sum(a, token) + unit[u] * EpVector<T>::SIZE;
        if (unit[u] < 0) continue;
#pragma unroll
        for (int i = 0; i < EpVector<T>::SIZE; i++)
            own[u].at[i] = kept[i];
    }
}

template <typename T>
__device__ __forceinline__ void add_vector(const EpVector<T> &x, EpVector<T> *sum) {
#pragma unroll
    for (int i = 0; i < EpVector<T>::SIZE; i++)
        sum->at[i] += x.at[i];
}

/* Some steps of a token: as they may have come from some of its ranks. */
typedef struct Coming {
    const EpLatencyGatherArgs *a;
    int token, step, stride;
    uint64_t flag;
} Coming;

__device__ __forceinline__ const char *coming_from(const Coming &c, int rank, int i) {
    const EpCudaGroup &g = c.a->group;
    return latency_record(c.a->latency, c.a->latency.own, rank, g.size, c.token, c.flag) +
           (c.step + i * c.stride) * EP_STEP_BYTES;
}

__device__ __forceinline__ void load_coming(const Coming &c, const int *ranks, int count,
                                            ulonglong2 x[AWAITED_AT_ONCE][REDUCED_AT_ONCE]) {
#pragma unroll
    for (int r = 0; r < AWAITED_AT_ONCE; r++)
#pragma unroll
        for (int i = 0; i < REDUCED_AT_ONCE; i++)
            if (r < count && ranks[r] != c.a->group.rank && c.step + i * c.stride < c.a->steps)
                x[r][i] = step_load(coming_from(c, ranks[r], i));
}

/* What comes from one rank. By a warp; 0: it does not. */
template <typename T>
__device__ __forceinline__ int add_coming(const Coming &c, int rank, ulonglong2 x[REDUCED_AT_ONCE],
                                          EpVector<T> sum[REDUCED_AT_ONCE]) {
    const StepOrigin origin = {rank, EP_PHASE_LINES, c.token};
#pragma unroll
    for (int i = 0; i < REDUCED_AT_ONCE; i++) {
        if (c.step + i * c.stride >= c.a->steps) break;
        const char *from = coming_from(c, rank, i);
        if (!step_await(c.a->group, c.a->latency, from, c.flag, &x[i], origin)) return 0;
        add_vector(ep_unpack<T>(step_unpack(x[i])), &sum[i]);
    }
    return 1;
}

/* Some steps of a token. What others send is on its way while this rank's part is summed up. */
template <typename T>
__device__ int reduce_steps(const Coming &c, const int *ranks, int count, const Terms &t) {
    const EpLatencyGatherArgs &a = *c.a;
    EpVector<T> sum[REDUCED_AT_ONCE] = {}, own[REDUCED_AT_ONCE] = {};
    ulonglong2 x[AWAITED_AT_ONCE][REDUCED_AT_ONCE];
    int unit[REDUCED_AT_ONCE];
#pragma unroll
    for (int i = 0; i < REDUCED_AT_ONCE; i++)
        unit[i] = own_unit(a, c.step + i * c.stride);
    load_coming(c, ranks, count, x);
    if (count) sum_own(a, t, c.token, unit, own);
#pragma unroll 1
    for (int at = 0; at < count; at += AWAITED_AT_ONCE) {
        if (at) load_coming(c, ranks + at, count - at, x);
#pragma unroll
        for (int r = 0; r < AWAITED_AT_ONCE; r++) {
            if (at + r >= count) break;
            if (ranks[at + r] != a.group.rank) {
                if (!add_coming(c, ranks[at + r], x[r], sum)) return 0;
                continue;
            }
#pragma unroll
            for (int i = 0; i < REDUCED_AT_ONCE; i++)
                add_vector(own[i], &sum[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < REDUCED_AT_ONCE; i++)
        if (unit[i] >= 0)
            *((uint4 *)(a.out_rows + c.token * a.row_bytes) + unit[i]) = ep_pack(sum[i]);
    return 1;
}

/* A warp's steps of a token; or of a row past this step's tokens, which is zero, and of which the
 * plan says nothing. */
template <typename T>
__device__ int reduce_token(const EpLatencyGatherArgs &a, int *list, int tokens, int token,
                            int step, int stride, uint64_t flag) {
    int count = token < tokens ? list_ranks(a, token, list) : 0;
    Terms own = {-1, 1, 0, 0};
    if (count && a.latency.senders) own = find_terms(a, a.group.rank, token);
#pragma unroll 1
    for (; step < a.steps; step += REDUCED_AT_ONCE * stride) {
        Coming c = {&a, token, step, stride, flag};
        if (!reduce_steps<T>(c, list, count, own)) return 0;
    }
    return 1;
}

/* By one block: every rank has sent its part, and of the same operation. */
__device__ void take_heads(const EpLatencyGatherArgs &a, uint64_t flag) {
#pragma unroll 1
    for (int r = (int)threadIdx.x / 32; r < a.group.size; r += WARPS)
        if (!take_head(a.group, a.latency, r, 1, flag, [](int, const uint4 &) {})) return;
}

/* By the blocks that receive. */
template <typename T>
__device__ void reduce_all(const EpLatencyGatherArgs &a, const Part &p, int tokens, int *list,
                           uint64_t flag) {
    int warps = p.blocks * WARPS, warp = (int)threadIdx.x / 32 * p.blocks + p.block;
    shares_work(a.latency.received, warp, warps, [&](int token, int step) {
        return reduce_token<T>(a, list, tokens, token, step, a.latency.received.each.by, flag);
    });
    if (p.block == p.blocks - 1) take_heads(a, flag);
}

#endif
