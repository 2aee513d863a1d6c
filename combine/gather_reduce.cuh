/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_GATHER_REDUCE_CUH
#define EP_COMBINE_GATHER_REDUCE_CUH

/**
 * A reducing block: for every token of its lane, in order, the sums of all ranks that it went to.
 */

#include "combine/gather_row.cuh"

/** Records of each rank that are known to have arrived in this lane. */
typedef struct Arrived {
    int32_t records[EP_CUDA_MAX_RANKS];
} Arrived;

/* Until record `row` of a rank is there. */
__device__ __forceinline__ int await_record(const EpCudaGroup &g, Arrived *s, uint32_t epoch,
                                            int ring, int rank, int row) {
    return ep_wait_known(g, ep_head(g, g.rank, rank, ring), epoch, row + 1, rank, EP_PHASE_RECORD,
                         ring, &s->records[rank]);
}

/* Which term of its team's sum a lane's is: ranks ascend, and within this rank k does. */
__device__ __forceinline__ int order_term(const Team &t, int is_term, int owner) {
    int mine = is_term ? owner : -1, at = 0, first = threadIdx.x % 32 - t.k;
    for (int i = 0; i < t.width; i++) {
        int other = __shfl_sync(~0u, mine, first + i);
        at += other >= 0 && (other < owner || (other == owner && i < t.k));
    }
    return at;
}

/* A lane's part of its token's sum: another rank's sum, or one of this rank's own slots. */
__device__ __forceinline__ Part take_part(const EpGatherArgs &a, const Team &t, const EpEntry &e,
                                          float weight, int ring) {
    const EpCudaGroup &g = a.group;
    int is_own = e.owner == g.rank && e.slot >= 0;
    int is_sum = e.owner >= 0 && e.owner != g.rank && e.carrier, own_terms;
    int own_before = team_rank(t, is_own, &own_terms);
    Part part = {NULL, order_term(t, is_own || is_sum, e.owner), 1, 1, -1, e.row};
    if (is_sum) part.from = ep_ring(g, g.rank, e.owner, ring, e.row), part.peer = e.owner;
    if (is_own) part.from = a.rows + e.slot * a.row_bytes, part.begins = own_before == 0;
    if (is_own) part.weight = weight;
    return part;
}

/* The planner of a reducing block: entries are looked up one round ahead. */
__device__ void plan_tokens(const EpGatherArgs &a, Pipe *p, Arrived *s, uint32_t epoch, int ring) {
    const EpCudaGroup &g = a.group;
    Team t = make_team(a.top_k, g.layout.depth);
    int begin, end;
    uint32_t n = 0;
    for (int r = threadIdx.x % 32; r < g.size; r += 32)
        s->records[r] = 0;
    ep_lane_range(g, (int)a.plan.header->num_tokens, ring, &begin, &end);
    EpEntry e, next = entry_of(a, t, begin + t.index, end);
    __syncwarp();
    for (int first = begin; first < end; first += t.count) {
        int token = first + t.index, valid = t.index < t.count && token < end, alive = 1;
        e = next, next = entry_of(a, t, token + t.count, end);
        int weighs = a.weighs && e.owner == g.rank && e.slot >= 0;
        float weight = weighs ? a.slot_weights[e.slot] : 1;
        Part part = take_part(a, t, e, weight, ring);
        if (part.peer >= 0) alive = await_record(g, s, epoch, ring, part.peer, part.row);
        if (!__all_sync(~0u, alive)) break;
        post_sum(a, p, t, n + t.index * a.pipe.pieces, part,
                 a.out_rows + (int64_t)token * a.row_bytes, token, g.rank, valid);
        n += min(t.count, end - first) * a.pipe.pieces;
    }
    pipe_end(p, n);
}

/* A value that comes back: from its slot here, or in the record of its owner's sum. */
__device__ __forceinline__ float returned_value(const EpGatherArgs &a, const EpEntry &e, int ring,
                                                int k) {
    const EpCudaGroup &g = a.group;
    if (e.owner < 0) return 0;
    if (e.owner == g.rank) return value_of(a, g.rank, ring, e.row, k);
    const char *record = ep_ring(g, g.rank, e.owner, ring, e.row);
    return __ldcg((const float *)(record + a.record.weights) + k);
}

/* The side warps: the values of a token's entries. */
__device__ void return_values(const EpGatherArgs &a, Pipe *p, int ring, int warp) {
    int k = threadIdx.x % 32;
    pipe_sides(p, warp, SIDE_WARPS, [&](int j) {
        int64_t at = (int64_t)p->item[j] * a.top_k + k;
        if (k < a.top_k) a.out_values[at] = returned_value(a, a.plan.entries[at], ring, k);
    });
}

/* The workers: rows of a fixed-shape buffer past this step's tokens have no slots. */
__device__ void zero_beyond(const EpGatherArgs &a, int ring, int thread) {
    int64_t tokens = a.plan.header->num_tokens;
    for (int64_t t = tokens + ring; t < a.out_num_rows; t += a.group.layout.lanes) {
        for (int64_t at = thread * 16; at < a.row_bytes; at += WORKERS * 16)
            *(uint4 *)(a.out_rows + t * a.row_bytes + at) = make_uint4(0, 0, 0, 0);
        if (a.carries_values && thread < a.top_k) a.out_values[t * a.top_k + thread] = 0;
    }
}

#endif
