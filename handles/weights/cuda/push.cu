/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reduces a weight's gradient on one node. Each rank sends every other rank the shard that this one
 * keeps, chunk by chunk, through the rings of the group's windows, and adds what comes: in
 * ascending rank from +0, its own shard where it lies.
 *
 * Sending and receiving blocks alternate. A block claims a chunk, or a chunk and a rank, in
 * ascending order, so what it waits for is claimed by blocks that run (runtime/cuda/device.h).
 *
 * Who waits on whom: a sending block for all ranks' arrivals, and for the credit of the record that
 * a chunk goes to; a receiving block for the heads of a chunk from all ranks.
 *
 * Memory order: all threads store their part of a chunk; behind a barrier one of them stores the
 * head with release semantics. A receiver's lane acquires it, and a barrier orders the loads of all
 * threads behind that. They do not go through L1, which may hold the record's last chunk. Credits
 * follow a barrier behind the last load.
 */
#include "handles/weights/cuda/push.h"
#include "runtime/cuda/device.cuh"
#include "runtime/cuda/rows.cuh"

#define THREADS 512
#define MOST_VECTORS (EP_MAX_ROW_BYTES / 16 / THREADS) /* of a chunk, for each thread */
#define SUMS 2                                         /* that a thread has under way */

/* Returns where a vector of a rank's shard lies in the gradient. */
__device__ __forceinline__ const uint4 *vector_at(const EpPushArgs &a, int rank, uint32_t vector) {
    uint32_t run = ep_large_quotient(vector, a.run), row = ep_large_quotient(run, a.rows);
    return (const uint4 *)a.grad + a.base[rank] + row * a.row_step +
           (run - row * a.rows.by) * a.step + (vector - run * a.run.by);
}

/* Claim the next item of a kind, by all threads of the block. */
__device__ __forceinline__ int claim(const EpPushArgs &a, int kind) {
    __shared__ int item;
    __syncthreads(); /* the last one's readers are done */
    if (threadIdx.x == 0) item = atomicAdd(&a.group.state->claimed[kind], 1);
    __syncthreads();
    return item;
}

/* ---- sending ------------------------------------------------------------------------------- */

__device__ __forceinline__ void send_chunk(const EpPushArgs &a, uint32_t epoch, int peer,
                                           int chunk) {
    const EpCudaGroup &g = a.group;
    uint32_t first = (uint32_t)chunk * a.chunk, count = min(a.chunk, a.vectors - (int)first);
    uint4 *to = (uint4 *)ep_ring(g, peer, g.rank, chunk), x[MOST_VECTORS];
#pragma unroll
    for (int k = 0; k < MOST_VECTORS; k++) {
        uint32_t at = threadIdx.x + k * THREADS;
        if (at < count) x[k] = *vector_at(a, peer, first + at);
    }
#pragma unroll
    for (int k = 0; k < MOST_VECTORS; k++) {
        uint32_t at = threadIdx.x + k * THREADS;
        if (at < count) to[at] = x[k];
    }
    __syncthreads();
    if (threadIdx.x == 0)
        ep_store_release_sys(ep_head(g, peer, g.rank, chunk),
                             ep_counter(epoch, (uint32_t)chunk + 1));
}

__device__ __forceinline__ void send(const EpPushArgs &a, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int others = g.size - 1, alive = 1;
    if (threadIdx.x < 32) alive = ep_await_arrivals(g, epoch);
    while (__syncthreads_and(alive)) {
        int item = claim(a, 0), chunk = item / others;
        if (chunk >= a.chunks) return;
        int peer = (g.rank + 1 + item % others) % g.size;
        if (threadIdx.x == 0)
            alive = ep_await_room(g, epoch, peer, chunk, ep_load_credit(g, peer, chunk));
        if (!__syncthreads_and(alive)) return;
        send_chunk(a, epoch, peer, chunk);
    }
}

/* ---- receiving ----------------------------------------------------------------------------- */

/* What is stored for a vector of sums. */
template <typename Out, int N> struct alignas(N * sizeof(Out) < 16 ? N * sizeof(Out) : 16) Result {
    Out at[N];
};

__device__ __forceinline__ void round_sum(float *out, float sum) {
    *out = sum;
}
__device__ __forceinline__ void round_sum(__nv_bfloat16 *out, float sum) {
    *out = __float2bfloat16_rn(sum);
}
__device__ __forceinline__ void round_sum(__half *out, float sum) {
    *out = __float2half_rn(sum);
}

