/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Latency mode's dispatch: routing and rows in one launch, or in two launches that send and
 * receive.
 *
 * A sending block stores each row once for each rank that has one of its experts, into a record
 * that belongs to that token alone (runtime/cuda/latency.h), with the header that its slots follow
 * from. A receiving block computes where slabs begin from the counts in all ranks' heads, then
 * takes the records as they arrive and copies their rows to their slots.
 *
 * Where blocks of rows have words (EpExtras.ready), each warp counts the parts of rows that it has
 * stored and the rows that it has zeroed (EpBlockCounters). The block that publishes the routing
 * counts the rest, and one unit more for each block of rows: so the routing precedes all words.
 *
 * Who waits on whom: sending blocks wait for no rank; receiving blocks wait for the heads and
 * records of all ranks. Memory order: every line carries a flag that shows its own arrival; only
 * where lines do not arrive whole, flags follow behind a fence (runtime/cuda/latency.cuh).
 *
 * The first blocks send: they claim tokens one by one. The other blocks receive from the start,
 * each warp its part, except the last block, which publishes the routing to host and caller. Where
 * a dispatch quantises, is alone in its group, or has a launch for each phase, every block takes
 * part in all of the launch's work.
 */
#include "dispatch/cuda/latency_scatter.h"

#include "handles/prepare/cuda/publish.cuh"
#include "runtime/cuda/latency.cuh"
#include "runtime/cuda/rows.cuh"

EP_VARIANT_BEGIN

/* ==== routing =============================================================================== */

/*
 * In a head, a source sends each rank its number of entries for
 * each of the rank's experts; with each row, its number of earlier entries for the row's experts.
 * Each receiving block reads all heads and computes where each source's entries begin in every
 * slab. With the numbers in a row's header follows each entry's slot.
 *
 * At these sizes not bytes take the time but instructions that wait for each other. So shared
 * memory is accessed by its own instructions, at offsets that the host computes; nothing is divided
 * by a value first known here; and independent loads are issued together.
 */

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
__device__ __forceinline__ char *workspace_memory(void) {
    extern __shared__ __align__(128) char memory[];
    return memory;
}

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

/* The sources are the ranks of the group, `self` is this one among them. On several nodes there may
 * be more of them than fit into the fixed part. */

__device__ __forceinline__ int num_sources(const EpLatencyScatterArgs &a) {
    return a.route.shape.num_ranks;
}

__device__ __forceinline__ int self(const EpLatencyScatterArgs &a) {
    return a.route.shape.rank;
}

__device__ __forceinline__ int32_t *source_tokens(const EpLatencyScatterArgs &a) {
    if (EP_SEVERAL_NODES) return (int32_t *)(workspace_memory() + a.workspace.sources);
    return workspace()->source_tokens;
}

__device__ __forceinline__ int32_t *source_rows(const EpLatencyScatterArgs &a) {
    return EP_SEVERAL_NODES ? source_tokens(a) + num_sources(a) : workspace()->source_rows;
}

__device__ __forceinline__ int32_t *flat_begin(const EpLatencyScatterArgs &a) {
    return EP_SEVERAL_NODES ? source_tokens(a) + 2 * num_sources(a) : workspace()->flat_begin;
}

/* ---- this rank's entries ------------------------------------------------------------------- */

/* Warps before this thread wait for words of memory before the block's first barrier; the others
 * load entries. */
#define ENTRIES_THREAD 128
#define ENTRIES_THREADS (LATENCY_THREADS - ENTRIES_THREAD)
#define LOADED_AT_ONCE 4
#define TOKENS_THREAD 96 /* loads the number of tokens; see latency_begin_operation */

/* Load the experts of all this rank's entries into the workspace. Rows past the step's tokens are
 * included, since the number of tokens may not be known yet. So are experts of masked ranks:
 * nothing is sent to these, so nothing reads their counts or their words in headers. */
template <int PLACED> __device__ __forceinline__ void load_entries(const EpLatencyScatterArgs &a) {
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
        for (int j = 0; j < LOADED_AT_ONCE; j++) {
            if (i + j * ENTRIES_THREADS >= entries) continue;
            int expert =
                place_index<PLACED>(a.route, index[j], (i + j * ENTRIES_THREADS) / a.route.top_k);
            workspace_experts(a)[i + j * ENTRIES_THREADS] = (int16_t)expert;
        }
    }
}

/* Load what a block needs to send, before its first barrier. The first block, which counts entries,
 * clears the counts. */
template <int PLACED>
__device__ __forceinline__ void open_workspace(const EpLatencyScatterArgs &a) {
    if (threadIdx.x >= ENTRIES_THREAD) load_entries<PLACED>(a);
    if (threadIdx.x == TOKENS_THREAD) workspace()->tokens = count_tokens(a.route);
    if (blockIdx.x) return;
    int columns = a.route.group.num_experts + num_sources(a);
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

/* ---- other nodes --------------------------------------------------------------------------- */

/* Returns the words of the tokens' sets of other nodes that they need. */
__device__ __forceinline__ uint32_t *token_needs(const EpLatencyScatterArgs &a) {
    return (uint32_t *)(workspace_memory() + a.workspace.needs);
}

/* Returns the slots of each source that found no place; while heads are sent, of each rank. */
__device__ __forceinline__ int32_t *source_dropped(const EpLatencyScatterArgs &a) {
    return (int32_t *)(workspace_memory() + a.workspace.dropped);
}

/* Drop a token's entries on another node, and count them as their ranks do. */
__device__ __forceinline__ void drop_token(const EpLatencyScatterArgs &a, int token, int other) {
    int k = a.route.top_k, last = -1, flat = a.route.shape.has_rows;
    atomicAdd(&token_needs(a)[token * ep_need_words(a.latency.nodes.num_others) + other / 32],
              0u - (1u << other % 32)); /* the bit is set */
#pragma unroll 1
    for (int r = 0; r < a.route.group.size; r++)
#pragma unroll 1
        for (int i = token * k; i < (token + 1) * k; i++) {
            int owner = owner_of(a, workspace_experts(a)[i]);
            EpRankPlace at = {-1, -1};
            if (owner >= 0) at = rank_place(a.latency, owner);
            if (at.other != other || at.number != r) continue;
            if (!flat || last != r) atomicAdd(&source_dropped(a)[owner], 1);
            workspace_experts(a)[i] = NO_EXPERT, last = r;
        }
}

/* Drop what messages have no room for: the tokens behind the first ones. By all threads of a block;
 * a warp for each other node. */
[[maybe_unused]] static __device__ __noinline__ void drop_tokens(const EpLatencyScatterArgs &a) {
    int words = ep_need_words(a.latency.nodes.num_others), lane = threadIdx.x % 32;
#pragma unroll 1
    for (int r = (int)threadIdx.x; r < num_sources(a); r += LATENCY_THREADS)
        source_dropped(a)[r] = 0;
    __syncthreads();
#pragma unroll 1
    for (int o = (int)(threadIdx.x / 32); o < a.latency.nodes.num_others; o += LATENCY_WARPS) {
        int filled = 0;
#pragma unroll 1
        for (int base = 0; base < workspace()->tokens; base += 32) {
            int t = base + lane, needs = 0;
            if (t < workspace()->tokens) needs = token_needs(a)[t * words + o / 32] >> o % 32 & 1;
            unsigned all = __ballot_sync(~0u, needs);
            int place = filled + __popc(all & ((1u << lane) - 1));
            if (needs && place >= a.latency.layout.node_rows) drop_token(a, t, o);
            filled += __popc(all);
        }
    }
    __syncthreads();
}

/* Find which other nodes the tokens need. By all threads of a block, after its first barrier. */
[[maybe_unused]] static __device__ __noinline__ void find_needs(const EpLatencyScatterArgs &a) {
    int words = ep_need_words(a.latency.nodes.num_others), k = a.route.top_k;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < workspace()->tokens * words; i += LATENCY_THREADS) {
        int token = i / words, word = i - token * words;
        uint32_t needs = 0;
#pragma unroll 1
        for (int entry = token * k; entry < (token + 1) * k; entry++) {
            int expert = workspace_experts(a)[entry];
            int other = expert < 0 ? -1 : rank_place(a.latency, owner_of(a, expert)).other;
            if (other >> 5 == word) needs |= 1u << other % 32;
        }
        token_needs(a)[i] = needs;
    }
    __syncthreads();
    if (a.route.shape.nodes.limit) drop_tokens(a);
}

