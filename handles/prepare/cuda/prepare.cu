/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ep_prepare on GPUs: one launch of a block for each token partition and one more, all of them
 * resident together.
 *
 * The blocks divide the rank's tokens into partitions. Each block sorts the entries of its own
 * partition. The last block, the publisher, sends the rank's arrival to all ranks and reports the
 * result to the host. Who waits on whom:
 *
 *     partition counts   block -> block       each warp sums some columns over all partitions
 *     partitions before  block -> block       and returns to each the sum over those before it
 *     rank counts        rank  -> all ranks   E + R + 1 integers to each
 *     begins, routes     block -> all ranks   for each token, the number of rows before it; for
 *                                             each row, its slots there
 *
 * From every rank's number of entries for every expert, a rank computes all slabs of all ranks, and
 * so the slot of each of its own entries, without the other ranks' routing. All blocks with a
 * partition copy what other ranks send into the plan; each copies an equal part of the words.
 *
 * A block takes its partition's tokens in chunks of one entry for each thread; a token is a team of
 * lanes of one warp. Entries for an expert are numbered by token and k, rows to a rank by token:
 * within a warp by comparing lanes, across warps by a table of each warp's counts. The first chunk
 * is usually the only one. It is numbered, and its begins are sent, while counts travel.
 *
 * Memory order: no word is ordered behind another. Each word is stored at once and shows its own
 * arrival: counts and begins carry the epoch in their upper half; a route is not 0, and its only
 * reader sets it to 0 again, so routes need no epoch. Each word has two buffers, used in turn: no
 * rank is more than one operation ahead of another, so a buffer is rewritten only after its readers
 * have left the operation that filled it. A partition's counts have one reader, which overwrites
 * them with the sums over the partitions before; EP_PARTITIONS_BEFORE marks such a sum.
 */
#include "handles/prepare/cuda/prepare.h"

#include "handles/prepare/cuda/publish.cuh"

EP_VARIANT_BEGIN

/* ==== partitions ============================================================================ */

/* A block's token partition, and the numbering of the entries of a chunk. */

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

/* Returns this thread's entry of the chunk that begins with token `first`, with its expert and
 * owner. By all lanes of the warp. */
