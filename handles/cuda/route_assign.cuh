/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_CUDA_ROUTE_ASSIGN_CUH
#define EP_HANDLES_CUDA_ROUTE_ASSIGN_CUH

/**
 * The last kernel of route_nodes.cu: slots, rows and places of the entries of a piece, stored into
 * the parts of the plan that this rank needs, as a source, a relay or a receiver.
 */

#include "handles/cuda/route_pieces.cuh"

/* ---- assign -------------------------------------------------------------------------------- */

/* A block's tables in shared memory. */
typedef struct Tables {
    uint8_t *count; /* [columns + others, EP_ROUTE_WARPS] of each warp in the piece */
    int32_t *start; /* [experts] first row of each expert's slab on its rank, capacity ignored */
} Tables;

__device__ __forceinline__ Tables open_tables(const EpRouteArgs &a, uint4 *memory) {
    int columns = a.columns + a.t.nodes - 1;
    Tables t = {(uint8_t *)memory, NULL};
    t.start = (int32_t *)(t.count + (EP_ROUTE_WARPS * columns + 15) / 16 * 16);
    return t;
}

/* Lay the slabs of this node's ranks, a warp for each. */
__device__ void lay_node_slabs(const EpRouteArgs &a, const Tables &t) {
    for (int number = threadIdx.x / 32; number < a.t.ranks; number += EP_ROUTE_WARPS) {
        int first = a.t.first_expert[number], experts = a.t.first_expert[number + 1] - first;
        int64_t start = 0;
        for (int at = 0; at < experts; at += 32) {
            int e = at + (int)threadIdx.x % 32;
            SlabStart slab = lay_slab(a.p, a.counts.total + first, experts, at, &start);
            if (e >= experts) continue;
            t.start[first + e] = (int)ep_block_begin(&a.p.shape, e, slab.start);
        }
    }
}

__device__ __forceinline__ uint8_t *count_at(const Tables &t, int column) {
    return t.count + column * EP_ROUTE_WARPS;
}

__device__ __forceinline__ int warps_before(const Tables &t, int column) {
    int sum = 0;
    for (int w = 0; w < (int)threadIdx.x / 32; w++)
        sum += count_at(t, column)[w];
    return sum;
}

/* What is numbered of a thread's entry, counted within its piece first. */
typedef struct Numbered {
    Same expert, owner, node; /* in the warp */
    int entry, row, place;    /* entries for its expert, rows to its rank, places of its message
                                 before this one */
    int here;                 /* tokens before this one that this node needs */
    int mine;                 /* rows to this rank before this token */
    int needs;                /* whether this node needs the token */
    int other;                /* its expert's node, among the others; -1: none */
} Numbered;

/* Count each warp's part of the piece; then number by what is before. By all threads. */
__device__ __forceinline__ Numbered number_entry(const EpRouteArgs &a, const Piece &p,
                                                 const Tables &t) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = 1 << a.team_shift;
    int columns = a.columns + a.t.nodes - 1, expert = p.number >= 0 ? expert_column(a, p) : -1;
    Numbered n;
    n.other = p.owner >= 0 && p.source == a.t.self ? a.t.other_of[p.owner] : -1;
    n.expert = find_same(a, expert), n.owner = find_same(a, p.number);
    n.node = find_same(a, n.other);
    Same here = find_same(a, p.number >= 0 ? 0 : -1);
    unsigned needs = __ballot_sync(~0u, here.leads);
    unsigned mine = __ballot_sync(~0u, n.owner.leads && p.number == a.t.rank);
    __syncthreads();
    for (int i = threadIdx.x; i < EP_ROUTE_WARPS * columns; i += EP_ROUTE_THREADS)
        t.count[i] = 0;
    __syncthreads();
    if (is_first(n.expert.all)) count_at(t, expert)[warp] = (uint8_t)__popc(n.expert.all);
    if (is_first(n.owner.all))
        count_at(t, row_column(a, p.number))[warp] = (uint8_t)__popc(n.owner.rows);
    if (is_first(n.node.all)) count_at(t, a.columns + n.other)[warp] = (uint8_t)__popc(n.node.rows);
    if (lane == 0) count_at(t, need_column(a))[warp] = (uint8_t)__popc(needs);
    __syncthreads();
    unsigned earlier = lanes_below(lane & -width);
    n.needs = (needs & team_lanes(a)) != 0;
    n.here = __popc(needs & earlier) + warps_before(t, need_column(a));
    n.mine = __popc(mine & earlier) + warps_before(t, row_column(a, a.t.rank));
    n.entry = n.row = n.place = 0;
    if (p.number >= 0) {
        n.entry = __popc(n.expert.all & lanes_below(lane)) + warps_before(t, expert);
        n.row = n.owner.earlier + warps_before(t, row_column(a, p.number));
    }
    if (n.other >= 0) n.place = n.node.earlier + warps_before(t, a.columns + n.other);
    return n;
}

