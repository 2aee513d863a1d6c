/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_SCATTER_FILL_CUH
#define EP_DISPATCH_SCATTER_FILL_CUH

/**
 * A filling block: rows that come from other ranks, to the slots of each.
 */

#include "dispatch/scatter_row.cuh"

/* Where a row lies that is to be copied or multiplied: in the ring, among the own tokens, or
 * already in the slot where its sender has landed it. */
__device__ __forceinline__ const char *find_row(const EpScatterArgs &a, int source, int row,
                                                int landing_slot) {
    const EpCudaGroup &g = a.group;
    if (source == g.rank) return a.rows + a.plan.own_token[row] * a.row_bytes;
    if (a.lands) return a.out_rows + landing_slot * a.row_bytes;
    return ep_ring(g, g.rank, source, row);
}

/* What a job is of, by one lane. */
__device__ __forceinline__ void describe_job(const EpScatterArgs &a, Pipe *p, uint32_t n,
                                             int source, int row, int piece, int loads, int brought,
                                             int stores) {
    int j = n % JOBS, cell = j * a.fill.width;
    p->job[j] = PipeJob{(int16_t)loads,
                        (int16_t)brought,
                        (int16_t)stores,
                        (int16_t)stores,
                        piece_bytes(a.fill, a.row_bytes, piece),
                        0,
                        0};
    p->notes[j] = source != a.group.rank && piece == a.fill.pieces - 1;
    p->source[j] = source, p->item[j] = row, p->piece[j] = piece;
    p->peer[cell] = source, p->row[cell] = row;
}

/* The jobs of a team's row. Where rows are copied, one load feeds a store to each slot but that in
 * which the row has landed. Where they are multiplied, each slot has a stage of its own, with the
 * slot's other row in it if dot products are taken. */
__device__ __forceinline__ void post_row(const EpScatterArgs &a, Pipe *p, const Team &t,
                                         uint32_t number, const Round &r, float weight) {
    int valid = r.valid, slot = r.slot, filled, at = team_rank(t, slot >= 0, &filled);
    int lands = a.lands && r.source != a.group.rank, multiplies = a.type != 0;
    int stores = lands && filled ? filled - 1 : filled;
    int loads = multiplies ? 1 + filled : stores > 0;
    int brought = multiplies && !a.takes_dots ? 1 : loads;
    int landing = __shfl_sync(~0u, slot, max(0, __ffs(__ballot_sync(~0u, slot >= 0) & t.mask) - 1));
    const char *from = valid && loads ? find_row(a, r.source, r.row, landing) : NULL;
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
            describe_job(a, p, n, r.source, r.row, piece, loads, brought, stores);
        }
        if (valid) ep_mbarrier_arrive(&p->barrier[POSTED][j]);
    }
}

/* The planner of a filling block. Own rows that are only copied are the sending block's. */
__device__ void plan_records(const EpScatterArgs &a, Pipe *p, ChunkRows *rows, uint32_t epoch,
                             int blocks) {
    const EpCudaGroup &g = a.group;
    Team t = make_team(a.top_k, a.fill);
    auto post = [&](const Round &r, float weight, uint32_t number) {
        int waits = r.valid && t.k == 0 && r.source != g.rank;
        int alive = !waits || ep_await_record(g, epoch, r.source, r.row);
        if (!__all_sync(~0u, alive)) return 0;
        post_row(a, p, t, number, r, weight);
        return 1;
    };
    pipe_end(p, t, walk_rows(a, rows, t, RECEIVERS, blocks, a.fill.pieces, a.type != 0, post));
}

/* ---- weights and scales -------------------------------------------------------------------- */

/* Beside a record: its weights and scales, to its row's slots. By a warp. */
__device__ __forceinline__ void fill_side(const EpScatterArgs &a, int source, int row) {
    const EpCudaGroup &g = a.group;
    int lane = threadIdx.x % 32;
    const char *record = ep_ring(g, g.rank, source, row);
    SideEntry side = {-1, -1, 0, NULL};
    if (lane < a.top_k) {
        side.slot = ep_slot(a.plan, g, a.shape, a.top_k, source, row, lane);
        side.expert = ep_route(a.plan, g, a.top_k, source, row, lane);
    }
    if (lane < a.top_k && a.carries_weights)
        side.weight = __ldcg((const float *)(record + a.record.weights) + lane);
    spread_side(a, side, record + a.record.scales);
}

__device__ void fill_sides(const EpScatterArgs &a, Pipe *p, int warp) {
    pipe_sides(p, warp, ALL_SIDES,
               [&](int j, uint32_t) { fill_side(a, p->source[j], p->item[j]); });
}

#endif
