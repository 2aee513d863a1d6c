/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scatter over NVLink: token rows to slots, for ep_dispatch and ep_combine_backward.
 *
 * One launch, one block on each multiprocessor, two roles. A sending block takes its lanes' tokens
 * one by one: bulk copies bring the row into shared memory, its weights and scales beside it, and
 * then push the whole record into the ring of every rank that needs it, each once. A filling block
 * takes records out of the rings of its lanes, from all sources in turn, and writes each to all the
 * slots that its route names; and the zeros of the padding.
 *
 * Who waits on whom: a sender for credit, that is, for the receiver's filler to have emptied a
 * record of the ring; a filler for the head. Fillers and senders take lanes in ascending order, so
 * the lowest unfinished lane of all ranks always has both of its ends at work: no deadlock, however
 * many blocks there are.
 *
 * Order: a record's stores have completed (bulk wait_group) before one thread fences, for the whole
 * system, and stores the heads. A filler acquires the head, crosses to the async proxy with a fence, and loads
 * the record; the load has completed (mbarrier) before the credit is stored.
 *
 * Rows of the rank's own tokens that are only copied go from the sender straight to their slots;
 * where they are multiplied, they go through a ring like all others, and every pair of lane and
 * source has a group of threads that empties it.
 */
#include "handles/plan_cuda.h"
#include "runtime/device.cuh"
#include "runtime/rows.cuh"

#define THREADS 512
#define MAX_STAGES 16
#define RANK_WORDS ((EP_CUDA_MAX_RANKS + 31) / 32)
/* Stores that may still be under way while a sender or filler goes on, where there are stages
 * enough: that many are not available to loads, and receivers learn of that many tokens later. */
#define MANY_STORES 6
#define TOKENS_PER_PUBLISH 2
#define FEW_STORES 1
#define GROUP 128 /* threads that multiply one row together */
#define GROUPS (THREADS / GROUP)
/* Records that a filler takes from one source before it looks at the next. */
#define BATCH 4

/* The ranks that a token goes to, one bit each. */
typedef struct RankSet {
    uint32_t word[RANK_WORDS];
} RankSet;

typedef struct Shared {
    uint64_t full[MAX_STAGES];
    int32_t token[MAX_STAGES];               /* sender: what a stage holds */
    RankSet ranks[MAX_STAGES];               /* sender: where that goes */
    int32_t entry[MAX_STAGES][EP_MAX_TOP_K]; /* of the plan's routes */
    int32_t slot[MAX_STAGES][EP_MAX_TOP_K];  /* to fill, -1 where none */
    int32_t source[MAX_STAGES], row[MAX_STAGES]; /* filler: where a stage's record is from */
    uint32_t count[EP_CUDA_MAX_RANKS];  /* records put into, or taken out of, the lane: ever */
    uint32_t seen[EP_CUDA_MAX_RANKS];   /* the other side's counter, as last read */
    uint32_t told[EP_CUDA_MAX_RANKS];   /* sender: as published */
    int32_t rows[EP_CUDA_MAX_RANKS];    /* filler: rows of this operation */
    int32_t issued[EP_CUDA_MAX_RANKS];  /* filler: of those, taken so far */
    float partial[GROUPS][EP_MAX_TOP_K][GROUP / 32]; /* dot products of a row's slots, by warp */
    int32_t alive[GROUPS];
} Shared;

__device__ __forceinline__ int stores_in_flight(const EpScatterArgs &a) {
    return a.stages >= 2 * MANY_STORES ? MANY_STORES : FEW_STORES;
}

/* Until all but those have been written. */
__device__ __forceinline__ void wait_stores(const EpScatterArgs &a) {
    if (stores_in_flight(a) == MANY_STORES)
        ep_bulk_wait<MANY_STORES>();
    else
        ep_bulk_wait<FEW_STORES>();
}