/* Returns how many tokens before this one need another node. By a warp. */
__device__ __forceinline__ int count_needing(const EpLatencyScatterArgs &a, int token, int other) {
    int words = ep_need_words(a.latency.nodes.num_others), count = 0;
#pragma unroll 1
    for (int t = (int)(threadIdx.x % 32); t < token; t += 32)
        count += token_needs(a)[t * words + other / 32] >> other % 32 & 1;
    return warp_sum(count);
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

/* Send the head for rank r of the group: into its window, or into the message to its node. By a
 * warp. */
__device__ __forceinline__ void send_head_to_node(const EpLatencyScatterArgs &a, int r, int first,
                                                  int count, int sent, uint64_t flag) {
    const EpLatency &l = a.latency;
    const EpCudaGroup &g = a.route.group;
    EpRankPlace at = rank_place(l, r);
    int places = at.other < 0 ? 0 : count_needing(a, workspace()->tokens, at.other);
    char *to = l.own + l.layout.outgoing + max((int)at.other, 0) * l.layout.message_bytes +
               at.number * l.layout.head_bytes;
    if (at.other < 0) to = latency_head(l, l.window[at.number], g.rank, l.layout.num_heads, flag);
    store_head(l, to, EP_HEAD_COUNTS + count, flag, [&](int unit) {
        uint4 x = head_unit(a, r, first, count, sent, unit);
        if (unit == 0 && at.other >= 0) x.w = (uint32_t)places;
        if (unit == 1) x.z = (uint32_t)workspace()->tokens;
        if (unit == 1 && a.route.shape.nodes.limit) x.w = (uint32_t)source_dropped(a)[r];
        return x;
    });
}

/* Add to the caller's counters the rows to each rank of this node, and those to relays. By all
 * threads of the block. */
__device__ __forceinline__ void count_sent_rows(const EpLatencyScatterArgs &a) {
    const EpStatistics &s = a.route.stats;
    int lane = threadIdx.x % 32, warp = (int)(threadIdx.x / 32);
    if (!s.peer_rows && !s.peer_bytes) return;
#pragma unroll 1
    for (int r = (int)threadIdx.x; r < num_sources(a); r += LATENCY_THREADS)
        if (rank_place(a.latency, r).other < 0)
            ep_count_row(s, r, workspace_counts(a)[a.route.group.num_experts + r]);
#pragma unroll 1
    for (int o = warp; o < a.latency.nodes.num_others; o += LATENCY_WARPS) {
        int rows = count_needing(a, workspace()->tokens, o);
        if (lane == 0) ep_count_row(s, other_node(a.latency, o).peer, rows);
    }
}

__device__ __forceinline__ void send_heads(const EpLatencyScatterArgs &a, uint64_t flag) {
    const EpCudaGroup &g = a.route.group;
    int sent = 0;
    count_entries(a);
#pragma unroll 1
    for (int r = (int)(threadIdx.x % 32); r < num_sources(a); r += 32)
        sent += r == self(a) || !ep_is_alive(r) ? 0 : workspace_counts(a)[g.num_experts + r];
    sent = warp_sum(sent);
#pragma unroll 1
    for (int r = (int)(threadIdx.x / 32); r < num_sources(a); r += LATENCY_WARPS) {
        int first = ep_owner_first(&a.route.owners, r), count = ep_owner_count(&a.route.owners, r);
        if (!EP_SEVERAL_NODES && !ep_is_alive(r)) continue;
        if (EP_SEVERAL_NODES) {
            send_head_to_node(a, r, first, count, sent, flag);
            continue;
        }
        send_head(g, a.latency, r, EP_HEAD_COUNTS + count, flag,
                  [&](int unit) { return head_unit(a, r, first, count, sent, unit); });
    }
    if (EP_SEVERAL_NODES) return count_sent_rows(a);
    if (threadIdx.x < 32) ep_count_rows(g, a.route.stats, workspace_counts(a) + g.num_experts);
}

/* ---- heads of the sources ------------------------------------------------------------------ */

__device__ __forceinline__ void take_unit(const EpLatencyScatterArgs &a, int source, int unit,
                                          const uint4 &x) {
    const uint32_t word[4] = {x.x, x.y, x.z, x.w};
    int local = a.route.shape.num_local;
    if (unit == 0) source_tokens(a)[source] = (int)x.w;
    if (unit == 0) atomicMax(&workspace()->most_tokens, (int)x.w);
    if (unit == 1) source_rows(a)[source] = (int)x.x;
    if (EP_SEVERAL_NODES && unit == 1) atomicMax(&workspace()->longest, (int)x.z);
    if (EP_SEVERAL_NODES && unit == 1) source_dropped(a)[source] = (int)x.w;
    if (unit == 1 && source == self(a)) workspace()->sent = (int)x.y;
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
        for (int source = 0; source < num_sources(a); source++, at += s.num_local) {
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
    int lane = threadIdx.x % 32, begin = 0, size = num_sources(a);
    int is_fixed = a.route.shape.is_fixed;
#pragma unroll 1
    for (int at = 0; at < size; at += 32) {
        int rows = is_fixed ? (int)a.route.shape.block_rows : 0;
        if (!is_fixed && at + lane < size) rows = source_rows(a)[at + lane];
        int through = ep_warp_prefix(rows);
        if (at + lane < size) flat_begin(a)[at + lane] = begin + through - rows;
        begin += __shfl_sync(~0u, through, 31);
    }
}

/* Reset the counters of heads, before the block's first barrier. */
__device__ __forceinline__ void reset_heads(void) {
    if (threadIdx.x == TOKENS_THREAD) workspace()->heads = workspace()->most_tokens = 0;
    if (EP_SEVERAL_NODES && threadIdx.x == TOKENS_THREAD) workspace()->longest = 0;
}

#define MOST_SOURCES (EP_SEVERAL_NODES ? EP_MAX_RANKS : EP_CUDA_MAX_RANKS)

/* Which head is a source's, and which rank of this node has stored it: a relay's stamps have been
 * compared before. */
typedef struct HeadOrigin {
    int index, peer, compares;
} HeadOrigin;

__device__ __forceinline__ HeadOrigin head_origin(const EpLatencyScatterArgs &a, int source) {
    if (!EP_SEVERAL_NODES) return HeadOrigin{source, source, 1};
    EpRankPlace at = rank_place(a.latency, source);
    return HeadOrigin{ep_head_of(at, a.route.group.size), at.number, at.other < 0};
}

/* Returns where a source's head comes. What NCCL has brought to this rank itself needs no
 * forwarding. */
__device__ __forceinline__ const char *head_from(const EpLatencyScatterArgs &a, int source,
                                                 const HeadOrigin &origin, uint64_t flag) {
    const EpCudaGroup &g = a.route.group;
    const EpLatency &l = a.latency;
    int other = EP_SEVERAL_NODES ? rank_place(l, source).other : -1;
    if (other >= 0 && origin.peer == g.rank && l.nodes.reads_landing)
        return landed_message(l, other) + g.rank * l.layout.head_bytes;
    return latency_head(l, l.own, origin.index, latency_num_heads(g, l), flag);
}

/* Take a masked rank's head: it sends nothing. By a warp. */
__device__ __forceinline__ void take_no_head(const EpLatencyScatterArgs &a, int source, int words) {
#pragma unroll 1
    for (int unit = (int)(threadIdx.x % 32); 4 * unit < words; unit += 32)
        take_unit(a, source, unit, make_uint4(0, 0, 0, 0));
}

/* Do without a head that is late, or of a rank that has cut this one: for this block that rank is
 * masked. By a warp. */
__device__ __noinline__ void skip_head(const EpLatencyScatterArgs &a, int source, int words,
                                       uint64_t flag) {
    take_no_head(a, source, words);
    if (threadIdx.x % 32) return;
    atomicOr(&latency_late(a.latency, flag)->absent[source / 32], 1u << source % 32);
    atomicAnd(&ep_alive_words()[source / 32], ~(1u << source % 32));
}

/* Returns whether a rank has cut this one: then what it has sent does not count. By a warp. */
__device__ __forceinline__ int has_cut(const EpCudaGroup &g, int rank) {
    if (!ep_cuts() || rank == g.rank) return 0;
    return __any_sync(~0u, ep_load_relaxed_sys(&ep_ballot(g, g.rank, rank)->masked) != 0);
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
    for (int r = (int)(threadIdx.x / 32); r < num_sources(a) && alive; r += LATENCY_WARPS) {
        HeadOrigin from = head_origin(a, r);
        if (EP_MASKED && !ep_is_alive(from.peer))
            take_no_head(a, r, words);
        else if (EP_MASKED && has_cut(g, from.peer))
            skip_head(a, r, words, flag);
        else
            alive = take_head_at(g, a.latency, head_from(a, r, from, flag), from.peer, words, flag,
                                 from.compares,
                                 [&](int unit, const uint4 &x) { take_unit(a, r, unit, x); });
        if (EP_MASKED && alive == STEP_LATE) skip_head(a, r, words, flag), alive = 1;
        if (threadIdx.x % 32 == 0) atomicAdd(&workspace()->heads, alive ? 1 : MOST_SOURCES);
    }
    while (__any_sync(~0u, ep_poll_shared(&workspace()->heads) < num_sources(a)))
        meanwhile();
    /* What other relays have received is read behind their heads. */
    if (EP_SEVERAL_NODES && g.size > 1) ep_fence_sys();
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
    return (source + 1 < num_sources(a) ? workspace_counts(a)[next] : workspace_total(a)[e]) -
           workspace_counts(a)[source * local + e];
}

/* Store each source's tokens and rows into the plan, and publish the numbers of rows, in every
 * layout. By a warp. */
__device__ __forceinline__ void publish_sizes(const EpLatencyScatterArgs &a, int64_t step) {
    int lane = threadIdx.x % 32, received = 0;
#pragma unroll 1
    for (int r = lane; r < num_sources(a); r += 32) {
        a.route.plan.tokens[r] = source_tokens(a)[r];
        a.route.plan.rows_from[r] = source_rows(a)[r];
        received += r == self(a) ? 0 : source_rows(a)[r];
    }
    received = warp_sum(received);
    if (lane == 0)
        publish_row_counts(a.route, step, workspace()->sent, received, source_rows(a)[self(a)]);
}

/* Publish what sources had no room for. By one thread of such a block. */
__device__ __forceinline__ void publish_not_sent(const EpLatencyScatterArgs &a, int64_t step) {
    int64_t lost = 0;
    int sources = EP_SEVERAL_NODES && a.route.shape.nodes.limit ? num_sources(a) : 0;
#pragma unroll 1
    for (int r = 0; r < sources; r++)
        lost += source_dropped(a)[r];
    if (EP_SEVERAL_NODES) publish_lost(a.route, step, lost);
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
    if (threadIdx.x == 0) publish_not_sent(a, step);
    if (threadIdx.x == 0) publish_step(a.route, step, source_tokens(a)[self(a)], op.number);
}

/* Returns the end of the slots of the rows that arrive, and flat_rows_kept of those that are kept:
 * where they follow one another also their number. In a block that has received the heads. */
__device__ __forceinline__ int64_t flat_rows(const EpLatencyScatterArgs &a) {
    int last = num_sources(a) - 1;
    return flat_begin(a)[last] + (int64_t)source_rows(a)[last];
}

__device__ __forceinline__ int64_t flat_rows_kept(const EpLatencyScatterArgs &a) {
    return min(flat_rows(a), ep_row_limit(&a.route.shape));
}

/* Publish the rows of each source that are kept. By all threads of such a block. */
__device__ __forceinline__ void publish_kept_by_source(const EpLatencyScatterArgs &a) {
    publish_flat_source_rows(
        a.route, flat_rows_kept(a), [&](int source) { return flat_begin(a)[source]; },
        [&](int source) { return source_rows(a)[source]; });
}

/* Publish the totals of rows of which none is lost. By a warp of such a block. */
__device__ __forceinline__ void publish_flat_totals(const EpLatencyScatterArgs &a, int64_t step) {
    const EpPlanShape &s = a.route.shape;
    int64_t rows = flat_rows(a), needed = rows;
    if (s.is_fixed) {
        int most = 0;
#pragma unroll 1
        for (int r = (int)(threadIdx.x % 32); r < num_sources(a); r += 32)
            most = max(most, source_rows(a)[r]);
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
    if (threadIdx.x == 0) publish_not_sent(a, step);
    if (threadIdx.x == 0) publish_step(route, step, source_tokens(a)[self(a)], op.number);
}

/* Count the entries of the flat rows that are kept, from the plan that all blocks have written. */
__device__ void count_kept(const EpLatencyScatterArgs &args) {
    const EpPrepareArgs &a = args.route;
    const EpCudaGroup &g = a.group;
#pragma unroll 1
    for (int e = threadIdx.x; e < a.shape.num_local; e += LATENCY_THREADS)
        a.plan.expert_counts[e] = 0;
    clear_sources(a);
    __syncthreads();
#pragma unroll 1
    for (int s = 0; s < num_sources(args); s++) {
        const int32_t *slot = a.plan.begins + (int64_t)s * (g.layout.max_tokens + 1);
        const int32_t *routes = a.plan.routes + (int64_t)s * g.layout.max_tokens * a.top_k;
#pragma unroll 1
        for (int i = threadIdx.x; i < source_tokens(args)[s] * a.top_k; i += LATENCY_THREADS) {
            int local = __ldcg(routes + i);
            if ((uint32_t)local >= (uint32_t)a.shape.num_local) continue;
            if (__ldcg(slot + i / a.top_k) < 0) continue;
            atomicAdd(&a.plan.expert_counts[local], 1);
            count_source(a, local, s);
        }
    }
    __syncthreads();
}

/* Returns whether a rank is late: of its tokens nobody knows which rows are kept. Then the group is
 * suspended. By all threads of the last block. */
__device__ __forceinline__ int finds_unknown_rows(const EpLatencyScatterArgs &a, uint64_t flag) {
    int t = (int)threadIdx.x;
    int lost = t < a.route.group.size && has_bit(latency_late(a.latency, flag)->lost, t);
    if (lost)
        ep_report(a.route.group, EP_FAULT_LATE, EpAwaited{t, EP_AWAIT_LINES, 0, (uint32_t)flag, 0});
    return !__syncthreads_and(!lost);
}

/* Publish the routing of flat rows if some are lost. By the last block: only then the entries of
 * the rows that are kept are known. */
__device__ __noinline__ void publish_flat_kept(const EpLatencyScatterArgs &a, LatencyOp op) {
    const EpPrepareArgs &route = a.route;
    __threadfence();
    if (ep_cuts() && finds_unknown_rows(a, op.flag)) return;
    if (ep_failed(route.group)) return;
    int64_t step = step_under_way(route), rows = flat_rows(a), kept = flat_rows_kept(a);
    if (threadIdx.x < 32) publish_sizes(a, step);
    if (threadIdx.x == 0) publish_totals(route, step, kept, rows, rows - kept);
    publish_kept_by_source(a);
    count_kept(a);
    if (threadIdx.x < 32) publish_flat_experts(route, step, NULL);
    __syncthreads();
    if (threadIdx.x == 0) publish_not_sent(a, step);
    if (threadIdx.x == 0) publish_step(route, step, source_tokens(a)[self(a)], op.number);
    ep_count_experts(route.stats, route.plan.expert_counts, route.shape.num_local, (int)threadIdx.x,
                     LATENCY_THREADS);
}

/* ---- counters ------------------------------------------------------------------------------ */

/* Whether this block adds to the caller's counters. The last one that receives rows has the fewest
 * of them. The block that publishes the plan would end later for it: its fences wait for additions.
 */
__device__ __forceinline__ int counts(const LatencyRole &role) {
    return role.block == max(0, role.blocks - 2);
}

/* Add the slots of each expert. By a warp of a block that has received the heads. */
__device__ __forceinline__ void count_experts(const EpLatencyScatterArgs &a) {
    const EpPlanShape &s = a.route.shape;
    int64_t start = 0;
#pragma unroll 1
    for (int at = 0; at < s.num_local && a.route.stats.expert_tokens; at += 32) {
        int e = at + (int)threadIdx.x % 32;
        SlabStart first = lay_slab(a.route, workspace_total(a), s.num_local, at, &start);
        int kept = s.has_rows ? first.count : (int)ep_slab(&s, e, first.start, first.count).kept;
        if (e < s.num_local) ep_count_expert(a.route.stats, e, kept);
    }
}

/* ==== sending blocks ======================================================================== */

/*
 * A sending block takes a token, reads its row once, and
 * stores the record to each rank that has one of its experts. Each other rank gets the record's
 * first step, whose header tells it that the row does not come.
 */

#define SENT_AT_ONCE 2 /* steps of a warp at a time */

/* ---- header -------------------------------------------------------------------------------- */

/* Returns how many 16-bit halves of a word are 0: those whose upper bit is clear and whose lower
 * bits give no carry. */
__device__ __forceinline__ int count_zeros(uint32_t x) {
    return __popc(~(((x & 0x7fff7fffu) + 0x7fff7fffu) | x | 0x7fff7fffu));
}

/* Returns the number of entries for an expert before `entry`. By a warp, eight entries to a
 * lane. */
__device__ __forceinline__ int count_entries_before(const EpLatencyScatterArgs &a, int entry,
                                                    int expert) {
    int lane = threadIdx.x % 32, rest = entry / 8 * 8 + lane, count = 0;
    uint32_t both = (uint32_t)expert * 0x10001u;
#pragma unroll 1
    for (int i = lane; i < entry / 8; i += 32) {
        uint4 x = ((const uint4 *)workspace_experts(a))[i];
        count += count_zeros(x.x ^ both) + count_zeros(x.y ^ both) + count_zeros(x.z ^ both) +
                 count_zeros(x.w ^ both);
    }
    if (rest < entry && lane < 8) count += workspace_experts(a)[rest] == expert;
    return warp_sum(count);
}

/* Returns the number of rows to a rank before a token's. By a warp. */
__device__ __noinline__ int count_rows_before(const EpLatencyScatterArgs &a, int token, int owner) {
    int count = 0, k = a.route.top_k;
#pragma unroll 1
    for (int t = (int)(threadIdx.x % 32); t < token; t += 32) {
        int is_sent = 0;
#pragma unroll 1
        for (int i = t * k; i < (t + 1) * k; i++)
            is_sent |= owner_of(a, workspace_experts(a)[i]) == owner;
        count += is_sent;
    }
    return warp_sum(count);
}

/* Write the record's header, without its weights. By a block, a warp for each entry. */
__device__ __forceinline__ void write_header(const EpLatencyScatterArgs &a, int token) {
    int k = a.route.top_k, flat = a.route.shape.has_rows;
#pragma unroll 1
    for (int i = (int)(threadIdx.x / 32); i < k; i += LATENCY_WARPS) {
        int entry = token * k + i, expert = workspace_experts(a)[entry], before = 0;
        if (expert >= 0)
            before = flat ? count_rows_before(a, token, owner_of(a, expert))
                          : count_entries_before(a, entry, expert);
        if (threadIdx.x % 32 == 0)
            workspace()->header[i] = (uint32_t)max(0, expert + 1) | (uint32_t)before
                                                                        << a.record.expert_bits;
    }
}

/* ---- units --------------------------------------------------------------------------------- */

/* Load a unit of the caller's scales, which may end within a unit, at any multiple of four
 * bytes. */
__device__ __noinline__ uint4 load_scales(const EpLatencyScatterArgs &a, int token, int unit) {
    const char *from = a.t.scales + (int64_t)token * scale_bytes_of(a);
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int at = unit * 16 + i * 4;
        word[i] = at < scale_bytes_of(a) ? *(const uint32_t *)(from + at) : 0;
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

/* Load the weights of a header's unit; each follows the word of its entry. */
__device__ __forceinline__ uint4 load_weights(const EpLatencyScatterArgs &a, int token, int unit) {
    const float *weights = a.t.topk_weights + (int64_t)token * a.route.top_k + 2 * unit;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (a.t.carries_weights && 2 * unit < a.route.top_k) x.y = __float_as_uint(__ldg(weights));
    if (a.t.carries_weights && 2 * unit + 1 < a.route.top_k)
        x.w = __float_as_uint(__ldg(weights + 1));
    return x;
}

/* Load a unit of the record, without the header's words, which are not known yet. */
__device__ __forceinline__ uint4 load_unit(const EpLatencyScatterArgs &a, int token, int unit) {
    int at = unit - a.record.header_units, scale = at - a.record.row_units;
    if (at < 0) return load_weights(a, token, unit);
    if (scale >= a.record.scale_units) return make_uint4(0, 0, 0, 0);
    if (a.t.format.bits) return *((const uint4 *)(workspace_memory() + a.workspace.staged) + at);
    if (scale < 0) return __ldg((const uint4 *)(a.t.rows + (int64_t)token * row_bytes_of(a)) + at);
    return load_scales(a, token, scale);
}

__device__ __forceinline__ uint32_t entry_word(const EpLatencyScatterArgs &a, int k) {
    return k < a.route.top_k ? workspace()->header[k] : 0;
}

/* Returns a header's unit: its words, and the weights in x if weights travel. */
__device__ __forceinline__ uint4 header_unit(const EpLatencyScatterArgs &a, int unit, uint4 x) {
    if (a.t.carries_weights)
        return make_uint4(entry_word(a, 2 * unit), x.y, entry_word(a, 2 * unit + 1), x.w);
    return make_uint4(entry_word(a, 4 * unit), entry_word(a, 4 * unit + 1),
                      entry_word(a, 4 * unit + 2), entry_word(a, 4 * unit + 3));
}

/* Load this lane's units of SENT_AT_ONCE steps from `step` on, without the header's words. */
__device__ __forceinline__ void load_steps(const EpLatencyScatterArgs &a, int token, int step,
                                           uint4 x[SENT_AT_ONCE]) {
#pragma unroll
    for (int i = 0; i < SENT_AT_ONCE; i++) {
        int at = step + i, unit = at * EP_STEP_UNITS + step_unit();
        x[i] = make_uint4(0, 0, 0, 0);
        if (at < a.record.steps && step_unit() >= 0) x[i] = load_unit(a, token, unit);
    }
}

/* ---- receiving ranks ----------------------------------------------------------------------- */

/* Returns a set of ranks with a bit for each: lane w has word w. Each lane adds `rank`, or none if
 * it is -1. By a warp. */
__device__ __forceinline__ unsigned rank_set(const EpLatencyScatterArgs &a, int rank) {
    int lane = threadIdx.x % 32;
    unsigned own = 0;
#pragma unroll
    for (int w = 0; w < RANK_WORDS; w++)
        if (a.route.group.size > 32 * w) {
            unsigned word = __reduce_or_sync(~0u, rank >> 5 == w ? 1u << rank % 32 : 0);
            own = lane == w ? word : own;
        }
    return own;
}

/* Returns a set of ranks without those that are masked. */
__device__ __forceinline__ unsigned living_ranks(unsigned set) {
    int lane = threadIdx.x % 32;
    return EP_MASKED && lane < EP_ALIVE_WORDS ? set & ep_alive_words()[lane] : set;
}

__device__ __forceinline__ int has_rank(unsigned set, int rank) {
    return __shfl_sync(~0u, set, rank / 32) >> rank % 32 & 1;
}

/* List where a token's record goes: first the ranks that get its row, then the others, which get
 * its first step with the header. Each token begins with another rank. By a warp. */
__device__ __forceinline__ void list_receivers(const EpLatencyScatterArgs &a, int token,
                                               uint64_t flag) {
    const EpCudaGroup &g = a.route.group;
    int lane = threadIdx.x % 32, k = a.route.top_k;
    int owner = lane < k ? owner_of(a, workspace_experts(a)[token * k + lane]) : -1;
    int living = owner >= 0 && !ep_is_alive(owner) ? -1 : owner; /* loaded while sets are made */
    unsigned set = living_ranks(rank_set(a, owner)), below = (1u << lane) - 1;
    int num_to = __reduce_add_sync(~0u, __popc(set)), listed = 0, others = num_to;
    int first = g.rank + 1 + ep_remainder(token, a.latency.ranks);
#pragma unroll 1
    for (int base = 0; base < g.size; base += 32) {
        int valid = base + lane < g.size, r = first - (first < g.size ? 0 : g.size);
        r += valid ? base + lane : 0;
        r -= r < g.size ? 0 : g.size;
        int to = ep_is_alive(r) ? r : g.rank; /* again, in place of a masked one */
        unsigned all = __ballot_sync(~0u, valid),
                 with_row = __ballot_sync(~0u, has_rank(set, r) & valid);
        int at = with_row >> lane & 1 ? listed + __popc(with_row & below)
                                      : others + __popc(all & ~with_row & below);
        if (valid)
            workspace()->to[at] =
                latency_record(a.latency, a.latency.window[to], g.rank, g.size, token, flag);
        listed += __popc(with_row), others += __popc(all & ~with_row);
    }
    if (lane == 0) workspace()->num_to = num_to;
    if (lane < k) a.route.plan.entries[(int64_t)token * k + lane].owner = (int16_t)living;
}

#if EP_SEVERAL_NODES
/* As above, among the ranks of this node; then the places in the messages to other nodes. */
__device__ __forceinline__ void list_receivers_on_nodes(const EpLatencyScatterArgs &a, int token,
                                                        uint64_t flag) {
    const EpCudaGroup &g = a.route.group;
    const EpLatency &l = a.latency;
    int lane = threadIdx.x % 32, k = a.route.top_k, key = -1, row = 0, places = 0;
    int owner = lane < k ? owner_of(a, workspace_experts(a)[token * k + lane]) : -1;
    EpRankPlace at = {-1, -1};
    if (owner >= 0) at = rank_place(l, owner), key = owner;
    unsigned set = rank_set(a, at.other < 0 ? at.number : -1);
    int num_to = __reduce_add_sync(~0u, __popc(set)), listed = 0;
#pragma unroll 1
    for (int base = 0; base < g.size; base += 32) {
        int r = base + lane, valid = r < g.size, has = has_rank(set, min(r, g.size - 1)) & valid;
        unsigned with_row = __ballot_sync(~0u, has), below = (1u << lane) - 1;
        int before = listed + __popc(with_row & below), index = has ? before : num_to + r - before;
        if (valid)
            workspace()->to[index] = latency_record(l, l.window[r], g.rank, g.size, token, flag);
        listed += __popc(with_row);
    }
#pragma unroll 1
    for (unsigned left = __ballot_sync(~0u, at.other >= 0); left; places++) {
        int other = __shfl_sync(~0u, at.other, __ffs((int)left) - 1);
        int place = count_needing(a, token, other);
        left &= ~__ballot_sync(~0u, at.other == other);
        if (at.other == other) row = place, key = other_node(l, other).first;
        if (lane == 0)
            workspace()->to[g.size + places] =
                message_place(l, l.own + l.layout.outgoing, other, place);
    }
    if (lane == 0) workspace()->num_to = num_to, workspace()->num_places = places;
    EpEntry *entry = &a.route.plan.entries[(int64_t)token * k + lane];
    if (lane < k) entry->owner = (int16_t)key, entry->row = row;
}
#endif

/* Call store(address, i) for step `step` + i of the record, for each rank that gets it. */
template <typename Store>
__device__ __forceinline__ void for_each_step(const EpLatencyScatterArgs &a, int step,
                                              Store store) {
    int num_to = workspace()->num_to;
#pragma unroll 1
    for (int j = 0; j < num_to; j++) {
        char *to = workspace()->to[j] + step * EP_STEP_BYTES;
#pragma unroll
        for (int i = 0; i < SENT_AT_ONCE; i++)
            if (step + i < a.record.steps) store(to + i * EP_STEP_BYTES, i);
    }
#pragma unroll 1
    for (int j = num_to; step == 0 && j < a.route.group.size; j++)
        store(workspace()->to[j], 0);
    int places = EP_SEVERAL_NODES ? workspace()->num_places : 0;
#pragma unroll 1
    for (int j = 0; j < places; j++) {
        char *to = workspace()->to[a.route.group.size + j] + step * EP_STEP_BYTES;
#pragma unroll
        for (int i = 0; i < SENT_AT_ONCE; i++)
            if (step + i < a.record.steps) store(to + i * EP_STEP_BYTES, i);
    }
}

__device__ __forceinline__ void store_steps(const EpLatencyScatterArgs &a, int step,
                                            const uint4 x[SENT_AT_ONCE], uint64_t flag) {
    ulonglong2 packed[SENT_AT_ONCE];
    int whole = a.latency.whole;
#pragma unroll
    for (int i = 0; i < SENT_AT_ONCE; i++) {
        int unit = (step + i) * EP_STEP_UNITS + step_unit();
        bool is_header = step_unit() >= 0 && unit < a.record.header_units;
        packed[i] = step_pack(is_header ? header_unit(a, unit, x[i]) : x[i], flag);
    }
    for_each_step(a, step, [&](char *to, int i) { step_store(to, packed[i], whole); });
    if (whole) return;
    step_fence();
    for_each_step(a, step, [&](char *to, int) { step_store_flag(to, flag); });
}

/* ---- a token ------------------------------------------------------------------------------- */

template <int IS_NVFP4>
__device__ __noinline__ void stage_quantised(const EpLatencyScatterArgs &a, int token) {
    char *staged = workspace_memory() + a.workspace.staged;
    ep_quantise_row(ep_format_of<IS_NVFP4>(a.t.format, a.t.global_scale), a.t.source_type,
                    a.t.rows + (int64_t)token * (int)a.t.source_row_bytes, (int)a.t.row_elements,
                    (uint8_t *)staged, staged + 16 * a.record.row_units, (int)threadIdx.x,
                    LATENCY_THREADS);
}

/* Send a token. By a block. */
template <int TILED>
__device__ __forceinline__ void send_token(const EpLatencyScatterArgs &a, int token,
                                           uint64_t flag) {
    int warp = threadIdx.x / 32, step = warp * SENT_AT_ONCE, quantises = a.t.format.bits;
    uint4 x[SENT_AT_ONCE];
    if (TILED && a.t.global_scale)
        stage_quantised<1>(a, token);
    else if (quantises)
        stage_quantised<0>(a, token);
    else
        load_steps(a, token, step, x);
    write_header(a, token);
#if EP_SEVERAL_NODES
    if (warp == LATENCY_WARPS - 1) list_receivers_on_nodes(a, token, flag);
#else
    if (warp == LATENCY_WARPS - 1) list_receivers(a, token, flag);
#endif
    __syncthreads();
    if (quantises) load_steps(a, token, step, x);
#pragma unroll 1
    while (step < a.record.steps) {
        store_steps(a, step, x, flag);
        step += SENT_AT_ONCE * LATENCY_WARPS;
        load_steps(a, token, step, x);
    }
}

/* Send heads and tokens. The first block sends the heads, before it claims a token: every rank
 * waits for them, and the first block runs if any block does. */
template <int TILED>
__device__ __forceinline__ void send_all(const EpLatencyScatterArgs &a, const LatencyOp &op) {
    if (__builtin_expect(blockIdx.x == 0, 0)) {
        send_heads(a, op.flag);
        if (threadIdx.x / 32 == LATENCY_WARPS - 1)
            store_operation_number(a.route.group, a.latency, op);
        claims_begin(a.latency);
        __syncthreads();
    }
    claims_work(a.latency, workspace()->tokens,
                [&](int token) { send_token<TILED>(a, token, op.flag); });
}

/* ==== receiving blocks ====================================================================== */

/*
 * Receiving warps wait for the records of all ranks' tokens,
 * several warps for each record, and copy rows, weights and scales to their slots.
 */

/* Entry k of a record, in lane k. */
typedef struct Entry {
    int local; /* expert among this rank's, -1: none or another rank's */
    int slot;  /* if rows have one slot: the row's, in each lane with an expert; -1: none */
    float weight;
    char *scales;          /* the first scale of its slot */
    unsigned slot_lanes;   /* lanes whose slots receive the row; one if rows have one slot */
    unsigned expert_lanes; /* lanes with an expert of this rank */
} Entry;

/* ---- header -------------------------------------------------------------------------------- */

/* Returns the slot of an entry, or a negative number beyond the capacity. `before` is the number of
 * the source's earlier entries for the expert (if rows have one slot: of its earlier rows). */
__device__ __forceinline__ int find_slot(const EpLatencyScatterArgs &a, int source, int local,
                                         int before) {
    int num_local = a.route.shape.num_local;
    int64_t slot = (int64_t)before + flat_begin(a)[source];
    if (a.route.shape.has_rows) return slot < ep_row_limit(&a.route.shape) ? (int)slot : -1;
    slot = (int64_t)before + workspace_offset(a)[local] +
           workspace_counts(a)[source * num_local + local];
    return slot < ep_slot_limit(&a.route.shape, local) ? (int)slot : a.lost_slot;
}

/* Returns the byte offset of a slot's first scale. */
template <int TILED>
__device__ __forceinline__ int64_t scale_at(const EpLatencyScatterArgs &a, int64_t slot) {
    return TILED ? ep_scale_at(&a.t.scale_map, slot, 0)
                 : ep_plain_scale_at(&a.t.scale_map, slot, 0);
}

/* Read a record's header from this lane's unit of its first step. By a warp. */
template <int TILED>
__device__ __forceinline__ Entry read_header(const EpLatencyScatterArgs &a, int source,
                                             const uint4 &unit) {
    int lane = threadIdx.x % 32, k = a.route.top_k;
    RecordWords h = record_words(unit, a.t.carries_weights, lane < k ? lane : 0);
    int expert = (int)(h.word & ((1u << a.record.expert_bits) - 1)) - 1;
    Entry e = {-1, -1, __uint_as_float(h.weight), NULL, 0, 0};
    if (lane < k && expert >= 0) e.local = expert - a.first_expert;
    if (e.local >= a.route.shape.num_local || e.local < 0) e.local = -1;
    if (e.local >= 0) e.slot = find_slot(a, source, e.local, (int)(h.word >> a.record.expert_bits));
    if (scale_bytes_of(a) && e.slot >= 0) e.scales = a.t.out_scales + scale_at<TILED>(a, e.slot);
    e.expert_lanes = __ballot_sync(~0u, e.local >= 0);
    e.slot_lanes = __ballot_sync(~0u, e.slot >= 0);
    if (a.route.shape.has_rows) e.slot_lanes &= 0u - e.slot_lanes; /* the lowest lane */
    return e;
}

/* ---- plan and weights ---------------------------------------------------------------------- */

__device__ __forceinline__ int flat_slot(const Entry &e) {
    return __shfl_sync(~0u, e.slot, e.slot_lanes ? __ffs((int)e.slot_lanes) - 1 : 0);
}

/* Store a row's routes and begin into the plan, which counts blocks of sources at their largest. By
 * one of the warps that share its record. */
__device__ __forceinline__ void store_plan_row(const EpLatencyScatterArgs &a, const Entry &e,
                                               int source, int token) {
    const EpPrepareArgs &route = a.route;
    int lane = threadIdx.x % 32, flat = route.shape.has_rows, slot = flat_slot(e);
    int64_t index = (int64_t)source * route.group.layout.max_tokens + token;
    if (lane < route.top_k) route.plan.routes[index * route.top_k + lane] = flat ? e.local : e.slot;
    int shorter = a.t.block_rows ? route.group.layout.max_tokens - (int)a.t.block_rows : 0;
    slot += source * shorter;
    int row = !e.expert_lanes ? EP_ROW_NONE : !flat ? 0 : e.slot_lanes ? slot : EP_ROW_LOST;
    if (lane == 0) route.plan.begins[index + source] = row;
}

/* Returns where the experts of rows with one slot go; data is NULL if the caller does not ask for
 * them. */
__device__ __forceinline__ EpCudaVector row_experts(const EpLatencyScatterArgs &a) {
    return EpCudaVector{a.t.out_idx, a.t.idx_type == EP_TYPE_INT64};
}

__device__ __forceinline__ void store_weights(const EpLatencyScatterArgs &a, const Entry &e) {
    int lane = threadIdx.x % 32, k = a.route.top_k;
    if (!a.route.shape.has_rows) {
        if (a.t.carries_weights && e.slot >= 0) a.t.out_weights[e.slot] = e.weight;
        return;
    }
    int64_t at = (int64_t)flat_slot(e) * k + lane;
    if (!e.slot_lanes || lane >= k) return;
    int has_weight = e.local >= 0 || a.route.shape.row_weights == EP_WEIGHTS_ALL;
    if (a.t.carries_weights) a.t.out_weights[at] = has_weight ? e.weight : 0;
    store_integer(row_experts(a), at, e.local >= 0 ? e.local + a.t.first_id : -1);
}

/* ---- units --------------------------------------------------------------------------------- */

/* Returns how many bytes of scales one store writes; of a tile, all of a row. */
template <int TILED> __device__ __forceinline__ int scale_unit(const EpLatencyScatterArgs &a) {
    int bytes = a.t.scale_map.by_column ? a.t.scale_map.element_bytes : scale_bytes_of(a);
    return bytes % 4 == 0 || (TILED && a.t.scale_map.swizzled) ? 4 : 1;
}

/* Returns the address of byte `at` of a slot's scales. Elements have a power of two of bytes. */
template <int TILED>
__device__ __forceinline__ char *scale_to(const EpLatencyScatterArgs &a, char *scales, int at) {
    int bytes = a.t.scale_map.element_bytes, element = at >> (31 - __clz(bytes));
    if (TILED && a.t.scale_map.swizzled)
        return scales + at / EP_TILE_SCALES * EP_TILE_BYTES + at % EP_TILE_SCALES;
    if (!a.t.scale_map.by_column) return scales + at;
    return scales + element * a.t.scale_map.slab_rows * bytes + (at & (bytes - 1));
}

/* Store a unit of swizzled scales, a word in each of up to four tiles. */
__device__ __forceinline__ void store_tiles(const EpLatencyScatterArgs &a, char *scales, int unit,
                                            uint4 x) {
    const uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int at = unit * 4 + i;
        if (at * EP_TILE_SCALES < scale_bytes_of(a))
            *(uint32_t *)(scales + at * EP_TILE_BYTES) =
                ep_swizzled_word(&a.t.scale_map, at, word[i]);
    }
}

template <int TILED>
__device__ __forceinline__ void store_scales(const EpLatencyScatterArgs &a, char *scales, int unit,
                                             const uint4 &x) {
    if (TILED && a.t.scale_map.swizzled) return store_tiles(a, scales, unit, x);
    const uint32_t word[4] = {x.x, x.y, x.z, x.w};
    int unit_bytes = scale_unit<TILED>(a);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int at = unit * 16 + i * 4;
        if (unit_bytes == 4 && at < scale_bytes_of(a))
            *(uint32_t *)scale_to<TILED>(a, scales, at) = word[i];
#pragma unroll 1
        for (int b = 0; b < 4 && unit_bytes == 1 && at + b < scale_bytes_of(a); b++)
            *scale_to<TILED>(a, scales, at + b) = (char)(word[i] >> 8 * b);
    }
}

/* Store this lane's units of steps `step` to before `end`, at most as many as x has, to all slots.
 * Each slot's address is computed once for all steps, since instructions limit the speed. */
template <int TILED>
__device__ __forceinline__ void store_units(const EpLatencyScatterArgs &a, const Entry &e, int step,
                                            int end, const uint4 x[EP_RECEIVED_AT_ONCE]) {
    unsigned first = (unsigned)(step * EP_STEP_UNITS + step_unit() - a.record.header_units);
    if (step_unit() < 0)
        first = 0u - EP_STEP_BYTES; /* no unit: past the end of every row, in all steps */
#pragma unroll 1
    for (unsigned left = e.slot_lanes; left; left &= left - 1) {
        int slot = __shfl_sync(~0u, e.slot, __ffs((int)left) - 1);
        uint4 *to = (uint4 *)(a.t.out_rows + (int64_t)slot * row_bytes_of(a)) + (int)first;
#pragma unroll
        for (int i = 0; i < EP_RECEIVED_AT_ONCE; i++)
            if (step + i < end && first + i * EP_STEP_UNITS < (unsigned)a.record.row_units)
                to[i * EP_STEP_UNITS] = x[i];
    }
    if (!scale_bytes_of(a) ||
        (step + EP_RECEIVED_AT_ONCE) * EP_STEP_UNITS <= a.record.header_units + a.record.row_units)
        return;
    first -= (unsigned)a.record.row_units;
#pragma unroll 1
    for (unsigned left = e.slot_lanes; left; left &= left - 1) {
        unsigned long long scales = (unsigned long long)e.scales;
        char *to = (char *)__shfl_sync(~0u, scales, __ffs((int)left) - 1);
#pragma unroll
        for (int i = 0; i < EP_RECEIVED_AT_ONCE; i++)
            if (step + i < end && first + i * EP_STEP_UNITS < (unsigned)a.record.scale_units)
                store_scales<TILED>(a, to, (int)(first + i * EP_STEP_UNITS), x[i]);
    }
}

/* ---- blocks of rows ------------------------------------------------------------------------ */

/* The counters of blocks of rows in this operation, and the units of a row: its parts. */
typedef struct BlockCount {
    uint64_t *counters;
    uint32_t units;
} BlockCount;

#define ROUTING_UNIT 1u /* of each block, besides its rows' */

/* Count a part of a row that the warp has stored to all slots; `is_first`: the row's first part. By
 * a warp. */
__device__ __forceinline__ void count_part(const EpLatencyScatterArgs &a, const BlockCount &c,
                                           const Entry &e, int is_first) {
    __syncwarp();
    if (!(e.slot_lanes >> threadIdx.x % 32 & 1)) return;
    ep_add_to_block(a.t.ready, c.counters, ep_row_block(&a.t.ready, e.slot), 1, (uint32_t)is_first,
                    c.units, ROUTING_UNIT);
}

/* Count a slot that the warp has zeroed. By a warp. */
__device__ __forceinline__ void count_zeroed(const EpLatencyScatterArgs &a, const BlockCount &c,
                                             int64_t slot) {
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        ep_add_rest(a.t.ready, c.counters, slot, slot + 1, c.units, ROUTING_UNIT, 0, 1);
}

/* Returns the slab that a row is in, of those that have rows: slabs follow one another. */
__device__ __forceinline__ int slab_of(const EpLatencyScatterArgs &a, int row) {
    int low = 0, high = a.route.shape.num_local - 1;
#pragma unroll 1
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (workspace_offset(a)[middle] <= row)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Rows `first` to before `end`. */
typedef struct RowRange {
    int64_t first, end;
} RowRange;

__device__ __forceinline__ int common_rows(const RowRange &x, int64_t first, int64_t end) {
    return (int)max((int64_t)0, min(x.end, end) - max(x.first, first));
}

/* Returns how many rows of a slab within a block hold no token and are zeroed by nobody: see
 * zero_padding. */
__device__ __forceinline__ int kept_in_slab(const EpLatencyScatterArgs &a, const RowRange &block,
                                            int e) {
    const EpPlanShape &s = a.route.shape;
    int has_tails = s.is_fixed && s.tail == EP_TAIL_ZERO;
    int64_t begin = workspace_offset(a)[e], limit = ep_slot_limit(&s, e);
    int64_t filled = min(limit, begin + workspace_total(a)[e]);
    int64_t padded = min(limit, begin + ep_slab_rows(&s, workspace_total(a)[e]));
    int64_t first = s.padding == EP_PADDING_KEEP ? padded : filled;
    int64_t last = has_tails ? limit : padded;
    if (!ep_has_padding(&s) && !has_tails) first = last = filled;
    return common_rows(block, filled, first) +
           common_rows(block, last, s.is_fixed ? limit : padded);
}

/* Returns the end of all rows that follow one another, padding included. */
__device__ __forceinline__ int64_t end_of_rows(const EpLatencyScatterArgs &a) {
    const EpPlanShape &s = a.route.shape;
    int last = (s.has_rows ? num_sources(a) : s.num_local) - 1;
    if (s.has_rows) return flat_begin(a)[last] + (int64_t)source_rows(a)[last];
    return last < 0
               ? 0
               : workspace_offset(a)[last] + (int64_t)ep_slab_rows(&s, workspace_total(a)[last]);
}

/* Likewise of a block, of all layouts. `end`: of all rows that follow one another. */
__device__ __forceinline__ int kept_in_block(const EpLatencyScatterArgs &a, int block,
                                             int64_t end) {
    const EpPlanShape &s = a.route.shape;
    const EpRowBlocks &b = a.t.ready;
    int first = ep_block_first(&b, block), section = block / b.per_section, kept = 0;
    int keeps = s.tail == EP_TAIL_KEEP;
    int64_t all = b.section_rows;
    RowRange rows = {first, first + ep_block_size(&b, block)};
    if (!s.has_rows && s.num_local)
        kept = kept_in_slab(a, rows, s.is_fixed ? section : slab_of(a, first));
    if (s.has_rows && s.is_fixed && keeps)
        kept = common_rows(rows, section * all + source_rows(a)[section], (section + 1) * all);
    if (!s.is_fixed) kept += common_rows(rows, keeps ? end : max(end, a.t.out_capacity), all);
    return kept;
}

/* Count what holds no token and is not zeroed, and the routing, which this block has published, in
 * one addition for each block of rows: an addition with its fence takes a microsecond. By all
 * threads. */
__device__ __noinline__ void count_rest(const EpLatencyScatterArgs &a, BlockCount c) {
    const EpRowBlocks &b = a.t.ready;
    int64_t end = min(end_of_rows(a), ep_row_limit(&a.route.shape));
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < b.sections * b.per_section; i += LATENCY_THREADS)
        ep_add_to_block(b, c.counters, i,
                        (uint32_t)kept_in_block(a, i, end) * c.units + ROUTING_UNIT, 0, c.units,
                        ROUTING_UNIT);
}

/* ---- a record ------------------------------------------------------------------------------ */

/* A warp's part of a record: steps `step` to before `end`. */
typedef struct Record {
    int source, token, step, end;
} Record;

/* Steps of a record as loaded, arrived or not: the first one, which has the header, and a
 * warp's. */
typedef struct Fetched {
    ulonglong2 head, x[EP_RECEIVED_AT_ONCE];
} Fetched;

/* Returns the rank of this node from which a source's records come. */
__device__ __forceinline__ int peer_of(const EpLatencyScatterArgs &a, int source) {
    return EP_SEVERAL_NODES ? rank_place(a.latency, source).number : source;
}

__device__ __forceinline__ const char *record_from(const EpLatencyScatterArgs &a, const Record &r,
                                                   uint64_t flag) {
    const EpLatency &l = a.latency;
    int source = r.source;
    if (EP_SEVERAL_NODES) {
        EpRankPlace at = rank_place(l, source);
        char *window = l.window[at.number], *messages = window + l.layout.landing;
        if (!l.nodes.reads_landing) messages = latency_messages(l, window, flag);
        /* Parts are fetched before heads tell how many places are filled: none past the last. */
        if (at.other >= 0)
            return message_place(l, messages, at.other, min(r.token, l.layout.node_rows - 1));
        source = at.number;
    }
    return latency_record(l, l.own, source, a.route.group.size, r.token, flag);
}

__device__ __forceinline__ void fetch_steps(const Record &r, const char *from,
                                            ulonglong2 x[EP_RECEIVED_AT_ONCE]) {
    const char *at = from + r.step * EP_STEP_BYTES;
#pragma unroll
    for (int i = 0; i < EP_RECEIVED_AT_ONCE; i++)
        if (r.step + i < r.end) x[i] = step_load(at + i * EP_STEP_BYTES);
}

/* Whether all steps of the part have arrived. By a warp. */
__device__ __forceinline__ int steps_are_here(const Record &r, uint64_t flag,
                                              const ulonglong2 x[EP_RECEIVED_AT_ONCE]) {
    int here = 1;
#pragma unroll
    for (int i = 0; i < EP_RECEIVED_AT_ONCE; i++)
        here &= r.step + i >= r.end || x[i].y == flag;
    return __all_sync(~0u, here || !has_flag());
}

__device__ __forceinline__ Fetched fetch_record(const EpLatencyScatterArgs &a, const Record &r,
                                                uint64_t flag) {
    Fetched f;
    const char *from = record_from(a, r, flag);
    f.head = step_load(from);
    fetch_steps(r, from, f.x);
    return f;
}

/* Wait for the steps of a part. By a warp. Returns 0 on timeout. */
__device__ __forceinline__ int await_steps(const EpLatencyScatterArgs &a, const Record &r,
                                           const char *from, uint64_t flag,
                                           ulonglong2 x[EP_RECEIVED_AT_ONCE]) {
    const StepOrigin origin = {peer_of(a, r.source), EP_AWAIT_LINES, r.token};
    int alive = 1;
#pragma unroll
    for (int i = 0; i < EP_RECEIVED_AT_ONCE; i++)
        if (alive && !(EP_MASKED && alive == STEP_LATE) && r.step + i < r.end)
            alive = step_await(a.route.group, a.latency, from + (r.step + i) * EP_STEP_BYTES, flag,
                               &x[i], origin);
    return alive;
}

/* Store which ranks of this node will have sums for a row that this rank relays. By a warp, from
 * the record's first step. */
__device__ __forceinline__ void store_relay_owners(const EpLatencyScatterArgs &a, const Record &r,
                                                   const uint4 &unit) {
    const EpLatency &l = a.latency;
    EpRankPlace from = rank_place(l, r.source), at = {0, -1};
    int lane = threadIdx.x % 32, k = a.route.top_k;
    if (from.other < 0 || from.number != a.route.group.rank) return;
    RecordWords h = record_words(unit, a.t.carries_weights, lane < k ? lane : 0);
    int expert = (int)(h.word & ((1u << a.record.expert_bits) - 1)) - 1;
    if (expert >= 0) at = rank_place(l, owner_of(a, expert));
    int64_t row = (int64_t)from.other * l.layout.node_rows + r.token;
    if (lane < k) a.route.plan.relay_owners[row * k + lane] = at.other < 0 ? at.number : -1;
}

/* A record's rank is late. The last block zeroes its rows; but words of blocks of rows cannot wait
 * for that, so there the group is suspended. Returns 0 then. */
template <int READY>
__device__ __forceinline__ int lose_record(const EpLatencyScatterArgs &a, const Record &r,
                                           uint64_t flag) {
    if (READY)
        ep_report(a.route.group, EP_FAULT_LATE,
                  EpAwaited{r.source, EP_AWAIT_LINES, r.token, (uint32_t)flag, 0});
    return !READY;
}

/* Receive a warp's part of a record. Returns 0 on timeout. */
template <int TILED, int READY>
__device__ __forceinline__ int receive_record(const EpLatencyScatterArgs &a, Record r, Fetched f,
                                              uint64_t flag, const BlockCount &c) {
    int is_first = r.step == 0;
    const char *from = record_from(a, r, flag);
    const StepOrigin origin = {peer_of(a, r.source), EP_AWAIT_LINES, r.token};
    int here = step_await(a.route.group, a.latency, from, flag, &f.head, origin);
    if (!here) return 0;
    if (EP_MASKED && here == STEP_LATE) return lose_record<READY>(a, r, flag);
    if (!steps_are_here(r, flag, f.x)) fetch_steps(r, from, f.x);
    Entry e = read_header<TILED>(a, r.source, step_unpack(f.head));
    if (r.step == 0) store_plan_row(a, e, r.source, r.token), store_weights(a, e);
    if (EP_SEVERAL_NODES && r.step == 0) store_relay_owners(a, r, step_unpack(f.head));
#pragma unroll 1
    while (e.slot_lanes) {
        uint4 unit[EP_RECEIVED_AT_ONCE];
        if (!a.latency.whole || !steps_are_here(r, flag, f.x)) {
            here = await_steps(a, r, from, flag, f.x);
            if (!here) return 0;
            if (EP_MASKED && here == STEP_LATE) return lose_record<READY>(a, r, flag);
        }
#pragma unroll
        for (int i = 0; i < EP_RECEIVED_AT_ONCE; i++)
            unit[i] = step_unpack(f.x[i]);
        store_units<TILED>(a, e, r.step, r.end, unit);
        r.step += EP_RECEIVED_AT_ONCE;
        if (r.step >= r.end) break;
        fetch_steps(r, from, f.x);
    }
    if (READY) count_part(a, c, e, is_first);
    return 1;
}

/* ---- all records --------------------------------------------------------------------------- */

/* A warp's progress through the records. `partition` divides them among the warps of `blocks`
 * blocks, and expects that no rank has more tokens than this one has rows. `fetched` holds part
 * `at`, of which some may have arrived before the heads. */
typedef struct ReceiveState {
    EpPartition partition;
    int warp, warps, at;
    Fetched fetched;
} ReceiveState;

__device__ __forceinline__ Record record_at(const EpLatencyScatterArgs &a, const ReceiveState &s) {
    int row = ep_quotient(s.at, s.partition.each), token = ep_quotient(row, a.latency.ranks);
    int source = self(a) + row - token * num_sources(a);
    int step = (s.at - row * s.partition.each.by) * s.partition.steps;
    return Record{source - (source < num_sources(a) ? 0 : num_sources(a)), token, step,
                  min(step + s.partition.steps, a.record.steps)};
}

__device__ __forceinline__ int has_record(const ReceiveState &s) {
    return s.at < s.partition.rows * s.partition.each.by;
}

/* Whether the current part lies in the memory of another rank, which relays it. Its flags tell
 * nothing before the heads are here, and loads over NVLink until then would slow down what that
 * rank still exchanges. */
__device__ __forceinline__ int is_relayed(const EpLatencyScatterArgs &a, const ReceiveState &s) {
    if (!EP_SEVERAL_NODES || !has_record(s)) return 0;
    EpRankPlace at = rank_place(a.latency, record_at(a, s).source);
    return at.other >= 0 && at.number != a.route.group.rank;
}

__device__ __forceinline__ void begin_part(const EpLatencyScatterArgs &a, ReceiveState *s, int at,
                                           uint64_t flag) {
    s->at = at;
    if (has_record(*s)) s->fetched = fetch_record(a, record_at(a, *s), flag);
}

__device__ __forceinline__ ReceiveState begin_receiving(const EpLatencyScatterArgs &a, int block,
                                                        int blocks, uint64_t flag) {
    ReceiveState s;
    s.partition = a.latency.received;
    s.warps = blocks * LATENCY_WARPS, s.warp = (int)(threadIdx.x / 32) * blocks + block;
    int at = block < blocks ? s.warp : INT32_MAX;
    if (EP_SEVERAL_NODES) s.at = at, s.fetched = Fetched{};
    if (!EP_SEVERAL_NODES || !is_relayed(a, s)) begin_part(a, &s, at, flag);
    return s;
}

/* Load again what had not arrived of the current part. */
__device__ __forceinline__ void refetch_part(const EpLatencyScatterArgs &a, ReceiveState *s,
                                             uint64_t flag) {
    if (!has_record(*s) || is_relayed(a, *s)) return;
    Record r = record_at(a, *s);
    const char *from = record_from(a, r, flag);
    if (!step_is_here(s->fetched.head, flag)) s->fetched.head = step_load(from);
    if (!steps_are_here(r, flag, s->fetched.x)) fetch_steps(r, from, s->fetched.x);
}

/* Returns how all records are divided, once it is known how many tokens ranks have. */
__device__ __forceinline__ EpPartition partition_of(const EpLatencyScatterArgs &a, int warps) {
    int most = workspace()->most_tokens;
    if (most <= a.route.num_rows) return a.latency.received;
    return ep_partition(most * num_sources(a), a.record.steps, EP_RECEIVED_AT_ONCE, warps);
}

/* Receive this warp's parts of all records. The next part is loaded while one is copied. Returns 0
 * on timeout. */
template <int TILED, int READY>
__device__ __forceinline__ int receive_records(const EpLatencyScatterArgs &a, ReceiveState s,
                                               uint64_t flag, const BlockCount &c) {
    if (workspace()->most_tokens > a.route.num_rows) {
        s.partition = partition_of(a, s.warps);
        begin_part(a, &s, s.warp, flag);
    }
#pragma unroll 1
    while (has_record(s)) {
        Record r = record_at(a, s);
        Fetched fetched = s.fetched;
        begin_part(a, &s, s.at + s.warps, flag);
        if (r.token < source_tokens(a)[r.source] &&
            !receive_record<TILED, READY>(a, r, fetched, flag, c))
            return 0;
    }
    return 1;
}

/* ---- padding ------------------------------------------------------------------------------- */

/* Zero a slot; ROW: of a row that does not come. By a warp. */
template <int TILED, int ROW = 0>
__device__ __noinline__ void zero_slot(const EpLatencyScatterArgs &a, int64_t slot) {
    int lane = threadIdx.x % 32, k = a.route.top_k, flat = a.route.shape.has_rows;
    int values = flat ? k : 1, unit_bytes = scale_unit<TILED>(a);
    if (lane < k) store_integer(row_experts(a), slot * k + lane, -1);
    /* Such layouts have no padding but the tail. */
    if (a.route.shape.tail == EP_TAIL_IDS && !ROW) return;
#pragma unroll 1
    for (int at = lane; at < a.record.row_units; at += 32)
        *((uint4 *)(a.t.out_rows + slot * row_bytes_of(a)) + at) = make_uint4(0, 0, 0, 0);
    if (a.t.carries_weights && lane < values) a.t.out_weights[slot * values + lane] = 0;
    if (!scale_bytes_of(a)) return;
    char *scales = a.t.out_scales + scale_at<TILED>(a, slot);
#pragma unroll 1
    for (int at = lane * unit_bytes; at < scale_bytes_of(a); at += 32 * unit_bytes)
#pragma unroll 1
        for (int b = 0; b < unit_bytes; b++)
            *(scale_to<TILED>(a, scales, at) + b) = 0;
}

/* Zero slots `begin` to before `end` of each lane. By `warps` warps that pass the same ranges and
 * divide them; this one is number `warp`. */
template <int TILED, int READY>
__device__ __forceinline__ void zero_slots(const EpLatencyScatterArgs &a, const BlockCount &c,
                                           int64_t begin, int64_t end, int warp, int warps) {
    int count = (int)max((int64_t)0, end - begin), through = ep_warp_prefix(count);
    int all = __shfl_sync(~0u, through, 31);
#pragma unroll 1
    for (int i = warp; i < all; i += warps) {
        int lane = __popc(__ballot_sync(~0u, through <= i));
        int64_t slot = __shfl_sync(~0u, begin + i - (through - count), lane);
        zero_slot<TILED>(a, slot);
        if (READY) count_zeroed(a, c, slot);
    }
}

/* Zero the slots behind each source's rows, in blocks of fixed size. */
template <int TILED, int READY>
__device__ __forceinline__ void zero_source_tails(const EpLatencyScatterArgs &a,
                                                  const BlockCount &c, int warp, int warps) {
    int size = num_sources(a), lane = threadIdx.x % 32, most = (int)a.route.shape.block_rows;
#pragma unroll 1
    for (int at = 0; at < size; at += 32) {
        int source = min(at + lane, size - 1);
        int64_t begin = flat_begin(a)[source], end = at + lane < size ? begin + most : 0;
        zero_slots<TILED, READY>(a, c, begin + source_rows(a)[source], end, warp, warps);
    }
}

/* Zero the slots of slabs that receive nothing and, on request, the rows behind the slabs. */
template <int TILED, int READY>
__device__ __forceinline__ void zero_padding(const EpLatencyScatterArgs &a, const BlockCount &c,
                                             int warp, int warps) {
    const EpPrepareArgs &route = a.route;
    const EpPlanShape &s = route.shape;
    int local = s.num_local, lane = threadIdx.x % 32;
    int keeps = s.padding == EP_PADDING_KEEP, has_tails = s.is_fixed && s.tail == EP_TAIL_ZERO;
    int has_slabs = !s.has_rows && (ep_has_padding(&s) || has_tails);
    int64_t end = 0;
#pragma unroll 1
    for (int at = 0; at < local && has_slabs; at += 32) {
        int e = min(at + lane, local - 1), total = workspace_total(a)[e];
        int64_t limit = ep_slot_limit(&route.shape, e), begin = workspace_offset(a)[e];
        int64_t last = min(limit, begin + ep_slab_rows(&s, total));
        int64_t first = keeps ? last : begin + total;
        if (has_tails) last = limit;
        zero_slots<TILED, READY>(a, c, first, at + lane < local ? last : 0, warp, warps);
    }
    if (s.tail == EP_TAIL_KEEP || (s.is_fixed && !s.has_rows)) return;
    if (s.is_fixed) return zero_source_tails<TILED, READY>(a, c, warp, warps);
    if (s.has_rows)
        end = flat_begin(a)[num_sources(a) - 1] + (int64_t)source_rows(a)[num_sources(a) - 1];
    else if (local)
        end = workspace_offset(a)[local - 1] +
              (int64_t)ep_slab_rows(&s, workspace_total(a)[local - 1]);
    zero_slots<TILED, READY>(a, c, min(end, ep_row_limit(&route.shape)),
                             lane == 0 ? a.t.out_capacity : 0, warp, warps);
}

/* ==== late ranks ============================================================================ */

#if EP_MASKED
/* Zero slots `first` to before `end`, as far as there are so many. By all warps of a block. */
template <int TILED>
__device__ void zero_rows(const EpLatencyScatterArgs &a, int64_t first, int64_t end,
                          int64_t limit) {
#pragma unroll 1
    for (int64_t slot = first + threadIdx.x / 32; slot < min(end, limit); slot += LATENCY_WARPS)
        zero_slot<TILED, 1>(a, slot);
}

/* Zero all rows of a rank whose head has come, and let combine send it nothing. By all threads of a
 * block that has received the heads. */
template <int TILED> __device__ void lose_rows(const EpLatencyScatterArgs &a, int source) {
    const EpPlanShape &s = a.route.shape;
    int64_t first = flat_begin(a)[source];
    if (s.has_rows) zero_rows<TILED>(a, first, first + source_rows(a)[source], ep_row_limit(&s));
#pragma unroll 1
    for (int e = 0; e < s.num_local && !s.has_rows; e++) {
        first = workspace_offset(a)[e] + (int64_t)workspace_counts(a)[source * s.num_local + e];
        zero_rows<TILED>(a, first, first + count_of(a, e, source), ep_slot_limit(&s, e));
    }
    if (threadIdx.x == 0) a.route.plan.tokens[source] = 0;
}

/* End an operation in which ranks may have been late. By all threads of the last block. */
template <int TILED>
__device__ __noinline__ void end_late(const EpLatencyScatterArgs &a, int blocks, uint64_t flag) {
    const EpCudaGroup &g = a.route.group;
    const EpLateRanks *late = latency_late(a.latency, flag);
    int t = (int)threadIdx.x, skipped = t < g.size ? latency_take_skipped(a.latency, t, flag) : 0;
    if (t < g.size && skipped != blocks && (skipped || has_bit(late->absent, t)) && !ep_failed(g))
        ep_report(g, EP_FAULT_LATE, EpAwaited{t, EP_AWAIT_HEAD, 0, (uint32_t)flag, 0});
    if (!latency_leave_late(a.latency, flag)) {
        if (late->since[0] | late->since[1]) latency_cut(g, a.latency, flag);
        return;
    }
    if (ep_failed(g)) return;
#pragma unroll 1
    for (int r = 0; r < g.size; r++) {
        if (!has_bit(late->absent, r) && has_bit(late->lost, r)) lose_rows<TILED>(a, r);
    }
    __syncthreads();
    latency_cut(g, a.latency, flag);
}
#endif

/* ==== kernel ================================================================================ */

/* Returns the most tokens of any source. */
__device__ __forceinline__ int most_of_any(const EpLatencyScatterArgs &a) {
    int most = workspace()->most_tokens;
    return EP_SEVERAL_NODES ? max(most, workspace()->longest) : most;
}

/* Report that some source has more tokens than there is room for in its block. By all threads of a
 * block. */
__device__ __noinline__ void report_blocks(const EpLatencyScatterArgs &a) {
    const EpCudaGroup &g = a.route.group;
    if (threadIdx.x || ep_failed(g)) return;
    ep_report(
        g, EP_FAULT_PLAN,
        EpAwaited{g.rank, EP_PLAN_BLOCKS, 0, (uint32_t)most_of_any(a), (uint32_t)a.t.block_rows});
}

/* Several nodes: give the others the heads of messages that have come, whose rows stay where they
 * are, and count these. Other ranks wait for the heads, so the first block gives them, which runs
 * whatever holds the GPU. By all threads of a block. */
__device__ __forceinline__ void take_landed(const EpLatencyScatterArgs &a, const LatencyRole &role,
                                            uint64_t flag) {
#if EP_SEVERAL_NODES
    const EpCudaGroup &g = a.route.group;
    const EpLatency &l = a.latency;
    int warp = (int)(threadIdx.x / 32), others = l.nodes.num_others;
    int gives = role.block == 0 && g.size > 1;
    if (gives) ep_fence_sys(); /* what NCCL has stored is read behind the heads */
#pragma unroll 1
    for (int i = warp; i < others * g.size && gives; i += LATENCY_WARPS)
        if (i % g.size != g.rank) forward_head(g, l, i / g.size, i % g.size, flag);
    if (!a.route.stats.peer_rows && !a.route.stats.peer_bytes) return;
    EpRelayedRows relayed = {a.route.stats, a.route.owners, a.route.top_k, a.record.expert_bits,
                             a.t.carries_weights};
#pragma unroll 1
    for (int o = 0; o < others; o++)
        count_landed(g, l, relayed, o, warp * role.blocks + role.block,
                     role.blocks * LATENCY_WARPS);
#endif
}

/* Receive this rank's rows. By all threads of a block. The last block publishes the routing. If
 * flat rows are lost, the block that finishes last does so at the end. */
template <int TILED, int READY>
__device__ __forceinline__ void receive(const EpLatencyScatterArgs &a, const LatencyRole &role,
                                        const LatencyOp &op) {
    uint64_t flag = op.flag;
    int blocks = max(1, role.blocks - 1), flat = a.route.shape.has_rows;
    if (counts(role)) latency_measure_heads(a.route.group, a.latency, a.route.stats, flag);
    if (EP_SEVERAL_NODES && a.latency.nodes.reads_landing) take_landed(a, role, flag);
    ReceiveState state = begin_receiving(a, role.block, blocks, flag);
    if (!take_heads(a, flag, [&] { refetch_part(a, &state, flag); })) return;
    if (a.t.block_rows && most_of_any(a) > a.t.block_rows) return report_blocks(a);
    if (is_relayed(a, state)) begin_part(a, &state, state.at, flag);
    BlockCount c = {NULL, 1};
    if (READY)
        c = BlockCount{a.block_counters + EP_FLAG_SET(flag) * EP_MAX_BLOCK_WORDS,
                       (uint32_t)partition_of(a, state.warps).each.by};
    int publishes = role.block == role.blocks - 1,
        has_lost_rows = flat && flat_rows_kept(a) < flat_rows(a);
    if (counts(role) && threadIdx.x / 32 == MEASURE_WARP && !has_lost_rows) count_experts(a);
    if (role.block < blocks) {
        receive_records<TILED, READY>(a, state, flag, c);
        zero_padding<TILED, READY>(a, c, state.warp, state.warps);
    }
    if (publishes && !flat) publish_routing(a, op);
    if (publishes && flat && !has_lost_rows) publish_flat(a, op);
    if (READY && publishes && !has_lost_rows) count_rest(a, c);
    if (has_lost_rows && latency_is_last(a.latency, role, op.flag)) {
        publish_flat_kept(a, op);
        if (READY) count_rest(a, c);
    }
}

/* TILED: the kernels where ep_scatter_is_tiled; READY: where blocks of rows have words; PLACED:
 * where the group has a placement. Others do not pay for that code. */
template <int TILED, int READY, int PLACED>
__global__ void __launch_bounds__(LATENCY_THREADS, 1)
    latency_scatter_kernel(const __grid_constant__ EpLatencyScatterArgs a) {
    const EpCudaGroup &g = a.route.group;
    const EpLatency &l = a.latency;
    LatencyOp op;
    LatencyRole role = latency_role(l);
    reset_heads();
    latency_begin(l);
    int has_global = !TILED || ep_has_global(a.t.global_scale);
    if (role.sends && blockIdx.x) claims_begin(l);
    if (role.sends) open_workspace<PLACED>(a);
    if (!latency_begin_operation(g, a.route.plan, l, &op) || !has_global) {
        if (TILED) ep_report_global(g, a.t.global_scale);
        latency_report(g, a.route.plan, l);
        if (EP_SEVERAL_NODES) latency_mark_begin(g, l);
        latency_pass(g, l, op, latency_ticket(l, op));
        return;
    }
    if (EP_SEVERAL_NODES) latency_mark_begin(g, l);
    if (role.sends && a.route.shape.merges) merge_duplicates(a);
    if (EP_SEVERAL_NODES && role.sends) find_needs(a);
    if (role.sends) send_all<TILED>(a, op);
    if (EP_SEVERAL_NODES && role.sends && blockIdx.x == 0) {
        await_node(g, l, op.flag);
        __syncthreads();
        latency_seal_stamps(g, l);
    }
    uint32_t ticket = latency_ticket(l, op);
    if (role.receives) receive<TILED, READY>(a, role, op);
#if EP_MASKED
    if (ep_cuts() && role.receives && latency_ends_late(g, l, role.blocks, op.flag, 0))
        end_late<TILED>(a, role.blocks, op.flag);
#endif
    latency_pass(g, l, op, ticket);
}

template <int PLACED> static int open_kernels(int shared_bytes) {
    int error = ep_open_kernel(latency_scatter_kernel<0, 0, PLACED>, shared_bytes);
    if (!error) error = ep_open_kernel(latency_scatter_kernel<0, 1, PLACED>, shared_bytes);
    if (!error) error = ep_open_kernel(latency_scatter_kernel<1, 0, PLACED>, shared_bytes);
    return error ? error : ep_open_kernel(latency_scatter_kernel<1, 1, PLACED>, shared_bytes);
}

/* Words of blocks are read while the kernel runs, so it starts after all that is before it. */
template <int PLACED>
static int launch_kernel(const EpLatencyScatterArgs *a, int blocks, void *stream) {
    int tiled = ep_scatter_is_tiled(&a->t);
    auto counting =
        tiled ? latency_scatter_kernel<1, 1, PLACED> : latency_scatter_kernel<0, 1, PLACED>;
    auto kernel =
        tiled ? latency_scatter_kernel<1, 0, PLACED> : latency_scatter_kernel<0, 0, PLACED>;
    if (a->t.ready.words)
        return ep_launch(counting, blocks, LATENCY_THREADS, a->workspace.bytes, stream, *a);
    int follows_nccl = EP_SEVERAL_NODES && a->latency.nodes.reads_landing; /* not a kernel alone */
    return ep_launch_early(kernel, blocks, LATENCY_THREADS, a->workspace.bytes, stream, *a,
                           a->route.group.early && !follows_nccl);
}

extern "C" int EP_VARIANT(ep_cuda_open_latency_scatter)(int shared_bytes) {
    int error = open_kernels<0>(shared_bytes);
    return error ? error : open_kernels<1>(shared_bytes);
}

extern "C" int EP_VARIANT(ep_cuda_launch_latency_scatter)(const void *args, int blocks,
                                                          void *stream) {
    const EpLatencyScatterArgs *a = (const EpLatencyScatterArgs *)args;
    return a->route.copies.of ? launch_kernel<1>(a, blocks, stream)
                              : launch_kernel<0>(a, blocks, stream);
}

EP_VARIANT_END