template <int PLACED>
__device__ __forceinline__ Own take_entry(const EpPrepareArgs &a, const Partition *p, int first,
                                          const Index &index) {
    Own o = {-1, -1, 0, 0, 0, 0};
    int expert = place_index<PLACED>(a, index, own_token(p, first));
    if (EP_MASKED && expert >= 0 && !ep_is_alive(ep_owner(&a.owners, expert))) expert = NO_EXPERT;
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

template <int PLACED>
__device__ __forceinline__ void check_index(const EpPrepareArgs &a, const Partition *p, int first,
                                            const Index &index) {
    if (expert_of<PLACED>(a, index) == BAD_EXPERT)
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

/* ==== counts ================================================================================ */

/* Of a partition, over the partitions of a rank, over all ranks. */

/* Returns where `source`'s part of a receive buffer begins, in tokens. There are two buffers, used
 * in turn. */
__device__ __forceinline__ int64_t tokens_of(const EpCudaGroup &g, int source, uint32_t epoch) {
    return (int64_t)((int)(epoch & 1) * g.size + source) * g.layout.max_tokens;
}

/* Returns the routes of `source`'s rows in `holder`'s window. */
__device__ __forceinline__ uint32_t *routes_of(const EpPrepareArgs &a, int holder, int source,
                                               uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    return ep_at<uint32_t>(g, holder, g.layout.routes) + tokens_of(g, source, epoch) * a.top_k;
}

__device__ __forceinline__ uint64_t *begins_of(const EpCudaGroup &g, int holder, int source,
                                               uint32_t epoch) {
    return ep_at<uint64_t>(g, holder, g.layout.begins) + tokens_of(g, source, epoch);
}

/* Initialise the tables before a barrier of the block and before the epoch is known. */
__device__ __forceinline__ void init_tables(const EpPrepareArgs &a, const Partition *p) {
    static_assert(EP_CUDA_MAX_RANKS <= PREPARE_THREADS, "a thread for each rank");
    const EpCudaGroup &g = a.group;
    int r = PREPARE_THREADS - 1 - threadIdx.x;
#pragma unroll 1
    for (int c = threadIdx.x; c < p->columns; c += PREPARE_THREADS)
        clear_column(p, c);
    if (r < g.size) {
        p->ranks->rows[r] = 0;
#pragma unroll
        for (int turn = 0; turn < 2; turn++) {
            p->ranks->routes[turn][r] = routes_of(a, r, g.rank, turn);
            p->ranks->begins[turn][r] = begins_of(g, r, g.rank, turn);
        }
    }
    if (threadIdx.x == 0) p->ranks->has_bad = 0;
}

/* Count the entries and rows of all chunks after the first, in base. By all threads of the
 * block. */
template <int PLACED> __device__ void count_later_chunks(const EpPrepareArgs &a, Partition *p) {
    Index next = load_own_index(a, p, p->begin + p->chunk_tokens);
#pragma unroll 1
    for (int c = threadIdx.x; c < p->columns; c += PREPARE_THREADS)
        p->base[c] = 0;
    __syncthreads();
    for (int first = p->begin + p->chunk_tokens; first < p->end; first += p->chunk_tokens) {
        Index index = next;
        next = load_own_index(a, p, first + p->chunk_tokens);
        Own o = take_entry<PLACED>(a, p, first, index);
        check_index<PLACED>(a, p, first, index);
        unsigned rows = first_of_rows(p, o) & o.owners;
        if (o.expert >= 0) atomicAdd(&p->base[o.expert], 1);
        if (first_lane(o.owners) == (int)threadIdx.x % 32)
            atomicAdd(&p->base[a.group.num_experts + o.owner], __popc(rows));
    }
    __syncthreads();
}

__device__ __forceinline__ uint64_t *partition_counts_of(const EpCudaGroup &g, int partition) {
    return g.partition_counts + (int64_t)partition * EP_COUNT_STRIDE(g.num_experts, g.size);
}

/* Publish to other blocks this partition's entries for each expert, its rows to each rank and its
 * tokens. `index` is this thread's index of the first chunk, which stays in the table. Returns its
 * entry. */
template <int PLACED>
__device__ __forceinline__ Own count_entries(const EpPrepareArgs &a, Partition *p,
                                             const Index &index, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    Own o = take_entry<PLACED>(a, p, p->begin, index);
    mark_entries(a, p, &o);
    check_index<PLACED>(a, p, p->begin, index);
    __syncthreads();
    int has_more = p->begin + p->chunk_tokens < p->end;
    if (has_more) count_later_chunks<PLACED>(a, p);
#pragma unroll 1
    for (int c = threadIdx.x; c < EP_COUNT_STRIDE(g.num_experts, g.size); c += PREPARE_THREADS) {
        int count = c == p->columns ? p->end - p->begin : 0;
        if (c < p->columns) count = count_column(p, c) + (has_more ? p->base[c] : 0);
        ep_store_relaxed_gpu(partition_counts_of(g, p->index) + c,
                             ep_counter(epoch, (uint32_t)count));
    }
    return o;
}

__device__ __forceinline__ uint64_t *counts_of(const EpCudaGroup &g, int holder, int source,
                                               uint32_t epoch) {
    return ep_at<uint64_t>(g, holder, g.layout.counts) +
           ((int64_t)(epoch & 1) * g.size + source) * EP_COUNT_WORDS(g.num_experts, g.size);
}

__device__ __forceinline__ int has_epoch(uint64_t word, uint32_t epoch) {
    return (uint32_t)(word >> 32) == epoch;
}

__device__ __forceinline__ int keep_waiting_for_grid(const EpCudaGroup &g, EpTimeout *timeout,
                                                     const Partition *p, uint32_t epoch) {
    return ep_keep_waiting(g, timeout, EpAwaited{g.rank, EP_AWAIT_GRID, 0, epoch, epoch - 1});
}

/* Send this rank's arrival and facts to all ranks, a thread for each. Orders no other store. */
__device__ __forceinline__ void send_arrivals(const EpCudaGroup &g, uint32_t epoch) {
    int r = PREPARE_THREADS - 1 - threadIdx.x;
    if (r < g.size) ep_send_arrival(g, r, epoch, g.facts, 0);
}

/* Four columns of two partitions. */
typedef struct Quads {
    int count[2][4];
} Quads;

/* Wait for four columns of all partitions; each lane takes two neighbouring partitions. By a warp.
 * Returns 0 on timeout. */
__device__ __forceinline__ int await_partitions(const EpCudaGroup &g, const Partition *p,
                                                int column, uint32_t epoch, Quads *q) {
    static_assert(EP_MAX_PARTITIONS <= 2 * 32, "two lanes for each thread");
    EpTimeout timeout = {0, 0};
    int ready, from = threadIdx.x % 32 * 2, stride = EP_COUNT_STRIDE(g.num_experts, g.size);
    const uint64_t *words = partition_counts_of(g, from) + column;
    do {
        ulonglong2 x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i].x = x[i].y = ep_counter(epoch, 0);
            if (from + i / 2 < g.partitions)
                x[i] = ep_load_relaxed_gpu_pair(words + i / 2 * stride + i % 2 * 2);
        }
        ready = 1;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            ready = ready & has_epoch(x[i].x, epoch) & has_epoch(x[i].y, epoch);
            q->count[i / 2][i % 2 * 2] = (int)x[i].x, q->count[i / 2][i % 2 * 2 + 1] = (int)x[i].y;
        }
    } while (!ready && keep_waiting_for_grid(g, &timeout, p, epoch));
    return __all_sync(~0u, ready);
}

/* Send each partition the sums of four columns over the partitions before it. By the warp that has
 * awaited these counts: it is their only reader, so it may overwrite them. */
__device__ __forceinline__ void send_partition_sums(const EpCudaGroup &g, int column,
                                                    uint32_t epoch, const Quads &q) {
    int before[4], partition = threadIdx.x % 32 * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int both = q.count[0][i] + q.count[1][i];
        before[i] = ep_warp_prefix(both) - both;
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        uint64_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] = ep_counter(epoch, EP_PARTITIONS_BEFORE |
                                             (uint32_t)(before[i] + (j ? q.count[0][i] : 0)));
        if (partition + j >= g.partitions) return;
        uint64_t *to = partition_counts_of(g, partition + j) + column;
        ep_store_relaxed_gpu_pair(to, ulonglong2{words[0], words[1]});
        ep_store_relaxed_gpu_pair(to + 2, ulonglong2{words[2], words[3]});
    }
}

/* Send the sum of each column over all partitions to all ranks, and the sum over the partitions
 * before it to each partition. Each warp of all blocks takes four columns at a time, as long as
 * there are any. Returns 0 on timeout. */