/* Until all but one less than those have been read from their stages. */
__device__ __forceinline__ void wait_stages(const EpScatterArgs &a) {
    if (stores_in_flight(a) == MANY_STORES)
        ep_bulk_wait_read<MANY_STORES - 1>();
    else
        ep_bulk_wait_read<FEW_STORES - 1>();
}

__device__ __forceinline__ char *stage_at(const EpScatterArgs &a, char *stages, int stage) {
    return stages + stage * a.record.bytes;
}

/* Spin on a local barrier; the copy it waits for cannot fail to come. */
__device__ __forceinline__ void wait_full(Shared *s, int stage, uint32_t parity) {
    while (!ep_mbarrier_try_wait(&s->full[stage], parity)) {
    }
}

/* Rows that are copied as they are go from the sender straight to the slots of its own rank. */
__device__ __forceinline__ int keeps_own_rows(const EpScatterArgs &a) {
    return a.type == 0;
}

/* Slots and entries of a row into shared memory, by the lanes of a warp. */
__device__ __forceinline__ void read_route(const EpScatterArgs &a, Shared *s, int stage, int source,
                                           int ring, int row, int lane) {
    if (lane >= a.top_k)
        return;
    s->entry[stage][lane] = ep_entry(a.plan, a.group, a.top_k, source, ring, row, lane);
    s->slot[stage][lane] = ep_slot(a.plan, a.group, a.shape, a.top_k, source, ring, row, lane);
}

/* A flat row tells its local experts, and their weights. */
__device__ __forceinline__ void describe_flat_row(const EpScatterArgs &a, const Shared *s,
                                                  const float *weights, int stage, int lane) {
    int64_t slot = s->slot[stage][0];
    if (slot < 0 || lane >= a.top_k)
        return;
    int expert = s->entry[stage][lane];
    if (a.carries_weights)
        a.out_weights[slot * a.top_k + lane] = expert >= 0 ? weights[lane] : 0;
    if (a.out_idx && a.idx_is_int64)
        ((int64_t *)a.out_idx)[slot * a.top_k + lane] = expert;
    else if (a.out_idx)
        ((int32_t *)a.out_idx)[slot * a.top_k + lane] = expert;
}

/* A record in a stage, to its slots: bulk copies for the row, lanes for the rest. Does not commit. */
__device__ __forceinline__ void copy_to_slots(const EpScatterArgs &a, const Shared *s,
                                              const char *record, int stage, int lane) {
    const int32_t *slot = s->slot[stage];
    const float *weights = (const float *)(record + a.record.weights);
    for (int k = 0; k < a.top_k && lane == 0; k++)
        if (slot[k] >= 0)
            ep_bulk_store(a.out_rows + slot[k] * a.row_bytes, record, (uint32_t)a.row_bytes);
    if (a.shape.layout == EP_LAYOUT_FLAT)
        describe_flat_row(a, s, weights, stage, lane);
    else if (a.carries_weights && lane < a.top_k && slot[lane] >= 0)
        a.out_weights[slot[lane]] = weights[lane];
    for (int k = 0; k < a.top_k && a.scale_bytes; k++)
        for (int i = lane; i < a.scale_bytes / 4 && slot[k] >= 0; i += 32)
            ((uint32_t *)(a.out_scales + slot[k] * a.scale_bytes))[i] =
                ((const uint32_t *)(record + a.record.scales))[i];
}

/* ---- sending ------------------------------------------------------------------------------- */

/* A lane's tokens, looked up 32 at a time, one by each lane of the warp. */
typedef struct Tokens {
    int at, end;   /* the next to look at, and the end of the lane */
    int base;      /* of the 32 that were looked up */
    RankSet ranks; /* of token base + lane */
    int own;       /* rows so far that stay on this rank */
} Tokens;

