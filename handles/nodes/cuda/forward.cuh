/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_NODES_CUDA_FORWARD_CUH
#define EP_HANDLES_NODES_CUDA_FORWARD_CUH

/** What a dispatch does with messages of other nodes that have come: it gives their heads to the
 *  ranks of this node, and counts their rows. A send phase forwards them, a whole dispatch leaves
 *  them where they are. */

#include "handles/nodes/cuda/forward.h"
#include "runtime/cuda/latency.cuh"

EP_VARIANT_BEGIN

__device__ __forceinline__ const char *landed_message(const EpLatency &l, int other) {
    return l.own + l.layout.landing + other * l.layout.message_bytes;
}

/* Returns how many places of a message are filled. By a warp. */
__device__ __forceinline__ int landed_rows(const EpLatency &l, int other) {
    uint4 head = step_unpack(step_load(landed_message(l, other)));
    return min(max((int)__shfl_sync(~0u, head.w, 0), 0), l.layout.node_rows);
}

/* Give rank r its head of the source on another node. By a warp. */
__device__ __forceinline__ void forward_head(const EpCudaGroup &g, const EpLatency &l, int other,
                                             int r, uint64_t flag) {
    const char *from = landed_message(l, other) + (int64_t)r * l.layout.head_bytes;
    EpRankPlace source = {(int16_t)other, (int16_t)g.rank};
    char *to = latency_head(l, l.window[r], ep_head_of(source, g.size), l.layout.num_heads, flag);
#pragma unroll 1
    for (int at = 0; at < l.layout.head_bytes; at += EP_STEP_BYTES)
        step_store(to + at, step_load(from + at), l.whole);
    if (!l.whole) step_fence();
#pragma unroll 1
    for (int at = 0; at < l.layout.head_bytes && !l.whole; at += EP_STEP_BYTES)
        step_store_flag(to + at, flag);
}

/* Add the rows of a message that the ranks of this node take to the caller's counters: a warp for
 * each place. */
static __device__ __noinline__ void count_landed(const EpCudaGroup &g, const EpLatency &l,
                                                 const EpRelayedRows &c, int other, int warp,
                                                 int warps) {
    int lane = threadIdx.x % 32, rows = landed_rows(l, other);
    const char *from = landed_message(l, other) + l.layout.message_heads;
#pragma unroll 1
    for (int place = warp; place < rows; place += warps) {
        const char *at = from + (int64_t)place * l.nodes.record_steps * EP_STEP_BYTES;
        uint4 unit = step_unpack(step_load(at));
        RecordWords h = record_words(unit, c.carries_weights, lane < c.top_k ? lane : 0);
        int expert = (int)(h.word & ((1u << c.expert_bits) - 1)) - 1, number = -1;
        if (lane < c.top_k && expert >= 0 && expert < g.num_experts) {
            EpRankPlace owner = rank_place(l, ep_owner(&c.owners, expert));
            if (owner.other < 0) number = owner.number;
        }
        int leads = __ffs((int)__match_any_sync(~0u, number)) - 1 == lane;
        if (leads && number >= 0) ep_count_row(c.stats, ep_member(g, number), 1);
    }
}

EP_VARIANT_END

#endif
