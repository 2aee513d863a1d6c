/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_CUDA_LATENCY_ROUTE_CUH
#define EP_DISPATCH_CUDA_LATENCY_ROUTE_CUH

/**
 * Routing in latency mode's dispatch. In a head, a source sends each rank its number of entries for
 * each of the rank's experts; with each row, its number of earlier entries for the row's experts.
 * Each receiving block reads all heads and computes where each source's entries begin in every
 * slab. With the numbers in a row's header follows each entry's slot.
 *
 * At these sizes not bytes take the time but instructions that wait for each other. So shared
 * memory is accessed by its own instructions, at offsets that the host computes; nothing is divided
 * by a value first known here; and independent loads are issued together.
 */

#include "dispatch/cuda/latency_scatter.h"
#include "handles/cuda/latency.cuh"

/* ---- sizes --------------------------------------------------------------------------------- */

/* These sizes fit an int: 32-bit arithmetic takes fewer instructions. */

__device__ __forceinline__ int row_bytes_of(const EpLatencyScatterArgs &a) {
    return (int)a.t.row_bytes;
}

__device__ __forceinline__ int scale_bytes_of(const EpLatencyScatterArgs &a) {
    return (int)a.t.scale_bytes;
}

/* ---- shared memory ------------------------------------------------------------------------- */

/* Returns the dynamic shared memory of the kernel: see EpWorkspaceLayout. */
__device__ __forceinline__ char *workspace_memory(void);

__device__ __forceinline__ EpWorkspace *workspace(void) {
    return (EpWorkspace *)workspace_memory();
}

__device__ __forceinline__ int16_t *workspace_experts(const EpLatencyScatterArgs &a) {
    return (int16_t *)(workspace_memory() + a.workspace.experts);
}

__device__ __forceinline__ int32_t *workspace_counts(const EpLatencyScatterArgs &a) {
    return (int32_t *)(workspace_memory() + a.workspace.counts);
}

__device__ __forceinline__ int32_t *workspace_total(const EpLatencyScatterArgs &a) {
    return (int32_t *)(workspace_memory() + a.workspace.total);
}

__device__ __forceinline__ int32_t *workspace_offset(const EpLatencyScatterArgs &a) {
    return (int32_t *)(workspace_memory() + a.workspace.offset);
}

/* ---- this rank's entries ------------------------------------------------------------------- */

/* Warps before this thread wait for words of memory before the block's first barrier; the others
 * load entries. */
#define ENTRIES_THREAD 128
#define ENTRIES_THREADS (LATENCY_THREADS - ENTRIES_THREAD)
#define LOADED_AT_ONCE 4
#define TOKENS_THREAD 96 /* loads the number of tokens; see latency_enter */

/* Load the experts of all this rank's entries into the workspace. Rows past the step's tokens are
 * included, since the number of tokens may not be known yet. */
__device__ __forceinline__ void load_entries(const EpLatencyScatterArgs &a) {
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
                workspace_experts(a)[i + j * ENTRIES_THREADS] =
                    (int16_t)expert_of(a.route, index[j]);
    }
}

/* Load what a block needs to send, before its first barrier. The first block, which counts entries,
 * clears the counts. */
__device__ __forceinline__ void open_workspace(const EpLatencyScatterArgs &a) {
    if (threadIdx.x >= ENTRIES_THREAD) load_entries(a);
    if (threadIdx.x == TOKENS_THREAD) workspace()->tokens = count_tokens(a.route);
    if (blockIdx.x) return;
    int columns = a.route.group.num_experts + a.route.group.size;
#pragma unroll 1
    for (int i = threadIdx.x; i < columns; i += LATENCY_THREADS)
        workspace_counts(a)[i] = 0;
}

/* Leave each expert to the lowest k of a token that names it. Each thread has tokens of its own. By
 * all threads of the block, after its first barrier. */