/* Where a token belongs on this node: its agent, its part, its place there. */
typedef struct Home {
    EpCudaPlan part;
    EpPlanPart kind;
    int agent, tokens; /* most tokens of the part */
    int at;            /* the token's place */
    int end;           /* rows to this rank from the places behind the last row of its lane */
    int last;          /* where this token stores the part's last begin; -1: another one does */
} Home;

template <typename T> __device__ __forceinline__ T *shift(T *array, int64_t bytes) {
    return (T *)((char *)array + bytes);
}

__device__ __forceinline__ EpCudaPlan part_of(const EpRouteArgs &a, EpPlanPart kind, int chunk) {
    EpCudaPlan part = a.part[kind];
    int64_t bytes = chunk * a.part_stride;
    part.entries = shift(part.entries, bytes), part.own_token = shift(part.own_token, bytes);
    part.tokens = shift(part.tokens, bytes), part.begins = shift(part.begins, bytes);
    part.row_slots = shift(part.row_slots, bytes);
    if (part.sizes.form == EP_ROUTES_DENSE) part.routes = shift(part.routes, bytes);
    return part;
}

/* The tokens of a lane that this node needs come first, in order; then the others, which have no
 * rows here. So a token's place is that of its record in the message. */
__device__ __forceinline__ Home find_home(const EpRouteArgs &a, const Piece &p, const Numbered &n,
                                          const int32_t *before) {
    Home h;
    int lane = a.t.lane_of[p.source];
    h.agent = a.t.agent_of[p.source];
    h.kind = lane < 0 ? EP_PART_OWN : EP_PART_RELAYED;
    h.part = part_of(a, h.kind, p.chunk);
    h.tokens = ep_part_tokens(&a.p.shape, h.kind);
    const int32_t *rows =
        (lane < 0 ? a.counts.own : a.counts.relayed) + (p.chunk * a.t.ranks + h.agent) * a.t.ranks;
    h.end = rows[a.t.rank];
    int lanes = lane < 0 ? 1 : a.t.lanes_of[h.agent]; /* of the part */
    int is_last = p.token == a.t.chunk - 1 && max(lane, 0) == lanes - 1;
    h.last = is_last ? lanes * a.t.chunk : -1;
    h.at = p.token;
    if (lane < 0) return h;
    int needed = a.counts.needed[p.source * a.t.chunks + p.chunk];
    int place = before[need_column(a)] + n.here;
    h.at = lane * a.t.chunk + (n.needs ? place : needed + p.token - place);
    if (lane + 1 < a.t.lanes_of[h.agent]) {
        int next = a.t.source_of[h.agent * a.t.lanes + lane + 1];
        h.end = before_of(a, piece_number(a, next, p.chunk, 0))[row_column(a, a.t.rank)];
    }
    return h;
}

