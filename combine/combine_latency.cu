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

template <typename T>
__device__ void gather(const EpLatencyGatherArgs &a, const int *tokens, Claims *claims, int *list,
                       uint64_t flag) {
    Part part = latency_part(a.latency);
    if (part.sends) send_sums<T>(a, tokens, claims, flag);
    if (threadIdx.x == 0) latency_pass(a.group, a.latency, flag);
    if (part.receives) reduce_all<T>(a, part, tokens[a.group.rank], list, flag);
}

__global__ void __launch_bounds__(THREADS, 1)
    latency_gather_kernel(const __grid_constant__ EpLatencyGatherArgs a) {
    __shared__ int item, lists[WARPS][EP_MAX_TOP_K], tokens[EP_CUDA_MAX_RANKS];
    uint64_t flag;
    Claims claims = claims_begin(a.latency, &item);
    int *list = lists[threadIdx.x / 32];
    for (int r = threadIdx.x; r < a.group.size; r += THREADS)
        tokens[r] = a.plan.tokens[r];
    if (!latency_enter(a.group, a.plan, a.latency, &flag)) {
        if (threadIdx.x == 0) latency_pass(a.group, a.latency, flag);
        return;
    }
    if (a.type == EP_TYPE_BF16)
        gather<__nv_bfloat16>(a, tokens, &claims, list, flag);
    else if (a.type == EP_TYPE_FP16)
        gather<__half>(a, tokens, &claims, list, flag);
    else
        gather<float>(a, tokens, &claims, list, flag);
}

extern "C" int ep_cuda_open_latency_gather(int shared_bytes) {
    return ep_open_kernel(latency_gather_kernel, shared_bytes);
}

extern "C" int ep_cuda_launch_latency_gather(const EpLatencyGatherArgs *a, int blocks,
                                             void *stream) {
    latency_gather_kernel<<<blocks, THREADS, 0, (cudaStream_t)stream>>>(*a);
    return cudaGetLastError();
}