__device__ __forceinline__ void look_up(const EpScatterArgs &a, Tokens *t, int base, int lane) {
    t->base = base;
    for (int w = 0; w < RANK_WORDS; w++)
        t->ranks.word[w] = 0;
    for (int k = 0; k < a.top_k && base + lane < t->end; k++) {
        int owner = a.plan.owner[(int64_t)(base + lane) * a.top_k + k];
#pragma unroll
        for (int w = 0; w < RANK_WORDS; w++)
            if (owner >= w * 32 && owner < w * 32 + 32)
                t->ranks.word[w] |= 1u << (owner - w * 32);
    }
}

/* Move on to the first token, from `at` on, that goes anywhere; at = end where there is none. */
__device__ __forceinline__ void skip_dead(const EpScatterArgs &a, Tokens *t, int lane) {
    while (t->at < t->end) {
        if (t->at >= t->base + 32)
            look_up(a, t, t->at, lane);
        uint32_t any = 0;
        for (int w = 0; w < RANK_WORDS; w++)
            any |= t->ranks.word[w];
        unsigned live = __ballot_sync(~0u, any) >> (t->at - t->base);
        t->at = live ? t->at + __ffs(live) - 1 : t->base + 32;
        if (live)
            return;
    }
}

__device__ __forceinline__ RankSet ranks_of(const Tokens *t) {
    RankSet set;
    for (int w = 0; w < RANK_WORDS; w++)
        set.word[w] = __shfl_sync(~0u, t->ranks.word[w], t->at - t->base);
    return set;
}

__device__ __forceinline__ int has_rank(const RankSet &set, int rank) {
    return set.word[rank / 32] >> (rank % 32) & 1;
}

/* Start bringing the token at t->at into a stage. The stage's weights and scales are written by
 * ordinary stores, which a fence hands over to the copies that will read them. */
__device__ __forceinline__ void load_token(const EpScatterArgs &a, Shared *s, char *stages,
                                           int stage, Tokens *t, int ring, int lane) {
    char *to = stage_at(a, stages, stage);
    int64_t token = t->at;
    RankSet set = ranks_of(t);
    if (lane == 0) {
        s->token[stage] = t->at;
        s->ranks[stage] = set;
        ep_mbarrier_expect(&s->full[stage], (uint32_t)a.row_bytes);
        ep_bulk_load(to, a.rows + token * a.row_bytes, (uint32_t)a.row_bytes, &s->full[stage]);
    }
    if (keeps_own_rows(a) && has_rank(set, a.group.rank))
        read_route(a, s, stage, a.group.rank, ring, t->own++, lane);
    if (a.carries_weights && lane < a.top_k)
        ((float *)(to + a.record.weights))[lane] = a.topk_weights[token * a.top_k + lane];
    const uint32_t *scales = (const uint32_t *)(a.scales + token * a.scale_bytes);
    for (int i = lane; i < a.scale_bytes / 4; i += 32)
        ((uint32_t *)(to + a.record.scales))[i] = scales[i];
    if (a.carries_weights || a.scale_bytes)
        ep_fence_proxy_async();
    __syncwarp();
}

/* Let receivers see what has certainly been written: all but the tokens still under way, whose
 * ranks the last stages tell. By lane 0, after a full wait for all but `pending` groups. */
__device__ __forceinline__ void publish_heads(const EpScatterArgs &a, Shared *s, int ring,
                                              uint32_t turn, int pending) {
    const EpCudaGroup &g = a.group;
    ep_fence_sys(); /* one for all: each costs as much as a short copy */
    for (int r = 0; r < g.size; r++) {
        uint32_t done = s->count[r];
        for (int i = 0; i < pending && s->told[r] != done; i++)
            done -= has_rank(s->ranks[(turn - i) % a.stages], r) &&
                    !(keeps_own_rows(a) && r == g.rank);
        if (s->told[r] == done)
            continue;
        s->told[r] = done;
        ep_store_relaxed_sys(ep_head(g, r, g.rank, ring), done);
    }
}

