/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_GATHER_SUM_CUH
#define EP_COMBINE_GATHER_SUM_CUH

/**
 * A summing block: for every row that another rank had sent in its lane, the sum of the slots that
 * the row had filled, back to that rank.
 */

#include "combine/gather_row.cuh"

/** Rows of each source in this lane; how many are summed, and how many there is room for. */
typedef struct Debts {
    int32_t rows[EP_CUDA_MAX_RANKS], next[EP_CUDA_MAX_RANKS], room[EP_CUDA_MAX_RANKS];
} Debts;

/* All ranks must have entered this operation before anything is stored there. By a warp; returns
 * how many rows are to be summed, -1 where a rank has not come. */
__device__ __forceinline__ int meet_sources(const EpGatherArgs &a, Debts *s, uint32_t epoch,
                                            int ring) {
    const EpCudaGroup &g = a.group;
    int rows = 0, alive = 1;
    for (int r = threadIdx.x % 32; r < g.size && ring == 0; r += 32)
        ep_announce_arrival(g, r, epoch, 0);
    for (int r = threadIdx.x % 32; r < g.size; r += 32) {
        s->rows[r] = r == g.rank ? 0 : a.plan.lane_rows[r * g.layout.lanes + ring];
        s->next[r] = 0, s->room[r] = g.layout.depth;
        rows += s->rows[r];
    }
    for (int r = threadIdx.x % 32; r < g.size && alive; r += 32)
        alive = ep_await_arrival(g, r, epoch, ring, NULL);
    __syncwarp();
    rows = __reduce_add_sync(~0u, rows);
    return __all_sync(~0u, alive) ? rows : -1;
}

/* A source with rows left and room in its ring, in turn; -1 where there is none. Credit is only
 * read where no room is known of. Any ring with room will do: were a full one waited for, ranks
 * could wait for each other in a circle. By a warp. */
__device__ __forceinline__ int find_debt(const EpCudaGroup &g, Debts *s, uint32_t epoch, int ring,
                                         int turn) {
    int lane = threadIdx.x % 32;
    for (int at = 0; at < g.size; at += 32) {
        int source = (turn + at + lane) % g.size, ready = 0;
        if (at + lane < g.size && s->next[source] < s->rows[source]) {
            if (s->room[source] <= s->next[source])
                s->room[source] =
                    g.layout.depth + ep_read_counter(ep_credit(g, g.rank, source, ring), epoch);
            ready = s->room[source] > s->next[source];
        }
        unsigned who = __ballot_sync(~0u, ready);
        __syncwarp();
        if (who) return (turn + at + __ffs(who) - 1) % g.size;
    }
    return -1;
}

__device__ __forceinline__ int await_debt(const EpCudaGroup &g, Debts *s, uint32_t epoch, int ring,
                                          int turn) {
    EpPatience patience = {0, 0};
    int source;
    while ((source = find_debt(g, s, epoch, ring, turn)) < 0) {
        int full = 0;
        while (s->next[full] >= s->rows[full])
            full++;
        uint32_t seen = (uint32_t)(s->room[full] - g.layout.depth);
        int patient =
            ep_patience(g, &patience, EpAwaited{full, EP_PHASE_CREDIT, ring, seen + 1, seen});
        if (!__all_sync(~0u, patient)) return -1;
    }
    return source;
}

/* The planner of a summing block. */
__device__ void plan_sums(const EpGatherArgs &a, Pipe *p, Debts *s, uint32_t epoch, int ring) {
    const EpCudaGroup &g = a.group;
    Team t = make_team(a.top_k, 32);
    int left = meet_sources(a, s, epoch, ring), turn = g.rank + 1, terms;
    uint32_t n = 0;
    while (left > 0) {
        int source = await_debt(g, s, epoch, ring, turn);
        if (source < 0) break;
        int first = s->next[source];
        int count = min(t.count, min(s->rows[source], s->room[source]) - first);
        int row = first + t.index, valid = t.index < count, slot = -1;
        if (valid && t.k < a.top_k)
            slot = ep_slot(a.plan, g, a.shape, a.top_k, source, ring, row, t.k);
        Part part = {NULL, team_rank(t, slot >= 0, &terms), 0, 1, -1, row};
        if (slot >= 0) part.from = a.rows + slot * a.row_bytes;
        if (slot >= 0 && a.weighs) part.weight = a.slot_weights[slot];
        if (valid && t.k == 0) part.peer = source;
        char *to = valid ? ep_ring(g, source, g.rank, ring, row) : NULL;
        post_sum(a, p, t, n + t.index * p->shape.pieces, part, to, row, source, valid);
        __syncwarp();
        if (threadIdx.x % 32 == 0) s->next[source] = first + count;
        __syncwarp();
        n += count * p->shape.pieces, left -= count, turn = source + 1;
    }
    pipe_end(p, n);
}

/* The side warps: values of a row's slots, into the record of its sum. */
__device__ void send_values(const EpGatherArgs &a, Pipe *p, int ring, int warp) {
    const EpCudaGroup &g = a.group;
    int lane = threadIdx.x % 32;
    for (uint32_t n = warp;; n += SIDE_WARPS) {
        int j = n % JOBS;
        pipe_wait(p->posted, n);
        if (p->loads[j] == PIPE_END) return;
        if (p->piece[j] == 0 && lane < a.top_k) {
            int source = p->source[j], row = p->item[j];
            char *record = ep_ring(g, source, g.rank, ring, row);
            ((float *)(record + a.record.weights))[lane] = value_of(a, source, ring, row, lane);
        }
        __syncwarp();
        if (lane == 0) ep_mbarrier_arrive(&p->done[j]);
    }
}

#endif