__device__ __noinline__ void merge_duplicates(const EpLatencyScatterArgs &a) {
#pragma unroll 1
    for (int row = (int)threadIdx.x; row < a.route.num_rows; row += LATENCY_THREADS) {
        int16_t *experts = workspace_experts(a) + row * a.route.top_k;
#pragma unroll 1
        for (int k = 1; k < a.route.top_k; k++)
#pragma unroll 1
            for (int lower = 0; lower < k && experts[k] >= 0; lower++)
                if (experts[lower] == experts[k]) experts[k] = NO_EXPERT;
    }
    __syncthreads();
}

__device__ __forceinline__ int owner_of(const EpLatencyScatterArgs &a, int expert) {
    int owner = ep_owner(&a.route.owners, max(0, expert));
    return expert < 0 ? -1 : owner;
}

/* ---- heads --------------------------------------------------------------------------------- */

/* Report bad indices, which are rare. By a warp. */
__device__ __noinline__ void publish_bad(const EpLatencyScatterArgs &a) {
    int lane = threadIdx.x % 32, count = 0, first = INT32_MAX;
#pragma unroll 1
    for (int i = lane; i < workspace()->tokens * a.route.top_k; i += 32) {
        if (workspace_experts(a)[i] != BAD_EXPERT) continue;
        count++;
        first = min(first, i);
    }
    count = warp_sum(count), first = __reduce_min_sync(~0u, first);
    if (lane == 0) report_bad_indices(a.route, (unsigned long long)count, (unsigned)first);
}

/* Count the entries for each expert and the rows to each rank, in counts, which are 0. The entries
 * of a token lie in neighbouring lanes. By all threads of the block. */
__device__ __forceinline__ void count_entries(const EpLatencyScatterArgs &a) {
    int32_t *counts = workspace_counts(a), *rows = counts + a.route.group.num_experts;
    int lane = threadIdx.x % 32, shift = a.team_shift, k = lane & ((1 << shift) - 1), bad = 0;
#pragma unroll 1
    for (int from = ((int)threadIdx.x - lane) >> shift; from < workspace()->tokens;
         from += LATENCY_THREADS >> shift) {
        int token = from + (lane >> shift), expert = NO_EXPERT;
        if (token < workspace()->tokens && k < a.route.top_k)
            expert = workspace_experts(a)[token * a.route.top_k + k];
        int owner = owner_of(a, expert);
        unsigned same = __match_any_sync(~0u, owner * 32 + (lane >> shift));
        if (owner >= 0) atomicAdd(&counts[expert], 1);
        if (owner >= 0 && __ffs((int)same) - 1 == lane) atomicAdd(&rows[owner], 1);
        bad |= expert == BAD_EXPERT;
    }
    if (!__syncthreads_and(!bad) && threadIdx.x < 32) publish_bad(a);
}

#define HEAD_UNITS (EP_HEAD_COUNTS / 4) /* before the counts */