/* Room for one more record. A receiver can only empty what it was told of. */
__device__ __forceinline__ int await_room(const EpScatterArgs &a, Shared *s, int peer, int ring,
                                          uint32_t turn) {
    const EpCudaGroup &g = a.group;
    const uint32_t *credit = ep_credit(g, g.rank, peer, ring);
    uint32_t needed = s->count[peer] + 1 - g.layout.depth;
    if (ep_reached(s->seen[peer], needed))
        return 1;
    s->seen[peer] = ep_load_acquire_sys(credit);
    if (ep_reached(s->seen[peer], needed))
        return 1;
    ep_bulk_commit();
    ep_bulk_wait<0>();
    publish_heads(a, s, ring, turn, 0);
    return ep_wait_counter(g, credit, needed, peer, EP_PHASE_CREDIT, ring);
}

/* Push a stage to every rank of its set. By lane 0. */
__device__ __forceinline__ int push_record(const EpScatterArgs &a, Shared *s, const char *record,
                                           int stage, int ring, uint32_t turn) {
    const EpCudaGroup &g = a.group;
    for (int w = 0; w < RANK_WORDS; w++)
        for (uint32_t left = s->ranks[stage].word[w]; left; left &= left - 1) {
            int peer = w * 32 + __ffs(left) - 1;
            if (peer == g.rank && keeps_own_rows(a))
                continue;
            if (!await_room(a, s, peer, ring, turn))
                return 0;
            ep_bulk_store(ep_ring(g, peer, g.rank, ring, s->count[peer]), record,
                          (uint32_t)a.record.bytes);
            s->count[peer]++;
        }
    return 1;
}

/* Store what a stage holds, everywhere it goes. */
__device__ __forceinline__ int store_token(const EpScatterArgs &a, Shared *s, char *stages,
                                           int ring, uint32_t turn, int lane) {
    int stage = (int)(turn % a.stages), alive = 1;
    char *record = stage_at(a, stages, stage);
    wait_full(s, stage, turn / a.stages % 2);
    if (lane == 0)
        alive = push_record(a, s, record, stage, ring, turn);
    if (keeps_own_rows(a) && has_rank(s->ranks[stage], a.group.rank))
        copy_to_slots(a, s, record, stage, lane);
    if (lane == 0) {
        ep_bulk_commit();
        wait_stores(a);
        if (turn % TOKENS_PER_PUBLISH == 0)
            publish_heads(a, s, ring, turn, stores_in_flight(a));
    }
    return __shfl_sync(~0u, alive, 0);
}

/* One lane, by one warp. Loads run ahead of stores by all stages but those still being stored. */
__device__ int send_lane(const EpScatterArgs &a, Shared *s, char *stages, int ring,
                         uint32_t *turns) {
    const EpCudaGroup &g = a.group;
    int lane = threadIdx.x, alive = 1;
    uint32_t loaded = *turns, stored = *turns;
    Tokens t = {0, 0, -32, {{0}}, 0};
    ep_lane_range((int)a.plan.header->num_tokens, ring, &t.at, &t.end);
    t.base = t.at - 32;
    for (int r = lane; r < g.size; r += 32) {
        s->told[r] = s->count[r] = g.state->sent[r][ring];
        s->seen[r] = s->count[r] - g.layout.depth; /* nothing known of the credit yet */
    }
    __syncwarp();
    for (skip_dead(a, &t, lane); alive && (t.at < t.end || stored != loaded); stored++) {
        while (t.at < t.end && loaded - stored < (uint32_t)(a.stages - stores_in_flight(a))) {
            load_token(a, s, stages, (int)(loaded++ % a.stages), &t, ring, lane);
            t.at++;
            skip_dead(a, &t, lane);
        }
        alive = store_token(a, s, stages, ring, stored, lane);
    }
    if (lane == 0) {
        ep_bulk_wait<0>();
        publish_heads(a, s, ring, stored, 0);
    }
    __syncwarp();
    *turns = loaded;
    for (int r = lane; r < g.size; r += 32)
        g.state->sent[r][ring] = s->count[r];
    __syncwarp();
    return alive;
}

