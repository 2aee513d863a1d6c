/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_NODES_CUDA_ROUTE_PIECES_CUH
#define EP_HANDLES_NODES_CUDA_ROUTE_PIECES_CUH

/**
 * What the kernels of route_nodes.cu share: pieces of the ranks' tokens, a thread for each entry, and
 * how the lanes of a warp agree on what their entries have in common.
 */

#include "handles/nodes/cuda/route.h"
#include "handles/prepare/cuda/publish.cuh"

/* ---- pieces -------------------------------------------------------------------------------- */

/* A piece, and this thread's entry in it. */
typedef struct Piece {
    int source, chunk, index; /* rank, its chunk, the piece there */
    int token;                /* of this thread, in the chunk; -1: past the piece's end */
    int k;                    /* of this thread; may be K or more */
    int expert;               /* of the group; -1: none */
    int owner, number;        /* rank of the group; its number on this node; -1: none, elsewhere */
} Piece;

__device__ __forceinline__ const EpRoutingHead *head_of(const EpRouteArgs &a, int source) {
    return (const EpRoutingHead *)(a.messages + source * a.message_bytes);
}

__device__ __forceinline__ int tokens_of(const EpRouteArgs &a, int source) {
    return min(max(head_of(a, source)->num_tokens, 0), a.p.shape.max_tokens);
}

__device__ __forceinline__ int num_pieces(const EpRouteArgs &a) {
    return a.t.group * a.t.chunks * a.pieces;
}

__device__ __forceinline__ int piece_number(const EpRouteArgs &a, int source, int chunk,
                                            int index) {
    return (source * a.t.chunks + chunk) * a.pieces + index;
}

__device__ __forceinline__ int32_t *before_of(const EpRouteArgs &a, int piece) {
    return a.counts.before + (int64_t)piece * a.columns;
}

/* Columns behind the experts. */
__device__ __forceinline__ int flat_column(const EpRouteArgs &a, int number) {
    return a.t.experts + number;
}

__device__ __forceinline__ int row_column(const EpRouteArgs &a, int number) {
    return a.t.experts + a.t.ranks + number;
}

__device__ __forceinline__ int need_column(const EpRouteArgs &a) {
    return a.t.experts + 2 * a.t.ranks;
}

__device__ __forceinline__ int expert_column(const EpRouteArgs &a, const Piece &p) {
    return a.t.first_expert[p.number] + p.expert - ep_owner_first(&a.p.owners, p.owner);
}

__device__ __forceinline__ Piece take_piece(const EpRouteArgs &a, int number) {
    Piece p;
    p.index = number % a.pieces, number /= a.pieces;
    p.chunk = number % a.t.chunks, p.source = number / a.t.chunks;
    int i = (int)threadIdx.x >> a.team_shift;
    p.k = threadIdx.x & ((1 << a.team_shift) - 1);
    p.token = p.index * a.piece_tokens + i;
    if (i >= a.piece_tokens || p.token >= a.t.chunk) p.token = -1;
    p.expert = p.owner = p.number = -1;
    int64_t token = (int64_t)p.chunk * a.t.chunk + p.token;
    if (p.token < 0 || p.k >= a.p.top_k || token >= tokens_of(a, p.source)) return p;
    const int32_t *routing = (const int32_t *)(head_of(a, p.source) + 1);
    p.expert = routing[token * a.p.top_k + p.k];
    if ((uint32_t)p.expert >= (uint32_t)a.p.shape.num_experts) p.expert = -1;
    if (p.expert < 0) return p;
    p.owner = ep_owner(&a.p.owners, p.expert);
    p.number = a.t.number_of[p.owner];
    return p;
}

/* ---- lanes --------------------------------------------------------------------------------- */

__device__ __forceinline__ unsigned lanes_below(int lane) {
    return (1u << lane) - 1;
}

/* Returns the lanes of this thread's token. */
__device__ __forceinline__ unsigned team_lanes(const EpRouteArgs &a) {
    int width = 1 << a.team_shift, first = threadIdx.x % 32 & -width;
    return (width == 32 ? ~0u : (1u << width) - 1) << first;
}

/* How the lanes of a warp agree on a key; none for a negative one. */
typedef struct Same {
    unsigned all;  /* lanes with the key */
    unsigned rows; /* of these the first of each token */
    int leads;     /* whether this lane is the first of its token */
    int earlier;   /* tokens before this one, in the warp, with the key */
} Same;

__device__ __forceinline__ Same find_same(const EpRouteArgs &a, int key) {
    int lane = threadIdx.x % 32, width = 1 << a.team_shift;
    Same s;
    unsigned all = __match_any_sync(~0u, key);
    s.all = key >= 0 ? all : 0;
    s.leads = key >= 0 && __ffs(s.all & team_lanes(a)) - 1 == lane;
    s.rows = __ballot_sync(~0u, s.leads) & s.all;
    s.earlier = __popc(s.rows & lanes_below(lane & -width));
    return s;
}

__device__ __forceinline__ int is_first(unsigned lanes) {
    return __ffs(lanes) - 1 == (int)(threadIdx.x % 32);
}

/* Returns whether this rank has not failed: the same in all threads of a block, whoever may fail
 * meanwhile. */
__device__ __forceinline__ int is_alive(const EpRouteArgs &a) {
    return __syncthreads_and(ep_failed(a.p.group) == 0);
}

#endif
