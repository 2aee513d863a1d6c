/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gather over NVLink: slots to token rows, for ep_combine and ep_dispatch_backward.
 *
 * One launch. Summing blocks add up, for every row that another rank had sent, the slots that the
 * row had filled, and push the sum, rounded to the rows' type, back through the ring to that rank.
 * Reducing blocks take this rank's tokens: they wait until the sums of all ranks that a token went
 * to are there, add them in ascending rank, this rank's own slots unrounded in their turn, and
 * write the token's row. How a block works is told in runtime/pipe.cuh, how blocks divide the work
 * and why nobody waits in a circle in runtime/cuda.h.
 *
 * Who waits on whom: a reducer for the heads of a token's rows, a summer for all ranks' arrival and
 * for credit, that is, for the other rank's reducer to have emptied a record of the ring.
 */
#include "combine/gather_reduce.cuh"
#include "combine/gather_sum.cuh"

#define THREADS (FIRST_WORKER * 32 + WORKERS)

typedef struct Shared {
    Pipe pipe;
    ChunkRows rows;
} Shared;

__device__ void sum_up(const EpGatherArgs &a, Shared *s, uint32_t epoch, int blocks) {
    Pipe *p = &s->pipe;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == PLANNER)
        plan_sums(a, p, &s->rows, epoch, blocks);
    else if (warp == LOADER)
        pipe_load(p, COMPUTED);
    else if (pipe_is_storer(warp) && lane == 0)
        pipe_store(p, warp - FIRST_STORER, COMPUTED, 1);
    else if (warp == ANNOUNCER)
        pipe_announce(p, a.group, epoch, 1);
    else if (warp >= FIRST_SIDE && a.carries_values)
        send_values(a, p, warp - FIRST_SIDE);
}

__device__ void reduce(const EpGatherArgs &a, Pipe *p, uint32_t epoch, int blocks) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == PLANNER)
        plan_tokens(a, p, epoch, blocks);
    else if (warp == LOADER)
        pipe_load(p, COMPUTED);
    else if (pipe_is_storer(warp) && lane == 0)
        pipe_store(p, warp - FIRST_STORER, COMPUTED, 0);
    else if (warp == ANNOUNCER)
        pipe_announce(p, a.group, epoch, 0);
    else if (warp >= FIRST_SIDE && a.carries_values)
        return_values(a, p, warp - FIRST_SIDE);
}

__global__ void __launch_bounds__(THREADS, 1)
    gather_kernel(const __grid_constant__ EpGatherArgs a) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Shared s;
    int thread = (int)threadIdx.x - FIRST_WORKER * 32;
    Shared *kept = ep_keep_shared(&s);
    Role role = pipe_role(a.receivers);
    uint32_t epoch = ep_epoch(a.group);
    pipe_open(&kept->pipe, a.pipe, memory, a.carries_values, a.top_k);
    if (!ep_enter(a.group, a.plan, epoch)) {
        ep_leave(a.group, epoch);
        return;
    }
    ep_arrive(a.group, epoch, 0);
    /* First, since nothing has been loaded yet that could be summed. */
    if (thread >= 0 && role.receives) zero_beyond(a, role, thread);
    if (thread >= 0)
        sum(a, &kept->pipe, thread);
    else if (role.receives)
        reduce(a, &kept->pipe, epoch, role.count);
    else
        sum_up(a, kept, epoch, role.count);
    ep_leave(a.group, epoch, 0);
}

extern "C" int ep_cuda_open_gather(int shared_bytes) {
    return ep_open_kernel(gather_kernel, shared_bytes);
}

extern "C" int ep_cuda_launch_gather(const EpGatherArgs *a, void *stream) {
    return ep_launch(gather_kernel, a->group.blocks, THREADS, pipe_bytes(a->pipe), stream, *a);
}
