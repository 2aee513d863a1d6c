/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Latency mode's combine: sums of slots and their way back in one launch, or in two.
 *
 * The plan says of each token of each rank which slots it fills here. Their sum goes back into a
 * place that is that token's alone (handles/latency.h), and says by itself that it is there
 * (runtime/lines.cuh). The first blocks send such sums; the others (see EpLatency) take this rank's
 * tokens, add up what comes of the ranks that each went to, and write the rows.
 */
#include "combine/latency_reduce.cuh"

template <typename T>
__global__ void __launch_bounds__(THREADS, 1)
    latency_gather_kernel(const __grid_constant__ EpLatencyGatherArgs a) {
    __shared__ int tokens[EP_CUDA_MAX_RANKS];
    Turn turn;
    Duty duty = latency_duty(a.latency);
    Sum first = ask_first_sum(a);
    if (duty.sends && claims_all(a.latency)) claims_begin(a.latency);
#pragma unroll 1
    for (int r = THREADS - 1 - (int)threadIdx.x; r < a.group.size; r += THREADS)
        tokens[r] = __ldg(a.plan.tokens + r);
    int alive = latency_enter(a.group, a.plan, a.latency, &turn);
    if (alive && duty.sends) send_sums<T>(a, tokens, first, turn);
    uint32_t ticket = latency_ticket(a.latency);
    if (alive && duty.receives) reduce_all<T>(a, duty, tokens[a.group.rank], turn.flag);
    latency_pass(a.group, a.latency, turn, ticket);
}

/* A kernel for each type: their code comes from the instruction caches, which hold one of them. */
extern "C" int ep_cuda_open_latency_gather(int shared_bytes) {
    int error = ep_open_kernel(latency_gather_kernel<__nv_bfloat16>, shared_bytes);
    if (!error) error = ep_open_kernel(latency_gather_kernel<__half>, shared_bytes);
    return error ? error : ep_open_kernel(latency_gather_kernel<float>, shared_bytes);
}

extern "C" int ep_cuda_launch_latency_gather(const EpLatencyGatherArgs *a, int blocks,
                                             void *stream) {
    auto kernel = latency_gather_kernel<float>;
    if (a->type == EP_TYPE_BF16) kernel = latency_gather_kernel<__nv_bfloat16>;
    if (a->type == EP_TYPE_FP16) kernel = latency_gather_kernel<__half>;
    return ep_launch(kernel, blocks, THREADS, 0, stream, *a);
}