__device__ __forceinline__ int exchange_counts(const EpPrepareArgs &a, const Partition *p,
                                               uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int lane = threadIdx.x % 32, quad = p->index + g.partitions * ((int)threadIdx.x / 32);
#pragma unroll 1
    for (; quad * 4 <= p->columns; quad += g.partitions * PREPARE_WARPS) {
        Quads q;
        int sums[4];
        if (!await_partitions(g, p, quad * 4, epoch, &q)) return 0;
#pragma unroll
        for (int i = 0; i < 4; i++)
            sums[i] = __reduce_add_sync(~0u, q.count[0][i] + q.count[1][i]);
        int column = quad * 4 + lane % 4;
        int sum = lane & 2 ? (lane & 1 ? sums[3] : sums[2]) : (lane & 1 ? sums[1] : sums[0]);
#pragma unroll 1
        for (int r = lane / 4; r < g.size && column <= p->columns; r += 8)
            if (ep_is_alive(r))
                ep_store_relaxed_sys(counts_of(g, r, g.rank, epoch) + column,
                                 ep_counter(epoch, (uint32_t)sum));
        send_partition_sums(g, quad * 4, epoch, q);
    }
    return 1;
}

__device__ __forceinline__ const uint64_t *partitions_before(const EpCudaGroup &g,
                                                             const Partition *p, int column) {
    return partition_counts_of(g, p->index) + column;
}

/* Wait for the sum of a column over the partitions before this one; `word` is the word as loaded
 * last. Returns 0 on timeout. */
__device__ __forceinline__ int await_partitions_before(const EpCudaGroup &g, const Partition *p,
                                                       int column, uint32_t epoch, uint64_t word,
                                                       int *before) {
    EpTimeout timeout = {0, 0};
    while (!has_epoch(word, epoch) || !((uint32_t)word & EP_PARTITIONS_BEFORE)) {
        if (!keep_waiting_for_grid(g, &timeout, p, epoch)) return 0;
        word = ep_load_relaxed_gpu(partitions_before(g, p, column));
    }
    *before = (int)((uint32_t)word & ~EP_PARTITIONS_BEFORE);
    return 1;
}

#define SOURCES_AT_ONCE 4

/* Wait for a column of the counts of SOURCES_AT_ONCE ranks from rank `from` on. By one thread.
 * Returns 0 on timeout. */
__device__ __forceinline__ int await_sources(const EpCudaGroup &g, int from, int column,
                                             uint32_t epoch, uint64_t x[SOURCES_AT_ONCE]) {
    const uint64_t *words = counts_of(g, g.rank, from, epoch) + column;
    EpTimeout timeout = {0, 0};
    int late;
    uint32_t seen;
    do {
#pragma unroll
        for (int i = 0; i < SOURCES_AT_ONCE; i++) {
            x[i] = ep_counter(epoch, 0);
            if (from + i < g.size && ep_is_alive(from + i))
                x[i] = ep_load_relaxed_sys(words + i * EP_COUNT_WORDS(g.num_experts, g.size));
        }
        late = -1, seen = 0;
#pragma unroll
        for (int i = 0; i < SOURCES_AT_ONCE; i++)
            if (!has_epoch(x[i], epoch)) late = from + i, seen = (uint32_t)(x[i] >> 32);
    } while (late >= 0 &&
             ep_keep_waiting(g, &timeout, EpAwaited{late, EP_AWAIT_ARRIVAL, 0, epoch, seen}));
    return late < 0;
}

/* Sum a column over all ranks into total, and over the ranks before this one into *before. Keep
 * each rank's tokens and its rows to this rank in the tables. By one thread. Returns 0 on
 * timeout. */
__device__ __forceinline__ int add_sources(const EpPrepareArgs &a, Partition *p, int column,
                                           uint32_t epoch, int *before) {
    const EpCudaGroup &g = a.group;
    int all = 0, is_kept = column == p->columns || column == g.num_experts + g.rank;
    int32_t *kept = column == p->columns ? p->ranks->tokens : p->ranks->incoming;
    *before = 0;
#pragma unroll 1
    for (int from = 0; from < g.size; from += SOURCES_AT_ONCE) {
        uint64_t x[SOURCES_AT_ONCE];
        if (!await_sources(g, from, column, epoch, x)) return 0;
#pragma unroll
        for (int i = 0; i < SOURCES_AT_ONCE; i++) {
            *before += from + i < g.rank ? (int)x[i] : 0;
            all += (int)x[i];
            if (is_kept && from + i < g.size) kept[from + i] = (int)x[i];
        }
    }
    if (column < p->columns) p->total[column] = all;
    return 1;
}

/* Set base: for an expert, the entries of earlier ranks and of earlier partitions; for a rank, the
 * rows of earlier partitions of this rank alone. The rows of earlier ranks go into ranks->before.
 * Returns 0 on timeout. */
__device__ __forceinline__ int await_counts(const EpPrepareArgs &a, Partition *p, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int alive = 1;
#pragma unroll 1
    for (int c = threadIdx.x; c <= p->columns && alive; c += PREPARE_THREADS) {
        int ranks, partitions = 0;
        uint64_t word = ep_load_relaxed_gpu(partitions_before(g, p, c));
        alive = add_sources(a, p, c, epoch, &ranks) &&
                await_partitions_before(g, p, c, epoch, word, &partitions);
        if (c < g.num_experts)
            p->base[c] = partitions + ranks;
        else if (c < p->columns)
            p->base[c] = partitions, p->ranks->before[c - g.num_experts] = ranks;
    }
    return alive;
}

/* Wait for the arrivals and counts of all ranks. By the publisher, which has no partition. Arrivals
 * show a rank that has entered another operation, which is then reported as such. */
