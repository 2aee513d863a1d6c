/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Latency mode's combine: sums of slots sent back to their tokens' ranks, in one launch, or in two
 * launches that send and receive.
 *
 * The plan says which slots each token of each rank has here. A sending block stores their sum into
 * a record that belongs to that token alone (handles/cuda/latency.h). A receiving block takes this
 * rank's tokens, adds up the sums of all ranks that each token went to, and writes the rows.
 *
 * Weights come with the slots, or are given at the tokens' ranks. Then sending blocks first push
 * them to the ranks that have the tokens' slots, and sums await them (latency_weights.cuh).
 *
 * Who waits on whom: sending blocks wait for no rank, or only for the weights of other ranks, which
 * every rank sends before it waits; receiving blocks wait for the sums and heads of
 * other ranks. handles/cuda/latency.h says why no wait is circular. Memory order: every line
 * carries a flag that shows its own arrival; only where lines do not arrive whole, flags follow
 * behind a fence (handles/cuda/lines.cuh). The first blocks send; see EpLatency for those that
 * receive.
 *
 * Without a plan to read, a launch that receives takes the heads of an operation that was dropped.
 */
#include "combine/cuda/latency_receive.cuh"

/* Returns a source's number of tokens. A damaged plan must not lead past this rank's weights. */
__device__ __forceinline__ int count_source_tokens(const EpLatencyGatherArgs &a, int source) {
    int count = a.plan.use.is_read ? ep_check_count(a.group, __ldg(a.plan.tokens + source)) : 0;
    if (awaits_weights(a) && source == a.group.rank) count = min(count, (int)a.plan.use.num_rows);
    return max(0, count);
}

template <typename T, int PACKED>
__global__ void __launch_bounds__(LATENCY_THREADS, 1)
    latency_gather_kernel(const __grid_constant__ EpLatencyGatherArgs a) {
    __shared__ int tokens[EP_CUDA_MAX_RANKS];
    LatencyOp op;
    LatencyRole role = latency_role(a.latency);
    latency_begin(a.latency);
    SumPart first = load_first_sum(a);
    if (role.sends && is_all_claimed(a)) claims_begin(a.latency);
#pragma unroll 1
    for (int r = LATENCY_THREADS - 1 - (int)threadIdx.x; r < a.group.size; r += LATENCY_THREADS)
        tokens[r] = count_source_tokens(a, r);
    if (!latency_enter(a.group, a.plan, a.latency, &op)) {
        latency_report(a.group, a.plan, a.latency);
        latency_pass(a.group, a.latency, op, latency_ticket(a.latency, op));
        return;
    }
    if (role.sends) send_sums<T, PACKED>(a, tokens, first, op);
    uint32_t ticket = latency_ticket(a.latency, op);
    if (role.receives) receive_sums<T, PACKED>(a, role, tokens[a.group.rank], op.flag);
    latency_pass(a.group, a.latency, op, ticket);
}

/* Each type has kernels of its own: the instruction caches hold the code of one. */
template <typename T> static int open_kernels(int shared_bytes) {
    int error = ep_open_kernel(latency_gather_kernel<T, 0>, shared_bytes);
    return error ? error : ep_open_kernel(latency_gather_kernel<T, 1>, shared_bytes);
}

extern "C" int ep_cuda_open_latency_gather(int shared_bytes) {
    int error = open_kernels<__nv_bfloat16>(shared_bytes);
    if (!error) error = open_kernels<__half>(shared_bytes);
    return error ? error : open_kernels<float>(shared_bytes);
}

template <typename T> static int launch(const EpLatencyGatherArgs &a, int blocks, void *stream) {
    auto kernel = a.t.format.bits ? latency_gather_kernel<T, 1> : latency_gather_kernel<T, 0>;
    return ep_launch_early(kernel, blocks, LATENCY_THREADS, 0, stream, a);
}

extern "C" int ep_cuda_launch_latency_gather(const void *args, int blocks, void *stream) {
    const EpLatencyGatherArgs *a = (const EpLatencyGatherArgs *)args;
    if (a->t.type == EP_TYPE_BF16) return launch<__nv_bfloat16>(*a, blocks, stream);
    if (a->t.type == EP_TYPE_FP16) return launch<__half>(*a, blocks, stream);
    return launch<float>(*a, blocks, stream);
}
