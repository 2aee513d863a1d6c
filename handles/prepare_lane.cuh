/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PREPARE_LANE_CUH
#define EP_HANDLES_PREPARE_LANE_CUH

/**
 * A block of ep_prepare: its lane, and the numbering of entries within a chunk of it.
 */

#include "handles/publish.cuh"

#define THREADS 1024
#define WARPS (THREADS / 32)

/* What a block knows of each rank, and of all its lane; at the beginning of its shared memory. */
typedef struct __attribute__((aligned(16))) Ranks {
    uint32_t *routes[2][EP_CUDA_MAX_RANKS]; /* where this rank's go, by parity of the epoch */
    uint64_t *begins[2][EP_CUDA_MAX_RANKS];
    int32_t rows[EP_CUDA_MAX_RANKS];   /* rows to it of this lane in the chunks before */
    int32_t before[EP_CUDA_MAX_RANKS]; /* rows to it of the ranks before this one */
    int32_t tokens[EP_CUDA_MAX_RANKS]; /* that it has */
    int32_t coming[EP_CUDA_MAX_RANKS]; /* rows that come from it */
    int32_t num_tokens;                /* of this rank */
    int32_t has_bad;                   /* whether this lane has bad indices */
} Ranks;

/* A block's lane, and its shared memory. A column is an expert, or a rank after the experts. */
typedef struct Lane {
    Ranks *ranks;
    uint8_t *table; /* [E + R, WARPS] entries or rows of each warp in this chunk: see byte_of */
    int32_t *base;  /* [E + R] slot of this chunk's first entry for the expert; rows to the rank of
                       the lanes before this one */
    int32_t *total; /* [E + R] entries of all ranks for the expert, rows of all to the rank */
    int lane, begin, end, columns;
    int team, team_shift, team_tokens; /* lanes of a token, tokens of a chunk */
} Lane;

/* What a thread has of a chunk. */
typedef struct Own {
    int expert, owner; /* -1: none */
    unsigned owners;   /* lanes of this warp whose entries go to the same rank */
    unsigned firsts;   /* lanes of this warp that stand for rows: the first of each */
    int before;        /* entries for the expert that come before, in this chunk */
    int row;           /* number of the row to the owner, among this lane's */
} Own;

/* The block behind those that have lanes tells the host, which takes long, and nothing else. */
__device__ __forceinline__ int is_publisher(const EpPrepareArgs &a, const Lane *l) {
    return l->lane == a.group.lanes;
}

/* The tokens of a lane, out of `tokens`: begin, and end at most `tokens`. */
__device__ __forceinline__ void lane_range(const EpPrepareArgs &a, int tokens, int lane, int *begin,
                                           int *end) {
    int share = a.lane_tokens;
    if (a.num_tokens.data) share = (tokens + a.group.lanes - 1) / a.group.lanes;
    *begin = min(tokens, lane * share);
    *end = min(tokens, *begin + share);
}

__device__ void note_bad_index(const EpPrepareArgs &a, const Lane *l, int64_t entry) {
    l->ranks->has_bad = 1;
    atomicAdd(&a.group.state->bad_count, 1ull);
    atomicMax(&a.group.state->bad_entry, ~(unsigned long long)entry);
}

/* By one thread of the last block: what all have found. */
__device__ void tell_all_bad_indices(const EpPrepareArgs &a) {
    volatile EpCudaState *state = a.group.state;
    unsigned long long count = state->bad_count, entry = ~state->bad_entry;
    if (!count) return;
    state->bad_count = state->bad_entry = 0;
    tell_bad_indices(a, count, entry);
}

/* ---- one chunk ----------------------------------------------------------------------------- */

__device__ __forceinline__ unsigned lanes_below(int lane) {
    return (1u << lane) - 1;
}

__device__ __forceinline__ int first_lane(unsigned lanes) {
    return lanes ? __ffs(lanes) - 1 : -1;
}

__device__ __forceinline__ int last_lane(unsigned lanes) {
    return 31 - __clz((int)lanes);
}

__device__ __forceinline__ int team_begin(const Lane *l) {
    return threadIdx.x % 32 & ~(l->team - 1);
}

__device__ __forceinline__ unsigned team_lanes(const Lane *l) {
    return (l->team == 32 ? ~0u : (1u << l->team) - 1) << team_begin(l);
}

/* The lanes of this thread's warp that have the same key; none where it is negative. */
__device__ __forceinline__ unsigned same_key(int key) {
    unsigned same = __match_any_sync(~0u, key);
    return key >= 0 ? same : 0;
}

/* This thread's token of the chunk that begins with token `first`, and which of its entries. */
__device__ __forceinline__ int own_token(const Lane *l, int first) {
    return first + ((int)threadIdx.x >> l->team_shift);
}

__device__ __forceinline__ int own_k(const Lane *l) {
    return threadIdx.x & (l->team - 1);
}

