/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_SCATTER_MULTIPLY_CUH
#define EP_DISPATCH_SCATTER_MULTIPLY_CUH

/**
 * A filling block that multiplies, for ep_combine_backward: rows times their slots' weights, and
 * dot products with the rows that lie in the slots.
 */

#include "dispatch/scatter_block.cuh"

/* 16 bytes of a row, multiplied and rounded, to one slot; returns their part of the product with
 * the slot's other row. */
template <typename T>
__device__ __forceinline__ float multiply_vector(const EpScatterArgs &a, const uint4 &x, float w,
                                                 const uint4 &y, char *out) {
    float dot = 0;
    const T *from = (const T *)&x, *other = (const T *)&y;
    uint4 result;
    T *to = (T *)&result;
#pragma unroll
    for (int i = 0; i < (int)(16 / sizeof(T)); i++) {
        to[i] = ep_round<T>(w * ep_float(from[i]));
        dot = fmaf(ep_float(from[i]), ep_float(other[i]), dot);
    }
    *(uint4 *)out = a.weighs ? result : x;
    return dot;
}

/* Threads of a group meet; groups go at their own pace. */
__device__ __forceinline__ void group_barrier(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(GROUP) : "memory");
}

/* A record that lies in the ring, to one slot, by a group. Each thread sums the products of its
 * vectors in order, each warp its threads', and finish_dots the warps': always in the same way. */
template <typename T>
__device__ __forceinline__ void multiply_to_slot(const EpScatterArgs &a, const char *record,
                                                 int64_t slot, float *partial) {
    float w = a.weighs ? a.slot_weights[slot] : 1, dot = 0;
    const char *other = a.slot_rows + slot * a.row_bytes;
    char *out = a.out_rows + slot * a.row_bytes;
#pragma unroll 7
    for (int64_t at = threadIdx.x % GROUP * 16; at < a.row_bytes; at += GROUP * 16) {
        uint4 x = __ldcg((const uint4 *)(record + at));
        uint4 y = a.takes_dots ? *(const uint4 *)(other + at) : make_uint4(0, 0, 0, 0);
        dot += multiply_vector<T>(a, x, w, y, out + at);
    }
    for (int d = 16; d > 0; d /= 2)
        dot += __shfl_xor_sync(~0u, dot, d);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x % GROUP / 32] = dot;
}

/* One lane of the group's first warp for each slot. */
__device__ __forceinline__ void finish_dots(const EpScatterArgs &a, const Shared *s, int group,
                                            int slot, int lane) {
    float dot = 0;
    for (int w = 0; w < GROUP / 32 && slot >= 0; w++)
        dot += s->partial[group][lane][w];
    if (a.takes_dots && slot >= 0) a.out_weights[slot] = dot;
}

/* Wait until a pair's next record is there: by one thread, for its group. */
__device__ __forceinline__ void await_pair(const EpCudaGroup &g, Shared *s, int group, int source,
                                           int ring, uint32_t taken, uint32_t *seen) {
    const uint32_t *head = ep_head(g, g.rank, source, ring);
    if (*seen != taken) return;
    s->alive[group] = ep_wait_counter(g, head, taken + 1, source, EP_PHASE_RECORD, ring);
    *seen = ep_load_acquire_sys(head);
}

/* All rows of one source in one lane, by a group of its own. */
template <typename T>
__device__ int multiply_pair(const EpScatterArgs &a, Shared *s, int group, int source, int ring) {
    const EpCudaGroup &g = a.group;
    int thread = threadIdx.x % GROUP, lane = threadIdx.x % 32;
    uint32_t taken = g.state->received[source][ring], seen = taken;
    int rows = a.plan.lane_rows[source * EP_LANES + ring];
    for (int row = 0; row < rows; row++, taken++) {
        const char *record = ep_ring(g, g.rank, source, ring, taken);
        int slot = -1;
        if (lane < a.top_k) slot = ep_slot(a.plan, g, a.shape, a.top_k, source, ring, row, lane);
        if (thread == 0) await_pair(g, s, group, source, ring, taken, &seen);
        group_barrier(group);
        if (!s->alive[group]) return 0;
        for (unsigned left = __ballot_sync(~0u, slot >= 0); left; left &= left - 1) {
            int k = __ffs(left) - 1;
            multiply_to_slot<T>(a, record, __shfl_sync(~0u, slot, k), s->partial[group][k]);
        }
        group_barrier(group);
        if (thread < 32) finish_dots(a, s, group, slot, lane);
        if (thread == 0) ep_store_relaxed_sys(ep_credit(g, source, g.rank, ring), taken + 1);
    }
    group_barrier(group);
    if (thread == 0) g.state->received[source][ring] = taken;
    return 1;
}

/* Groups take pairs of lane and source, lanes in ascending order: see the head of this file. */
template <typename T> __device__ void multiply(const EpScatterArgs &a, Shared *s, int block) {
    int group = threadIdx.x / GROUP;
    if (threadIdx.x % GROUP == 0) s->alive[group] = 1;
    for (int pair = group * a.fill_blocks + block; pair < EP_LANES * a.group.size;
         pair += GROUPS * a.fill_blocks)
        if (!multiply_pair<T>(a, s, group, pair % a.group.size, pair / a.group.size)) return;
}

#endif
