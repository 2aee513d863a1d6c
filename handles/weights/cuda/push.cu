/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moves weights on one node. Reducing a gradient, each rank sends every other rank the shard that
 * this one keeps, chunk by chunk, through the rings of the group's windows, and adds what comes: in
 * ascending rank from +0, its own shard where it lies. Gathering, each rank sends all others its
 * shard, and puts what comes into its place. Of numbers each rank sends all others its own. Moving
 * experts, each rank sends rows to some ranks, and gets rows from some.
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
#include "runtime/cuda/rows.cuh"

#define THREADS 512
#define MOST_VECTORS (EP_MAX_ROW_BYTES / 16 / THREADS) /* of a chunk, for each thread */
#define SUMS 2                                         /* that a thread has under way */

/* Returns where a word of a rank's shard lies in the whole. */
__device__ __forceinline__ int64_t place_of(const EpPushedShards &s, int rank, uint32_t word) {
    uint32_t run = ep_large_quotient(word, s.run), row = ep_large_quotient(run, s.rows);
    return s.base[rank] + row * s.row_step + (run - row * s.rows.by) * s.step +
           (word - run * s.run.by);
}

/** The words of a chunk, within the shard. */
struct Chunk {
    uint32_t first, count;
};

__device__ __forceinline__ Chunk chunk_of(const EpPushedShards &s, int chunk) {
    uint32_t first = (uint32_t)chunk * s.chunk;
    return Chunk{first, min((uint32_t)s.chunk, (uint32_t)s.words - first)};
}

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

