/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_CUDA_GATHER_SEND_CUH
#define EP_COMBINE_CUDA_GATHER_SEND_CUH

/**
 * A sending block of gather.cu: for each row of another rank, the sum of its slots, sent back to
 * that rank. A receiving block adds up the slots of own rows in place.
 *
 * Nothing may be stored on other ranks before all of them have entered the operation. But the first
 * sums are made meanwhile: a gate holds up the warps that store.
 */

#include "combine/cuda/gather_sum.cuh"

/* ---- the gate ------------------------------------------------------------------------------ */

/** Opens once all ranks are here, or once it is known that they will not be: then nothing may be
 *  stored. */
typedef struct Gate {
    uint64_t is_open; /* mbarrier */
    int32_t is_void;
} Gate;

/** What a sending block has besides its pipeline. */
typedef struct Sending {
    ChunkRows rows[SCHEDULER_WARPS];
    Gate gate;
} Sending;

/** Initialise the gate, which can be used after the block's next barrier. By one thread. */
__device__ __forceinline__ void init_gate(Gate *gate) {
    ep_mbarrier_init(&gate->is_open, 1);
    ep_fence_mbarrier_init();
}

/* Wait for all ranks, and open the gate. Returns 0 if the wait has failed. By the signal warp,
 * which has nothing to do yet. */
__device__ __forceinline__ int open_gate(const EpGatherArgs &a, Gate *gate, uint32_t epoch) {
    int alive = ep_await_arrivals(a.group, epoch);
    if (threadIdx.x % 32 == 0) gate->is_void = !alive, ep_mbarrier_arrive(&gate->is_open);
    return alive;
}

/* Wait until the gate is open. Returns whether nothing may be stored. */
__device__ __forceinline__ int await_gate(Gate *gate) {
    while (!ep_mbarrier_try_wait(&gate->is_open, 0)) {
    }
    return gate->is_void;
}

/* ---- warps --------------------------------------------------------------------------------- */

/* Post the work items of a batch of rows, a row for each team. */
template <Form FORM>
__device__ __forceinline__ void post_batch(const EpGatherArgs &a, Pipeline *p, const Team &t,
                                           const RowBatch &r, float weight) {
    int terms, at = team_rank(t, r.slot >= 0, &terms);
    Term term = {NULL, at, weight, -1, r.row, 0, terms};
    if (r.slot >= 0) term.from = a.t.rows + r.slot * a.t.row_bytes;
    if (r.valid && t.k == 0) term.peer = r.source;
    char *to = r.valid ? ep_ring(a.group, r.source, a.group.rank, r.row) : NULL;
    int pieces = a.pipeline.pieces;
    uint32_t number = pipeline_take(p, r.count * pieces) + t.index * pieces;
    post_sum<FORM>(a, p, t, number, term, to, r.row, r.source, r.valid);
}

/* A scheduler warp. */
template <Form FORM>
__device__ void schedule_rows(const EpGatherArgs &a, Pipeline *p, ChunkRows *rows,
                              const Start &start, uint32_t epoch, int blocks) {
    Team t = make_team(a.top_k, a.pipeline);
    auto look = [&](const RowBatch &r) {
        return r.valid && t.k == 0 ? ep_look_for_room(a.group, r.source, r.row) : 0;
    };
    auto await = [&](const RowBatch &r, uint64_t word) {
        int waits = r.valid && t.k == 0;
        return __all_sync(~0u, !waits || ep_await_room(a.group, epoch, r.source, r.row, word));
    };
    auto post = [&](const RowBatch &r, float weight) { post_batch<FORM>(a, p, t, r, weight); };
    walk_rows(a, rows, t, start, SENDERS, blocks, 1, look, await, post);
    pipeline_end(p, t);
}

/* The metadata warps: copy the values of a row's slots into the record of its sum. */
__device__ void send_values(const EpGatherArgs &a, Pipeline *p, Gate *gate, int warp) {
    const EpCudaGroup &g = a.group;
    int k = threadIdx.x % 32, sends = !await_gate(gate) && k < a.top_k;
    pipeline_metadata(p, warp, METADATA_WARPS, [&](int j, uint32_t) {
        int source = p->source[j], row = p->index[j];
        char *record = ep_ring(g, source, g.rank, row);
        if (sends) ((float *)(record + a.record.weights))[k] = value_of(a, source, row, k);
    });
}

template <Form FORM>
__device__ void send(const EpGatherArgs &a, Pipeline *p, Sending *s, const Start &start,
                     uint32_t epoch, int blocks) {
    constexpr PipelineWork work = FORM == PACKED ? WORK_PACKED : WORK_COMPUTE;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (pipeline_is_scheduler(warp, a.schedulers))
        schedule_rows<FORM>(a, p, &s->rows[warp - SCHEDULER_WARP], start, epoch, blocks);
    else if (warp == LOAD_WARP)
        pipeline_load(p, work);
    else if (pipeline_is_store_warp(warp) && lane == 0)
        pipeline_store(p, warp - FIRST_STORE_WARP, work, 1, FORM == PACKED, await_gate(&s->gate));
    else if (warp == SIGNAL_WARP)
        pipeline_signal(p, a.group, epoch, open_gate(a, &s->gate, epoch) ? LATE_HEADS : NO_SIGNALS);
    else if (warp >= FIRST_METADATA_WARP && a.t.carries_values)
        send_values(a, p, &s->gate, warp - FIRST_METADATA_WARP);
}

#endif
