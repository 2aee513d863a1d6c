/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PREPARE_CUDA_PARTITION_CUH
#define EP_HANDLES_PREPARE_CUDA_PARTITION_CUH

/**
 * A block of ep_prepare: its token partition, and the numbering of the entries of a chunk.
 */

#include "handles/prepare/cuda/publish.cuh"

#define PREPARE_THREADS 1024
#define PREPARE_WARPS (PREPARE_THREADS / 32)

/* What a block stores for each rank, at the start of its dynamic shared memory. */
typedef struct __attribute__((aligned(16))) RankTables {
    uint32_t *routes[2][EP_CUDA_MAX_RANKS]; /* this rank's routes and begins in each window, by
                                               parity of the epoch */
    uint64_t *begins[2][EP_CUDA_MAX_RANKS];
    int32_t rows[EP_CUDA_MAX_RANKS];     /* rows to it from earlier chunks of this partition */
    int32_t before[EP_CUDA_MAX_RANKS];   /* rows to it from the ranks before this one */
    int32_t tokens[EP_CUDA_MAX_RANKS];   /* tokens of it */
    int32_t incoming[EP_CUDA_MAX_RANKS]; /* rows from it to this rank */
    int32_t num_tokens;                  /* tokens of this rank */
    int32_t has_bad;                     /* whether this partition has bad indices */
} RankTables;

/* A block's token partition and shared memory. A column is an expert, or a rank after the
 * experts. */
typedef struct Partition {
    RankTables *ranks;
    uint8_t *table; /* [E + R, PREPARE_WARPS] entries or rows of each warp in this chunk */
    int32_t *base; /* [E + R] slot of this chunk's first entry for the expert; rows to the rank from
                      the partitions before this one */
    int32_t *total; /* [E + R] entries of all ranks for the expert, rows of all ranks to the rank */
    int index, begin, end, columns;
    int team, team_shift, chunk_tokens; /* lanes of a token and their log2, tokens of a chunk */
} Partition;

/* A thread's entry of a chunk. */
typedef struct Own {
    int expert, owner; /* -1: none */
    unsigned owners;   /* lanes of this warp whose entries go to the same rank */
    unsigned firsts;   /* lanes of this warp that stand for rows: the first lane of each row */
    int before;        /* earlier entries for the expert in this chunk */
    int row;           /* number of its row among the partition's rows to the owner */
} Own;

/* Whether this is the publisher: the block after those with partitions, which sends arrivals,
 * reports to the host, which is slow, and does nothing else. */
__device__ __forceinline__ int is_publisher(const EpPrepareArgs &a, const Partition *p) {
    return p->index == a.group.partitions;
}

/* Compute the tokens of a partition, *begin to before *end, out of the rank's `tokens`. */
__device__ __forceinline__ void partition_range(const EpPrepareArgs &a, int tokens, int partition,
                                                int *begin, int *end) {
    int tokens_each = a.partition_tokens;
    if (a.num_tokens.data) tokens_each = (tokens + a.group.partitions - 1) / a.group.partitions;
    *begin = min(tokens, partition * tokens_each);
    *end = min(tokens, *begin + tokens_each);
}

