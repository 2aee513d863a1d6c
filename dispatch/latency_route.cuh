/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_LATENCY_ROUTE_CUH
#define EP_DISPATCH_LATENCY_ROUTE_CUH

/**
 * Routing in latency mode's dispatch. A source tells each rank how many entries it has for each of
 * the rank's experts, and with each row how many entries for its experts come before. From the
 * first, all of which each receiving block reads, follows where each source's entries begin in
 * every slab; with the second, each entry's slot.
 *
 * At these sizes it is not bytes that take the time but instructions that wait for each other. So
 * shared memory is reached by its own instructions, through offsets that the host has laid out;
 * nothing is divided by what is first known here; and loads that need not follow each other do not.
 */

#include "handles/latency.cuh"

/* ---- shared memory ------------------------------------------------------------------------- */

typedef struct DeskWords {
    int tokens; /* of this rank: known to who sends */
    int32_t source_tokens[EP_CUDA_MAX_RANKS], source_rows[EP_CUDA_MAX_RANKS];
    int32_t flat_begin[EP_CUDA_MAX_RANKS];
    int32_t most_tokens;           /* of any source */
    int32_t heads;                 /* that have been taken */
    int32_t sent;                  /* rows to other ranks */
    uint32_t header[EP_MAX_TOP_K]; /* of the record under work: without its weights */
    char *to[EP_CUDA_MAX_RANKS];   /* where it goes in each rank's window: first those of its row */
    int32_t num_to;                /* how many these are */
} DeskWords;

/* All that the kernel has asked for: see EpDeskLayout. */
__device__ __forceinline__ char *desk_memory(void);

__device__ __forceinline__ DeskWords *desk(void) {
    return (DeskWords *)desk_memory();
}

__device__ __forceinline__ int16_t *desk_experts(const EpLatencyScatterArgs &a) {
    return (int16_t *)(desk_memory() + a.desk.experts);
}

__device__ __forceinline__ int32_t *desk_counts(const EpLatencyScatterArgs &a) {
    return (int32_t *)(desk_memory() + a.desk.counts);
}

__device__ __forceinline__ int32_t *desk_total(const EpLatencyScatterArgs &a) {
    return (int32_t *)(desk_memory() + a.desk.total);
}

__device__ __forceinline__ int32_t *desk_offset(const EpLatencyScatterArgs &a) {
    return (int32_t *)(desk_memory() + a.desk.offset);
}

static EpDeskLayout lay_out_desk(const EpPlanShape &s, int64_t entries, int64_t staged_bytes) {
    int64_t ranks = s.num_ranks, local = s.num_local, experts = s.num_experts;
    int64_t counts = experts > ranks * local ? experts : ranks * local;
    int64_t at = 0;
    auto take = [&](int64_t bytes) {
        int64_t offset = at;
        at = ep_round_up(at + bytes, 16);
        return (int32_t)offset;
    };
    EpDeskLayout desk;
    take(sizeof(DeskWords));
    desk.experts = take(2 * entries);
    desk.counts = take(4 * (counts + ranks));
    desk.total = take(4 * local);
    desk.offset = take(4 * local);
    desk.staged = take(staged_bytes);
    desk.bytes = (int32_t)at; /* handles that have more entries than fit are refused */
    return desk;
}

/* ---- this rank's entries ------------------------------------------------------------------- */

/* Before its first barrier a block has some words to wait for; these warps have none. */
#define ENTRIES_THREAD 128
#define ENTRIES_THREADS (THREADS - ENTRIES_THREAD)
#define LOADED_AT_ONCE 4
#define TOKENS_THREAD 96 /* who asks how many tokens there are, as in latency_enter */

/* All of this rank's entries into shared memory; those of rows past the step's tokens, too: their
 * number may be on its way. */
__device__ __forceinline__ void keep_entries(const EpLatencyScatterArgs &a) {
    int entries = a.route.num_rows * a.route.top_k;
#pragma unroll 1
    for (int i = (int)threadIdx.x - ENTRIES_THREAD; i < entries;
         i += LOADED_AT_ONCE * ENTRIES_THREADS) {
        Index index[LOADED_AT_ONCE];
#pragma unroll
        for (int j = 0; j < LOADED_AT_ONCE; j++)
            if (i + j * ENTRIES_THREADS < entries)
                index[j] = load_index(a.route, i + j * ENTRIES_THREADS);
#pragma unroll
        for (int j = 0; j < LOADED_AT_ONCE; j++)
            if (i + j * ENTRIES_THREADS < entries)
                desk_experts(a)[i + j * ENTRIES_THREADS] = (int16_t)expert_of(a.route, index[j]);
    }
}

