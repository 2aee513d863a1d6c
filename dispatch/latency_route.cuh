/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_LATENCY_ROUTE_CUH
#define EP_DISPATCH_LATENCY_ROUTE_CUH

/**
 * Routing in latency mode's dispatch. A source tells each rank how many entries it has for each of
 * the rank's experts, and with each row how many entries for its experts come before. From the
 * first, all of which each receiving block reads, follows where each source's entries begin in
 * every slab; with the second, each entry's slot.
 */

#include "handles/latency.cuh"

/* What a block's threads share. */
typedef struct DeskWords {
    int tokens; /* of this rank: known to who sends */
    int32_t source_tokens[EP_CUDA_MAX_RANKS], source_rows[EP_CUDA_MAX_RANKS];
    int32_t flat_begin[EP_CUDA_MAX_RANKS];
    int32_t sent;                           /* rows to other ranks */
    uint32_t header[2 * EP_MAX_TOP_K];      /* of the record under work */
    int32_t goes[EP_CUDA_MAX_RANKS];        /* whether its row goes to that rank */
    int32_t to[EP_CUDA_MAX_RANKS], num_to;  /* all ranks, those first, and how many these are */
    unsigned long long bad_count, bad_last; /* bad indices; ~ of the first entry that has one */
} DeskWords;

/* A block's shared memory. */
typedef struct Desk {
    DeskWords *w;
    char *staged;     /* a quantised row and its scales */
    int32_t *experts; /* [tokens, K] of this rank's entries, or NO_EXPERT, BAD_EXPERT; NULL: they do
                         not fit */
    int32_t *counts;  /* sending heads: [E] entries, then [R] rows. Receiving: [R, L] entries of the
                         sources before for each local expert */
    int32_t *total;   /* [L] entries of all sources */
    int32_t *offset;  /* [L] where slabs begin */
    uint8_t *owner;   /* [E] rank of each expert */
} Desk;

/* Bytes of each array. */
typedef struct DeskShape {
    int64_t staged, experts, counts, local, owner;
} DeskShape;

static __host__ __device__ __forceinline__ DeskShape desk_shape(const EpLatencyScatterArgs &a,
                                                                int keeps_routing) {
    int64_t ranks = a.route.group.size, experts = a.route.group.num_experts;
    int64_t local = a.route.shape.num_local, entries = (int64_t)a.route.num_rows * a.route.top_k;
    int64_t counts = experts > ranks * local ? experts : ranks * local;
    int64_t staged = a.quant > EP_QUANT_NONE ? 16 * (a.record.row_units + a.record.scale_units) : 0;
    return DeskShape{staged, keeps_routing ? 4 * entries : 0, 4 * (counts + ranks), 4 * local,
                     experts};
}

static __host__ __device__ __forceinline__ int64_t desk_bytes(const DeskShape &s) {
    return s.staged + s.experts + s.counts + 2 * s.local + s.owner;
}

__device__ __forceinline__ Desk make_desk(const EpLatencyScatterArgs &a, DeskWords *w,
                                          char *memory) {
    DeskShape s = desk_shape(a, a.keeps_routing);
    Desk d = {w, memory, NULL, NULL, NULL, NULL, NULL};
    memory += s.staged;
    if (a.keeps_routing) d.experts = (int32_t *)memory, memory += s.experts;
    d.counts = (int32_t *)memory, memory += s.counts;
    d.total = (int32_t *)memory, memory += s.local;
    d.offset = (int32_t *)memory, memory += s.local;
    d.owner = (uint8_t *)memory;
    return d;
}

/* ---- this rank's entries ------------------------------------------------------------------- */

__device__ __forceinline__ int64_t index_at(const EpPrepareArgs &a, int64_t entry) {
    return load_integer(a.topk_idx, a.idx_is_int64, entry);
}

#define NO_EXPERT (-1)
#define BAD_EXPERT (-2) /* the caller meant one, which there is not */

__device__ __forceinline__ int expert_of(const EpPrepareArgs &a, int64_t index) {
    return index < 0 ? NO_EXPERT : index < a.group.num_experts ? (int)index : BAD_EXPERT;
}

/* What a block needs to send, before its first barrier. Rows past the step's tokens are loaded,
 * too: their number may be on its way. */
