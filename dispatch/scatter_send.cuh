/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_SCATTER_SEND_CUH
#define EP_DISPATCH_SCATTER_SEND_CUH

/**
 * A sending block: tokens of this rank, each once to every rank that needs it; quantised on the
 * way, if that is asked for (scatter_quantise.cuh).
 */

#include "dispatch/scatter_row.cuh"

/** Where rows are put on the other ranks. */
typedef struct Landings {
    char *of[EP_CUDA_MAX_RANKS]; /* NULL: into the ring */
} Landings;

/* All ranks must have entered this operation before anything is stored there. By a warp. */
__device__ __forceinline__ int meet_peers(const EpCudaGroup &g, Landings *landings,
                                          uint32_t epoch) {
    int alive = 1;
    for (int r = threadIdx.x % 32; r < g.size && alive; r += 32) {
        uint64_t where = 0;
        alive = ep_await_arrival(g, r, epoch, &where);
        int window = (int)(where >> 40) - 1;
        landings->of[r] = NULL;
        if (alive && window >= 0)
            landings->of[r] =
                g.peers[window * EP_CUDA_MAX_RANKS + r] + (where & (((uint64_t)1 << 40) - 1)) * 16;
    }
    return __all_sync(~0u, alive);
}

/* Rows that are copied as they are go from here straight to the slots of this rank; those that are
 * multiplied are left to the filling block. */
__device__ __forceinline__ int copies(const EpScatterArgs &a) {
    return a.type == 0;
}

/* Where this lane of a team stores its token, if anywhere, and whom it tells. */
__device__ __forceinline__ int choose_target(const EpScatterArgs &a, const Landings *landings,
                                             uint32_t epoch, const EpEntry &e, char **to,
                                             int *peer) {
    const EpCudaGroup &g = a.group;
    *to = NULL, *peer = -1;
    if (e.owner == g.rank && copies(a) && e.slot >= 0) *to = a.out_rows + e.slot * a.row_bytes;
    if (e.owner < 0 || e.owner == g.rank || !e.carrier) return 1;
    *peer = e.owner;
    if (!ep_await_room(g, epoch, e.owner, e.row)) return 0;
    char *landing = landings->of[e.owner];
    if (!landing)
        *to = ep_ring(g, e.owner, g.rank, e.row);
    else if (e.slot >= 0)
        *to = landing + e.slot * a.row_bytes;
    return 1;
}

/* The jobs of a team's token, one for each piece of its row. `number` is the first. */
__device__ __forceinline__ void post_token(const EpScatterArgs &a, Pipe *p, const Team &t,
                                           uint32_t number, int token, int valid, char *to, int row,
                                           int peer) {
    int stores, notes, at = team_rank(t, to != NULL, &stores);
    int note = team_rank(t, peer >= 0, &notes);
    for (int piece = 0; piece < a.send.pieces; piece++) {
        uint32_t n = number + piece;
        int j = n % JOBS, cell = j * a.send.width;
        int64_t offset = (int64_t)piece * a.send.stage_bytes;
        if (valid) pipe_await_open(p, n);
        if (valid && to) p->to[cell + at] = to + (offset >> a.send.shrink);
        if (valid && peer >= 0) p->peer[cell + note] = peer, p->row[cell + note] = row;
        if (valid && t.k == 0) {
            p->from[cell] = a.rows + token * a.source_row_bytes + offset;
            p->job[j] = PipeJob{
                1, 1, (int16_t)stores, 0, piece_bytes(a.send, a.source_row_bytes, piece), 0, 0};
            p->notes[j] = piece == a.send.pieces - 1 ? notes : 0;
            p->item[j] = token, p->piece[j] = piece;
        }
        if (valid) ep_mbarrier_arrive(&p->barrier[POSTED][j]);
    }
}

/* The planner of a sending block. */
__device__ void plan_tokens(const EpScatterArgs &a, Pipe *p, Landings *landings, uint32_t epoch,
                            int blocks) {
    Team t = make_team(a.top_k, a.send);
    int met = 0;
    if (!copies(a) && a.group.size == 1) return pipe_end(p, t, 0);
    auto post = [&](const EpEntry &e, int token, int valid, uint32_t number) {
        char *to;
        int peer;
        if (!met && !(met = meet_peers(a.group, landings, epoch))) return 0;
        if (!__all_sync(~0u, choose_target(a, landings, epoch, e, &to, &peer))) return 0;
        post_token(a, p, t, number, token, valid, to, e.row, peer);
        return 1;
    };
    pipe_end(p, t, walk_tokens(a, t, SENDERS, blocks, a.send.pieces, post));
    if (!met) meet_peers(a.group, landings, epoch);
}

/* ---- weights and scales -------------------------------------------------------------------- */

/* Beside a token: its weights and scales, into the records that go to peers and to its own slots.
 * By a warp. `await_scales()` returns when they are there. */
template <typename Await>
__device__ __forceinline__ void send_side(const EpScatterArgs &a, int64_t token,
                                          Await await_scales) {
    const EpCudaGroup &g = a.group;
    int lane = threadIdx.x % 32, has_entry = lane < a.top_k;
    EpEntry e = {-1, 0, -1, 0, 0};
    SideEntry side = {-1, -1, 0, NULL};
    if (has_entry) e = a.plan.entries[token * a.top_k + lane];
    if (has_entry && a.carries_weights) side.weight = a.topk_weights[token * a.top_k + lane];
    if (e.owner == g.rank && copies(a)) side.slot = e.slot;
    if (e.owner == g.rank) side.expert = e.expert;
    if (e.owner >= 0 && e.owner != g.rank && e.carrier)
        side.record = ep_ring(g, e.owner, g.rank, e.row);
    await_scales();
    spread_side(a, side, a.scales + token * a.scale_stride);
}

__device__ void send_sides(const EpScatterArgs &a, Pipe *p, int warp, PipeWork work) {
    int count = work == CONVERTED ? SIDE_WARPS : ALL_SIDES;
    pipe_sides(p, warp, count, [&](int j, uint32_t n) {
        send_side(a, p->item[j], [&] {
            if (work == CONVERTED) pipe_wait(p->barrier[WORKED], n);
        });
    });
}

#endif
