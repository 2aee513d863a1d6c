/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_CUDA_LATENCY_WEIGHTS_CUH
#define EP_COMBINE_CUDA_LATENCY_WEIGHTS_CUH

/**
 * Weights that latency mode's combine gets at the tokens' ranks: each rank pushes its tokens'
 * weights to the ranks that sum their slots, and these wait for them before they sum.
 *
 * Float k of a token is in unit k / 4 of its lines, so line i holds EP_LINE_WEIGHTS floats from
 * EP_LINE_WEIGHTS * i on. Its flag shows that they are here (runtime/cuda/lines.cuh).
 */

#include "combine/cuda/latency_gather.h"
#include "runtime/cuda/latency.cuh"

/* Whether sums wait for weights of the tokens' ranks. */
__device__ __forceinline__ int awaits_weights(const EpLatencyGatherArgs &a) {
    return a.latency.awaits_weights;
}

/* Lanes work in groups: each group has all lines of one token's weights. */

__device__ __forceinline__ int lanes_of_group(const EpLatencyGatherArgs &a) {
    return 8 * ep_weight_lines(a.top_k);
}

/* Returns what step_store and step_load take, so that this lane's group finds the lines at `lines`.
 */
__device__ __forceinline__ char *group_lines(const EpLatencyGatherArgs &a, char *lines) {
    return lines - 16 * ((int)(threadIdx.x % 32) & -lanes_of_group(a));
}

/* ---- pushing ------------------------------------------------------------------------------- */

/* Returns this lane's 16 bytes of a token's lines, in each group. Units that hold no weights repeat
 * others. By a warp. */
__device__ __forceinline__ ulonglong2 pack_weights(const EpLatencyGatherArgs &a, int token,
                                                   uint64_t flag) {
    int lane = threadIdx.x % 32, at = lane % lanes_of_group(a), k = 4 * (at / 8 * 7 + at % 8) % 32;
    const float *weights = a.t.topk_weights + (int64_t)token * a.top_k;
    uint32_t own = lane < a.top_k ? __float_as_uint(__ldg(weights + lane)) : 0;
    uint4 unit;
    unit.x = __shfl_sync(~0u, own, k), unit.y = __shfl_sync(~0u, own, k + 1);
    unit.z = __shfl_sync(~0u, own, k + 2), unit.w = __shfl_sync(~0u, own, k + 3);
    return step_pack(unit, flag);
}

/* Call store(to) for the token's lines on each other rank that has its row, with a rank for each
 * group of lanes; groups that are left over repeat the first one's. By a warp. */
template <typename Store>
__device__ __forceinline__ void for_each_owner(const EpLatencyGatherArgs &a, int token,
                                               uint64_t flag, Store store) {
    const EpCudaGroup &g = a.group;
    int lane = threadIdx.x % 32, lanes = lanes_of_group(a), owner = -1;
    if (lane < a.top_k) owner = __ldg(&a.plan.entries[token * a.top_k + lane].owner);
    owner = owner < g.size && owner != g.rank ? owner : -1;
    int is_first = __ffs((int)__match_any_sync(~0u, owner)) - 1 == lane;
    unsigned owners = __ballot_sync(~0u, is_first && owner >= 0);
    while (owners) {
        int from = __ffs((int)owners) - 1;
#pragma unroll 1
        for (int group = 0; group < 32 && owners; group += lanes, owners &= owners - 1)
            if (lane / lanes * lanes == group) from = __ffs((int)owners) - 1;
        int r = __shfl_sync(~0u, owner, from);
        char *window = a.latency.window[r];
        store(group_lines(a, latency_weights(a.latency, window, g.rank, g.size, token, flag)));
    }
}

/* Push the weights of one of this rank's tokens. By a warp. */
__device__ __noinline__ void push_weights(const EpLatencyGatherArgs &a, int token, uint64_t flag) {
    int whole = a.latency.whole;
    ulonglong2 packed = pack_weights(a, token, flag);
    for_each_owner(a, token, flag, [&](char *to) { step_store(to, packed, whole); });
    if (whole) return;
    step_fence();
    for_each_owner(a, token, flag, [&](char *to) { step_store_flag(to, flag); });
}

/* ---- waiting ------------------------------------------------------------------------------- */

/* Lines of weights, as loaded by each group of lanes. */
typedef struct FetchedWeights {
    const char *from; /* see group_lines */
    ulonglong2 x;
} FetchedWeights;

/* Begin to load the weights of a source's token, arrived or not. */
__device__ __forceinline__ FetchedWeights fetch_weights(const EpLatencyGatherArgs &a, int source,
                                                        int token, uint64_t flag) {
    FetchedWeights f;
    f.from = group_lines(
        a, latency_weights(a.latency, a.latency.own, source, a.group.size, token, flag));
    f.x = step_load(f.from);
    return f;
}

/* Returns in lane k the weight of entry k. By a warp. */
__device__ __forceinline__ float unpack_weights(const ulonglong2 &x) {
    int lane = threadIdx.x % 32, from = lane_of_unit(lane / 4);
    unsigned long long low = __shfl_sync(~0u, x.x, from), high = __shfl_sync(~0u, x.y, from);
    unsigned long long both = lane & 2 ? high : low;
    return __uint_as_float((uint32_t)(lane & 1 ? both >> 32 : both));
}

/* In lane k the weight of entry k, if `alive`. */
typedef struct AwaitedWeights {
    int alive;
    float weight;
} AwaitedWeights;

/* Wait for weights; alive is 0 if they will not come. Not inlined, since most combines await none.
 * By a warp. */
__device__ __noinline__ AwaitedWeights await_weights(const EpLatencyGatherArgs &a, int source,
                                                     int token, uint64_t flag, FetchedWeights f) {
    const StepOrigin origin = {source, EP_AWAIT_WEIGHTS, token};
    int alive = step_await(a.group, a.latency, f.from, flag, &f.x, origin);
    return AwaitedWeights{alive, unpack_weights(f.x)};
}

#endif