__device__ void send(const EpScatterArgs &a, Shared *s, char *stages) {
    uint32_t turns = 0;
    if (threadIdx.x >= 32)
        return;
    for (int ring = blockIdx.x; ring < EP_LANES; ring += a.send_blocks)
        if (!send_lane(a, s, stages, ring, &turns))
            return;
}

/* ---- filling slots ------------------------------------------------------------------------- */

/* Records of a source that have arrived and not been taken, as far as is known. */
__device__ __forceinline__ int known_records(const Shared *s, int source) {
    int left = s->rows[source] - s->issued[source];
    int arrived = (int)(s->seen[source] - (s->count[source] + s->issued[source]));
    return min(left, arrived);
}

/* A source with records to take, in turn; -1 where there is none yet. Heads are only read where
 * nothing is known to be there. Called by a whole warp. */
__device__ __forceinline__ int find_source(const EpCudaGroup &g, Shared *s, int ring, int turn,
                                           int lane) {
    for (int at = 0; at < g.size; at += 32) {
        int source = (turn + at + lane) % g.size, ready = 0;
        if (at + lane < g.size && s->issued[source] < s->rows[source]) {
            if (known_records(s, source) <= 0)
                s->seen[source] = ep_load_acquire_sys(ep_head(g, g.rank, source, ring));
            ready = known_records(s, source) > 0;
        }
        unsigned who = __ballot_sync(~0u, ready);
        if (who)
            return (turn + at + __ffs(who) - 1) % g.size;
    }
    return -1;
}

/* Wait for a record of any source: a source that is late must not keep the others' rings full, or
 * ranks could wait for each other in a circle. -1 when the deadline has passed. */
__device__ __forceinline__ int await_source(const EpCudaGroup &g, Shared *s, int ring, int turn,
                                            int lane) {
    EpPatience patience = {0, 0};
    int source;
    while ((source = find_source(g, s, ring, turn, lane)) < 0) {
        int missing = 0;
        while (s->issued[missing] >= s->rows[missing])
            missing++;
        uint32_t expected = s->count[missing] + s->issued[missing] + 1;
        int patient = ep_patience(
            g, &patience, EpAwaited{missing, EP_PHASE_RECORD, ring, expected, expected - 1});
        if (!__all_sync(~0u, patient))
            return -1;
    }
    return source;
}

/* Start taking `count` records of a source into the stages from `turn` on. */
__device__ __forceinline__ void load_records(const EpScatterArgs &a, Shared *s, char *stages,
                                             int ring, uint32_t turn, int source, int count,
                                             int lane) {
    const EpCudaGroup &g = a.group;
    int first = s->issued[source];
    for (int i = 0; i < count && lane == 0; i++) {
        int stage = (int)((turn + i) % a.stages);
        s->source[stage] = source, s->row[stage] = first + i;
        ep_mbarrier_expect(&s->full[stage], (uint32_t)a.record.bytes);
        ep_bulk_load(stage_at(a, stages, stage),
                     ep_ring(g, g.rank, source, ring, s->count[source] + first + i),
                     (uint32_t)a.record.bytes, &s->full[stage]);
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++)
        if (i < count)
            read_route(a, s, (int)((turn + i) % a.stages), source, ring, first + i, lane);
    __syncwarp();
    if (lane == 0)
        s->issued[source] = first + count;
    __syncwarp();
}

__device__ __forceinline__ int enter_lane(const EpScatterArgs &a, Shared *s, int ring, int lane) {
    const EpCudaGroup &g = a.group;
    int rows = 0;
    for (int r = lane; r < g.size; r += 32) {
        int comes = !(keeps_own_rows(a) && r == g.rank);
        s->rows[r] = comes ? a.plan.lane_rows[r * EP_LANES + ring] : 0;
        s->seen[r] = s->count[r] = g.state->received[r][ring];
        s->issued[r] = 0;
        rows += s->rows[r];
    }
    __syncwarp();
    return __reduce_add_sync(~0u, rows);
}