/* Returns a unit of the head for rank r, which owns `count` experts from `first` on. */
__device__ __forceinline__ uint4 head_unit(const EpLatencyScatterArgs &a, int r, int first,
                                           int count, int sent, int unit) {
    const EpCudaGroup &g = a.route.group;
    static_assert(EP_HEAD_DIGEST == 0 && EP_HEAD_FACTS == 1 && EP_HEAD_TOKENS == 3, "unit 0");
    static_assert(EP_HEAD_ROWS == 4 && EP_HEAD_SENT == 5 && HEAD_UNITS == 2, "unit 1");
    if (unit == 0)
        return make_uint4(g.digest, (uint32_t)g.facts, (uint32_t)(g.facts >> 32),
                          (uint32_t)workspace()->tokens);
    if (unit == 1)
        return make_uint4((uint32_t)workspace_counts(a)[g.num_experts + r], (uint32_t)sent, 0, 0);
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int e = (unit - HEAD_UNITS) * 4 + i;
        word[i] = e < count ? (uint32_t)workspace_counts(a)[first + e] : 0;
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

__device__ __forceinline__ void send_heads(const EpLatencyScatterArgs &a, uint64_t flag) {
    const EpCudaGroup &g = a.route.group;
    int sent = 0;
    count_entries(a);
#pragma unroll 1
    for (int r = (int)(threadIdx.x % 32); r < g.size; r += 32)
        sent += r == g.rank ? 0 : workspace_counts(a)[g.num_experts + r];
    sent = warp_sum(sent);
#pragma unroll 1
    for (int r = (int)(threadIdx.x / 32); r < g.size; r += LATENCY_WARPS) {
        int first = ep_owner_first(&a.route.owners, r), count = ep_owner_count(&a.route.owners, r);
        send_head(g, a.latency, r, EP_HEAD_COUNTS + count, flag,
                  [&](int unit) { return head_unit(a, r, first, count, sent, unit); });
    }
}

/* ---- heads of the sources ------------------------------------------------------------------ */

__device__ __forceinline__ void take_unit(const EpLatencyScatterArgs &a, int source, int unit,
                                          const uint4 &x) {
    const uint32_t word[4] = {x.x, x.y, x.z, x.w};
    int local = a.route.shape.num_local;
    if (unit == 0) workspace()->source_tokens[source] = (int)x.w;
    if (unit == 0) atomicMax(&workspace()->most_tokens, (int)x.w);
    if (unit == 1) workspace()->source_rows[source] = (int)x.x;
    if (unit == 1 && source == a.route.group.rank) workspace()->sent = (int)x.y;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int e = (unit - HEAD_UNITS) * 4 + i;
        if (unit >= HEAD_UNITS && e < local) workspace_counts(a)[source * local + e] = (int)word[i];
    }
}

/* Replace each source's counts by the sums over the sources before it, and sum them up in total.
 * These are the offsets of slabs of fixed size. */
__device__ __forceinline__ void add_sources(const EpLatencyScatterArgs &a) {
    const EpPlanShape &s = a.route.shape;
#pragma unroll 1
    for (int e = threadIdx.x; e < s.num_local; e += LATENCY_THREADS) {
        int before = 0;
        int32_t *at = workspace_counts(a) + e;
#pragma unroll 4
        for (int source = 0; source < a.route.group.size; source++, at += s.num_local) {
            int count = *at;
            *at = before;
            before += count;
        }
        workspace_total(a)[e] = before;
        workspace_offset(a)[e] = (int)min(e * s.block_rows, (int64_t)INT32_MAX);
    }
}

/* Compute where slabs begin that follow one another. By a warp. */
__device__ __forceinline__ void lay_workspace_slabs(const EpLatencyScatterArgs &a) {
    int lane = threadIdx.x % 32, local = a.route.shape.num_local;
    int64_t start = 0;
#pragma unroll 1
    for (int at = 0; at < local; at += 32) {
        SlabStart slab = lay_slab(a.route, workspace_total(a), local, at, &start);
        if (at + lane < local)
            workspace_offset(a)[at + lane] = (int)min(slab.start, (int64_t)INT32_MAX);
    }
}

/* Compute where each source's rows begin, where rows have one slot. By a warp. */
__device__ __forceinline__ void lay_workspace_rows(const EpLatencyScatterArgs &a) {
    int lane = threadIdx.x % 32, begin = 0, size = a.route.group.size;
    int is_fixed = a.route.shape.is_fixed;
#pragma unroll 1
    for (int at = 0; at < size; at += 32) {
        int rows = is_fixed ? (int)a.route.shape.block_rows : 0;
        if (!is_fixed && at + lane < size) rows = workspace()->source_rows[at + lane];
        int through = ep_warp_prefix(rows);
        if (at + lane < size) workspace()->flat_begin[at + lane] = begin + through - rows;
        begin += __shfl_sync(~0u, through, 31);
    }
}

/* Reset the counters of heads, before the block's first barrier. */
__device__ __forceinline__ void reset_heads(void) {
    if (threadIdx.x == TOKENS_THREAD) workspace()->heads = workspace()->most_tokens = 0;
}

