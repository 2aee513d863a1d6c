/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_SCATTER_FILL_CUH
#define EP_DISPATCH_SCATTER_FILL_CUH

/**
 * A filling block: the records of its lane, from all sources in turn, to the slots of each.
 */

#include "dispatch/scatter_row.cuh"

/** Rows of each source in this lane: how many come, are taken, and are known to be there. */
typedef struct Sources {
    int32_t rows[EP_CUDA_MAX_RANKS], next[EP_CUDA_MAX_RANKS], seen[EP_CUDA_MAX_RANKS];
} Sources;

/* By a warp. Returns how many rows there are in all. Own rows are there from the beginning; where
 * rows are only copied, they are the sending block's. */
__device__ __forceinline__ int look_at_sources(const EpScatterArgs &a, Sources *s, int ring) {
    const EpCudaGroup &g = a.group;
    int rows = 0;
    for (int r = threadIdx.x % 32; r < g.size; r += 32) {
        int skipped = r == g.rank && a.type == 0;
        s->rows[r] = skipped ? 0 : a.plan.lane_rows[r * g.layout.lanes + ring];
        s->next[r] = 0;
        s->seen[r] = r == g.rank ? s->rows[r] : 0;
        rows += s->rows[r];
    }
    __syncwarp();
    return __reduce_add_sync(~0u, rows);
}

/* A source with records to take, in turn; -1 where there is none yet. Heads are only read where
 * nothing is known to be there. By a warp. */
__device__ __forceinline__ int find_source(const EpCudaGroup &g, Sources *s, uint32_t epoch,
                                           int ring, int turn) {
    int lane = threadIdx.x % 32;
    for (int at = 0; at < g.size; at += 32) {
        int source = (turn + at + lane) % g.size, ready = 0;
        if (at + lane < g.size && s->next[source] < s->rows[source]) {
            if (s->seen[source] <= s->next[source]) {
                s->seen[source] = ep_read_counter(ep_head(g, g.rank, source, ring), epoch);
                ep_fence_proxy_global(); /* the loader reads through the other proxy */
            }
            ready = s->seen[source] > s->next[source];
        }
        unsigned who = __ballot_sync(~0u, ready);
        __syncwarp();
        if (who) return (turn + at + __ffs(who) - 1) % g.size;
    }
    return -1;
}

/* Wait for a record of any source: a source that is late must not keep the others' rings full, or
 * ranks could wait for each other in a circle. -1 when the deadline has passed. */
__device__ __forceinline__ int await_source(const EpCudaGroup &g, Sources *s, uint32_t epoch,
                                            int ring, int turn) {
    EpPatience patience = {0, 0};
    int source;
    while ((source = find_source(g, s, epoch, ring, turn)) < 0) {
        int missing = 0;
        while (s->next[missing] >= s->rows[missing])
            missing++;
        uint32_t seen = (uint32_t)s->next[missing];
        int patient = ep_patience(
            g, &patience, EpAwaited{missing, EP_PHASE_RECORD, ring, seen + 1, seen});
        if (!__all_sync(~0u, patient)) return -1;
    }
    return source;
}

/* Where a row lies that is to be copied or multiplied: in the ring, among the own tokens, or
 * already in the slot where its sender has landed it. */
__device__ __forceinline__ const char *find_row(const EpScatterArgs &a, int source, int ring,
                                                int row, int landing_slot) {
    const EpCudaGroup &g = a.group;
    if (source == g.rank)
        return a.rows +
               a.plan.own_token[(int64_t)ring * g.layout.lane_tokens + row] * a.row_bytes;
    if (a.lands) return a.out_rows + landing_slot * a.row_bytes;
    return ep_ring(g, g.rank, source, ring, row);
}

/* What a job is of, by one lane. */
__device__ __forceinline__ void describe_job(const EpScatterArgs &a, Pipe *p, uint32_t n,
                                             int source, int row, int piece, int loads,
                                             int stores) {
    int j = n % JOBS, is_note = source != a.group.rank && piece == p->shape.pieces - 1;
    p->loads[j] = loads, p->stores[j] = p->terms[j] = stores, p->notes[j] = is_note;
    p->bytes[j] = (int32_t)min((int64_t)p->shape.stage_bytes,
                               a.row_bytes - (int64_t)piece * p->shape.stage_bytes);
    p->source[j] = source, p->item[j] = row, p->piece[j] = piece;
    p->peer[j * p->shape.width] = source, p->row[j * p->shape.width] = row;
}