/* What a block needs to send, before its first barrier; the first one counts. */
__device__ __forceinline__ void open_desk(const EpLatencyScatterArgs &a) {
    if (threadIdx.x >= ENTRIES_THREAD) keep_entries(a);
    if (threadIdx.x == TOKENS_THREAD) desk()->tokens = count_tokens(a.route);
    if (blockIdx.x) return;
    int columns = a.route.group.num_experts + a.route.group.size;
#pragma unroll 1
    for (int i = threadIdx.x; i < columns; i += THREADS)
        desk_counts(a)[i] = 0;
}

__device__ __forceinline__ int owner_of(const EpLatencyScatterArgs &a, int expert) {
    int owner = ep_owner(&a.route.owners, max(0, expert));
    return expert < 0 ? -1 : owner;
}

/* ---- heads --------------------------------------------------------------------------------- */

/* Where there are bad indices, which is rare. By a warp. */
__device__ __noinline__ void tell_of_bad(const EpLatencyScatterArgs &a) {
    int lane = threadIdx.x % 32, count = 0, first = INT32_MAX;
#pragma unroll 1
    for (int i = lane; i < desk()->tokens * a.route.top_k; i += 32) {
        if (desk_experts(a)[i] != BAD_EXPERT) continue;
        count++;
        first = min(first, i);
    }
    count = warp_sum(count), first = __reduce_min_sync(~0u, first);
    if (lane == 0) tell_bad_indices(a.route, (unsigned long long)count, (unsigned)first);
}

/* Entries for each expert and rows to each rank, into counts, which are 0. The entries of a token
 * are neighbouring lanes'. */
__device__ __forceinline__ void count_all(const EpLatencyScatterArgs &a) {
    int32_t *counts = desk_counts(a), *rows = counts + a.route.group.num_experts;
    int lane = threadIdx.x % 32, shift = a.team_shift, k = lane & ((1 << shift) - 1), bad = 0;
#pragma unroll 1
    for (int from = ((int)threadIdx.x - lane) >> shift; from < desk()->tokens;
         from += THREADS >> shift) {
        int token = from + (lane >> shift), expert = NO_EXPERT;
        if (token < desk()->tokens && k < a.route.top_k)
            expert = desk_experts(a)[token * a.route.top_k + k];
        int owner = owner_of(a, expert);
        unsigned same = __match_any_sync(~0u, owner * 32 + (lane >> shift));
        if (owner >= 0) atomicAdd(&counts[expert], 1);
        if (owner >= 0 && __ffs((int)same) - 1 == lane) atomicAdd(&rows[owner], 1);
        bad |= expert == BAD_EXPERT;
    }
    if (!__syncthreads_and(!bad) && threadIdx.x < 32) tell_of_bad(a);
}

#define HEAD_UNITS (EP_HEAD_COUNTS / 4) /* before the counts */

/* Of the head for rank r, whose experts are `count` from `first` on. */
__device__ __forceinline__ uint4 head_unit(const EpLatencyScatterArgs &a, int r, int first,
                                           int count, int sent, int unit) {
    const EpCudaGroup &g = a.route.group;
    static_assert(EP_HEAD_DIGEST == 0 && EP_HEAD_FACTS == 1 && EP_HEAD_TOKENS == 3, "unit 0");
    static_assert(EP_HEAD_ROWS == 4 && EP_HEAD_SENT == 5 && HEAD_UNITS == 2, "unit 1");
    if (unit == 0)
        return make_uint4(g.digest, (uint32_t)g.facts, (uint32_t)(g.facts >> 32),
                          (uint32_t)desk()->tokens);
    if (unit == 1)
        return make_uint4((uint32_t)desk_counts(a)[g.num_experts + r], (uint32_t)sent, 0, 0);
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int e = (unit - HEAD_UNITS) * 4 + i;
        word[i] = e < count ? (uint32_t)desk_counts(a)[first + e] : 0;
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

__device__ __forceinline__ void send_heads(const EpLatencyScatterArgs &a, uint64_t flag) {
    const EpCudaGroup &g = a.route.group;
    int sent = 0;
    count_all(a);
#pragma unroll 1
    for (int r = (int)(threadIdx.x % 32); r < g.size; r += 32)
        sent += r == g.rank ? 0 : desk_counts(a)[g.num_experts + r];
    sent = warp_sum(sent);
#pragma unroll 1
    for (int r = (int)(threadIdx.x / 32); r < g.size; r += WARPS) {
        int first = ep_owner_first(&a.route.owners, r), count = ep_owner_count(&a.route.owners, r);
        send_head(g, a.latency, r, EP_HEAD_COUNTS + count, flag,
                  [&](int unit) { return head_unit(a, r, first, count, sent, unit); });
    }
}

/* ---- what the sources say ------------------------------------------------------------------ */

__device__ __forceinline__ void take_unit(const EpLatencyScatterArgs &a, int source, int unit,
                                          const uint4 &x) {
    const uint32_t word[4] = {x.x, x.y, x.z, x.w};
    int local = a.route.shape.num_local;
    if (unit == 0) desk()->source_tokens[source] = (int)x.w;
    if (unit == 0) atomicMax(&desk()->most_tokens, (int)x.w);
    if (unit == 1) desk()->source_rows[source] = (int)x.x;
    if (unit == 1 && source == a.route.group.rank) desk()->sent = (int)x.y;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int e = (unit - HEAD_UNITS) * 4 + i;
        if (unit >= HEAD_UNITS && e < local) desk_counts(a)[source * local + e] = (int)word[i];
    }
}