__device__ __forceinline__ int await_all(const EpPrepareArgs &a, Partition *p, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int r = PREPARE_THREADS - 1 - threadIdx.x, before;
    uint64_t begin = ep_global_timer(), end = 0;
    int alive = r >= g.size || ep_await_arrival(g, r, epoch, NULL, NULL, &end);
    if (end) ep_count_wait(g, a.stats, r, end - begin);
#pragma unroll 1
    for (int c = threadIdx.x; c <= p->columns && alive; c += PREPARE_THREADS)
        alive = add_sources(a, p, c, epoch, &before);
    return alive;
}

/* ---- slabs --------------------------------------------------------------------------------- */

__device__ __forceinline__ void add_to_base(const Partition *p, int expert, int64_t offset) {
    p->base[expert] += (int)min(offset, (int64_t)INT32_MAX);
}

/* Add the offset of each slab of one rank to base. By a warp, two experts to a lane. */
__device__ __forceinline__ void lay_slabs(const EpPrepareArgs &a, const Partition *p, int rank) {
    const EpPlanShape &s = a.shape;
    int first = ep_owner_first(&a.owners, rank), local = ep_owner_count(&a.owners, rank);
    int64_t start = 0;
#pragma unroll 1
    for (int e = threadIdx.x % 32 * 2; __any_sync(~0u, e < local); e += 64) {
        int rows = e < local ? ep_slab_rows(&s, p->total[first + e]) : 0;
        int both = rows + (e + 1 < local ? ep_slab_rows(&s, p->total[first + e + 1]) : 0);
        int through = ep_warp_prefix(both);
        int64_t begin = start + through - both;
        if (e < local) add_to_base(p, first + e, ep_block_begin(&s, e, begin));
        if (e + 1 < local) add_to_base(p, first + e + 1, ep_block_begin(&s, e + 1, begin + rows));
        start += __shfl_sync(~0u, through, 31);
    }
}

/* Returns the entries of a source for local expert `e`, once they have been waited for. */
__device__ __forceinline__ uint64_t counted(const EpPrepareArgs &a, int e, int source,
                                            uint32_t epoch) {
    int first = ep_owner_first(&a.owners, a.group.rank);
    if (!ep_is_alive(source)) return 0;
    return ep_load_relaxed_sys(counts_of(a.group, a.group.rank, source, epoch) + first + e);
}

/* Publish the number of rows to other ranks, from other ranks, and of rows that stay; store those
 * of each rank into the plan. By a warp. */
__device__ void publish_rows(const EpPrepareArgs &a, const Partition *p, int64_t step,
                             uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    const uint64_t *own = counts_of(g, g.rank, g.rank, epoch) + g.num_experts;
    int sent = 0, local = (int)ep_load_relaxed_sys(own + g.rank);
    for (int r = threadIdx.x % 32; r < g.size; r += 32) {
        int rows = (int)ep_load_relaxed_sys(own + r);
        a.plan.rows_to[r] = rows, a.plan.rows_from[r] = p->ranks->incoming[r];
        sent += r == g.rank ? 0 : rows;
    }
    sent = warp_sum(sent);
    if (threadIdx.x % 32) return;
    publish_row_counts(a, step, sent, p->total[g.num_experts + g.rank] - local, local);
}

/* ==== entries =============================================================================== */

/* Their slots and rows, stored into the plan and sent to the receiving ranks. */

/* Returns the lane of the leader of this lane's row: its first entry with a slot, or its first
 * entry if none has a slot. */
__device__ __forceinline__ int find_leader(const Partition *p, const Own &o, int slot) {
    unsigned entries = o.owners & team_lanes(p);
    unsigned kept = entries & __ballot_sync(~0u, slot >= 0);
    return first_lane(kept ? kept : entries);
}

/* Send the route of one row for each team straight into its rank's window. `row_lanes` is a set of
 * lanes with entries of the row, 0 for no row; `to` in these lanes is the route's address there.
 * Lane k of the team stores word k: `value`, or none if this lane's entry is not of the row. */
__device__ __forceinline__ void send_route(const EpPrepareArgs &a, const Partition *p,
                                           unsigned row_lanes, int is_own, const uint32_t *to,
                                           int value) {
    int k = own_k(p);
    uint64_t route = __shfl_sync(~0u, (unsigned long long)to, max(0, last_lane(row_lanes)));
    if (row_lanes && k < a.top_k)
        ep_store_relaxed_sys32((uint32_t *)route + k, (uint32_t)(is_own ? value : -1) + 2);
}

#define RANKS_IN_TURN 8

/* Send the routes of all rows of a chunk. Routes of neighbouring tokens to one rank are adjacent,
 * and are stored together where the loop runs over ranks. With many ranks most of its turns would
 * be empty; then each team takes its own rows in turn. */
__device__ __forceinline__ void send_routes(const EpPrepareArgs &a, const Partition *p,
                                            const Own &o, const uint32_t *to, int value) {
    if (a.group.size <= RANKS_IN_TURN) {
#pragma unroll 1
        for (int r = 0; r < a.group.size; r++) {
            unsigned row_lanes = __ballot_sync(~0u, o.owner == r) & team_lanes(p);
            send_route(a, p, row_lanes, o.owner == r, to, value);
        }
        return;
    }
    unsigned left = o.firsts & team_lanes(p);
#pragma unroll 1
    for (; __any_sync(~0u, left); left &= left - 1) {
        unsigned row_lanes = left & -left;
        send_route(a, p, row_lanes, (o.owners & row_lanes) != 0, to, value);
    }
}

