/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_WEIGHTS_CUDA_PUSH_CUH
#define EP_HANDLES_WEIGHTS_CUDA_PUSH_CUH

/**
 * What kernels share that move weights on one node (push.cu, push_rows.cu): chunks go from rank to
 * rank through the rings of the group's windows.
 *
 * Sending and receiving blocks alternate. A block claims a chunk, or a chunk and a rank, in
 * ascending order, so what it waits for is claimed by blocks that run (runtime/cuda/device.h).
 *
 * Who waits on whom: a sending block for all ranks' arrivals, and for the credit of the records
 * that a chunk goes to; a receiving block for the heads of its chunk.
 *
 * Memory order: all threads store their part of a chunk; behind a barrier one of them stores the
 * head with release semantics. A receiver's lane acquires it, and a barrier orders the loads of all
 * threads behind that. They do not go through L1, which may hold the record's last chunk. Credits
 * follow a barrier behind the last load.
 */

#include "handles/weights/cuda/push.h"
#include "runtime/cuda/device.cuh"

#define THREADS 512

EP_VARIANT_BEGIN

/** The words of a chunk, within the shard. */
struct Chunk {
    uint32_t first, count;
};

/* Claim an item of a kind: by lane 0 of the first warp, which needs the result one item later. */
__device__ __forceinline__ int claim(const EpCudaGroup &g, int kind) {
    return threadIdx.x == 0 ? atomicAdd(&g.state->claimed[kind], 1) : 0;
}

/* Returns the item that was claimed last, once `await(item, lane)` has returned 1 in all lanes of
 * the first warp, and claims the next one; -1: there are no more, or a wait has failed. By all
 * threads of the block, with a barrier of the caller's between two calls. */
template <typename Await>
__device__ __forceinline__ int take_item(const EpCudaGroup &g, int kind, int items, int *claimed,
                                         Await await) {
    __shared__ int shared;
    if (threadIdx.x < 32) {
        int item = __shfl_sync(~0u, *claimed, 0), lane = (int)threadIdx.x;
        *claimed = claim(g, kind);
        int alive = item < items && await(item, lane);
        alive = __all_sync(~0u, alive);
        if (lane == 0) shared = alive ? item : -1;
    }
    __syncthreads();
    return shared;
}

__device__ __forceinline__ int has_room(const EpCudaGroup &g, uint32_t epoch, int peer, int chunk) {
    return ep_await_room(g, epoch, peer, chunk, ep_load_credit(g, peer, chunk));
}

__device__ __forceinline__ void give_head(const EpCudaGroup &g, uint32_t epoch, int peer,
                                          int chunk) {
    ep_store_release_sys(ep_head(g, peer, g.rank, chunk), ep_counter(epoch, (uint32_t)chunk + 1));
}

__device__ __forceinline__ void give_credit(const EpCudaGroup &g, uint32_t epoch, int peer,
                                            int chunk) {
    ep_store_relaxed_sys(ep_credit(g, peer, g.rank, chunk), ep_counter(epoch, (uint32_t)chunk + 1));
}

/* Returns whether all ranks have arrived. By all threads. */
__device__ __forceinline__ int await_all(const EpCudaGroup &g, uint32_t epoch) {
    return __syncthreads_and(threadIdx.x >= 32 || ep_await_arrivals(g, epoch));
}

/* Begin the operation, call work(epoch), and end it. By all threads. */
template <typename Work>
__device__ __forceinline__ void run_operation(const EpCudaGroup &g, Work work) {
    uint32_t epoch = ep_epoch(g);
    int alive = 1;
    ep_load_alive(g);
    if (threadIdx.x == 0) {
        ep_set_operation(g, 0);
        alive = !ep_failed_before(ep_failed(g), epoch);
    }
    if (__syncthreads_and(alive)) {
        ep_arrive(g, epoch, 0, 0);
        work(epoch);
    }
    (void)ep_end_operation(g, epoch, 0);
}

/* Likewise: send(epoch) or receive(epoch). */
template <typename Send, typename Receive>
__device__ __forceinline__ void run(const EpCudaGroup &g, int receivers, Send send,
                                    Receive receive) {
    int block = (int)blockIdx.x, blocks = (int)gridDim.x;
    run_operation(g, [&](uint32_t epoch) {
        if (ep_receivers_before(block + 1, blocks, receivers) >
            ep_receivers_before(block, blocks, receivers))
            receive(epoch);
        else
            send(epoch);
    });
}

#define COPIES 8 /* words that a thread has under way */

/* Copy the words of a chunk: store(word of the chunk, load(it)). */
template <typename Word, typename Load, typename Store>
__device__ __forceinline__ void copy_chunk(const Chunk &c, Load load, Store store) {
    for (uint32_t begin = threadIdx.x; begin < c.count; begin += COPIES * THREADS) {
        Word x[COPIES];
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            if (begin + i * THREADS < c.count) x[i] = load(begin + i * THREADS);
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            if (begin + i * THREADS < c.count) store(begin + i * THREADS, x[i]);
    }
}

EP_VARIANT_END

#endif
