/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Latency mode's dispatch: routing and rows in one launch, or in two launches that send and
 * receive.
 *
 * A sending block stores each row once for each rank that has one of its experts, into a record
 * that belongs to that token alone (handles/cuda/latency.h), with the header that its slots follow
 * from. A receiving block computes where slabs begin from the counts in all ranks' heads, then
 * takes the records as they arrive and copies their rows to their slots.
 *
 * Who waits on whom: sending blocks wait for no rank; receiving blocks wait for the heads and
 * records of all ranks. Memory order: every line carries a flag that shows its own arrival; only
 * where lines do not arrive whole, flags follow behind a fence (handles/cuda/lines.cuh).
 *
 * The first blocks send: they claim tokens one by one. The other blocks receive from the start,
 * each warp its part, except the last block, which publishes the routing to host and caller. Where
 * a dispatch quantises, is alone in its group, or has a launch for each phase, every block takes
 * part in all of the launch's work.
 */
#include "runtime/cuda/quantise.cuh"

#include "dispatch/cuda/latency_receive.cuh"
#include "dispatch/cuda/latency_send.cuh"

__device__ __forceinline__ char *workspace_memory(void) {
    extern __shared__ __align__(128) char memory[];
    return memory;
}

/* Receive this rank's rows. By all threads of a block. The last block publishes the routing. If
 * flat rows are lost, the block that finishes last does so at the end. */
__device__ __forceinline__ void receive(const EpLatencyScatterArgs &a, const LatencyRole &role,
                                        const LatencyOp &op) {
    uint64_t flag = op.flag;
    int blocks = max(1, role.blocks - 1), flat = a.route.shape.has_rows;
    ReceiveState state = begin_receiving(a, role.block, blocks, flag);
    if (!take_heads(a, flag, [&] { refetch_part(a, &state, flag); })) return;
    if (role.block < blocks) {
        receive_records(a, state, flag);
        zero_padding(a, state.warp, state.warps);
    }
    int publishes = role.block == role.blocks - 1,
        has_lost_rows = flat && flat_rows_kept(a) < flat_rows(a);
    if (publishes && !flat) publish_routing(a, op);
    if (publishes && flat && !has_lost_rows) publish_flat(a, op);
    if (has_lost_rows && latency_is_last(a.latency, role, op.flag)) publish_flat_kept(a, op);
}

__global__ void __launch_bounds__(LATENCY_THREADS, 1)
    latency_scatter_kernel(const __grid_constant__ EpLatencyScatterArgs a) {
    const EpCudaGroup &g = a.route.group;
    const EpLatency &l = a.latency;
    LatencyOp op;
    LatencyRole role = latency_role(l);
    reset_heads();
    latency_begin(l);
    if (role.sends && blockIdx.x) claims_begin(l);
    if (role.sends) open_workspace(a);
    if (!latency_enter(g, a.route.plan, l, &op)) {
        latency_report(g, a.route.plan, l);
        latency_pass(g, l, op, latency_ticket(l, op));
        return;
    }
    if (role.sends && a.route.shape.merges) merge_duplicates(a);
    if (role.sends) send_all(a, op);
    uint32_t ticket = latency_ticket(l, op);
    if (role.receives) receive(a, role, op);
    latency_pass(g, l, op, ticket);
}

extern "C" int ep_cuda_open_latency_scatter(int shared_bytes) {
    return ep_open_kernel(latency_scatter_kernel, shared_bytes);
}

extern "C" int ep_cuda_launch_latency_scatter(const void *args, int blocks, void *stream) {
    const EpLatencyScatterArgs *a = (const EpLatencyScatterArgs *)args;
    return ep_launch_early(latency_scatter_kernel, blocks, LATENCY_THREADS, a->workspace.bytes,
                           stream, *a);
}
