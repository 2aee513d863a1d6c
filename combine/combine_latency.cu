/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Latency mode's combine: sums of slots and their way back in one launch, or in two.
 *
 * The plan says of each token of each rank which slots it fills here. Their sum goes back into a
 * place that is that token's alone (handles/latency.h), and says by itself that it is there
 * (runtime/lines.cuh). Blocks claim what is to be sent. These or others (see EpLatency) take this
 * rank's tokens, add up what comes of the ranks that each went to, and write the rows.
 */
#include "combine/latency_reduce.cuh"

/* Returns the block's ticket: see latency_pass. */
template <typename T>
__device__ uint32_t gather(const EpLatencyGatherArgs &a, const Part &part, const int *tokens,
                           int *list, const Turn &turn) {
    if (part.sends) send_sums<T>(a, tokens, turn);
    uint32_t ticket = latency_ticket(a.latency);
    if (part.receives) reduce_all<T>(a, part, tokens[a.group.rank], list, turn.flag);
    return ticket;
}

__global__ void __launch_bounds__(THREADS, 1)
    latency_gather_kernel(const __grid_constant__ EpLatencyGatherArgs a) {
    __shared__ int lists[WARPS][EP_MAX_TOP_K], tokens[EP_CUDA_MAX_RANKS];
    Turn turn;
    uint32_t ticket;
    Part part = latency_part(a.latency);
    int *list = lists[threadIdx.x / 32];
    if (part.sends) claims_begin(a.latency);
    for (int r = THREADS - 1 - (int)threadIdx.x; r < a.group.size; r += THREADS)
        tokens[r] = a.plan.tokens[r];
    if (!latency_enter(a.group, a.plan, a.latency, &turn))
        ticket = latency_ticket(a.latency);
    else if (a.type == EP_TYPE_BF16)
        ticket = gather<__nv_bfloat16>(a, part, tokens, list, turn);
    else if (a.type == EP_TYPE_FP16)
        ticket = gather<__half>(a, part, tokens, list, turn);
    else
        ticket = gather<float>(a, part, tokens, list, turn);
    latency_pass(a.group, a.latency, turn, ticket);
}

extern "C" int ep_cuda_open_latency_gather(int shared_bytes) {
    return ep_open_kernel(latency_gather_kernel, shared_bytes);
}

extern "C" int ep_cuda_launch_latency_gather(const EpLatencyGatherArgs *a, int blocks,
                                             void *stream) {
    latency_gather_kernel<<<blocks, THREADS, 0, (cudaStream_t)stream>>>(*a);
    return cudaGetLastError();
}