__device__ __forceinline__ void leave_lane(const EpScatterArgs &a, const Shared *s, int ring,
                                           int lane) {
    __syncwarp();
    for (int r = lane; r < a.group.size; r += 32)
        a.group.state->received[r][ring] = s->count[r] + s->issued[r];
    __syncwarp();
}

/* The record is in shared memory, and nothing is left to order: its place in the ring is free. */
__device__ __forceinline__ void give_credit(const EpCudaGroup &g, const Shared *s, int ring,
                                            int stage) {
    int source = s->source[stage];
    ep_store_relaxed_sys(ep_credit(g, source, g.rank, ring), s->count[source] + s->row[stage] + 1);
}

/* One lane, by one warp: rows are copied as they are. */
__device__ int fill_lane_copying(const EpScatterArgs &a, Shared *s, char *stages, int ring,
                                 uint32_t *turns) {
    const EpCudaGroup &g = a.group;
    int lane = threadIdx.x, turn = g.rank + 1, rows = enter_lane(a, s, ring, lane);
    int loaded = 0, ahead = a.stages - stores_in_flight(a);
    for (int stored = 0; stored < rows; stored++) {
        while (loaded < rows && loaded < stored + ahead) {
            int source = find_source(g, s, ring, turn, lane);
            if (source < 0 && loaded > stored)
                break;
            if (source < 0)
                source = await_source(g, s, ring, turn, lane);
            if (source < 0)
                return 0;
            int count = min(min(BATCH, known_records(s, source)), stored + ahead - loaded);
            if (lane == 0) {
                wait_stages(a);
                ep_fence_proxy_async();
            }
            __syncwarp();
            load_records(a, s, stages, ring, *turns + loaded, source, count, lane);
            turn = source + 1, loaded += count;
        }
        uint32_t at = *turns + stored;
        int stage = (int)(at % a.stages);
        wait_full(s, stage, at / a.stages % 2);
        if (lane == 0)
            give_credit(g, s, ring, stage);
        copy_to_slots(a, s, stage_at(a, stages, stage), stage, lane);
        if (lane == 0)
            ep_bulk_commit();
        __syncwarp();
    }
    *turns += rows;
    leave_lane(a, s, ring, lane);
    return 1;
}

/* ---- filling with arithmetic: combine backward ------------------------------------------------ */

/* 16 bytes of a row, multiplied and rounded, to one slot; returns their part of the product with
 * the slot's other row. */
template <typename T>
__device__ __forceinline__ float multiply_vector(const EpScatterArgs &a, const uint4 &x, float w,
                                                 const uint4 &y, char *out) {
    float dot = 0;
    const T *from = (const T *)&x, *other = (const T *)&y;
    uint4 result;
    T *to = (T *)&result;
#pragma unroll
    for (int i = 0; i < (int)(16 / sizeof(T)); i++) {
        to[i] = ep_round<T>(w * ep_float(from[i]));
        dot = fmaf(ep_float(from[i]), ep_float(other[i]), dot);
    }
    *(uint4 *)out = a.weighs ? result : x;
    return dot;
}

/* Threads of a group meet; groups go at their own pace. */
__device__ __forceinline__ void group_barrier(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(GROUP) : "memory");
}

/* A record that lies in the ring, to one slot, by a group. Each thread sums the products of its
 * vectors in order, each warp its threads', and finish_dots the warps': always in the same way. */
template <typename T>
__device__ __forceinline__ void multiply_to_slot(const EpScatterArgs &a, const char *record,
                                                 int64_t slot, float *partial) {
    float w = a.weighs ? a.slot_weights[slot] : 1, dot = 0;
    const char *other = a.slot_rows + slot * a.row_bytes;
    char *out = a.out_rows + slot * a.row_bytes;
#pragma unroll 7
    for (int64_t at = threadIdx.x % GROUP * 16; at < a.row_bytes; at += GROUP * 16) {
        uint4 x = __ldcg((const uint4 *)(record + at));
        uint4 y = a.takes_dots ? *(const uint4 *)(other + at) : make_uint4(0, 0, 0, 0);
        dot += multiply_vector<T>(a, x, w, y, out + at);
    }
    for (int d = 16; d > 0; d /= 2)
        dot += __shfl_xor_sync(~0u, dot, d);
    if (threadIdx.x % 32 == 0)
        partial[threadIdx.x % GROUP / 32] = dot;
}