/* Store where the rows of the token begin on this rank. By one lane of the token. */
__device__ __forceinline__ void store_begin(const EpRouteArgs &a, const Piece &p, const Numbered &n,
                                            const Home &h, const int32_t *before) {
    int32_t *begins = h.part.begins + (int64_t)h.agent * (h.tokens + 1);
    int begin = before[row_column(a, a.t.rank)] + n.mine;
    begins[h.at] = h.kind == EP_PART_OWN || n.needs ? begin : h.end;
    if (h.last >= 0) begins[h.last] = h.end;
}

/* Returns one lane for each row of a token: the first that has a slot, if any has. */
__device__ __forceinline__ int find_leader(const EpRouteArgs &a, const Numbered &n, int slot) {
    unsigned with = __ballot_sync(~0u, slot >= 0), row = n.owner.all & team_lanes(a);
    return is_first(with & row ? with & row : row);
}

/* Store this rank's own entry, for the ranks of this node or for another node's message. */
__device__ __forceinline__ void store_entry(const EpRouteArgs &a, const Piece &p, const Numbered &n,
                                            const Home &h, const EpEntry &here) {
    EpEntry e = here;
    int other = n.other >= 0 ? a.t.ranks + n.other : -1;
    const int32_t *places =
        a.counts.places + (p.chunk * a.pieces + p.index) * (a.t.nodes - 1) + n.other;
    if (p.number < 0) e = EpEntry{-1, 0, (int16_t)other, 0, n.node.leads};
    if (n.other >= 0) e.row = *places + n.place;
    h.part.entries[(int64_t)h.at * a.p.top_k + p.k] = e;
    if (e.leader && p.number == a.t.rank) h.part.own_token[e.row] = h.at;
}

/* Store what this rank, as a receiver, must know of a token's row: the slots of its entries. `row`,
 * `flat`: of the row, in all lanes of the token. */
__device__ __forceinline__ void store_route(const EpRouteArgs &a, const Piece &p, const Home &h,
                                            int row, int flat, int slot, int expert) {
    int64_t at = (int64_t)h.agent * h.tokens + row, k = p.k;
    int is_mine = p.number == a.t.rank;
    if (h.part.sizes.form == EP_ROUTES_DENSE) {
        h.part.routes[at * a.p.top_k + k] = is_mine ? slot : -1;
        return;
    }
    if (k == 0) h.part.row_slots[at] = flat;
    if (flat < h.part.sizes.slots)
        h.part.routes[(int64_t)flat * a.p.top_k + k] = is_mine ? expert : -1;
}

__device__ __forceinline__ void assign_entry(const EpRouteArgs &a, const Piece &p, const Tables &t,
                                             const int32_t *before) {
    Numbered n = number_entry(a, p, t);
    Home h = find_home(a, p, n, before);
    int has_rows = a.p.shape.has_rows, exists = p.token >= 0 && p.k < a.p.top_k;
    int slot = -1, row = 0, flat = 0, expert = -1;
    if (p.number >= 0) {
        expert = p.expert - ep_owner_first(&a.p.owners, p.owner);
        row = before[row_column(a, p.number)] + n.row;
        flat = before[flat_column(a, p.number)] + n.row;
        int column = expert_column(a, p);
        if (!has_rows) slot = t.start[column] + before[column] + n.entry;
        if (slot >= ep_slot_limit(&a.p.shape, expert)) slot = -1;
    }
    int leads = find_leader(a, n, slot) && p.number >= 0;
    if (has_rows && leads) slot = flat < ep_row_limit(&a.p.shape) ? flat : -1;
    if (exists && h.agent == a.t.rank)
        store_entry(a, p, n, h, EpEntry{slot, row, (int16_t)p.number, (int16_t)expert, leads});
    unsigned mine = __ballot_sync(~0u, p.number == a.t.rank) & team_lanes(a);
    int from = mine ? __ffs(mine) - 1 : 0;
    row = __shfl_sync(~0u, row, from), flat = __shfl_sync(~0u, flat, from);
    if (exists && mine) store_route(a, p, h, row, flat, slot, expert);
    if (p.token >= 0 && p.k == 0) store_begin(a, p, n, h, before);
}

#endif