/* Returns the lanes that stand for rows to rank r; each lane passes an r of its own. By a warp. */
__device__ __forceinline__ unsigned rows_to(const Own &o, int r) {
    int lane = threadIdx.x % 32;
    unsigned rows = 0;
    unsigned left = __ballot_sync(~0u, o.owner >= 0 && first_lane(o.owners) == lane);
#pragma unroll 1
    for (; left; left &= left - 1) {
        int from = first_lane(left), owner = __shfl_sync(~0u, o.owner, from);
        unsigned same_owner = __shfl_sync(~0u, o.owners, from);
        if (owner == r) rows = same_owner & o.firsts;
    }
    return rows;
}

/* Returns the number of this rank's rows to rank r from the tokens before this warp's, or -1 on
 * timeout. */
__device__ __forceinline__ int rows_before(const EpPrepareArgs &a, const Partition *p, int first,
                                           int r, uint32_t epoch) {
    int column = a.group.num_experts + r, partitions;
    if (first != p->begin)
        partitions = p->base[column];
    else if (!await_partitions_before(a.group, p, column, epoch, 0, &partitions))
        return -1;
    return partitions + p->ranks->rows[r] + count_before(p, column, warps_before());
}

/* Send begins to 32 ranks from rank `at` on: for each of this warp's tokens, the number of rows
 * from the tokens before it. `token` is the warp's first; `before` and `rows` belong to rank `at` +
 * lane. Words for one rank are adjacent and stored together. */
__device__ __forceinline__ void send_some_begins(const EpPrepareArgs &a, const Partition *p, int at,
                                                 int token, int before, unsigned rows,
                                                 uint32_t epoch) {
    int lane = threadIdx.x % 32, tokens_shift = 5 - p->team_shift;
    int i = lane & ((1 << tokens_shift) - 1);
#pragma unroll 1
    for (int from = 0; from < 32 && at + from < a.group.size; from += p->team) {
        int offset = from + (lane >> tokens_shift);
        int begin = __shfl_sync(~0u, before, offset);
        unsigned earlier = __shfl_sync(~0u, rows, offset) & lanes_below(i << p->team_shift);
        if (at + offset < a.group.size && token + i < p->end && ep_is_alive(at + offset))
            ep_store_relaxed_sys(p->ranks->begins[epoch & 1][at + offset] + token + i,
                                 ep_counter(epoch, (uint32_t)(begin + __popc(earlier))));
    }
}

/* Send the begins of a chunk to all ranks. Returns 0 on timeout. */
__device__ __forceinline__ int send_begins(const EpPrepareArgs &a, const Partition *p, const Own &o,
                                           int first, uint32_t epoch) {
    int token = first + ((int)(threadIdx.x & ~31u) >> p->team_shift);
    if (token >= p->end) return 1;
#pragma unroll 1
    for (int at = 0; at < a.group.size; at += 32) {
        int r = at + (int)threadIdx.x % 32;
        unsigned rows = rows_to(o, r);
        int before = r < a.group.size ? rows_before(a, p, first, r, epoch) : 0;
        if (!__all_sync(~0u, before >= 0)) return 0;
        send_some_begins(a, p, at, token, before, rows, epoch);
    }
    return 1;
}

/* Store an entry with one 16-byte store. EpEntry itself is not aligned to 16 bytes, since its
 * readers then load single fields and wait for less. */
__device__ __forceinline__ void store_entry(const EpPrepareArgs &a, int64_t i, const EpEntry &e) {
    static_assert(sizeof(EpEntry) == sizeof(uint4), "as one");
    *((uint4 *)a.plan.entries + i) =
        make_uint4((uint32_t)e.slot, (uint32_t)e.row,
                   (uint16_t)e.owner | (uint32_t)(uint16_t)e.expert << 16, (uint32_t)e.leader);
}

/* Store the entries of a chunk into the plan and send their routes to their owners. */
template <int FORM>
__device__ __forceinline__ void store_chunk(const EpPrepareArgs &a, const Partition *p,
                                            const Own &o, int first, uint32_t epoch) {
    constexpr int FLAT = FORM == EP_ROUTES_FLAT;
    const EpCudaGroup &g = a.group;
    int token = own_token(p, first), k = own_k(p), row = 0, slot = -1, expert = -1;
    const uint32_t *to = NULL;
    if (o.owner >= 0) {
        row = p->base[g.num_experts + o.owner] + o.row;
        to = p->ranks->routes[epoch & 1][o.owner] + (int64_t)row * a.top_k;
        expert = o.expert - ep_owner_first(&a.owners, o.owner);
        if (!FLAT) slot = p->base[o.expert] + o.before;
    }
    if (slot >= ep_slot_limit(&a.shape, expert)) slot = -1;
    send_routes(a, p, o, to, FLAT ? expert : slot);
    int is_leader = find_leader(p, o, slot) == (int)threadIdx.x % 32;
    if (FLAT && is_leader) slot = p->ranks->before[o.owner] + row;
    if (FLAT && is_leader && slot >= ep_row_limit(&a.shape)) slot = -1;
    if (token < p->end && k < a.top_k)
        store_entry(a, (int64_t)token * a.top_k + k,
                    EpEntry{slot, row, (int16_t)o.owner, (int16_t)expert, is_leader});
    if (is_leader && o.owner == g.rank) a.plan.own_token[row] = token;
}

/* Store and send all entries of the partition. Those of the first chunk are numbered, and its
 * begins sent, already. */
template <int FORM, int PLACED>
__device__ __forceinline__ void store_entries(const EpPrepareArgs &a, Partition *p, Own o,
                                              uint32_t epoch) {
#pragma unroll 1
    for (int first = p->begin; first < p->end; first += p->chunk_tokens) {
        store_chunk<FORM>(a, p, o, first, epoch);
        if (first != p->begin) send_begins(a, p, o, first, epoch);
        if (first + p->chunk_tokens >= p->end) return;
        Index index = load_own_index(a, p, first + p->chunk_tokens);
        advance(a, p);
        o = take_entry<PLACED>(a, p, first + p->chunk_tokens, index);
        mark_entries(a, p, &o);
        __syncthreads();
        number_entries(a, p, &o);
    }
}