template <typename T, typename Out>
__device__ __forceinline__ void store_sums(const EpPushArgs &a, uint32_t vector,
                                           const EpVector<T> &sum) {
    typedef Result<Out, EpVector<T>::SIZE> Sums;
    Sums *out = (Sums *)a.out + vector, result;
    if (a.accumulate) result = *out;
#pragma unroll
    for (int e = 0; e < EpVector<T>::SIZE; e++)
        round_sum(&result.at[e], a.accumulate ? ep_float(result.at[e]) + sum.at[e] : sum.at[e]);
    *out = result;
}

template <typename T, typename Out>
__device__ __forceinline__ void add_chunk(const EpPushArgs &a, int chunk) {
    const EpCudaGroup &g = a.group;
    uint32_t first = (uint32_t)chunk * a.chunk, count = min(a.chunk, a.vectors - (int)first);
    for (uint32_t begin = threadIdx.x; begin < count; begin += SUMS * THREADS) {
        EpVector<T> sum[SUMS] = {};
        for (int r = 0; r < g.size; r++) {
            const uint4 *received = (const uint4 *)ep_ring(g, g.rank, r - (r == g.rank), chunk);
            uint4 x[SUMS];
#pragma unroll
            for (int i = 0; i < SUMS; i++) {
                uint32_t at = min(begin + i * THREADS, count - 1);
                x[i] = __ldcg(r == g.rank ? vector_at(a, r, first + at) : received + at);
            }
#pragma unroll
            for (int i = 0; i < SUMS; i++)
                ep_add(&sum[i], ep_unpack<T>(x[i]));
        }
#pragma unroll
        for (int i = 0; i < SUMS; i++)
            if (begin + i * THREADS < count)
                store_sums<T, Out>(a, first + begin + i * THREADS, sum[i]);
    }
}

template <typename T, typename Out>
__device__ __forceinline__ void receive(const EpPushArgs &a, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int peer = (int)threadIdx.x, has_peer = peer < g.size && peer != g.rank;
    for (;;) {
        int chunk = claim(a, 1), alive = 1;
        if (chunk >= a.chunks) return;
        if (has_peer) alive = ep_await_record(g, epoch, peer, chunk);
        if (!__syncthreads_and(alive)) return;
        add_chunk<T, Out>(a, chunk);
        __syncthreads();
        if (has_peer)
            ep_store_relaxed_sys(ep_credit(g, peer, g.rank, chunk),
                                 ep_counter(epoch, (uint32_t)chunk + 1));
    }
}

template <typename T, typename Out>
__global__ void __launch_bounds__(THREADS, 1) push_sums(const __grid_constant__ EpPushArgs a) {
    uint32_t epoch = ep_epoch(a.group);
    int block = (int)blockIdx.x, blocks = (int)gridDim.x, alive = 1;
    if (threadIdx.x == 0) {
        ep_set_operation(a.group, 0);
        alive = !ep_failed_before(ep_failed(a.group), epoch);
    }
    if (__syncthreads_and(alive)) {
        ep_arrive(a.group, epoch, 0, 0);
        if (ep_receivers_before(block + 1, blocks, a.receivers) >
            ep_receivers_before(block, blocks, a.receivers))
            receive<T, Out>(a, epoch);
        else
            send(a, epoch);
    }
    (void)ep_end_operation(a.group, epoch, 0);
}

/* ---- launching ----------------------------------------------------------------------------- */

template <typename T, typename Out> static int open_for(void) {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, push_sums<T, Out>);
}

extern "C" int ep_cuda_open_push(void) {
    int error = open_for<__nv_bfloat16, float>();
    if (!error) error = open_for<__half, float>();
    if (!error) error = open_for<float, float>();
    if (!error) error = open_for<__nv_bfloat16, __nv_bfloat16>();
    if (!error) error = open_for<__half, __half>();
    if (!error) error = open_for<float, __nv_bfloat16>();
    return error ? error : open_for<float, __half>();
}

template <typename T, typename Out>
static int launch(const EpPushArgs *a, int blocks, void *stream) {
    return ep_launch(push_sums<T, Out>, blocks, THREADS, 0, stream, *a);
}

extern "C" int ep_cuda_launch_push(const EpPushArgs *a, int blocks, void *stream) {
    int is_wide = a->type == EP_TYPE_FP32;
    if (a->out_type == EP_TYPE_FP32) {
        if (a->type == EP_TYPE_BF16) return launch<__nv_bfloat16, float>(a, blocks, stream);
        if (a->type == EP_TYPE_FP16) return launch<__half, float>(a, blocks, stream);
        return launch<float, float>(a, blocks, stream);
    }
    if (a->out_type == EP_TYPE_BF16)
        return is_wide ? launch<float, __nv_bfloat16>(a, blocks, stream)
                       : launch<__nv_bfloat16, __nv_bfloat16>(a, blocks, stream);
    return is_wide ? launch<float, __half>(a, blocks, stream)
                   : launch<__half, __half>(a, blocks, stream);
}
