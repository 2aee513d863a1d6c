/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_SCATTER_FILL_CUH
#define EP_DISPATCH_SCATTER_FILL_CUH

/**
 * A filling block that copies: records of its lanes, from all sources, to their slots.
 */

#include "dispatch/scatter_block.cuh"

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
        if (who) return (turn + at + __ffs(who) - 1) % g.size;
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
        if (!__all_sync(~0u, patient)) return -1;
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
    if (lane == 0) s->issued[source] = first + count;
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
            if (source < 0 && loaded > stored) break;
            if (source < 0) source = await_source(g, s, ring, turn, lane);
            if (source < 0) return 0;
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
        if (lane == 0) give_credit(g, s, ring, stage);
        copy_to_slots(a, s, stage_at(a, stages, stage), stage, lane);
        if (lane == 0) ep_bulk_commit();
        __syncwarp();
    }
    *turns += rows;
    leave_lane(a, s, ring, lane);
    return 1;
}

#endif