/* ---- begins and routes of other ranks ------------------------------------------------------ */

/* Returns this thread's first word to copy. All threads of all partitions divide the words, 32
 * adjacent ones to a warp. */
__device__ __forceinline__ int first_word(const EpPrepareArgs &a, const Partition *p) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return (warp * a.group.partitions + p->index) * 32 + lane;
}

__device__ __forceinline__ int word_stride(const EpPrepareArgs &a) {
    return a.group.partitions * PREPARE_THREADS;
}

/* Wait for word i of the routes of SOURCES_AT_ONCE sources from rank `from` on; of source j only if
 * i < end[j]. `routes` are the first source's. Returns 0 on timeout. */
__device__ __forceinline__ int await_routes(const EpPrepareArgs &a, int from,
                                            const uint32_t *routes, int i,
                                            const int end[SOURCES_AT_ONCE],
                                            uint32_t words[SOURCES_AT_ONCE]) {
    int64_t stride = (int64_t)a.group.layout.max_tokens * a.top_k;
    EpTimeout timeout = {0, 0};
    int late;
    do {
        late = -1;
#pragma unroll
        for (int j = 0; j < SOURCES_AT_ONCE; j++)
            words[j] = i < end[j] ? ep_load_relaxed_sys32(routes + j * stride + i) : 1;
#pragma unroll
        for (int j = 0; j < SOURCES_AT_ONCE; j++)
            if (!words[j]) late = from + j;
    } while (late >= 0 &&
             ep_keep_waiting(a.group, &timeout, EpAwaited{late, EP_AWAIT_ROUTES, 0, 1, 0}));
    return late < 0;
}

/* Set end[j] to the words of the routes of source from + j. Returns the most of them. */
__device__ __forceinline__ int count_words(const EpPrepareArgs &a, const Partition *p, int from,
                                           int end[SOURCES_AT_ONCE]) {
    int most = 0;
#pragma unroll
    for (int j = 0; j < SOURCES_AT_ONCE; j++) {
        end[j] = from + j < a.group.size ? p->ranks->incoming[from + j] * a.top_k : 0;
        most = max(most, end[j]);
    }
    return most;
}

/* Copy this block's part of some sources' routes from the window into the plan, and reset the
 * window's words to 0. Flat routes of all sources lie behind each other, these from word *begin on,
 * which moves past them; rows without a slot have none. Returns 0 on timeout. */
template <int FLAT>
__device__ __forceinline__ int receive_routes(const EpPrepareArgs &a, const Partition *p, int from,
                                              uint32_t epoch, int *begin) {
    const EpCudaGroup &g = a.group;
    int64_t stride = (int64_t)g.layout.max_tokens * a.top_k;
    uint32_t *routes = routes_of(a, g.rank, from, epoch);
    int32_t *stored = a.plan.routes + (FLAT ? 0 : from * stride);
    int end[SOURCES_AT_ONCE], most = count_words(a, p, from, end);
    int room = a.plan.sizes.slots * a.top_k;
#pragma unroll 1
    for (int i = first_word(a, p); i < most; i += word_stride(a)) {
        uint32_t words[SOURCES_AT_ONCE];
        int at = *begin + i;
        if (!await_routes(a, from, routes, i, end, words)) return 0;
#pragma unroll
        for (int j = 0; j < SOURCES_AT_ONCE; at += end[j++]) {
            if (i >= end[j]) continue;
            if (!FLAT) stored[j * stride + i] = (int32_t)(words[j] - 2);
            if (FLAT && at < room) stored[at] = (int32_t)(words[j] - 2);
            routes[j * stride + i] = 0;
        }
    }
#pragma unroll
    for (int j = 0; j < SOURCES_AT_ONCE; j++)
        *begin += end[j];
    return 1;
}

/* Store the chain of a team's row into the plan. Lane k of the team has the slot of entry k, -1:
 * none. By a warp. */
__device__ __forceinline__ void store_chain(const EpPrepareArgs &a, const Partition *p, int64_t row,
                                            int has_row, int slot) {
    unsigned slots = __ballot_sync(~0u, slot >= 0) & team_lanes(p);
    unsigned later = slots & ~1u << threadIdx.x % 32;
    int first = __shfl_sync(~0u, slot, max(0, first_lane(slots)));
    int next = __shfl_sync(~0u, slot, max(0, first_lane(later)));
    if (slot >= 0 && later) a.plan.next[slot] = next;
    if (has_row && own_k(p) == 0)
        a.plan.chains[row] = EpChain{slots ? first : -1, slots >> team_begin(p)};
}

/* As receive_routes, for a plan with chains. A row is a team of lanes of one warp. */
__device__ __forceinline__ int receive_chains(const EpPrepareArgs &a, const Partition *p, int from,
                                              uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int64_t tokens = g.layout.max_tokens, stride = tokens * a.top_k;
    uint32_t *routes = routes_of(a, g.rank, from, epoch);
    int end[SOURCES_AT_ONCE], most = count_words(a, p, from, end), k = own_k(p);
#pragma unroll 1
    for (int at = first_word(a, p); ((at & ~31) >> p->team_shift) * a.top_k < most;
         at += word_stride(a)) {
        uint32_t words[SOURCES_AT_ONCE];
        int row = at >> p->team_shift, i = k < a.top_k ? row * a.top_k + k : INT32_MAX;
        if (!__all_sync(~0u, await_routes(a, from, routes, i, end, words))) return 0;
#pragma unroll
        for (int j = 0; j < SOURCES_AT_ONCE; j++) {
            int slot = i < end[j] ? (int)(words[j] - 2) : -1;
            if ((uint32_t)slot >= (uint32_t)a.plan.sizes.slots) slot = -1;
            store_chain(a, p, (from + j) * tokens + row, i < end[j], slot);
            if (i < end[j]) routes[j * stride + i] = 0;
        }
    }
    return 1;
}