__device__ void record_bad_index(const EpPrepareArgs &a, const Partition *p, int64_t entry) {
    p->ranks->has_bad = 1;
    atomicAdd(&a.group.state->bad_count, 1ull);
    atomicMax(&a.group.state->bad_entry, ~(unsigned long long)entry);
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

__device__ __forceinline__ int team_begin(const Partition *p) {
    return threadIdx.x % 32 & ~(p->team - 1);
}

__device__ __forceinline__ unsigned team_lanes(const Partition *p) {
    return (p->team == 32 ? ~0u : (1u << p->team) - 1) << team_begin(p);
}

/* Returns the lanes of this warp with the same key; none for a negative key. */
__device__ __forceinline__ unsigned same_key(int key) {
    unsigned same = __match_any_sync(~0u, key);
    return key >= 0 ? same : 0;
}

/* Returns this thread's token of the chunk that begins with token `first`. */
__device__ __forceinline__ int own_token(const Partition *p, int first) {
    return first + ((int)threadIdx.x >> p->team_shift);
}

__device__ __forceinline__ int own_k(const Partition *p) {
    return threadIdx.x & (p->team - 1);
}

/* Load this thread's index of the chunk that begins with token `first`, as the caller gave it. */
__device__ __forceinline__ Index load_own_index(const EpPrepareArgs &a, const Partition *p,
                                                int first) {
    int token = own_token(p, first), k = own_k(p);
    if (token >= p->end || k >= a.top_k) return Index{-1, -1};
    return load_index(a, (int64_t)token * a.top_k + k);
}

/* Returns this thread's entry, with its expert and owner. By all lanes of the warp. */
__device__ __forceinline__ Own take_entry(const EpPrepareArgs &a, const Partition *p,
                                          const Index &index) {
    Own o = {-1, -1, 0, 0, 0, 0};
    int expert = expert_of(a, index);
    if (a.shape.merges) { /* the token's lowest k keeps the expert */
        unsigned same = __match_any_sync(~0u, expert) & team_lanes(p);
        if (same & lanes_below((int)threadIdx.x % 32)) expert = NO_EXPERT;
    }
    if (expert >= 0) {
        o.expert = expert;
        o.owner = ep_owner(&a.owners, expert);
    }
    o.owners = same_key(o.owner);
    return o;
}

__device__ __forceinline__ void check_index(const EpPrepareArgs &a, const Partition *p, int first,
                                            const Index &index) {
    if (expert_of(a, index) == BAD_EXPERT)
        record_bad_index(a, p, (int64_t)own_token(p, first) * a.top_k + own_k(p));
}

/* Returns one lane for each row of the warp: the first of a team's lanes with the same owner. */
__device__ __forceinline__ unsigned first_of_rows(const Partition *p, const Own &o) {
    return __ballot_sync(~0u, first_lane(o.owners & team_lanes(p)) == (int)threadIdx.x % 32);
}

/* Returns the byte of a warp in a column of the table. Columns have 32 bytes. Every other four
 * columns have their halves swapped, so that adjacent columns lie in different banks. */
__device__ __forceinline__ uint8_t *byte_of(const Partition *p, int column, int warp) {
    return p->table + column * PREPARE_WARPS + (warp ^ (column & 4) << 2);
}

__device__ __forceinline__ uint4 *half_of(const Partition *p, int column, int half) {
    return (uint4 *)byte_of(p, column, half * 16);
}

#define ONES 0x01010101u

__device__ __forceinline__ int add_bytes(uint32_t word, int sum) {
    return (int)__dp4a(word, ONES, (uint32_t)sum);
}

__device__ __forceinline__ int add_half(const uint4 &x) {
    return add_bytes(x.x, add_bytes(x.y, add_bytes(x.z, add_bytes(x.w, 0))));
}

/* Returns a word with 1 in each of its first n bytes. */
__device__ __forceinline__ uint32_t first_bytes(int n) {
    return n > 0 ? ONES >> max(0, 32 - 8 * n) : 0;
}

/* Returns a 1 in each byte of the warps before this one, in this warp's half of a column. */
__device__ __forceinline__ uint4 warps_before(void) {
    int n = threadIdx.x / 32 % 16;
    return make_uint4(first_bytes(n), first_bytes(n - 4), first_bytes(n - 8), first_bytes(n - 12));
}

/* Returns the sum of a column over the warps before this one. */
__device__ __forceinline__ int count_before(const Partition *p, int column, const uint4 &warps) {
    int half = threadIdx.x / (PREPARE_THREADS / 2);
    uint4 x = *half_of(p, column, half);
    uint32_t sum = __dp4a(x.x, warps.x, __dp4a(x.y, warps.y, 0u));
    sum = __dp4a(x.z, warps.z, __dp4a(x.w, warps.w, sum));
    return (int)sum + (half ? add_half(*half_of(p, column, 0)) : 0);
}

__device__ __forceinline__ int count_column(const Partition *p, int column) {
    return add_half(*half_of(p, column, 0)) + add_half(*half_of(p, column, 1));
}

__device__ __forceinline__ void clear_column(const Partition *p, int column) {
    *half_of(p, column, 0) = *half_of(p, column, 1) = uint4{0, 0, 0, 0};
}

/* Store this warp's counts in the table, which is clear, and number its entries and rows within the
 * warp. By a warp. */
__device__ __forceinline__ void mark_entries(const EpPrepareArgs &a, const Partition *p, Own *o) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned same = same_key(o->expert);
    o->firsts = first_of_rows(p, *o);
    unsigned rows = o->firsts & o->owners;
    o->before = __popc(same & lanes_below(lane));
    o->row = __popc(rows & lanes_below(team_begin(p)));
    if (first_lane(same) == lane) *byte_of(p, o->expert, warp) = (uint8_t)__popc(same);
    if (first_lane(o->owners) == lane)
        *byte_of(p, a.group.num_experts + o->owner, warp) = (uint8_t)__popc(rows);
}

/* Add the counts of the warps before this one to an entry's numbers, and those of earlier chunks to
 * its row. */
__device__ __forceinline__ void number_entries(const EpPrepareArgs &a, const Partition *p, Own *o) {
    if (o->expert < 0) return;
    const uint4 warps = warps_before();
    o->before += count_before(p, o->expert, warps);
    o->row += p->ranks->rows[o->owner] + count_before(p, a.group.num_experts + o->owner, warps);
}

/* Advance the running numbers by this chunk's counts, and clear the table for the next chunk. */
__device__ __forceinline__ void advance(const EpPrepareArgs &a, Partition *p) {
    int experts = a.group.num_experts;
    __syncthreads();
#pragma unroll 1
    for (int c = threadIdx.x; c < p->columns; c += PREPARE_THREADS) {
        *(c < experts ? p->base + c : p->ranks->rows + (c - experts)) += count_column(p, c);
        clear_column(p, c);
    }
    __syncthreads();
}

#endif
