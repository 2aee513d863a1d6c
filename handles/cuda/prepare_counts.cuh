/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_CUDA_PREPARE_COUNTS_CUH
#define EP_HANDLES_CUDA_PREPARE_COUNTS_CUH

/**
 * Counts of ep_prepare: of a partition, over the partitions of a rank, over all ranks.
 */

#include "handles/cuda/prepare_partition.cuh"

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
__device__ void count_later_chunks(const EpPrepareArgs &a, Partition *p) {
    Index next = load_own_index(a, p, p->begin + p->chunk_tokens);
#pragma unroll 1
    for (int c = threadIdx.x; c < p->columns; c += PREPARE_THREADS)
        p->base[c] = 0;
    __syncthreads();
    for (int first = p->begin + p->chunk_tokens; first < p->end; first += p->chunk_tokens) {
        Index index = next;
        next = load_own_index(a, p, first + p->chunk_tokens);
        Own o = take_entry(a, p, index);
        check_index(a, p, first, index);
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
__device__ __forceinline__ Own count_entries(const EpPrepareArgs &a, Partition *p,
                                             const Index &index, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    Own o = take_entry(a, p, index);
    mark_entries(a, p, &o);
    check_index(a, p, p->begin, index);
    __syncthreads();
    int has_more = p->begin + p->chunk_tokens < p->end;
    if (has_more) count_later_chunks(a, p);
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
            if (from + i < g.size)
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
    int alive = r >= g.size || ep_await_arrival(g, r, epoch, NULL, NULL);
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
    return ep_load_relaxed_sys(counts_of(a.group, a.group.rank, source, epoch) + first + e);
}

/* Publish the number of rows to other ranks, from other ranks, and of rows that stay. By a warp. */
__device__ void publish_rows(const EpPrepareArgs &a, const Partition *p, int64_t step,
                             uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    const uint64_t *own = counts_of(g, g.rank, g.rank, epoch) + g.num_experts;
    int sent = 0, local = (int)ep_load_relaxed_sys(own + g.rank);
    for (int r = threadIdx.x % 32; r < g.size; r += 32)
        sent += r == g.rank ? 0 : (int)ep_load_relaxed_sys(own + r);
    sent = warp_sum(sent);
    if (threadIdx.x % 32) return;
    publish_row_counts(a, step, sent, p->total[g.num_experts + g.rank] - local, local);
}

#endif