/* Wait for the begin of a token of SOURCES_AT_ONCE sources from rank `from` on; of source j only if
 * token < tokens[j]. Returns 0 on timeout. */
__device__ __forceinline__ int await_begins(const EpCudaGroup &g, int from, int token,
                                            const int tokens[SOURCES_AT_ONCE], uint32_t epoch,
                                            uint64_t begins[SOURCES_AT_ONCE]) {
    const uint64_t *words = begins_of(g, g.rank, from, epoch) + token;
    EpTimeout timeout = {0, 0};
    int late;
    uint32_t seen;
    do {
        late = -1, seen = 0;
#pragma unroll
        for (int j = 0; j < SOURCES_AT_ONCE; j++)
            begins[j] = token < tokens[j]
                            ? ep_load_relaxed_sys(words + (int64_t)j * g.layout.max_tokens)
                            : ep_counter(epoch, 0);
#pragma unroll
        for (int j = 0; j < SOURCES_AT_ONCE; j++)
            if (!has_epoch(begins[j], epoch)) late = from + j, seen = (uint32_t)(begins[j] >> 32);
    } while (late >= 0 &&
             ep_keep_waiting(g, &timeout, EpAwaited{late, EP_AWAIT_ROUTES, token, epoch, seen}));
    return late < 0;
}

/* Copy this block's part of some sources' begins into the plan. The begin after the last token is
 * the number of all rows. Returns 0 on timeout. */
__device__ __forceinline__ int receive_begins(const EpPrepareArgs &a, const Partition *p, int from,
                                              uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int tokens[SOURCES_AT_ONCE], most = -1;
#pragma unroll
    for (int j = 0; j < SOURCES_AT_ONCE; j++) {
        tokens[j] = from + j < g.size ? p->ranks->tokens[from + j] : -1;
        most = max(most, tokens[j]);
    }
#pragma unroll 1
    for (int token = first_word(a, p); token <= most; token += word_stride(a)) {
        uint64_t begins[SOURCES_AT_ONCE];
        if (!await_begins(g, from, token, tokens, epoch, begins)) return 0;
#pragma unroll
        for (int j = 0; j < SOURCES_AT_ONCE; j++) {
            if (token > tokens[j]) continue;
            int begin = token < tokens[j] ? (int)begins[j] : p->ranks->incoming[from + j];
            a.plan.begins[(int64_t)(from + j) * (g.layout.max_tokens + 1) + token] = begin;
            if (token == tokens[j]) a.plan.tokens[from + j] = token;
        }
    }
    return 1;
}

/* Copy this block's part of all begins and routes into the plan: begins first, since ranks send
 * them first. */
template <int FORM>
__device__ __forceinline__ void receive_plan(const EpPrepareArgs &a, const Partition *p,
                                             uint32_t epoch) {
    int begin = 0;
#pragma unroll 1
    for (int from = 0; from < a.group.size; from += SOURCES_AT_ONCE) {
        if (!receive_begins(a, p, from, epoch)) return;
        int alive = FORM == EP_ROUTES_CHAINED
                        ? receive_chains(a, p, from, epoch)
                        : receive_routes<FORM == EP_ROUTES_FLAT>(a, p, from, epoch, &begin);
        if (!alive) return;
    }
}

/* ==== kernel ================================================================================ */

/* ---- flat rows ----------------------------------------------------------------------------- */

/* Returns the totals of this rank's experts. */
__device__ __forceinline__ const int32_t *own_total(const EpPrepareArgs &a, const Partition *p) {
    return p->total + ep_owner_first(&a.owners, a.group.rank);
}

/* Publish a plan of flat rows. By the last block to leave, since only then all rows are known.
 * After a failure the plan is undefined and not read. */
__device__ void complete_flat(const EpPrepareArgs &a, const Partition *p, uint32_t epoch) {
    __threadfence();
    if (ep_failed(a.group)) return;
    int64_t step = step_under_way(a);
    publish_flat(
        a, step, own_total(a, p), [&](int source) { return p->ranks->incoming[source]; },
        [&](int e, int source) { return counted(a, e, source, epoch); });
    if (threadIdx.x == 0) publish_step(a, step, p->ranks->num_tokens, epoch);
}

/* ---- kernel -------------------------------------------------------------------------------- */

template <int FORM, int PLACED>
__device__ __forceinline__ void prepare_partition(const EpPrepareArgs &a, Partition *p,
                                                  const Index &index, uint32_t epoch) {
    constexpr int FLAT = FORM == EP_ROUTES_FLAT;
    Own o = count_entries<PLACED>(a, p, index, epoch);
    int alive = exchange_counts(a, p, epoch);
    number_entries(a, p, &o);
    alive = alive && send_begins(a, p, o, p->begin, epoch);
    alive = alive && await_counts(a, p, epoch);
    if (!__syncthreads_and(alive)) return;
#pragma unroll 1
    for (int r = threadIdx.x / 32; r < a.group.size && !FLAT; r += PREPARE_WARPS)
        lay_slabs(a, p, r);
    if (!FLAT) __syncthreads();
    store_entries<FORM, PLACED>(a, p, o, epoch);
    receive_plan<FORM>(a, p, epoch);
}