/* Counts of each source become those of the sources before. Batched slabs lie where they do. */
__device__ __forceinline__ void add_sources(const EpLatencyScatterArgs &a) {
    const EpPlanShape &s = a.route.shape;
#pragma unroll 1
    for (int e = threadIdx.x; e < s.num_local; e += THREADS) {
        int before = 0;
        int32_t *at = desk_counts(a) + e;
#pragma unroll 4
        for (int source = 0; source < a.route.group.size; source++, at += s.num_local) {
            int count = *at;
            *at = before;
            before += count;
        }
        desk_total(a)[e] = before;
        desk_offset(a)[e] = (int)min(e * s.rows_per_expert, (int64_t)INT32_MAX);
    }
}

/* By a warp: where expert-major slabs begin. */
__device__ __forceinline__ void lay_desk_slabs(const EpLatencyScatterArgs &a) {
    int lane = threadIdx.x % 32, local = a.route.shape.num_local;
    int64_t start = 0;
#pragma unroll 1
    for (int at = 0; at < local; at += 32) {
        Slab slab = lay_slab(a.route, desk_total(a), local, at, &start);
        if (at + lane < local)
            desk_offset(a)[at + lane] = (int)min(slab.offset, (int64_t)INT32_MAX);
    }
}

/* By a warp: where each source's flat rows begin. */
__device__ __forceinline__ void lay_desk_rows(const EpLatencyScatterArgs &a) {
    int lane = threadIdx.x % 32, begin = 0, size = a.route.group.size;
#pragma unroll 1
    for (int at = 0; at < size; at += 32) {
        int rows = at + lane < size ? desk()->source_rows[at + lane] : 0;
        int through = ep_warp_prefix(rows);
        if (at + lane < size) desk()->flat_begin[at + lane] = begin + through - rows;
        begin += __shfl_sync(~0u, through, 31);
    }
}

/* Before the block's first barrier. */
__device__ __forceinline__ void expect_heads(void) {
    if (threadIdx.x == TOKENS_THREAD) desk()->heads = desk()->most_tokens = 0;
}

/* By all threads of a block; 0: some head is not to be had. A warp that waits for others' heads
 * does something else meanwhile, over and over. */
template <typename Meanwhile>
__device__ __forceinline__ int take_heads(const EpLatencyScatterArgs &a, uint64_t flag,
                                          Meanwhile meanwhile) {
    const EpPrepareArgs &route = a.route;
    const EpCudaGroup &g = route.group;
    int alive = 1, words = EP_HEAD_COUNTS + route.shape.num_local;
#pragma unroll 1
    for (int r = (int)(threadIdx.x / 32); r < g.size && alive; r += WARPS) {
        alive = take_head(g, a.latency, r, words, flag,
                          [&](int unit, const uint4 &x) { take_unit(a, r, unit, x); });
        if (threadIdx.x % 32 == 0) atomicAdd(&desk()->heads, alive ? 1 : EP_CUDA_MAX_RANKS);
    }
    while (__any_sync(~0u, *(volatile int32_t *)&desk()->heads < g.size))
        meanwhile();
    if (!__syncthreads_and(alive)) return 0;
    add_sources(a);
    __syncthreads();
    if (route.shape.layout == EP_LAYOUT_BATCHED) return 1;
    if (threadIdx.x < 32)
        route.shape.layout == EP_LAYOUT_FLAT ? lay_desk_rows(a) : lay_desk_slabs(a);
    __syncthreads();
    return 1;
}

/* ---- what is told -------------------------------------------------------------------------- */