/* Call each(r) for each other rank until one returns 0. By a warp. */
template <typename Each>
__device__ __forceinline__ int with_others(const EpCudaGroup &g, int lane, Each each) {
    int alive = 1;
    for (int r = lane; r < g.size && alive; r += 32)
        alive = r == g.rank || each(r);
    return alive;
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

/* ---- sending ------------------------------------------------------------------------------- */

__device__ __forceinline__ void send_chunk(const EpPushArgs &a, int peer, int chunk) {
    const EpCudaGroup &g = a.group;
    const Chunk c = chunk_of(a.shards, chunk);
    uint4 *to = (uint4 *)ep_ring(g, peer, g.rank, chunk), x[MOST_VECTORS];
#pragma unroll
    for (int k = 0; k < MOST_VECTORS; k++) {
        uint32_t at = threadIdx.x + k * THREADS;
        if (at < c.count) x[k] = ((const uint4 *)a.grad)[place_of(a.shards, peer, c.first + at)];
    }
#pragma unroll
    for (int k = 0; k < MOST_VECTORS; k++) {
        uint32_t at = threadIdx.x + k * THREADS;
        if (at < c.count) to[at] = x[k];
    }
}

__device__ __forceinline__ void send(const EpPushArgs &a, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int others = g.size - 1, claimed = claim(g, 0);
    auto peer_of = [&](int item) { return (g.rank + 1 + item % others) % g.size; };
    auto await = [&](int item, int lane) {
        return lane || has_room(g, epoch, peer_of(item), item / others);
    };
    if (!await_all(g, epoch)) return;
    for (int item; (item = take_item(g, 0, a.shards.chunks * others, &claimed, await)) >= 0;) {
        send_chunk(a, peer_of(item), item / others);
        __syncthreads();
        if (threadIdx.x == 0) give_head(g, epoch, peer_of(item), item / others);
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
    const Chunk c = chunk_of(a.shards, chunk);
    const uint4 *grad = (const uint4 *)a.grad;
    for (uint32_t begin = threadIdx.x; begin < c.count; begin += SUMS * THREADS) {
        EpVector<T> sum[SUMS] = {};
        for (int r = 0; r < g.size; r++) {
            const uint4 *received = (const uint4 *)ep_ring(g, g.rank, r - (r == g.rank), chunk);
            uint4 x[SUMS];
#pragma unroll
            for (int i = 0; i < SUMS; i++) {
                uint32_t at = min(begin + i * THREADS, c.count - 1);
                x[i] = __ldcg(r == g.rank ? grad + place_of(a.shards, r, c.first + at)
                                          : received + at);
            }
#pragma unroll
            for (int i = 0; i < SUMS; i++)
                ep_add(&sum[i], ep_unpack<T>(x[i]));
        }
#pragma unroll
        for (int i = 0; i < SUMS; i++)
            if (begin + i * THREADS < c.count)
                store_sums<T, Out>(a, c.first + begin + i * THREADS, sum[i]);
    }
}

template <typename T, typename Out>
__device__ __forceinline__ void receive(const EpPushArgs &a, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int claimed = claim(g, 1);
    auto await = [&](int chunk, int lane) {
        return with_others(g, lane, [&](int r) { return ep_await_record(g, epoch, r, chunk); });
    };
    for (int chunk; (chunk = take_item(g, 1, a.shards.chunks, &claimed, await)) >= 0;) {
        add_chunk<T, Out>(a, chunk);
        __syncthreads();
        if (threadIdx.x < 32)
            with_others(g, (int)threadIdx.x, [&](int r) {
                give_credit(g, epoch, r, chunk);
                return 1;
            });
    }
}

template <typename T, typename Out>
__global__ void __launch_bounds__(THREADS, 1) push_sums(const __grid_constant__ EpPushArgs a) {
    run(
        a.group, a.receivers, [&](uint32_t epoch) { send(a, epoch); },
        [&](uint32_t epoch) { receive<T, Out>(a, epoch); });
}

/* ---- gathering ----------------------------------------------------------------------------- */

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

template <typename Word>
__device__ __forceinline__ void spread_chunk(const EpPushGatherArgs &a, const Chunk &c, int chunk) {
    const EpCudaGroup &g = a.group;
    Word *whole = (Word *)a.whole;
    auto load = [&](uint32_t at) {
        return a.from ? ((const Word *)a.from)[c.first + at]
                      : whole[place_of(a.shards, g.rank, c.first + at)];
    };
    copy_chunk<Word>(c, load, [&](uint32_t at, const Word &x) {
        for (int i = 1; i < g.size; i++)
            ((Word *)ep_ring(g, (g.rank + i) % g.size, g.rank, chunk))[at] = x;
        if (a.from) whole[place_of(a.shards, g.rank, c.first + at)] = x;
    });
}

template <typename Word>
__device__ __forceinline__ void send_shard(const EpPushGatherArgs &a, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int claimed = claim(g, 0);
    auto await = [&](int chunk, int lane) {
        return with_others(g, lane, [&](int r) { return has_room(g, epoch, r, chunk); });
    };
    if (!await_all(g, epoch)) return;
    for (int chunk; (chunk = take_item(g, 0, a.shards.chunks, &claimed, await)) >= 0;) {
        spread_chunk<Word>(a, chunk_of(a.shards, chunk), chunk);
        __syncthreads();
        if (threadIdx.x < 32)
            with_others(g, (int)threadIdx.x, [&](int r) {
                give_head(g, epoch, r, chunk);
                return 1;
            });
    }
}

template <typename Word>
__device__ __forceinline__ void receive_shards(const EpPushGatherArgs &a, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int others = g.size - 1, claimed = claim(g, 1);
    auto peer_of = [&](int item) { return (g.rank + 1 + item % others) % g.size; };
    auto await = [&](int item, int lane) {
        return lane || ep_await_record(g, epoch, peer_of(item), item / others);
    };
    for (int item; (item = take_item(g, 1, a.shards.chunks * others, &claimed, await)) >= 0;) {
        int peer = peer_of(item), chunk = item / others;
        const Chunk c = chunk_of(a.shards, chunk);
        const Word *from = (const Word *)ep_ring(g, g.rank, peer, chunk);
        copy_chunk<Word>(
            c, [&](uint32_t at) { return __ldcg(from + at); },
            [&](uint32_t at, const Word &x) {
                ((Word *)a.whole)[place_of(a.shards, peer, c.first + at)] = x;
            });
        __syncthreads();
        if (threadIdx.x == 0) give_credit(g, epoch, peer, chunk);
    }
}

template <typename Word>
__global__ void __launch_bounds__(THREADS, 1)
    push_shards(const __grid_constant__ EpPushGatherArgs a) {
    run(
        a.group, a.receivers, [&](uint32_t epoch) { send_shard<Word>(a, epoch); },
        [&](uint32_t epoch) { receive_shards<Word>(a, epoch); });
}

/* ---- numbers ------------------------------------------------------------------------------- */

/* One block sends a chunk and then takes it from all ranks, chunk by chunk, so that no rank waits
 * for one that waits for it. */
__device__ __forceinline__ int exchange_numbers(const EpPushMaxArgs &a, uint32_t epoch, int chunk,
                                                int64_t first, int count) {
    const EpCudaGroup &g = a.group;
    int lane = (int)threadIdx.x, leads = lane < 32;
    int alive = !leads || with_others(g, lane, [&](int r) { return has_room(g, epoch, r, chunk); });
    if (!__syncthreads_and(alive)) return 0;
    for (int i = lane; i < count; i += THREADS)
        for (int r = 0; r < g.size; r++)
            if (r != g.rank) ((uint32_t *)ep_ring(g, r, g.rank, chunk))[i] = a.numbers[first + i];
    __syncthreads();
    if (leads) {
        with_others(g, lane, [&](int r) {
            give_head(g, epoch, r, chunk);
            return 1;
        });
        alive = with_others(g, lane, [&](int r) { return ep_await_record(g, epoch, r, chunk); });
    }
    return __syncthreads_and(alive);
}

__global__ void __launch_bounds__(THREADS, 1) push_max(const __grid_constant__ EpPushMaxArgs a) {
    const EpCudaGroup &g = a.group;
    const int64_t most = EP_PUSH_BYTES / sizeof(uint32_t);
    run_operation(g, [&](uint32_t epoch) {
        if (!await_all(g, epoch)) return;
        for (int chunk = 0; chunk * most < a.count; chunk++) {
            int64_t first = chunk * most;
            int count = (int)min(most, a.count - first);
            if (!exchange_numbers(a, epoch, chunk, first, count)) return;
            for (int i = (int)threadIdx.x; i < count; i += THREADS) {
                uint32_t largest = a.numbers[first + i];
                for (int r = 0; r < g.size; r++)
                    if (r != g.rank)
                        largest = max(largest,
                                      __ldcg((const uint32_t *)ep_ring(g, g.rank, r, chunk) + i));
                a.numbers[first + i] = largest;
            }
            __syncthreads();
            if (threadIdx.x < 32)
                with_others(g, (int)threadIdx.x, [&](int r) {
                    give_credit(g, epoch, r, chunk);
                    return 1;
                });
        }
    });
}

/* ---- moving -------------------------------------------------------------------------------- */

/** A chunk of a row: number `chunk` of all that go from one rank to the other. */
struct MovedChunk {
    int peer, chunk;
};

__device__ __forceinline__ int chunks_with(const EpPushMoveArgs &a, const EpPushedRows &rows,
                                           int peer) {
    return (rows.begin[peer + 1] - rows.begin[peer]) * a.chunks;
}

/* Returns item `item` of those in one direction. Chunk n of all peers comes before chunk n + 1 of
 * any, at both ends. So what a block waits for is never behind an item that waits for this rank.
 * Peers with fewer rows come last, and drop out one after the other. */
__device__ __forceinline__ MovedChunk find_moved(const EpPushMoveArgs &a, const EpPushedRows &rows,
                                                 int item) {
    int first = 0;
#pragma unroll 1
    for (int peers = rows.peers; peers > 0; peers--) {
        int until = chunks_with(a, rows, rows.order[peers - 1]), here = (until - first) * peers;
        if (item < here) return MovedChunk{rows.order[item % peers], first + item / peers};
        item -= here, first = until;
    }
    return MovedChunk{0, 0};
}

/* Returns the chunk's words within the row, and in *row which row it is. */
__device__ __forceinline__ Chunk place_moved(const EpPushMoveArgs &a, const EpPushedRows &rows,
                                             const MovedChunk &m, int64_t *row) {
    int number = m.chunk / a.chunks;
    uint32_t first = (uint32_t)(m.chunk - number * a.chunks) * a.chunk;
    *row = rows.row[rows.begin[m.peer] + number];
    return Chunk{first, min((uint32_t)a.chunk, (uint32_t)a.words - first)};
}

template <typename Word>
__device__ __forceinline__ void send_rows(const EpPushMoveArgs &a, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int claimed = claim(g, 0), items = a.sent.begin[g.size] * a.chunks;
    int64_t row;
    auto await = [&](int item, int lane) {
        MovedChunk m = find_moved(a, a.sent, item);
        return lane || has_room(g, epoch, m.peer, m.chunk);
    };
    if (!await_all(g, epoch)) return;
    for (int item; (item = take_item(g, 0, items, &claimed, await)) >= 0;) {
        const MovedChunk m = find_moved(a, a.sent, item);
        const Chunk c = place_moved(a, a.sent, m, &row);
        const Word *from = (const Word *)a.from + row * a.from_step + c.first;
        Word *to = (Word *)ep_ring(g, m.peer, g.rank, m.chunk);
        copy_chunk<Word>(
            c, [&](uint32_t at) { return from[at]; },
            [&](uint32_t at, const Word &x) { to[at] = x; });
        __syncthreads();
        if (threadIdx.x == 0) give_head(g, epoch, m.peer, m.chunk);
    }
}

template <typename Word>
__device__ __forceinline__ void receive_rows(const EpPushMoveArgs &a, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int claimed = claim(g, 1), items = a.got.begin[g.size] * a.chunks;
    int64_t row;
    auto await = [&](int item, int lane) {
        MovedChunk m = find_moved(a, a.got, item);
        return lane || ep_await_record(g, epoch, m.peer, m.chunk);
    };
    for (int item; (item = take_item(g, 1, items, &claimed, await)) >= 0;) {
        const MovedChunk m = find_moved(a, a.got, item);
        const Chunk c = place_moved(a, a.got, m, &row);
        const Word *from = (const Word *)ep_ring(g, g.rank, m.peer, m.chunk);
        Word *to = (Word *)a.to + row * a.to_step + c.first;
        copy_chunk<Word>(
            c, [&](uint32_t at) { return __ldcg(from + at); },
            [&](uint32_t at, const Word &x) { to[at] = x; });
        __syncthreads();
        if (threadIdx.x == 0) give_credit(g, epoch, m.peer, m.chunk);
    }
}

template <typename Word>
__global__ void __launch_bounds__(THREADS, 1) push_rows(const __grid_constant__ EpPushMoveArgs a) {
    run(
        a.group, a.receivers, [&](uint32_t epoch) { send_rows<Word>(a, epoch); },
        [&](uint32_t epoch) { receive_rows<Word>(a, epoch); });
}

/* ---- launching ----------------------------------------------------------------------------- */

template <typename T, typename Out> static int open_for(void) {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, push_sums<T, Out>);
}

template <typename Word> static int open_gather(void) {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, push_shards<Word>);
}