template <int FLAT>
__device__ __forceinline__ void publish_partitions(const EpPrepareArgs &a, Partition *p,
                                                   uint32_t epoch) {
    send_arrivals(a.group, epoch);
    int64_t step = step_under_way(a);
    int alive = await_all(a, p, epoch);
    if (!__syncthreads_and(alive)) return;
    if (threadIdx.x / 32 == 1) publish_rows(a, p, step, epoch);
    if (FLAT) return; /* complete_flat publishes flat rows at the end */
    publish_all_slabs(a, step, own_total(a, p),
                      [&](int e, int source) { return counted(a, e, source, epoch); });
    if (threadIdx.x == 0) publish_step(a, step, p->ranks->num_tokens, epoch);
}

__device__ __forceinline__ Partition open_partition(const EpPrepareArgs &a, uint4 *memory) {
    const EpCudaGroup &g = a.group;
    int tokens = count_tokens(a);
    Partition p;
    p.index = blockIdx.x;
    partition_range(a, tokens, p.index, &p.begin, &p.end);
    p.columns = g.num_experts + g.size;
    p.ranks = (RankTables *)memory;
    p.table = (uint8_t *)(p.ranks + 1);
    if (threadIdx.x == 0) p.ranks->num_tokens = tokens;
    p.base = (int32_t *)(p.table + PREPARE_WARPS * p.columns);
    p.total = p.base + p.columns;
    p.team_shift = a.top_k > 1 ? 32 - __clz(a.top_k - 1) : 0;
    p.team = 1 << p.team_shift;
    p.chunk_tokens = PREPARE_THREADS >> p.team_shift;
    return p;
}

/* Load the first indices before ep_begin_operation, so that its loads and these overlap. */
template <int FORM, int PLACED>
__device__ __forceinline__ void prepare(const EpPrepareArgs &a, uint4 *memory) {
    constexpr int FLAT = FORM == EP_ROUTES_FLAT;
    Partition p = open_partition(a, memory);
    Index index = load_own_index(a, &p, p.begin);
    EpLoadedHeader header = ep_load_header(a.group, a.plan);
    uint32_t epoch;
    init_tables(a, &p);
    if (!ep_begin_operation(a.group, a.plan, header, &epoch)) {
        ep_report_plan(a.group, a.plan);
        ep_end_operation(a.group, epoch, 0);
        return;
    }
    if (is_publisher(a, &p))
        publish_partitions<FLAT>(a, &p, epoch);
    else
        prepare_partition<FORM, PLACED>(a, &p, index, epoch);
    if (ep_end_operation(a.group, epoch, FLAT || p.ranks->has_bad) != EP_LAST_PUBLISHES) return;
    if (threadIdx.x == 0) report_all_bad_indices(a);
    if (FLAT) complete_flat(a, &p, epoch);
}

template <int PLACED>
__global__ void __launch_bounds__(PREPARE_THREADS)
    prepare_slabs(const __grid_constant__ EpPrepareArgs a) {
    extern __shared__ uint4 memory[];
    prepare<EP_ROUTES_DENSE, PLACED>(a, ep_keep_shared(memory));
}

template <int PLACED>
__global__ void __launch_bounds__(PREPARE_THREADS)
    prepare_chained(const __grid_constant__ EpPrepareArgs a) {
    extern __shared__ uint4 memory[];
    prepare<EP_ROUTES_CHAINED, PLACED>(a, ep_keep_shared(memory));
}

template <int PLACED>
__global__ void __launch_bounds__(PREPARE_THREADS)
    prepare_flat(const __grid_constant__ EpPrepareArgs a) {
    extern __shared__ uint4 memory[];
    prepare<EP_ROUTES_FLAT, PLACED>(a, ep_keep_shared(memory));
}

template <int PLACED> static int open_prepare(int shared_bytes) {
    int error = ep_open_kernel(prepare_slabs<PLACED>, shared_bytes);
    if (!error) error = ep_open_kernel(prepare_chained<PLACED>, shared_bytes);
    return error ? error : ep_open_kernel(prepare_flat<PLACED>, shared_bytes);
}

extern "C" int EP_VARIANT(ep_cuda_open_prepare)(int shared_bytes) {
    int error = open_prepare<0>(shared_bytes);
    return error ? error : open_prepare<1>(shared_bytes);
}

template <int PLACED> static int launch_prepare(const EpPrepareArgs *a, int blocks, void *stream) {
    size_t shared = (size_t)ep_cuda_prepare_shared(a->group.num_experts, a->group.size);
    EpRouteForm form = a->plan.sizes.form;
    auto kernel = form == EP_ROUTES_FLAT      ? prepare_flat<PLACED>
                  : form == EP_ROUTES_CHAINED ? prepare_chained<PLACED>
                                              : prepare_slabs<PLACED>;
    return ep_launch(kernel, blocks, PREPARE_THREADS, shared, stream, *a);
}

extern "C" int EP_VARIANT(ep_cuda_launch_prepare)(const void *args, int blocks, void *stream) {
    const EpPrepareArgs *a = (const EpPrepareArgs *)args;
    static_assert(sizeof(RankTables) <= EP_RANK_TABLES_BYTES, "groups are created by this size");
    static_assert(PREPARE_WARPS == EP_PREPARE_WARPS, "groups are created by this number");
    return a->copies.of ? launch_prepare<1>(a, blocks, stream)
                        : launch_prepare<0>(a, blocks, stream);
}

EP_VARIANT_END
