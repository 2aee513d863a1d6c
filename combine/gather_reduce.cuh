/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_GATHER_REDUCE_CUH
#define EP_COMBINE_GATHER_REDUCE_CUH

/**
 * A reducing block: for tokens of this rank, the sums of all ranks that they went to.
 */

#include "combine/gather_row.cuh"

/* Which term of its team's sum a lane's is: ranks ascend, and within this rank k does. */
__device__ __forceinline__ int order_term(const Team &t, int is_term, int owner) {
    int mine = is_term ? owner : -1, at = 0, first = threadIdx.x % 32 - t.k;
    for (int i = 0; i < t.width; i++) {
        int other = __shfl_sync(~0u, mine, first + i);
        at += other >= 0 && (other < owner || (other == owner && i < t.k));
    }
    return at;
}

/* A lane's part of its token's sum: another rank's sum, or one of this rank's own slots, which are
 * added up first. */
__device__ __forceinline__ Part take_part(const EpGatherArgs &a, const Team &t, const EpEntry &e,
                                          float weight) {
    const EpCudaGroup &g = a.group;
    int is_own = e.owner == g.rank && e.slot >= 0;
    int is_sum = e.owner >= 0 && e.owner != g.rank && e.carrier, own, before;
    team_rank(t, is_own, &own);
    team_rank(t, is_sum && e.owner < g.rank, &before);
    Part part = {NULL,        order_term(t, is_own || is_sum, e.owner), 1, -1, e.row, before,
                 before + own};
    if (is_sum) part.from = ep_ring(g, g.rank, e.owner, e.row), part.peer = e.owner;
    if (is_own) part.from = a.rows + e.slot * a.row_bytes, part.weight = weight;
    return part;
}

/* The planner of a reducing block. */
__device__ void plan_tokens(const EpGatherArgs &a, Pipe *p, uint32_t epoch, int blocks) {
    const EpCudaGroup &g = a.group;
    Team t = make_team(a.top_k, a.pipe);
    auto post = [&](const EpEntry &e, int token, int valid, uint32_t number) {
        int weighs = a.weighs && e.owner == g.rank && e.slot >= 0;
        Part part = take_part(a, t, e, weighs ? a.slot_weights[e.slot] : 1);
        int alive = part.peer < 0 || ep_await_record(g, epoch, part.peer, part.row);
        if (!__all_sync(~0u, alive)) return 0;
        post_sum(a, p, t, number, part, a.out_rows + (int64_t)token * a.row_bytes, token, g.rank,
                 valid);
        return 1;
    };
    pipe_end(p, t, walk_tokens(a, t, RECEIVERS, blocks, a.pipe.pieces, post));
}

/* A value that comes back: from its slot here, or in the record of its owner's sum. */
__device__ __forceinline__ float returned_value(const EpGatherArgs &a, const EpEntry &e, int k) {
    const EpCudaGroup &g = a.group;
    if (e.owner < 0) return 0;
    if (e.owner == g.rank) return value_of(a, g.rank, e.row, k);
    const char *record = ep_ring(g, g.rank, e.owner, e.row);
    return __ldcg((const float *)(record + a.record.weights) + k);
}

/* The side warps: the values of a token's entries. */
__device__ void return_values(const EpGatherArgs &a, Pipe *p, int warp) {
    int k = threadIdx.x % 32;
    pipe_sides(p, warp, SIDE_WARPS, [&](int j, uint32_t) {
        int64_t at = (int64_t)p->item[j] * a.top_k + k;
        if (k < a.top_k) a.out_values[at] = returned_value(a, a.plan.entries[at], k);
    });
}

/* The workers: rows of a fixed-shape buffer past this step's tokens have no slots. */
__device__ void zero_beyond(const EpGatherArgs &a, const Role &role, int thread) {
    int64_t tokens = a.plan.header->num_tokens;
    for (int64_t t = tokens + role.index; t < a.out_num_rows; t += role.count) {
        for (int64_t at = thread * 16; at < a.row_bytes; at += WORKERS * 16)
            *(uint4 *)(a.out_rows + t * a.row_bytes + at) = make_uint4(0, 0, 0, 0);
        if (a.carries_values && thread < a.top_k) a.out_values[t * a.top_k + thread] = 0;
    }
}

#endif
