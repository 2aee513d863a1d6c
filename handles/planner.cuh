/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PLANNER_CUH
#define EP_HANDLES_PLANNER_CUH

/**
 * What the planners of pipes read of the plan: a lane's tokens in order, as its source, or the rows
 * of all sources in turn, as their receiver. `Args` is EpScatterArgs or EpGatherArgs.
 */

#include "handles/enter.cuh"
#include "runtime/pipe.cuh"

/* ---- tokens -------------------------------------------------------------------------------- */

/** Entry k of this team's token; none past the end. */
template <typename Args>
__device__ __forceinline__ EpEntry entry_of(const Args &a, const Team &t, int token, int end) {
    EpEntry none = {-1, 0, -1, 0, 0};
    int valid = t.index < t.count && token < end && t.k < a.top_k;
    return valid ? a.plan.entries[(int64_t)token * a.top_k + t.k] : none;
}

/* ---- rows in turn -------------------------------------------------------------------------- */

/** What rows of a source wait for. */
typedef struct TurnRule {
    int phase; /* EP_PHASE_RECORD: their arrival; EP_PHASE_CREDIT: room for what is made of them */
    int spare; /* how many need not wait */
} TurnRule;

/** Rows of each source in this lane: how many there are, are taken, and may be taken as far as is
 *  known. In shared memory. */
typedef struct Turns {
    int32_t rows[EP_CUDA_MAX_RANKS], next[EP_CUDA_MAX_RANKS], ready[EP_CUDA_MAX_RANKS];
} Turns;

/** By a warp; returns how many rows there are. This rank's own are there from the beginning, if
 * they count at all. */
template <typename Args>
__device__ __forceinline__ int turns_open(const Args &a, Turns *s, int ring, TurnRule rule,
                                          int takes_own) {
    const EpCudaGroup &g = a.group;
    int rows = 0;
    for (int r = threadIdx.x % 32; r < g.size; r += 32) {
        int is_own = r == g.rank;
        s->rows[r] = is_own && !takes_own ? 0 : a.plan.lane_rows[r * g.layout.lanes + ring];
        s->next[r] = 0;
        s->ready[r] = is_own ? s->rows[r] : rule.spare;
        rows += s->rows[r];
    }
    __syncwarp();
    return __reduce_add_sync(~0u, rows);
}

/* Has a source rows that may be taken? Its counter is only read where nothing is known of. */
__device__ __forceinline__ int turn_ready(const EpCudaGroup &g, Turns *s, uint32_t epoch, int ring,
                                          TurnRule rule, int source) {
    if (s->next[source] >= s->rows[source]) return 0;
    if (s->ready[source] > s->next[source]) return 1;
    const uint64_t *counter = rule.phase == EP_PHASE_RECORD ? ep_head(g, g.rank, source, ring)
                                                            : ep_credit(g, g.rank, source, ring);
    s->ready[source] = rule.spare + ep_read_counter(counter, epoch);
    if (s->ready[source] <= s->next[source]) return 0;
    ep_fence_proxy_global(); /* the loader reads through the other proxy */
    return 1;
}

/* A source whose turn it is, -1 where none is ready. By a warp. */
__device__ __forceinline__ int find_turn(const EpCudaGroup &g, Turns *s, uint32_t epoch, int ring,
                                         TurnRule rule, int turn) {
    for (int base = 0; base < g.size; base += 32) {
        int at = base + (int)threadIdx.x % 32;
        int ready = at < g.size && turn_ready(g, s, epoch, ring, rule, (turn + at) % g.size);
        unsigned who = __ballot_sync(~0u, ready);
        __syncwarp();
        if (who) return (turn + base + __ffs(who) - 1) % g.size;
    }
    return -1;
}

/* Wait for any source: were one that is late or full waited for, ranks could wait for each other in
 * a circle. -1 when the deadline has passed. */
__device__ __forceinline__ int await_turn(const EpCudaGroup &g, Turns *s, uint32_t epoch, int ring,
                                          TurnRule rule, int turn) {
    EpPatience patience = {0, 0};
    int source;
    while ((source = find_turn(g, s, epoch, ring, rule, turn)) < 0) {
        int missing = 0;
        while (s->next[missing] >= s->rows[missing])
            missing++;
        uint32_t seen = (uint32_t)(s->ready[missing] - rule.spare);
        int patient =
            ep_patience(g, &patience, EpAwaited{missing, rule.phase, ring, seen + 1, seen});
        if (!__all_sync(~0u, patient)) return -1;
    }
    return source;
}

/** Rows of one source that a round takes, a team each; and this lane's slot of its team's. */
typedef struct Batch {
    int source, first, count;
    int slot; /* -1: none */
} Batch;

/* The next rows there are, if any, or `waits`; and begin to look up their slots. The count is 0
 * where there are none, -1 where the deadline has passed. */
template <typename Args>
__device__ __forceinline__ Batch take_batch(const Args &a, Turns *s, const Team &t, uint32_t epoch,
                                            int ring, TurnRule rule, int turn, int waits) {
    const EpCudaGroup &g = a.group;
    Batch b = {waits ? await_turn(g, s, epoch, ring, rule, turn)
                     : find_turn(g, s, epoch, ring, rule, turn),
               0, 0, -1};
    if (b.source < 0) {
        b.count = waits ? -1 : 0;
        return b;
    }
    b.first = s->next[b.source];
    b.count = min(t.count, min(s->rows[b.source], s->ready[b.source]) - b.first);
    if (t.index < b.count && t.k < a.top_k)
        b.slot = ep_slot(a.plan, g, a.shape, a.top_k, b.source, ring, b.first + t.index, t.k);
    __syncwarp();
    if (threadIdx.x % 32 == 0) s->next[b.source] = b.first + b.count;
    __syncwarp();
    return b;
}

/**
 * All `left` rows, batch by batch, to `post(batch, weight, number of the team's first job)`. Slots
 * are looked up one round ahead; but nobody waits for more rows before those that are there have
 * been passed on. Returns how many jobs there were.
 */
template <typename Args, typename Post>
__device__ __forceinline__ uint32_t take_turns(const Args &a, Turns *s, const Team &t,
                                               uint32_t epoch, int ring, TurnRule rule, int left,
                                               int pieces, Post post) {
    int turn = a.group.rank + 1;
    uint32_t n = 0;
    Batch now = {0, 0, 0, -1};
    while (left > 0 || now.count > 0) {
        float weight = a.weighs && now.slot >= 0 ? a.slot_weights[now.slot] : 1;
        Batch next = {0, 0, 0, -1};
        if (left > 0) next = take_batch(a, s, t, epoch, ring, rule, turn, now.count == 0);
        if (next.count < 0) break;
        if (now.count > 0) post(now, weight, n + t.index * pieces);
        n += now.count * pieces, left -= next.count;
        turn = next.count ? next.source + 1 : turn;
        now = next;
    }
    return n;
}

#endif
