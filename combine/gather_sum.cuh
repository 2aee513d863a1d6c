/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_GATHER_SUM_CUH
#define EP_COMBINE_GATHER_SUM_CUH

/**
 * A summing block: for every row that another rank had sent in its lane, the sum of the slots that
 * the row had filled, back to that rank.
 */

#include "combine/gather_row.cuh"

/* All ranks must have entered this operation before anything is stored there. By a warp. */
__device__ __forceinline__ int meet_sources(const EpCudaGroup &g, uint32_t epoch, int ring) {
    int alive = 1;
    for (int r = threadIdx.x % 32; r < g.size && alive; r += 32)
        alive = ep_await_arrival(g, r, epoch, ring, NULL);
    return __all_sync(~0u, alive);
}

/* The jobs of a round's rows, a team each. */
__device__ __forceinline__ void post_batch(const EpGatherArgs &a, Pipe *p, const Team &t,
                                           uint32_t number, const Batch &b, int ring,
                                           float weight) {
    int valid = t.index < b.count, row = b.first + t.index, terms;
    Part part = {NULL, team_rank(t, b.slot >= 0, &terms), 0, weight, -1, row};
    if (b.slot >= 0) part.from = a.rows + b.slot * a.row_bytes;
    if (valid && t.k == 0) part.peer = b.source;
    char *to = valid ? ep_ring(a.group, b.source, a.group.rank, ring, row) : NULL;
    post_sum(a, p, t, number, part, to, row, b.source, valid);
}

/* The planner of a summing block. Own rows are added up where they are, by the reducing block. */
__device__ void plan_sums(const EpGatherArgs &a, Pipe *p, Turns *s, uint32_t epoch, int ring) {
    Team t = make_team(a.top_k, 32);
    TurnRule rule = {EP_PHASE_CREDIT, a.group.layout.depth};
    int left = turns_open(a, s, ring, rule, 0);
    if (!meet_sources(a.group, epoch, ring)) left = 0;
    pipe_end(p, take_turns(a, s, t, epoch, ring, rule, left, a.pipe.pieces,
                           [&](const Batch &b, float weight, uint32_t number) {
                               post_batch(a, p, t, number, b, ring, weight);
                           }));
}

/* The side warps: values of a row's slots, into the record of its sum. */
__device__ void send_values(const EpGatherArgs &a, Pipe *p, int ring, int warp) {
    const EpCudaGroup &g = a.group;
    int k = threadIdx.x % 32;
    pipe_sides(p, warp, SIDE_WARPS, [&](int j) {
        int source = p->source[j], row = p->item[j];
        char *record = ep_ring(g, source, g.rank, ring, row);
        if (k < a.top_k)
            ((float *)(record + a.record.weights))[k] = value_of(a, source, ring, row, k);
    });
}

#endif
