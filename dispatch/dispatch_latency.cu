/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Latency mode's dispatch: routing and rows in one launch, or in two that send and receive.
 *
 * A sender stores each row once for each rank that has one of its experts, into a place that is
 * that token's alone (handles/latency.h), with what the receiver must know to find its slots. Data
 * says by itself that it is there (runtime/lines.cuh). A receiver reads everyone's counts, from
 * which follows where slabs begin, then rows as they come, and copies them to their slots.
 *
 * Blocks claim what is to be sent, token by token. When nothing of that is left, they receive, each
 * warp its share; one of them tells host and caller of the routing instead.
 */
#include "dispatch/quantise.cuh"

#include "dispatch/latency_fill.cuh"
#include "dispatch/latency_send.cuh"

/* By all threads of a block; 0: this rank has failed. */
__device__ int receive(const EpLatencyScatterArgs &a, const Desk *d, const Part &p, int64_t step,
                       uint64_t flag) {
    int blocks = max(1, p.blocks - 1); /* that fill */
    Filling filling = begin_filling(a, p.block, blocks, flag);
    if (!take_heads(a, d, flag)) return 0;
    if (p.block < blocks) {
        fill_all(a, d, filling, flag);
        zero_padding(a, d, p.block, blocks);
    }
    if (p.block == p.blocks - 1 && a.route.shape.layout != EP_LAYOUT_FLAT)
        publish_routing(a.route, d, step);
    return 1;
}

__global__ void __launch_bounds__(THREADS, 1)
    latency_scatter_kernel(const __grid_constant__ EpLatencyScatterArgs a) {
    extern __shared__ __align__(128) char memory[];
    __shared__ DeskWords words;
    const EpPrepareArgs &route = a.route;
    const EpLatency &l = a.latency;
    Turn turn;
    int64_t step = step_under_way(route);
    Part part = latency_part(l);
    Desk d = make_desk(a, &words, memory);
    if (part.sends) claims_begin(l);
    if (part.sends) open_desk(route, &d);
    int alive = latency_enter(route.group, route.plan, l, &turn);
    if (alive && part.sends) send_all(a, &d, turn);
    uint32_t ticket = latency_ticket(l);
    if (alive && part.receives) alive = receive(a, &d, part, step, turn.flag);
    if (part.receives && route.shape.layout == EP_LAYOUT_FLAT && latency_is_last(l, part) && alive)
        publish_flat(route, &d);
    latency_pass(route.group, l, turn, ticket);
}

extern "C" int ep_cuda_open_latency_scatter(int shared_bytes) {
    return ep_open_kernel(latency_scatter_kernel, shared_bytes);
}

extern "C" size_t ep_cuda_latency_scatter_bytes(const EpLatencyScatterArgs *a, int keeps_routing) {
    return (size_t)desk_bytes(desk_shape(*a, keeps_routing));
}

extern "C" int ep_cuda_launch_latency_scatter(const EpLatencyScatterArgs *a, int blocks,
                                              void *stream) {
    size_t shared = ep_cuda_latency_scatter_bytes(a, a->keeps_routing);
    latency_scatter_kernel<<<blocks, THREADS, shared, (cudaStream_t)stream>>>(*a);
    return cudaGetLastError();
}