extern "C" int ep_cuda_open_push(void) {
    cudaFuncAttributes attributes;
    int error = cudaFuncGetAttributes(&attributes, push_max);
    if (!error) error = open_for<__nv_bfloat16, float>();
    if (!error) error = open_gather<uint4>();
    if (!error) error = open_gather<uint32_t>();
    if (!error) error = open_gather<uint8_t>();
    if (!error) error = open_for<__half, float>();
    if (!error) error = open_for<float, float>();
    if (!error) error = open_for<__nv_bfloat16, __nv_bfloat16>();
    if (!error) error = open_for<__half, __half>();
    if (!error) error = open_for<float, __nv_bfloat16>();
    return error ? error : open_for<float, __half>();
}

template <typename Word> static int open_rows(void) {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, push_rows<Word>);
}

extern "C" int ep_cuda_open_push_rows(void) {
    int error = open_rows<uint4>();
    if (!error) error = open_rows<uint32_t>();
    return error ? error : open_rows<uint8_t>();
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

extern "C" int ep_cuda_launch_push_max(const EpPushMaxArgs *a, void *stream) {
    return ep_launch(push_max, 1, THREADS, 0, stream, *a);
}

extern "C" int ep_cuda_launch_push_gather(const EpPushGatherArgs *a, int blocks, void *stream) {
    if (a->shards.word == 16) return ep_launch(push_shards<uint4>, blocks, THREADS, 0, stream, *a);
    if (a->shards.word == 4)
        return ep_launch(push_shards<uint32_t>, blocks, THREADS, 0, stream, *a);
    return ep_launch(push_shards<uint8_t>, blocks, THREADS, 0, stream, *a);
}

extern "C" int ep_cuda_launch_push_rows(const EpPushMoveArgs *a, int blocks, void *stream) {
    if (a->word == 16) return ep_launch(push_rows<uint4>, blocks, THREADS, 0, stream, *a);
    if (a->word == 4) return ep_launch(push_rows<uint32_t>, blocks, THREADS, 0, stream, *a);
    return ep_launch(push_rows<uint8_t>, blocks, THREADS, 0, stream, *a);
}