/* One lane of the group's first warp for each slot. */
__device__ __forceinline__ void finish_dots(const EpScatterArgs &a, const Shared *s, int group,
                                            int slot, int lane) {
    float dot = 0;
    for (int w = 0; w < GROUP / 32 && slot >= 0; w++)
        dot += s->partial[group][lane][w];
    if (a.takes_dots && slot >= 0)
        a.out_weights[slot] = dot;
}

/* Wait until a pair's next record is there: by one thread, for its group. */
__device__ __forceinline__ void await_pair(const EpCudaGroup &g, Shared *s, int group, int source,
                                           int ring, uint32_t taken, uint32_t *seen) {
    const uint32_t *head = ep_head(g, g.rank, source, ring);
    if (*seen != taken)
        return;
    s->alive[group] = ep_wait_counter(g, head, taken + 1, source, EP_PHASE_RECORD, ring);
    *seen = ep_load_acquire_sys(head);
}

/* All rows of one source in one lane, by a group of its own. */
template <typename T>
__device__ int multiply_pair(const EpScatterArgs &a, Shared *s, int group, int source, int ring) {
    const EpCudaGroup &g = a.group;
    int thread = threadIdx.x % GROUP, lane = threadIdx.x % 32;
    uint32_t taken = g.state->received[source][ring], seen = taken;
    int rows = a.plan.lane_rows[source * EP_LANES + ring];
    for (int row = 0; row < rows; row++, taken++) {
        const char *record = ep_ring(g, g.rank, source, ring, taken);
        int slot = -1;
        if (lane < a.top_k)
            slot = ep_slot(a.plan, g, a.shape, a.top_k, source, ring, row, lane);
        if (thread == 0)
            await_pair(g, s, group, source, ring, taken, &seen);
        group_barrier(group);
        if (!s->alive[group])
            return 0;
        for (unsigned left = __ballot_sync(~0u, slot >= 0); left; left &= left - 1) {
            int k = __ffs(left) - 1;
            multiply_to_slot<T>(a, record, __shfl_sync(~0u, slot, k), s->partial[group][k]);
        }
        group_barrier(group);
        if (thread < 32)
            finish_dots(a, s, group, slot, lane);
        if (thread == 0)
            ep_store_relaxed_sys(ep_credit(g, source, g.rank, ring), taken + 1);
    }
    group_barrier(group);
    if (thread == 0)
        g.state->received[source][ring] = taken;
    return 1;
}

/* Groups take pairs of lane and source, lanes in ascending order: see the head of this file. */
template <typename T> __device__ void multiply(const EpScatterArgs &a, Shared *s, int block) {
    int group = threadIdx.x / GROUP;
    if (threadIdx.x % GROUP == 0)
        s->alive[group] = 1;
    for (int pair = group * a.fill_blocks + block; pair < EP_LANES * a.group.size;
         pair += GROUPS * a.fill_blocks)
        if (!multiply_pair<T>(a, s, group, pair % a.group.size, pair / a.group.size))
            return;
}

/* ---- padding ------------------------------------------------------------------------------- */

/* The threads that write zeros. */
typedef struct Zeroers {
    int index, count;
} Zeroers;

__device__ void zero_bytes(char *out, int64_t bytes, Zeroers z) {
    for (int64_t at = z.index * 4; at < bytes; at += z.count * 4)
        *(uint32_t *)(out + at) = 0;
}

