/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_SCATTER_SEND_CUH
#define EP_DISPATCH_SCATTER_SEND_CUH

/**
 * A sending block: tokens of its lanes, one by one, to every rank that needs them.
 */

#include "dispatch/scatter_block.cuh"

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
            if (owner >= w * 32 && owner < w * 32 + 32) t->ranks.word[w] |= 1u << (owner - w * 32);
    }
}

/* Move on to the first token, from `at` on, that goes anywhere; at = end where there is none. */
__device__ __forceinline__ void skip_dead(const EpScatterArgs &a, Tokens *t, int lane) {
    while (t->at < t->end) {
        if (t->at >= t->base + 32) look_up(a, t, t->at, lane);
        uint32_t any = 0;
        for (int w = 0; w < RANK_WORDS; w++)
            any |= t->ranks.word[w];
        unsigned live = __ballot_sync(~0u, any) >> (t->at - t->base);
        t->at = live ? t->at + __ffs(live) - 1 : t->base + 32;
        if (live) return;
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
    if (a.carries_weights || a.scale_bytes) ep_fence_proxy_async();
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
            done -=
                has_rank(s->ranks[(turn - i) % a.stages], r) && !(keeps_own_rows(a) && r == g.rank);
        if (s->told[r] == done) continue;
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
    if (ep_reached(s->seen[peer], needed)) return 1;
    s->seen[peer] = ep_load_acquire_sys(credit);
    if (ep_reached(s->seen[peer], needed)) return 1;
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
            if (peer == g.rank && keeps_own_rows(a)) continue;
            if (!await_room(a, s, peer, ring, turn)) return 0;
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
    if (lane == 0) alive = push_record(a, s, record, stage, ring, turn);
    if (keeps_own_rows(a) && has_rank(s->ranks[stage], a.group.rank))
        copy_to_slots(a, s, record, stage, lane);
    if (lane == 0) {
        ep_bulk_commit();
        wait_stores(a);
        if (turn % TOKENS_PER_PUBLISH == 0) publish_heads(a, s, ring, turn, stores_in_flight(a));
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
    if (threadIdx.x >= 32) return;
    for (int ring = blockIdx.x; ring < EP_LANES; ring += a.send_blocks)
        if (!send_lane(a, s, stages, ring, &turns)) return;
}

#endif
