/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_GATHER_SUM_CUH
#define EP_COMBINE_GATHER_SUM_CUH

/**
 * A summing block: for rows that other ranks have sent, the sums of the slots that they fill, back
 * to those ranks.
 */

#include "combine/gather_row.cuh"

/* All ranks must have entered this operation before anything is stored there. By a warp. */
__device__ __forceinline__ int meet_sources(const EpCudaGroup &g, uint32_t epoch) {
    int alive = 1;
    for (int r = threadIdx.x % 32; r < g.size && alive; r += 32)
        alive = ep_await_arrival(g, r, epoch, NULL);
    return __all_sync(~0u, alive);
}

/* The jobs of a round's rows, a team each. */
__device__ __forceinline__ void post_round(const EpGatherArgs &a, Pipe *p, const Team &t,
                                           uint32_t number, const Round &r, float weight) {
    int terms, at = team_rank(t, r.slot >= 0, &terms);
    Part part = {NULL, at, weight, -1, r.row, 0, terms};
    if (r.slot >= 0) part.from = a.rows + r.slot * a.row_bytes;
    if (r.valid && t.k == 0) part.peer = r.source;
    char *to = r.valid ? ep_ring(a.group, r.source, a.group.rank, r.row) : NULL;
    post_sum(a, p, t, number, part, to, r.row, r.source, r.valid);
}

/* The planner of a summing block. Own rows are added up where they are, by a reducing block. */
__device__ void plan_sums(const EpGatherArgs &a, Pipe *p, ChunkRows *rows, uint32_t epoch,
                          int blocks) {
    const EpCudaGroup &g = a.group;
    Team t = make_team(a.top_k, a.pipe);
    int met = 0;
    auto post = [&](const Round &r, float weight, uint32_t number) {
        if (!met && !(met = meet_sources(g, epoch))) return 0;
        int waits = r.valid && t.k == 0;
        if (!__all_sync(~0u, !waits || ep_await_room(g, epoch, r.source, r.row))) return 0;
        post_round(a, p, t, number, r, weight);
        return 1;
    };
    pipe_end(p, t, walk_rows(a, rows, t, SENDERS, blocks, a.pipe.pieces, 0, post));
    if (!met) meet_sources(g, epoch);
}

/* The side warps: values of a row's slots, into the record of its sum. */
__device__ void send_values(const EpGatherArgs &a, Pipe *p, int warp) {
    const EpCudaGroup &g = a.group;
    int k = threadIdx.x % 32;
    pipe_sides(p, warp, SIDE_WARPS, [&](int j, uint32_t) {
        int source = p->source[j], row = p->item[j];
        char *record = ep_ring(g, source, g.rank, row);
        if (k < a.top_k) ((float *)(record + a.record.weights))[k] = value_of(a, source, row, k);
    });
}

#endif