__device__ __forceinline__ void open_desk(const EpPrepareArgs &a, const Desk *d) {
    const EpCudaGroup &g = a.group;
    EpPlacement placement = {g.num_experts, g.size};
    int entries = d->experts ? a.num_rows * a.top_k : 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < entries; i += THREADS)
        d->experts[i] = expert_of(a, index_at(a, i));
#pragma unroll 1
    for (int e = threadIdx.x; e < g.num_experts; e += THREADS)
        d->owner[e] = (uint8_t)ep_placement_owner(&placement, e);
#pragma unroll 1
    for (int i = threadIdx.x; i < g.num_experts + g.size; i += THREADS)
        d->counts[i] = 0;
    if (threadIdx.x == 0) d->w->bad_count = d->w->bad_last = 0;
    if (threadIdx.x == 32) d->w->tokens = count_tokens(a);
}

__device__ __forceinline__ int expert_at(const EpPrepareArgs &a, const Desk *d, int entry) {
    return d->experts ? d->experts[entry] : expert_of(a, index_at(a, entry));
}

__device__ __forceinline__ int owner_of(const Desk *d, int expert) {
    return expert < 0 ? -1 : d->owner[expert];
}

/* Entries for an expert before one of them. By a warp. */
__device__ __forceinline__ int count_entries_before(const EpPrepareArgs &a, const Desk *d,
                                                    int entry, int expert) {
    int count = 0;
    for (int i = (int)threadIdx.x % 32; i < entry; i += 32)
        count += expert_at(a, d, i) == expert;
    return warp_sum(count);
}

/* Rows to a rank before a token's. By a warp. */
__device__ __noinline__ int count_rows_before(const EpPrepareArgs &a, const Desk *d, int token,
                                              int owner) {
    int count = 0;
#pragma unroll 1
    for (int t = (int)threadIdx.x % 32; t < token; t += 32) {
        int goes = 0;
#pragma unroll 1
        for (int i = t * a.top_k; i < (t + 1) * a.top_k; i++)
            goes |= owner_of(d, expert_at(a, d, i)) == owner;
        count += goes;
    }
    return warp_sum(count);
}

/* ---- heads --------------------------------------------------------------------------------- */

/* A token's entries, counted; bits are set of the ranks that it goes to. */
__device__ __forceinline__ void count_token(const EpPrepareArgs &a, const Desk *d, int token,
                                            unsigned goes[RANK_WORDS]) {
#pragma unroll 1
    for (int i = token * a.top_k; i < (token + 1) * a.top_k; i++) {
        int expert = expert_at(a, d, i), owner = owner_of(d, expert);
        if (expert == BAD_EXPERT) {
            atomicAdd(&d->w->bad_count, 1ull);
            atomicMax(&d->w->bad_last, ~(unsigned long long)i);
        }
        if (expert >= 0) atomicAdd(&d->counts[expert], 1);
#pragma unroll
        for (int w = 0; w < RANK_WORDS; w++)
            if (owner >= 0 && owner / 32 == w) goes[w] |= 1u << owner % 32;
    }
}

/* Entries for each expert and rows to each rank, into counts, which are 0. */
__device__ void count_all(const EpPrepareArgs &a, const Desk *d) {
    int32_t *rows = d->counts + a.group.num_experts;
    int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int from = (int)threadIdx.x - lane; from < d->w->tokens; from += THREADS) {
        unsigned goes[RANK_WORDS] = {0};
        if (from + lane < d->w->tokens) count_token(a, d, from + lane, goes);
#pragma unroll
        for (int w = 0; w < RANK_WORDS; w++)
#pragma unroll 1
            for (int r = w * 32; r < min(a.group.size, w * 32 + 32); r++) {
                unsigned tokens = __ballot_sync(~0u, goes[w] >> r % 32 & 1);
                if (lane == 0 && tokens) atomicAdd(&rows[r], __popc(tokens));
            }
    }
    __syncthreads();
    if (threadIdx.x == 0 && d->w->bad_count) tell_bad_indices(a, d->w->bad_count, ~d->w->bad_last);
}

