/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gather over NVLink: slots to token rows, for ep_combine and ep_dispatch_backward.
 *
 * One launch of sending and receiving blocks (pipeline_role). For every row that another rank has
 * sent, a sending block adds up the row's slots, and pushes the sum, rounded to the rows' type or
 * packed (gather_packed.cuh), through the ring back to that rank. A receiving block takes this
 * rank's tokens: it waits for the sums of all ranks that a token went to, adds them in ascending
 * rank, this rank's own slots unrounded in their turn, and writes the token's row.
 * runtime/cuda/pipeline.cuh describes the warps of a block; runtime/cuda/device.h how blocks divide
 * the work, why there is no circular wait, and the memory order of records, heads and credits.
 *
 * Who waits on whom: a receiving block waits for the heads of a token's rows; a sending block waits
 * for all ranks' arrivals and for credits, that is, until the other rank's receiving block has
 * emptied a record of the ring.
 */
#include "combine/cuda/gather_packed.cuh"
#include "combine/cuda/gather_receive.cuh"
#include "combine/cuda/gather_send.cuh"
#include "handles/cuda/relay_marks.cuh"

#define GATHER_THREADS (FIRST_COMPUTE_WARP * 32 + COMPUTE_THREADS)

typedef struct Shared {
    Pipeline pipeline;
    Sending sending;
} Shared;
static_assert(sizeof(Shared) <= EP_GATHER_STATIC_BYTES, "the pipeline has the rest");

/* ---- kernel -------------------------------------------------------------------------------- */

/* Start to walk what this block moves. By a scheduler warp. */
__device__ __forceinline__ Start start_walk(const EpGatherArgs &a, const Role &role, Sending *s,
                                            int warp) {
    return role.receives ? start_tokens(a, RECEIVERS)
                         : start_rows(a, &s->rows[warp - SCHEDULER_WARP], SENDERS);
}

template <Form FORM>
__global__ void __launch_bounds__(GATHER_THREADS, 1)
    gather_kernel(const __grid_constant__ EpGatherArgs a) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Shared s;
    int thread = (int)threadIdx.x - FIRST_COMPUTE_WARP * 32;
    Shared *shared = ep_keep_shared(&s);
    uint32_t epoch;
    EpLook look = ep_look(a.group, a.plan);
    Role role = pipeline_role(a.receivers);
    Start start = {0, 0};
    int warp = (int)threadIdx.x / 32;
    if (warp == SCHEDULER_WARP) start = start_walk(a, role, &shared->sending, warp);
    if (threadIdx.x == SCHEDULER_WARP * 32) init_gate(&shared->sending.gate);
    pipeline_open(&shared->pipeline, a.pipeline, memory, COMPUTE_WARPS, a.t.carries_values,
                  a.schedulers, a.top_k);
    int reads_messages = FORM != ONE_NODE && a.marks.watch != NULL;
    if (reads_messages) ep_look_at_stamps(a.marks, &look);
    if (!ep_enter(a.group, a.plan, look, &epoch)) {
        if (reads_messages) ep_report_stamps(a.group, a.marks);
        ep_report_plan(a.group, a.plan);
        ep_leave(a.group, epoch, 0);
        if (FORM != ONE_NODE && a.stamp) ep_seal_stamp(a.group, a.stamp);
        return;
    }
    if (reads_messages) ep_take_messages(a.marks);
    ep_arrive(a.group, epoch, 0, 0);
    if (warp > SCHEDULER_WARP && pipeline_is_scheduler(warp, a.schedulers))
        start = start_walk(a, role, &shared->sending, warp);
    /* First, since nothing has been loaded yet that could be summed. */
    if (thread >= 0 && role.receives && a.plan.use.fills_rest) zero_extra_rows(a, role, thread);
    int rounds = FORM != ONE_NODE && role.receives && a.rounds;
    if (thread >= 0 && FORM == PACKED)
        sum_packed(a, &shared->pipeline, rounds, !role.receives || rounds, thread);
    else if (thread >= 0)
        sum(a, &shared->pipeline, rounds, thread);
    else if (role.receives)
        receive<FORM>(a, &shared->pipeline, start, epoch, role.count);
    else
        send<FORM>(a, &shared->pipeline, &shared->sending, start, epoch, role.count);
    ep_leave(a.group, epoch, 0);
    if (FORM != ONE_NODE && a.stamp) ep_seal_stamp(a.group, a.stamp);
}

extern "C" int ep_cuda_open_gather(int shared_bytes) {
    int error = ep_open_kernel(gather_kernel<ONE_NODE>, shared_bytes);
    if (!error) error = ep_open_kernel(gather_kernel<NODES>, shared_bytes);
    return error ? error : ep_open_kernel(gather_kernel<PACKED>, shared_bytes);
}

extern "C" int ep_cuda_launch_gather(const void *args, int blocks, void *stream) {
    const EpGatherArgs *a = (const EpGatherArgs *)args;
    int has_nodes = a->rounds || a->nodes.order || a->nodes.records;
    auto kernel = a->t.format.bits ? gather_kernel<PACKED>
                  : has_nodes      ? gather_kernel<NODES>
                                   : gather_kernel<ONE_NODE>;
    return ep_launch(kernel, blocks, GATHER_THREADS, pipeline_bytes(a->pipeline), stream, *a);
}
