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
                /* The loader reads through the other proxy. */
                if (s->seen[source] > s->next[source]) ep_fence_proxy_global();
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

/** Rows of one source that a round takes, a team each; and this lane's slot of its team's. */
typedef struct Batch {
    int source, first, count;
    int slot; /* -1: none */
} Batch;

/* What a job is of, by one lane. */
__device__ __forceinline__ void describe_job(const EpScatterArgs &a, Pipe *p, uint32_t n,
                                             int source, int row, int piece, int loads, int brought,
                                             int stores) {
    int j = n % JOBS, cell = j * a.fill.width;
    p->job[j] = PipeJob{(int16_t)loads,  (int16_t)brought,
                        (int16_t)stores, (int16_t)stores,
                        piece_bytes(a.fill, a.row_bytes, piece), 0};
    p->notes[j] = source != a.group.rank && piece == a.fill.pieces - 1;
    p->source[j] = source, p->item[j] = row, p->piece[j] = piece;
    p->peer[cell] = source, p->row[cell] = row;
}

/* The jobs of a team's row. Where rows are copied, one load feeds a store to each slot but that in
 * which the row has landed. Where they are multiplied, each slot has a stage of its own, with the
 * slot's other row in it if dot products are taken. */
__device__ __forceinline__ void post_row(const EpScatterArgs &a, Pipe *p, const Team &t,
                                         uint32_t number, const Batch &b, int ring, float weight) {
    int valid = t.index < b.count, row = b.first + t.index, slot = b.slot;
    int filled, at = team_rank(t, slot >= 0, &filled);
    int lands = a.lands && b.source != a.group.rank, multiplies = a.type != 0;
    int stores = lands && filled ? filled - 1 : filled;
    int loads = multiplies ? 1 + filled : stores > 0;
    int brought = multiplies && !a.takes_dots ? 1 : loads;
    int landing = __shfl_sync(~0u, slot, max(0, __ffs(__ballot_sync(~0u, slot >= 0) & t.mask) - 1));
    const char *from = valid && loads ? find_row(a, b.source, ring, row, landing) : NULL;
    for (int piece = 0; piece < a.fill.pieces; piece++) {
        uint32_t n = number + piece;
        int j = n % JOBS, cell = j * a.fill.width, index = at - lands;
        int64_t offset = (int64_t)piece * a.fill.stage_bytes;
        if (valid) pipe_await_open(p, n);
        if (valid && slot >= 0 && index >= 0)
            p->to[cell + index] = a.out_rows + slot * a.row_bytes + offset;
        if (valid && slot >= 0 && multiplies) {
            p->from[cell + 1 + at] =
                a.takes_dots ? a.slot_rows + slot * a.row_bytes + offset : NULL;
            p->slot[cell + at] = slot, p->weight[cell + at] = weight;
        }
        if (valid && t.k == 0) {
            p->from[cell] = from ? from + offset : NULL;
            describe_job(a, p, n, b.source, row, piece, loads, brought, stores);
        }
        __syncwarp();
        if (valid && t.k == 0) ep_mbarrier_arrive(&p->posted[j]);
    }
}

/* The next rows there are, if any, or `waits`; and begin to look up their slots. The count is 0
 * where there are none, -1 where the deadline has passed. */
__device__ __forceinline__ Batch take_batch(const EpScatterArgs &a, Sources *s, const Team &t,
                                            uint32_t epoch, int ring, int turn, int waits) {
    const EpCudaGroup &g = a.group;
    Batch b = {waits ? await_source(g, s, epoch, ring, turn) : find_source(g, s, epoch, ring, turn),
               0, 0, -1};
    if (b.source < 0) {
        b.count = waits ? -1 : 0;
        return b;
    }
    b.first = s->next[b.source];
    b.count = min(t.count, s->seen[b.source] - b.first);
    if (t.index < b.count && t.k < a.top_k)
        b.slot = ep_slot(a.plan, g, a.shape, a.top_k, b.source, ring, b.first + t.index, t.k);
    __syncwarp();
    if (threadIdx.x % 32 == 0) s->next[b.source] = b.first + b.count;
    __syncwarp();
    return b;
}

/* The planner of a filling block. Slots are looked up one round ahead; but nobody waits for more
 * rows before what has come is passed on. */
__device__ void plan_records(const EpScatterArgs &a, Pipe *p, Sources *s, uint32_t epoch,
                             int ring) {
    const EpCudaGroup &g = a.group;
    Team t = make_team(a.top_k, 32);
    int left = look_at_sources(a, s, ring), turn = g.rank + 1;
    uint32_t n = 0;
    Batch now = {0, 0, 0, -1};
    while (left > 0 || now.count > 0) {
        float weight = a.weighs && now.slot >= 0 ? a.slot_weights[now.slot] : 1;
        Batch next = {0, 0, 0, -1};
        if (left > 0) next = take_batch(a, s, t, epoch, ring, turn, now.count == 0);
        if (next.count < 0) break;
        if (now.count > 0) post_row(a, p, t, n + t.index * a.fill.pieces, now, ring, weight);
        n += now.count * a.fill.pieces, left -= next.count;
        turn = next.count ? next.source + 1 : turn;
        now = next;
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
        if (p->job[j].loads == PIPE_END) return;
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
