/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Latency mode's dispatch: routing and rows in one launch, or in two that send and receive.
 *
 * A sender stores each row once for each rank that has one of its experts, into a place that is
 * that token's alone (handles/latency.h), with what the receiver must know to find its slots. Data
 * says by itself that it is there (runtime/lines.cuh). A receiver reads everyone's counts, from
 * which follows where slabs begin, then rows as they come, and copies them to their slots.
 *
 * The first blocks send: they claim tokens, one by one. The others receive from the beginning, each
 * warp its share, but for the last, which tells host and caller of the routing. Where a dispatch
 * quantises, is alone in its group, or has a launch for each half, every block does all of it.
 */
#include "dispatch/quantise.cuh"

#include "dispatch/latency_fill.cuh"
#include "dispatch/latency_send.cuh"

__device__ __forceinline__ char *desk_memory(void) {
    extern __shared__ __align__(128) char memory[];
    return memory;
}

/* By all threads of a block. The last block tells of the routing. Flat rows that are lost are told
 * of at the end, by the block that comes there last. */
__device__ __forceinline__ void receive(const EpLatencyScatterArgs &a, const Duty &duty,
                                        uint64_t flag) {
    int blocks = max(1, duty.blocks - 1), flat = a.route.shape.layout == EP_LAYOUT_FLAT;
    Filling filling = begin_filling(a, duty.block, blocks, flag);
    if (!take_heads(a, flag, [&] { go_on_filling(a, &filling, flag); })) return;
    if (duty.block < blocks) {
        fill_all(a, filling, flag);
        zero_padding(a, filling.warp, filling.warps);
    }
    int tells = duty.block == duty.blocks - 1, loses = flat && flat_rows_kept(a) < flat_rows(a);
    if (tells && !flat) publish_routing(a);
    if (tells && flat && !loses) publish_flat(a);
    if (loses && latency_is_last(a.latency, duty)) publish_flat_kept(a);
}

__global__ void __launch_bounds__(THREADS, 1)
    latency_scatter_kernel(const __grid_constant__ EpLatencyScatterArgs a) {
    const EpCudaGroup &g = a.route.group;
    const EpLatency &l = a.latency;
    Turn turn;
    Duty duty = latency_duty(l);
    if (duty.sends && blockIdx.x) claims_begin(l);
    if (duty.sends) open_desk(a);
    expect_heads();
    int alive = latency_enter(g, a.route.plan, l, &turn);
    if (alive && duty.sends) send_all(a, turn);
    uint32_t ticket = latency_ticket(l);
    if (alive && duty.receives) receive(a, duty, turn.flag);
    latency_pass(g, l, turn, ticket);
}

extern "C" int ep_cuda_open_latency_scatter(int shared_bytes) {
    return ep_open_kernel(latency_scatter_kernel, shared_bytes);
}

extern "C" EpDeskLayout ep_cuda_desk_layout(const EpPlanShape *shape, int64_t entries,
                                            int64_t staged_bytes) {
    return lay_out_desk(*shape, entries, staged_bytes);
}

extern "C" int ep_cuda_launch_latency_scatter(const EpLatencyScatterArgs *a, int blocks,
                                              void *stream) {
    return ep_launch(latency_scatter_kernel, blocks, THREADS, a->desk.bytes, stream, *a);
}
