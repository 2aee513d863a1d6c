/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gather over NVLink: slots to token rows, for ep_combine and ep_dispatch_backward.
 *
 * One launch, two blocks for each lane, all resident together. A summing block adds up, for every
 * row that another rank had sent in its lane, the slots that the row had filled, and pushes the
 * sum, rounded to the rows' type, back through the lane's ring. A reducing block takes its lane's
 * tokens in order: it waits until the sums of all ranks that a token went to are there, adds them
 * in ascending rank, this rank's own slots unrounded in their turn, and writes the token's row. How
 * a block works is told in runtime/pipe.cuh.
 *
 * Who waits on whom: a reducer for the heads of a token's ranks, a summer for all ranks' arrival
 * and then for credit of any one of the ranks that it still has rows for. Sums travel to each rank
 * in order of token. So of all unfinished tokens of a lane, on all ranks, the reducer of the lowest
 * has emptied the rings of what came before; the summers it waits for find room there; and all of
 * it goes on.
 */
#include "combine/gather_reduce.cuh"
#include "combine/gather_sum.cuh"

#define THREADS (FIRST_WORKER * 32 + WORKERS)

typedef struct Shared {
    Pipe pipe;
    union {
        Turns turns;
        Arrived arrived;
    };
} Shared;

__device__ void sum_up(const EpGatherArgs &a, Shared *s, uint32_t epoch, int ring) {
    Pipe *p = &s->pipe;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == PLANNER)
        plan_sums(a, p, &s->turns, epoch, ring);
    else if (warp == LOADER && lane == 0)
        pipe_load(p);
    else if (warp >= FIRST_STORER && warp < FIRST_SIDE && lane == 0)
        pipe_store(p, warp - FIRST_STORER, 1, 0, 1);
    else if (warp == ANNOUNCER)
        pipe_announce(p, a.group, epoch, ring, 1);
    else if (warp >= FIRST_SIDE && a.carries_values)
        send_values(a, p, ring, warp - FIRST_SIDE);
}

__device__ void reduce(const EpGatherArgs &a, Shared *s, uint32_t epoch, int ring) {
    Pipe *p = &s->pipe;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == PLANNER)
        plan_tokens(a, p, &s->arrived, epoch, ring);
    else if (warp == LOADER && lane == 0)
        pipe_load(p);
    else if (warp >= FIRST_STORER && warp < FIRST_SIDE && lane == 0)
        pipe_store(p, warp - FIRST_STORER, 1, 0, 0);
    else if (warp == ANNOUNCER)
        pipe_announce(p, a.group, epoch, ring, 0);
    else if (warp >= FIRST_SIDE && a.carries_values)
        return_values(a, p, ring, warp - FIRST_SIDE);
}

__global__ void __launch_bounds__(THREADS, 1)
    gather_kernel(const __grid_constant__ EpGatherArgs a) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Shared s;
    int thread = (int)threadIdx.x - FIRST_WORKER * 32, reduces = pipe_receives();
    int ring = pipe_lane();
    uint32_t epoch = ep_epoch(a.group);
    if (!ep_enter(a.group, a.plan, epoch)) {
        ep_leave(a.group, epoch);
        return;
    }
    ep_arrive(a.group, epoch, 0);
    pipe_open(&s.pipe, a.pipe, memory, a.carries_values);
    if (thread >= 0)
        sum(a, &s.pipe, thread);
    else if (reduces)
        reduce(a, &s, epoch, ring);
    else
        sum_up(a, &s, epoch, ring);
    if (thread >= 0 && reduces) zero_beyond(a, ring, thread);
    ep_leave(a.group, epoch);
}

extern "C" int ep_cuda_open_gather(int shared_bytes) {
    return ep_open_kernel(gather_kernel, shared_bytes);
}

extern "C" int ep_cuda_launch_gather(const EpGatherArgs *a, void *stream) {
    size_t shared = pipe_bytes(a->pipe);
    gather_kernel<<<2 * a->group.layout.lanes, THREADS, shared, (cudaStream_t)stream>>>(*a);
    return cudaGetLastError();
}