/* Entries of a source for a local expert. */
__device__ __forceinline__ int count_of(const EpLatencyScatterArgs &a, int e, int source) {
    int local = a.route.shape.num_local, next = (source + 1) * local + e;
    return (source + 1 < a.route.group.size ? desk_counts(a)[next] : desk_total(a)[e]) -
           desk_counts(a)[source * local + e];
}

/* What every layout tells. By a warp. */
__device__ __forceinline__ void publish_sizes(const EpLatencyScatterArgs &a, int64_t step) {
    const EpCudaGroup &g = a.route.group;
    int lane = threadIdx.x % 32, received = 0;
#pragma unroll 1
    for (int r = lane; r < g.size; r += 32) {
        a.route.plan.tokens[r] = desk()->source_tokens[r];
        received += r == g.rank ? 0 : desk()->source_rows[r];
    }
    received = warp_sum(received);
    if (lane == 0)
        publish_row_counts(a.route, step, desk()->sent, received, desk()->source_rows[g.rank]);
}

/* By a block that has taken the heads, of another layout than FLAT. */
__device__ __forceinline__ void publish_routing(const EpLatencyScatterArgs &a) {
    int64_t step = step_under_way(a.route);
    int warp = (int)(threadIdx.x / 32);
    if (warp == 0) publish_slabs(a.route, step, desk_total(a));
    if (warp == 1) publish_sizes(a, step);
    __syncthreads();
    publish_sources(a.route, [&](int e, int source) { return count_of(a, e, source); });
    if (threadIdx.x == 0) publish_step(a.route, step, desk()->source_tokens[a.route.group.rank]);
}

/* Flat rows that come, for a block that has taken the heads; and those of them that are kept. */
__device__ __forceinline__ int64_t flat_rows(const EpLatencyScatterArgs &a) {
    int last = a.route.group.size - 1;
    return desk()->flat_begin[last] + (int64_t)desk()->source_rows[last];
}

__device__ __forceinline__ int64_t flat_rows_kept(const EpLatencyScatterArgs &a) {
    return min(flat_rows(a), slot_limit(a.route, 0));
}

/* By such a block, if all are kept. */
__device__ __forceinline__ void publish_flat(const EpLatencyScatterArgs &a) {
    const EpPrepareArgs &route = a.route;
    int64_t step = step_under_way(route), rows = flat_rows(a);
    int warp = (int)(threadIdx.x / 32);
    if (warp == 0) publish_flat_experts(route, step, desk_total(a));
    if (warp == 1) publish_sizes(a, step);
    if (threadIdx.x == 0) publish_totals(route, step, rows, rows, 0);
    __syncthreads();
    publish_sources(route, [&](int e, int source) { return count_of(a, e, source); });
    __syncthreads();
    if (threadIdx.x == 0) publish_step(route, step, desk()->source_tokens[route.group.rank]);
}

/* Entries of the flat rows that are kept, which all blocks have put into the plan. */
__device__ void count_kept(const EpPrepareArgs &a) {
    const EpCudaGroup &g = a.group;
#pragma unroll 1
    for (int e = threadIdx.x; e < a.shape.num_local; e += THREADS)
        a.plan.expert_counts[e] = 0;
    clear_sources(a);
    __syncthreads();
#pragma unroll 1
    for (int s = 0; s < g.size; s++) {
        const int32_t *slot = a.plan.begins + (int64_t)s * (g.layout.max_tokens + 1);
        const int32_t *routes = a.plan.routes + (int64_t)s * g.layout.max_tokens * a.top_k;
#pragma unroll 1
        for (int i = threadIdx.x; i < desk()->source_tokens[s] * a.top_k; i += THREADS) {
            int local = __ldcg(routes + i);
            if (local < 0 || __ldcg(slot + i / a.top_k) < 0) continue;
            atomicAdd(&a.plan.expert_counts[local], 1);
            count_source(a, local, s);
        }
    }
    __syncthreads();
}

/* By the last block, if not: only now is it known which entries the rows have that are kept. */
__device__ __noinline__ void publish_flat_kept(const EpLatencyScatterArgs &a) {
    const EpPrepareArgs &route = a.route;
    __threadfence();
    if (*(volatile uint32_t *)&route.group.state->failed) return;
    int64_t step = step_under_way(route), rows = flat_rows(a), kept = flat_rows_kept(a);
    if (threadIdx.x < 32) publish_sizes(a, step);
    if (threadIdx.x == 0) publish_totals(route, step, kept, rows, rows - kept);
    count_kept(route);
    if (threadIdx.x < 32) publish_flat_experts(route, step, NULL);
    __syncthreads();
    if (threadIdx.x == 0) publish_step(route, step, desk()->source_tokens[route.group.rank]);
}

#endif
