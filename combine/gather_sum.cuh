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

/** Rows of one source that a round takes, a team each; and this lane's slot of its team's. */
typedef struct Batch {
    int source, first, count;
    int slot; /* -1: none */
} Batch;

/* The next rows there is room for, if any, or `waits`; and begin to look up their slots. The count
 * is 0 where there are none, -1 where the deadline has passed. */
__device__ __forceinline__ Batch take_batch(const EpGatherArgs &a, Debts *s, const Team &t,
                                            uint32_t epoch, int ring, int turn, int waits) {
    const EpCudaGroup &g = a.group;
    Batch b = {waits ? await_debt(g, s, epoch, ring, turn) : find_debt(g, s, epoch, ring, turn), 0,
               0, -1};
    if (b.source < 0) {
        b.count = waits ? -1 : 0;
        return b;
    }
    b.first = s->next[b.source];
    b.count = min(t.count, min(s->rows[b.source], s->room[b.source]) - b.first);
    if (t.index < b.count && t.k < a.top_k)
        b.slot = ep_slot(a.plan, g, a.shape, a.top_k, b.source, ring, b.first + t.index, t.k);
    __syncwarp();
    if (threadIdx.x % 32 == 0) s->next[b.source] = b.first + b.count;
    __syncwarp();
    return b;
}

/* The jobs of a round's rows, a team each. */
__device__ __forceinline__ void post_batch(const EpGatherArgs &a, Pipe *p, const Team &t,
                                           uint32_t n, const Batch &b, int ring, float weight) {
    int valid = t.index < b.count, row = b.first + t.index, terms;
    Part part = {NULL, team_rank(t, b.slot >= 0, &terms), 0, weight, -1, row};
    if (b.slot >= 0) part.from = a.rows + b.slot * a.row_bytes;
    if (valid && t.k == 0) part.peer = b.source;
    char *to = valid ? ep_ring(a.group, b.source, a.group.rank, ring, row) : NULL;
    post_sum(a, p, t, n + t.index * a.pipe.pieces, part, to, row, b.source, valid);
}

/* The planner of a summing block. Slots are looked up one round ahead; but nobody waits for room
 * before the rows that have it are passed on. */
__device__ void plan_sums(const EpGatherArgs &a, Pipe *p, Debts *s, uint32_t epoch, int ring) {
    const EpCudaGroup &g = a.group;
    Team t = make_team(a.top_k, 32);
    int left = meet_sources(a, s, epoch, ring), turn = g.rank + 1;
    uint32_t n = 0;
    Batch now = {0, 0, 0, -1};
    while (left > 0 || now.count > 0) {
        float weight = a.weighs && now.slot >= 0 ? a.slot_weights[now.slot] : 1;
        Batch next = {0, 0, 0, -1};
        if (left > 0) next = take_batch(a, s, t, epoch, ring, turn, now.count == 0);
        if (next.count < 0) break;
        if (now.count > 0) post_batch(a, p, t, n, now, ring, weight);
        n += now.count * a.pipe.pieces, left -= next.count;
        turn = next.count ? next.source + 1 : turn;
        now = next;
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
        if (p->job[j].loads == PIPE_END) return;
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
