/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_CUDA_PREPARE_ENTRIES_CUH
#define EP_HANDLES_CUDA_PREPARE_ENTRIES_CUH

/**
 * Entries of ep_prepare: their slots and rows, stored into the plan and sent to the receiving
 * ranks.
 */

#include "handles/cuda/prepare_counts.cuh"

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
        if (at + offset < a.group.size && token + i < p->end)
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
template <int FORM>
__device__ __forceinline__ void store_entries(const EpPrepareArgs &a, Partition *p, Own o,
                                              uint32_t epoch) {
#pragma unroll 1
    for (int first = p->begin; first < p->end; first += p->chunk_tokens) {
        store_chunk<FORM>(a, p, o, first, epoch);
        if (first != p->begin) send_begins(a, p, o, first, epoch);
        if (first + p->chunk_tokens >= p->end) return;
        Index index = load_own_index(a, p, first + p->chunk_tokens);
        advance(a, p);
        o = take_entry(a, p, index);
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

#endif
