/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moves weights on one node. Reducing a gradient, each rank sends every other rank the shard that
 * this one keeps, chunk by chunk, and adds what comes: in ascending rank from +0, its own shard
 * where it lies. Gathering, each rank sends all others its shard, and puts what comes into its
 * place. Of numbers each rank sends all others its own. push.cuh tells how chunks travel.
 */
#include "handles/weights/cuda/push.cuh"
#include "runtime/cuda/rows.cuh"

#define MOST_VECTORS (EP_MAX_ROW_BYTES / 16 / THREADS) /* of a chunk, for each thread */
#define SUMS 2                                         /* that a thread has under way */

/* Returns where a word of a rank's shard lies in the whole. */
__device__ __forceinline__ int64_t place_of(const EpPushedShards &s, int rank, uint32_t word) {
    uint32_t run = ep_large_quotient(word, s.run), row = ep_large_quotient(run, s.rows);
    return s.base[rank] + row * s.row_step + (run - row * s.rows.by) * s.step +
           (word - run * s.run.by);
}

__device__ __forceinline__ Chunk chunk_of(const EpPushedShards &s, int chunk) {
    uint32_t first = (uint32_t)chunk * s.chunk;
    return Chunk{first, min((uint32_t)s.chunk, (uint32_t)s.words - first)};
}

/* Call each(r) for each other rank until one returns 0. By a warp. */
template <typename Each>
__device__ __forceinline__ int with_others(const EpCudaGroup &g, int lane, Each each) {
    int alive = 1;
    for (int r = lane; r < g.size && alive; r += 32)
        alive = r == g.rank || each(r);
    return alive;
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