/* This thread's index of the chunk that begins with token `first`, as the caller gave it. */
__device__ __forceinline__ Index load_own_index(const EpPrepareArgs &a, const Lane *l, int first) {
    int token = own_token(l, first), k = own_k(l);
    if (token >= l->end || k >= a.top_k) return Index{-1, -1};
    return load_index(a, (int64_t)token * a.top_k + k);
}

__device__ __forceinline__ Own take_entry(const EpPrepareArgs &a, const Index &index) {
    Own o = {-1, -1, 0, 0, 0, 0};
    int expert = expert_of(a, index);
    if (expert >= 0) {
        o.expert = expert;
        o.owner = ep_owner(&a.owners, expert);
    }
    o.owners = same_key(o.owner);
    return o;
}

__device__ __forceinline__ void check_index(const EpPrepareArgs &a, const Lane *l, int first,
                                            const Index &index) {
    if (expert_of(a, index) == BAD_EXPERT)
        note_bad_index(a, l, (int64_t)own_token(l, first) * a.top_k + own_k(l));
}

/* Of a team's lanes with entries for one owner, the first: one for each row. */
__device__ __forceinline__ unsigned first_of_rows(const Lane *l, const Own &o) {
    return __ballot_sync(~0u, first_lane(o.owners & team_lanes(l)) == (int)threadIdx.x % 32);
}

/* Columns of the table are 32 bytes; every other four have their halves swapped, so that columns
 * next to each other are in different banks. */
__device__ __forceinline__ uint8_t *byte_of(const Lane *l, int column, int warp) {
    return l->table + column * WARPS + (warp ^ (column & 4) << 2);
}

__device__ __forceinline__ uint4 *half_of(const Lane *l, int column, int half) {
    return (uint4 *)byte_of(l, column, half * 16);
}

#define ONES 0x01010101u

__device__ __forceinline__ int add_bytes(uint32_t word, int sum) {
    return (int)__dp4a(word, ONES, (uint32_t)sum);
}

__device__ __forceinline__ int add_half(const uint4 &x) {
    return add_bytes(x.x, add_bytes(x.y, add_bytes(x.z, add_bytes(x.w, 0))));
}

/* 1 in each of the first n bytes of a word. */
__device__ __forceinline__ uint32_t first_bytes(int n) {
    return n > 0 ? ONES >> max(0, 32 - 8 * n) : 0;
}

/* The warps before this one, in its half of a column. */
__device__ __forceinline__ uint4 warps_before(void) {
    int n = threadIdx.x / 32 % 16;
    return make_uint4(first_bytes(n), first_bytes(n - 4), first_bytes(n - 8), first_bytes(n - 12));
}

/* Sum of a column over them, and over the half before. */
__device__ __forceinline__ int count_before(const Lane *l, int column, const uint4 &warps) {
    int half = threadIdx.x / (THREADS / 2);
    uint4 x = *half_of(l, column, half);
    uint32_t sum = __dp4a(x.x, warps.x, __dp4a(x.y, warps.y, 0u));
    sum = __dp4a(x.z, warps.z, __dp4a(x.w, warps.w, sum));
    return (int)sum + (half ? add_half(*half_of(l, column, 0)) : 0);
}

__device__ __forceinline__ int count_column(const Lane *l, int column) {
    return add_half(*half_of(l, column, 0)) + add_half(*half_of(l, column, 1));
}

__device__ __forceinline__ void clear_column(const Lane *l, int column) {
    *half_of(l, column, 0) = *half_of(l, column, 1) = uint4{0, 0, 0, 0};
}

/* This warp's counts go into the table, which is clear; numbers within the warp are found. */
__device__ __forceinline__ void mark_entries(const EpPrepareArgs &a, const Lane *l, Own *o) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned same = same_key(o->expert);
    o->firsts = first_of_rows(l, *o);
    unsigned rows = o->firsts & o->owners;
    o->before = __popc(same & lanes_below(lane));
    o->row = __popc(rows & lanes_below(team_begin(l)));
    if (first_lane(same) == lane) *byte_of(l, o->expert, warp) = (uint8_t)__popc(same);
    if (first_lane(o->owners) == lane)
        *byte_of(l, a.group.num_experts + o->owner, warp) = (uint8_t)__popc(rows);
}

/* And across warps. */
__device__ __forceinline__ void number_entries(const EpPrepareArgs &a, const Lane *l, Own *o) {
    if (o->expert < 0) return;
    const uint4 warps = warps_before();
    o->before += count_before(l, o->expert, warps);
    o->row += l->ranks->rows[o->owner] + count_before(l, a.group.num_experts + o->owner, warps);
}

/* The running numbers move on by what this chunk has had; the table is clear for the next. */
__device__ __forceinline__ void advance(const EpPrepareArgs &a, Lane *l) {
    int experts = a.group.num_experts;
    __syncthreads();
#pragma unroll 1
    for (int c = threadIdx.x; c < l->columns; c += THREADS) {
        *(c < experts ? l->base + c : l->ranks->rows + (c - experts)) += count_column(l, c);
        clear_column(l, c);
    }
    __syncthreads();
}

#endif