__device__ void zero_slots(const EpScatterArgs &a, int64_t begin, int64_t end, Zeroers z) {
    if (begin >= end)
        return;
    for (int64_t at = begin * a.row_bytes + z.index * 16; at < end * a.row_bytes; at += z.count * 16)
        *(uint4 *)(a.out_rows + at) = make_uint4(0, 0, 0, 0);
    int64_t values = a.shape.layout == EP_LAYOUT_FLAT && a.carries_weights ? a.top_k : 1;
    if (a.out_weights)
        zero_bytes((char *)(a.out_weights + begin * values), (end - begin) * values * 4, z);
    for (int64_t i = begin * a.top_k + z.index; a.out_idx && i < end * a.top_k; i += z.count) {
        if (a.idx_is_int64)
            ((int64_t *)a.out_idx)[i] = -1;
        else
            ((int32_t *)a.out_idx)[i] = -1;
    }
    zero_bytes(a.out_scales + begin * a.scale_bytes, (end - begin) * a.scale_bytes, z);
}

__device__ void zero_padding(const EpScatterArgs &a, int block, Zeroers z) {
    const EpPlanShape &s = a.shape;
    int batched = s.layout == EP_LAYOUT_BATCHED;
    for (int e = block; e < s.num_local && s.layout != EP_LAYOUT_FLAT; e += a.fill_blocks) {
        int64_t offset = a.plan.expert_offsets[e];
        int64_t end = offset + a.plan.expert_padded[e];
        if (batched && s.zero_tail)
            end = a.plan.expert_offsets[e + 1];
        zero_slots(a, offset + a.plan.expert_counts[e], end, z);
    }
    int64_t tail = a.plan.header->recv_rows, share = a.out_capacity - tail;
    if (batched || !s.zero_tail || share <= 0)
        return;
    share = (share + a.fill_blocks - 1) / a.fill_blocks;
    zero_slots(a, tail + block * share, min(tail + (block + 1) * share, a.out_capacity), z);
}

/* ---- kernel -------------------------------------------------------------------------------- */

/* Where rows are copied, one warp does it, and the others write the zeros meanwhile. */
__device__ void fill(const EpScatterArgs &a, Shared *s, char *stages) {
    int block = (int)blockIdx.x - a.send_blocks, thread = threadIdx.x;
    uint32_t turns = 0;
    int alive = 1;
    if (a.type == EP_TYPE_BF16)
        multiply<__nv_bfloat16>(a, s, block);
    else if (a.type == EP_TYPE_FP16)
        multiply<__half>(a, s, block);
    else if (a.type == EP_TYPE_FP32)
        multiply<float>(a, s, block);
    if (a.type)
        zero_padding(a, block, Zeroers{thread, THREADS});
    else if (thread >= 32)
        zero_padding(a, block, Zeroers{thread - 32, THREADS - 32});
    if (a.type || thread >= 32)
        return;
    for (int ring = block; ring < EP_LANES && alive; ring += a.fill_blocks)
        alive = fill_lane_copying(a, s, stages, ring, &turns);
    ep_bulk_wait<0>();
}

__global__ void __launch_bounds__(THREADS, 1)
    scatter_kernel(const __grid_constant__ EpScatterArgs a) {
    extern __shared__ __align__(128) char stages[];
    __shared__ Shared s;
    if (threadIdx.x == 0) {
        for (int i = 0; i < a.stages; i++)
            ep_mbarrier_init(&s.full[i], 1);
        ep_fence_mbarrier_init();
    }
    __syncthreads();
    if ((int)blockIdx.x < a.send_blocks)
        send(a, &s, stages);
    else
        fill(a, &s, stages);
}

extern "C" int ep_cuda_launch_scatter(const EpScatterArgs *a, void *stream) {
    size_t shared = (size_t)a->stages * (size_t)a->record.bytes;
    cudaError_t error = cudaFuncSetAttribute(
        scatter_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    if (error != cudaSuccess)
        return error;
    scatter_kernel<<<a->send_blocks + a->fill_blocks, THREADS, shared, (cudaStream_t)stream>>>(*a);
    return cudaGetLastError();
}