__device__ __forceinline__ uint32_t head_word(const EpPrepareArgs &a, const Desk *d, int r,
                                              int first, int count, int sent, int w) {
    const EpCudaGroup &g = a.group;
    if (w >= EP_HEAD_COUNTS)
        return w - EP_HEAD_COUNTS < count ? (uint32_t)d->counts[first + w - EP_HEAD_COUNTS] : 0;
    switch (w) {
    case EP_HEAD_DIGEST:
        return g.digest;
    case EP_HEAD_FACTS:
        return (uint32_t)g.facts;
    case EP_HEAD_FACTS + 1:
        return (uint32_t)(g.facts >> 32);
    case EP_HEAD_TOKENS:
        return (uint32_t)d->w->tokens;
    case EP_HEAD_ROWS:
        return (uint32_t)d->counts[g.num_experts + r];
    default:
        return w == EP_HEAD_SENT ? (uint32_t)sent : 0;
    }
}

__device__ void send_heads(const EpLatencyScatterArgs &a, const Desk *d, uint64_t flag) {
    const EpPrepareArgs &route = a.route;
    const EpCudaGroup &g = route.group;
    EpPlacement placement = {g.num_experts, g.size};
    int sent = 0;
    count_all(route, d);
#pragma unroll 1
    for (int r = (int)threadIdx.x % 32; r < g.size; r += 32)
        sent += r == g.rank ? 0 : d->counts[g.num_experts + r];
    sent = warp_sum(sent);
#pragma unroll 1
    for (int r = (int)threadIdx.x / 32; r < g.size; r += WARPS) {
        int first = ep_placement_first(&placement, r), count = ep_placement_count(&placement, r);
        send_head(g, a.latency, r, EP_HEAD_COUNTS + count, flag,
                  [&](int w) { return head_word(route, d, r, first, count, sent, w); });
    }
}

/* ---- what the sources say ------------------------------------------------------------------ */

__device__ __forceinline__ void take_word(const Desk *d, int source, int local, int own, int w,
                                          uint32_t word) {
    int e = w - EP_HEAD_COUNTS;
    if (e >= 0 && e < local) d->counts[source * local + e] = (int)word;
    if (w == EP_HEAD_TOKENS) d->w->source_tokens[source] = (int)word;
    if (w == EP_HEAD_ROWS) d->w->source_rows[source] = (int)word;
    if (w == EP_HEAD_SENT && source == own) d->w->sent = (int)word;
}

/* Counts of each source become those of the sources before. Batched slabs lie where they do. */
__device__ void add_sources(const EpPrepareArgs &a, const Desk *d) {
    int local = a.shape.num_local;
#pragma unroll 1
    for (int e = threadIdx.x; e < local; e += THREADS) {
        int before = 0;
#pragma unroll 1
        for (int s = 0; s < a.group.size; s++) {
            int count = d->counts[s * local + e];
            d->counts[s * local + e] = before;
            before += count;
        }
        d->total[e] = before;
        d->offset[e] = (int)min(e * a.shape.rows_per_expert, (int64_t)INT32_MAX);
    }
}

/* By a warp: where expert-major slabs begin. */
__device__ void lay_desk_slabs(const EpPrepareArgs &a, const Desk *d) {
    int lane = threadIdx.x % 32, local = a.shape.num_local;
    int64_t start = 0;
#pragma unroll 1
    for (int at = 0; at < local; at += 32) {
        Slab slab = lay_slab(a, d->total, local, at, &start);
        if (at + lane < local) d->offset[at + lane] = (int)min(slab.offset, (int64_t)INT32_MAX);
    }
}

/* By a warp: where each source's flat rows begin. */
__device__ void lay_desk_rows(const EpPrepareArgs &a, const Desk *d) {
    int lane = threadIdx.x % 32, begin = 0;
#pragma unroll 1
    for (int at = 0; at < a.group.size; at += 32) {
        int rows = at + lane < a.group.size ? d->w->source_rows[at + lane] : 0;
        int through = ep_warp_prefix(rows);
        if (at + lane < a.group.size) d->w->flat_begin[at + lane] = begin + through - rows;
        begin += __shfl_sync(~0u, through, 31);
    }
}