/* The jobs of a team's row. Where rows are copied, one load feeds a store to each slot but that in
 * which the row has landed. Where they are multiplied, each slot has a stage of its own, with the
 * slot's other row in it if dot products are taken. */
__device__ __forceinline__ void post_row(const EpScatterArgs &a, Pipe *p, const Team &t,
                                         uint32_t number, int source, int ring, int row, int slot,
                                         int valid) {
    int filled, at = team_rank(t, slot >= 0, &filled);
    int lands = a.lands && source != a.group.rank, multiplies = a.type != 0;
    int stores = lands && filled ? filled - 1 : filled;
    int loads = multiplies ? 1 + filled : stores > 0;
    int landing = __shfl_sync(~0u, slot, max(0, __ffs(__ballot_sync(~0u, slot >= 0) & t.mask) - 1));
    const char *from = valid && loads ? find_row(a, source, ring, row, landing) : NULL;
    for (int piece = 0; piece < p->shape.pieces; piece++) {
        uint32_t n = number + piece;
        int j = n % JOBS, cell = j * p->shape.width, index = at - lands;
        int64_t offset = (int64_t)piece * p->shape.stage_bytes;
        if (valid) pipe_await_open(p, n);
        if (valid && slot >= 0 && index >= 0)
            p->to[cell + index] = a.out_rows + slot * a.row_bytes + offset;
        if (valid && slot >= 0 && multiplies) {
            p->from[cell + 1 + at] =
                a.takes_dots ? a.slot_rows + slot * a.row_bytes + offset : NULL;
            p->slot[cell + at] = slot;
            p->weight[cell + at] = a.weighs ? a.slot_weights[slot] : 1;
        }
        if (valid && t.k == 0) {
            p->from[cell] = from ? from + offset : NULL;
            describe_job(a, p, n, source, row, piece, loads, stores);
        }
        __syncwarp();
        if (valid && t.k == 0) ep_mbarrier_arrive(&p->posted[j]);
    }
}

/* The planner of a filling block. */
__device__ void plan_records(const EpScatterArgs &a, Pipe *p, Sources *s, uint32_t epoch,
                             int ring) {
    const EpCudaGroup &g = a.group;
    Team t = make_team(a.top_k, 32);
    int left = look_at_sources(a, s, ring), turn = g.rank + 1;
    uint32_t n = 0;
    while (left) {
        int source = await_source(g, s, epoch, ring, turn);
        if (source < 0) break;
        int first = s->next[source], count = min(t.count, s->seen[source] - first);
        int row = first + t.index, valid = t.index < count, slot = -1;
        if (valid && t.k < a.top_k)
            slot = ep_slot(a.plan, g, a.shape, a.top_k, source, ring, row, t.k);
        post_row(a, p, t, n + t.index * p->shape.pieces, source, ring, row, slot, valid);
        __syncwarp();
        if (threadIdx.x % 32 == 0) s->next[source] = first + count;
        __syncwarp();
        n += count * p->shape.pieces, left -= count, turn = source + 1;
    }
    pipe_end(p, n);
}

/* ---- weights and scales -------------------------------------------------------------------- */

__device__ void fill_sides(const EpScatterArgs &a, Pipe *p, int ring, int warp) {
    const EpCudaGroup &g = a.group;
    int lane = threadIdx.x % 32;
    for (uint32_t n = warp;; n += SIDE_WARPS) {
        int j = n % JOBS;
        pipe_wait(p->posted, n);
        if (p->loads[j] == PIPE_END) return;
        if (p->piece[j] == 0 && p->source[j] != g.rank) {
            int source = p->source[j], row = p->item[j], slot = -1, expert = -1;
            const char *record = ep_ring(g, g.rank, source, ring, row);
            float weight = 0;
            if (lane < a.top_k) {
                slot = ep_slot(a.plan, g, a.shape, a.top_k, source, ring, row, lane);
                expert = ep_route(a.plan, g, a.top_k, source, ring, row, lane);
            }
            if (a.carries_weights && lane < a.top_k)
                weight = __ldcg((const float *)(record + a.record.weights) + lane);
            fill_side(a, slot, expert, weight, (const uint32_t *)(record + a.record.scales));
        }
        __syncwarp();
        if (lane == 0) ep_mbarrier_arrive(&p->done[j]);
    }
}

#endif