/* Receive all heads. By all threads of a block. A warp that waits for other warps' heads calls
 * meanwhile() over and over. Returns 0 if a head does not arrive in time or is of another
 * operation. */
template <typename Meanwhile>
__device__ __forceinline__ int take_heads(const EpLatencyScatterArgs &a, uint64_t flag,
                                          Meanwhile meanwhile) {
    const EpPrepareArgs &route = a.route;
    const EpCudaGroup &g = route.group;
    int alive = 1, words = EP_HEAD_COUNTS + route.shape.num_local;
#pragma unroll 1
    for (int r = (int)(threadIdx.x / 32); r < g.size && alive; r += LATENCY_WARPS) {
        alive = take_head(g, a.latency, r, words, flag, 1,
                          [&](int unit, const uint4 &x) { take_unit(a, r, unit, x); });
        if (threadIdx.x % 32 == 0) atomicAdd(&workspace()->heads, alive ? 1 : EP_CUDA_MAX_RANKS);
    }
    while (__any_sync(~0u, *(volatile int32_t *)&workspace()->heads < g.size))
        meanwhile();
    if (!__syncthreads_and(alive)) return 0;
    add_sources(a);
    __syncthreads();
    if (route.shape.is_fixed && !route.shape.has_rows) return 1; /* add_sources has set all */
    if (threadIdx.x < 32) route.shape.has_rows ? lay_workspace_rows(a) : lay_workspace_slabs(a);
    __syncthreads();
    return 1;
}

/* ---- publishing ---------------------------------------------------------------------------- */

/* Returns the number of a source's entries for a local expert. */
__device__ __forceinline__ int count_of(const EpLatencyScatterArgs &a, int e, int source) {
    int local = a.route.shape.num_local, next = (source + 1) * local + e;
    return (source + 1 < a.route.group.size ? workspace_counts(a)[next] : workspace_total(a)[e]) -
           workspace_counts(a)[source * local + e];
}

/* Store each source's tokens into the plan, and publish the numbers of rows, in every layout. By a
 * warp. */
__device__ __forceinline__ void publish_sizes(const EpLatencyScatterArgs &a, int64_t step) {
    const EpCudaGroup &g = a.route.group;
    int lane = threadIdx.x % 32, received = 0;
#pragma unroll 1
    for (int r = lane; r < g.size; r += 32) {
        a.route.plan.tokens[r] = workspace()->source_tokens[r];
        received += r == g.rank ? 0 : workspace()->source_rows[r];
    }
    received = warp_sum(received);
    if (lane == 0)
        publish_row_counts(a.route, step, workspace()->sent, received,
                           workspace()->source_rows[g.rank]);
}

/* Publish the routing of layouts whose entries have slots of their own. By a block that has
 * received the heads. */
__device__ __forceinline__ void publish_routing(const EpLatencyScatterArgs &a,
                                                const LatencyOp &op) {
    int64_t step = step_under_way(a.route);
    int warp = (int)(threadIdx.x / 32);
    if (warp == 0) publish_slabs(a.route, step, workspace_total(a));
    if (warp == 1) publish_sizes(a, step);
    __syncthreads();
    publish_sources(a.route, [&](int e, int source) { return count_of(a, e, source); });
    if (threadIdx.x == 0)
        publish_step(a.route, step, workspace()->source_tokens[a.route.group.rank], op.number);
}

/* Returns the end of the slots of the rows that arrive, and flat_rows_kept of those that are kept:
 * where they follow one another also their number. In a block that has received the heads. */
__device__ __forceinline__ int64_t flat_rows(const EpLatencyScatterArgs &a) {
    int last = a.route.group.size - 1;
    return workspace()->flat_begin[last] + (int64_t)workspace()->source_rows[last];
}

__device__ __forceinline__ int64_t flat_rows_kept(const EpLatencyScatterArgs &a) {
    return min(flat_rows(a), ep_row_limit(&a.route.shape));
}

