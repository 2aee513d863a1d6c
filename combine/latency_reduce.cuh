/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_LATENCY_REDUCE_CUH
#define EP_COMBINE_LATENCY_REDUCE_CUH

/**
 * The receiving part of latency mode's combine: for each token of this rank, the sums of all ranks
 * that it went to, as they come, added in ascending rank.
 */

#include "combine/latency_sum.cuh"

#define AWAITED_AT_ONCE 4 /* ranks */

/* The ranks of a token's experts in ascending order, into list[K]; how many. By a warp. */
__device__ __forceinline__ int list_ranks(const EpLatencyGatherArgs &a, int token, int *list) {
    int lane = threadIdx.x % 32, owner = -1, at = 0, count = 0;
    if (lane < a.top_k) owner = a.plan.entries[(int64_t)token * a.top_k + lane].owner;
    unsigned same = __match_any_sync(~0u, owner);
    int opens = owner >= 0 && __ffs((int)same) - 1 == lane;
    for (int i = 0; i < a.top_k; i++) {
        int other = __shfl_sync(~0u, opens ? owner : -1, i);
        at += other >= 0 && other < owner, count += other >= 0;
    }
    if (opens) list[at] = owner;
    __syncwarp();
    return count;
}

/* This rank's part of one of its tokens. */
template <typename T>
__device__ __forceinline__ void add_own(const EpLatencyGatherArgs &a, const Terms &t, int token,
                                        int unit, EpVector<T> *sum) {
    EpVector<T> own[1] = {};
    if (a.latency.sends) {
        const int units[1] = {unit};
        add_terms<T, 1>(a, t, units, own);
    } else if (unit >= 0) {
        const float *kept = kept_sum(a, token) + unit * EpVector<T>::SIZE;
        for (int i = 0; i < EpVector<T>::SIZE; i++)
            own[0].at[i] = kept[i];
    }
    for (int i = 0; i < EpVector<T>::SIZE; i++)
        sum->at[i] += own[0].at[i];
}

template <typename T> __device__ __forceinline__ void add_unit(const uint4 &x, EpVector<T> *sum) {
    EpVector<T> term = ep_unpack<T>(x);
#pragma unroll
    for (int i = 0; i < EpVector<T>::SIZE; i++)
        sum->at[i] += term.at[i];
}

/* One step of a token. By a warp; 0: it is not to be had. */
template <typename T>
__device__ int reduce_step(const EpLatencyGatherArgs &a, const int *ranks, int count,
                           const Terms &own, int token, int step, uint64_t flag) {
    const EpCudaGroup &g = a.group;
    const EpLatency &l = a.latency;
    int unit = own_unit(a, step);
    EpVector<T> sum = {};
    auto from = [&](int r) {
        return latency_record(l, g.rank, r, g.size, token, flag) + step * EP_STEP_BYTES;
    };
    for (int at = 0; at < count; at += AWAITED_AT_ONCE) {
        ulonglong2 x[AWAITED_AT_ONCE];
#pragma unroll
        for (int i = 0; i < AWAITED_AT_ONCE; i++)
            if (at + i < count && ranks[at + i] != g.rank) x[i] = step_load(from(ranks[at + i]));
#pragma unroll
        for (int i = 0; i < AWAITED_AT_ONCE; i++) {
            if (at + i >= count) break;
            int r = ranks[at + i];
            const StepOrigin origin = {r, EP_PHASE_LINES, token};
            if (r == g.rank) {
                add_own<T>(a, own, token, unit, &sum);
                continue;
            }
            if (!step_await(g, l, from(r), flag, &x[i], origin)) return 0;
            add_unit<T>(step_unpack(x[i]), &sum);
        }
    }
    if (unit >= 0) *((uint4 *)(a.out_rows + token * a.row_bytes) + unit) = ep_pack(sum);
    return 1;
}

/* A warp's steps of a token, or of a row past this step's tokens, which is zero. */
template <typename T>
__device__ int reduce_token(const EpLatencyGatherArgs &a, int *list, int tokens, int token,
                            int step, int stride, uint64_t flag) {
    int count = 0;
    Terms own = {-1, 1, 0, 0};
    __syncwarp();
    if (token < tokens) count = list_ranks(a, token, list);
    if (token < tokens && a.latency.sends) own = find_terms(a, a.group.rank, token);
    for (; step < a.steps; step += stride)
        if (!reduce_step<T>(a, list, count, own, token, step, flag)) return 0;
    return 1;
}

/* By one block: every rank has sent its part, and of the same operation. */
__device__ void take_heads(const EpLatencyGatherArgs &a, uint64_t flag) {
    for (int r = (int)threadIdx.x / 32; r < a.group.size; r += WARPS)
        if (!take_head(a.group, a.latency, r, 1, flag, [](int, const uint4 &) {})) return;
}

template <typename T>
__device__ void reduce_all(const EpLatencyGatherArgs &a, int (*lists)[EP_MAX_TOP_K],
                           uint64_t flag) {
    int warp = threadIdx.x / 32, warps = (int)gridDim.x * WARPS;
    int tokens = (int)a.plan.header->num_tokens, rows = (int)max(a.out_num_rows, (int64_t)tokens);
    Shares shares = make_shares(rows, a.steps, warps);
    shares_work(shares, warp * (int)gridDim.x + (int)blockIdx.x, warps, [&](int token, int step) {
        return reduce_token<T>(a, lists[warp], tokens, token, step, shares.stride, flag);
    });
    if (blockIdx.x == gridDim.x - 1) take_heads(a, flag);
}

#endif
