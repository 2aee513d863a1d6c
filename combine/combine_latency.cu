/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Latency mode's combine: sums of slots and their way back in one launch, or in two.
 *
 * The plan says of each token of each rank which slots it fills here. Their sum goes back into a
 * place that is that token's alone (handles/latency.h), and says by itself that it is there
 * (runtime/lines.cuh). Blocks claim what is to be sent; when nothing of that is left, they take
 * this rank's tokens, add up what comes of the ranks that each went to, and write the rows.
 */
#include "combine/latency_reduce.cuh"

/* What a warp knows before it begins. */
typedef struct Outlook {
    Shares sums;
    Reduction reduction;
} Outlook;

template <typename T>
__device__ void gather(const EpLatencyGatherArgs &a, const Outlook &o, Claims *claims, int *list,
                       uint64_t flag) {
    if (a.latency.sends) send_sums<T>(a, o.sums, claims, flag);
    if (a.latency.receives) reduce_all<T>(a, o.reduction, list, flag);
}

__global__ void __launch_bounds__(THREADS, 1)
    latency_gather_kernel(const __grid_constant__ EpLatencyGatherArgs a) {
    __shared__ int item, lists[WARPS][EP_MAX_TOP_K];
    uint64_t flag = latency_flag(a.latency);
    Claims claims = claims_begin(a.latency, &item);
    Outlook outlook = {share_sums(a), plan_reduction(a)};
    int *list = lists[threadIdx.x / 32];
    if (!latency_enter(a.group, a.plan)) {
        latency_leave(a.group, a.latency, flag, 0);
        return;
    }
    if (a.type == EP_TYPE_BF16)
        gather<__nv_bfloat16>(a, outlook, &claims, list, flag);
    else if (a.type == EP_TYPE_FP16)
        gather<__half>(a, outlook, &claims, list, flag);
    else
        gather<float>(a, outlook, &claims, list, flag);
    latency_leave(a.group, a.latency, flag, 0);
}

extern "C" int ep_cuda_open_latency_gather(int shared_bytes) {
    return ep_open_kernel(latency_gather_kernel, shared_bytes);
}

extern "C" int ep_cuda_launch_latency_gather(const EpLatencyGatherArgs *a, int blocks,
                                             void *stream) {
    latency_gather_kernel<<<blocks, THREADS, 0, (cudaStream_t)stream>>>(*a);
    return cudaGetLastError();
}