/* By all threads of a block; 0: some head is not to be had. */
__device__ int take_heads(const EpLatencyScatterArgs &a, const Desk *d, uint64_t flag) {
    const EpPrepareArgs &route = a.route;
    const EpCudaGroup &g = route.group;
    int alive = 1, local = route.shape.num_local;
#pragma unroll 1
    for (int r = (int)threadIdx.x / 32; r < g.size && alive; r += WARPS)
        alive =
            take_head(g, a.latency, r, EP_HEAD_COUNTS + local, flag, [&](int w, const uint4 &unit) {
                take_word(d, r, local, g.rank, w, unit.x);
                take_word(d, r, local, g.rank, w + 1, unit.y);
                take_word(d, r, local, g.rank, w + 2, unit.z);
                take_word(d, r, local, g.rank, w + 3, unit.w);
            });
    if (!__syncthreads_and(alive)) return 0;
    add_sources(route, d);
    __syncthreads();
    if (route.shape.layout == EP_LAYOUT_BATCHED) return 1;
    if (threadIdx.x < 32)
        route.shape.layout == EP_LAYOUT_FLAT ? lay_desk_rows(route, d) : lay_desk_slabs(route, d);
    __syncthreads();
    return 1;
}

/* ---- what is told -------------------------------------------------------------------------- */

/* Entries of a source for a local expert. */
__device__ __forceinline__ int count_of(const EpPrepareArgs &a, const Desk *d, int e, int source) {
    int local = a.shape.num_local, next = (source + 1) * local + e;
    return (source + 1 < a.group.size ? d->counts[next] : d->total[e]) -
           d->counts[source * local + e];
}

/* What every layout tells. */
__device__ void publish_sizes(const EpPrepareArgs &a, const Desk *d, int64_t step) {
    const EpCudaGroup &g = a.group;
#pragma unroll 1
    for (int r = threadIdx.x; r < g.size; r += THREADS)
        a.plan.tokens[r] = d->w->source_tokens[r];
    if (threadIdx.x) return;
    int received = 0;
#pragma unroll 1
    for (int r = 0; r < g.size; r++)
        received += r == g.rank ? 0 : d->w->source_rows[r];
    publish_row_counts(a, step, d->w->sent, received, d->w->source_rows[g.rank]);
}

/* By a block that has taken the heads, of another layout than FLAT; `step` is under way. */
__device__ __noinline__ void publish_routing(const EpPrepareArgs &a, const Desk *d, int64_t step) {
    publish_sizes(a, d, step);
    if (threadIdx.x < 32) publish_slabs(a, step, d->total);
    __syncthreads();
    publish_sources(a, [&](int e, int source) { return count_of(a, d, e, source); });
    if (threadIdx.x == 0) publish_step(a, step, d->w->source_tokens[a.group.rank]);
}

/* Entries of the flat rows that are kept, which all blocks have put into the plan. */
__device__ void count_kept(const EpPrepareArgs &a, const Desk *d) {
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
        for (int i = threadIdx.x; i < d->w->source_tokens[s] * a.top_k; i += THREADS) {
            int local = __ldcg(routes + i);
            if (local < 0 || __ldcg(slot + i / a.top_k) < 0) continue;
            atomicAdd(&a.plan.expert_counts[local], 1);
            count_source(a, local, s);
        }
    }
    __syncthreads();
}

/* By the last block: only now are all rows' entries known. */
__device__ __noinline__ void publish_flat(const EpPrepareArgs &a, const Desk *d) {
    const EpCudaGroup &g = a.group;
    __threadfence();
    if (*(volatile uint32_t *)&g.state->failed) return;
    int64_t step = step_under_way(a);
    int64_t rows = d->w->flat_begin[g.size - 1] + (int64_t)d->w->source_rows[g.size - 1];
    int64_t kept = min(rows, slot_limit(a, 0));
    publish_sizes(a, d, step);
    if (threadIdx.x == 0) publish_totals(a, step, kept, rows, rows - kept);
    if (kept < rows) count_kept(a, d);
    if (threadIdx.x < 32) publish_flat_experts(a, step, kept < rows ? NULL : d->total);
    __syncthreads();
    if (kept == rows)
        publish_sources(a, [&](int e, int source) { return count_of(a, d, e, source); });
    __syncthreads();
    if (threadIdx.x == 0) publish_step(a, step, d->w->source_tokens[g.rank]);
}

#endif