/* Publish the rows of each source that are kept. By all threads of such a block. */
__device__ __forceinline__ void publish_kept_by_source(const EpLatencyScatterArgs &a) {
    publish_flat_source_rows(
        a.route, flat_rows_kept(a), [&](int source) { return workspace()->flat_begin[source]; },
        [&](int source) { return workspace()->source_rows[source]; });
}

/* Publish the totals of rows of which none is lost. By a warp of such a block. */
__device__ __forceinline__ void publish_flat_totals(const EpLatencyScatterArgs &a, int64_t step) {
    const EpPlanShape &s = a.route.shape;
    int64_t rows = flat_rows(a), needed = rows;
    if (s.is_fixed) {
        int most = 0;
#pragma unroll 1
        for (int r = (int)(threadIdx.x % 32); r < a.route.group.size; r += 32)
            most = max(most, workspace()->source_rows[r]);
        rows = s.capacity, needed = __reduce_max_sync(~0u, most);
    }
    if (threadIdx.x % 32 == 0) publish_totals(a.route, step, rows, needed, 0);
}

/* Publish the routing where rows have one slot and none is lost. By a block that has received the
 * heads. */
__device__ __forceinline__ void publish_flat(const EpLatencyScatterArgs &a, const LatencyOp &op) {
    const EpPrepareArgs &route = a.route;
    int64_t step = step_under_way(route);
    int warp = (int)(threadIdx.x / 32);
    if (warp == 0) publish_flat_experts(route, step, workspace_total(a));
    if (warp == 1) publish_sizes(a, step);
    if (warp == 0) publish_flat_totals(a, step);
    __syncthreads();
    publish_sources(route, [&](int e, int source) { return count_of(a, e, source); });
    publish_kept_by_source(a);
    __syncthreads();
    if (threadIdx.x == 0)
        publish_step(route, step, workspace()->source_tokens[route.group.rank], op.number);
}

/* Count the entries of the flat rows that are kept, from the plan that all blocks have written. */
__device__ void count_kept(const EpPrepareArgs &a) {
    const EpCudaGroup &g = a.group;
#pragma unroll 1
    for (int e = threadIdx.x; e < a.shape.num_local; e += LATENCY_THREADS)
        a.plan.expert_counts[e] = 0;
    clear_sources(a);
    __syncthreads();
#pragma unroll 1
    for (int s = 0; s < g.size; s++) {
        const int32_t *slot = a.plan.begins + (int64_t)s * (g.layout.max_tokens + 1);
        const int32_t *routes = a.plan.routes + (int64_t)s * g.layout.max_tokens * a.top_k;
#pragma unroll 1
        for (int i = threadIdx.x; i < workspace()->source_tokens[s] * a.top_k;
             i += LATENCY_THREADS) {
            int local = __ldcg(routes + i);
            if ((uint32_t)local >= (uint32_t)a.shape.num_local) continue;
            if (__ldcg(slot + i / a.top_k) < 0) continue;
            atomicAdd(&a.plan.expert_counts[local], 1);
            count_source(a, local, s);
        }
    }
    __syncthreads();
}

/* Publish the routing of flat rows if some are lost. By the last block: only then the entries of
 * the rows that are kept are known. */
__device__ __noinline__ void publish_flat_kept(const EpLatencyScatterArgs &a, LatencyOp op) {
    const EpPrepareArgs &route = a.route;
    __threadfence();
    if (ep_failed(route.group)) return;
    int64_t step = step_under_way(route), rows = flat_rows(a), kept = flat_rows_kept(a);
    if (threadIdx.x < 32) publish_sizes(a, step);
    if (threadIdx.x == 0) publish_totals(route, step, kept, rows, rows - kept);
    publish_kept_by_source(a);
    count_kept(route);
    if (threadIdx.x < 32) publish_flat_experts(route, step, NULL);
    __syncthreads();
    if (threadIdx.x == 0)
        publish_step(route, step, workspace()->source_tokens[route.group.rank], op.number);
}

#endif
