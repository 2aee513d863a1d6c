/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moves weights on one node. Reducing a gradient, each rank sends every other rank the shard that
 * this one keeps, chunk by chunk, and adds what comes: in ascending rank from +0, its own shard
 * where it lies. Gathering, each rank sends all others its shard, and puts what comes into its
 * place. Of numbers each rank sends all others its own. push.cuh tells how chunks travel.
 */
#include "handles/weights/cuda/push.cuh"
#include "runtime/cuda/rows.cuh"

#define NUMBER_THREADS 512 /* of push_max */
#define SUMS 4 /* vectors that a lane adds at a time; those of four ranks are under way */

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
#pragma unroll 1
    for (int r = lane; r < g.size && alive; r += 32)
        alive = r == g.rank || each(r);
    return alive;
}

/* The runs of a shard, as a side of a copy. */
template <typename Word> struct Runs {
    Word *whole;
    const EpPushedShards &s;
    int rank;
    Chunk c;

    template <typename Each> __device__ __forceinline__ void pieces(int lane, Each each) const {
        uint32_t last = ep_large_quotient(c.first + c.count - 1, s.run);
        for (uint32_t run = ep_large_quotient(c.first, s.run) + lane; run <= last; run += 32) {
            uint32_t begin = max(c.first, run * s.run.by);
            uint32_t end = min(c.first + c.count, (run + 1) * s.run.by);
            each(whole + place_of(s, rank, begin), begin - c.first, end - begin);
        }
    }
    __device__ __forceinline__ Word *at(uint32_t word) const {
        return whole + place_of(s, rank, c.first + word);
    }
};

/* Returns item `item` where each chunk has one for every other rank. */
__device__ __forceinline__ PeerChunk peer_chunk(const EpCudaGroup &g, int item) {
    int others = g.size - 1;
    return PeerChunk{(g.rank + 1 + item % others) % g.size, item / others};
}

/* ---- reducing: sending --------------------------------------------------------------------- */

__device__ __forceinline__ void send_gradient(const EpPushArgs &a, Mover m, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int by_bulk = goes_by_bulk<uint4>(a.shards.run.by);
    for_claimed(g, 0, a.shards.chunks * (g.size - 1), [&](int item) {
        const PeerChunk p = peer_chunk(g, item);
        const Chunk c = chunk_of(a.shards, p.chunk);
        const Runs<const uint4> from = {(const uint4 *)a.grad, a.shards, p.peer, c};
        return send_chunk<uint4>(
            &m, by_bulk, c.count, from,
            [&] { return __all_sync(~0u, m.lane || has_room(g, epoch, p.peer, p.chunk)); },
            [&](auto store) { store(record_of<uint4>(g, p.peer, g.rank, p.chunk, c.count)); },
            [&] {
                if (m.lane == 0) give_head(g, epoch, p.peer, p.chunk);
            });
    });
}

/* ---- reducing: receiving ------------------------------------------------------------------- */

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

/* Store a lane's sums of the vectors from number `at` of the chunk on. What they are added to is
 * loaded at once. */
template <typename T, typename Out>
__device__ __forceinline__ void store_sums(const EpPushArgs &a, const Chunk &c, uint32_t at,
                                           const EpVector<T> *sum) {
    typedef Result<Out, EpVector<T>::SIZE> Sums;
    Sums *out = (Sums *)a.out + c.first, result[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++)
        if (a.accumulate) result[i] = out[min(at + i * 32, c.count - 1)];
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
#pragma unroll
        for (int e = 0; e < EpVector<T>::SIZE; e++)
            round_sum(&result[i].at[e],
                      a.accumulate ? ep_float(result[i].at[e]) + sum[i].at[e] : sum[i].at[e]);
        if (at + i * 32 < c.count) out[at + i * 32] = result[i];
    }
}

/* A lane's vectors of two ranks. */
struct Pair {
    uint4 x[2][SUMS];
};

/* How far a warp is in a chunk: at the vectors from `begin` on, and at a pair of ranks. */
struct Step {
    uint32_t begin;
    int rank;

    __device__ __forceinline__ void next(int ranks) {
        rank += 2;
        if (rank >= ranks) rank = 0, begin += SUMS * 32;
    }
};

/* Load SUMS vectors of a rank: place(vector of the chunk) is where each lies. */
template <typename Place>
__device__ __forceinline__ void load_vectors(const Chunk &c, uint32_t begin, uint4 *x,
                                             Place place) {
#pragma unroll
    for (int i = 0; i < SUMS; i++)
        x[i] = __ldcg(place(min(begin + i * 32, c.count - 1)));
}

__device__ __forceinline__ void load_pair(const EpPushArgs &a, const Chunk &c, int chunk,
                                          const Step &step, int lane, Pair *pair) {
    const EpCudaGroup &g = a.group;
    const Runs<const uint4> own = {(const uint4 *)a.grad, a.shards, g.rank, c};
    if (step.begin >= c.count) return;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        int r = step.rank + j;
        if (r >= g.size) return;
        const uint4 *received = (const uint4 *)ep_ring(g, g.rank, r - (r == g.rank), chunk);
        if (r == g.rank)
            load_vectors(c, step.begin + lane, pair->x[j], [&](uint32_t at) { return own.at(at); });
        else
            load_vectors(c, step.begin + lane, pair->x[j],
                         [&](uint32_t at) { return received + at; });
    }
}

/* Add a chunk of all ranks. The next pair of vectors is loaded while one is added. */
template <typename T, typename Out>
__device__ __forceinline__ void add_chunk(const EpPushArgs &a, int chunk, int lane) {
    const int ranks = a.group.size;
    const Chunk c = chunk_of(a.shards, chunk);
    EpVector<T> sum[SUMS] = {};
    Pair first, second;
    Step loaded = {0, 0}, added = {0, 0};
    auto load = [&](Pair *pair) {
        load_pair(a, c, chunk, loaded, lane, pair);
        loaded.next(ranks);
    };
    auto add = [&](const Pair &pair) {
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < SUMS; i++)
                if (added.rank + j < ranks) ep_add(&sum[i], ep_unpack<T>(pair.x[j][i]));
        if (added.rank + 2 >= ranks) {
            store_sums<T, Out>(a, c, added.begin + lane, sum);
#pragma unroll
            for (int i = 0; i < SUMS; i++)
                sum[i] = EpVector<T>{};
        }
        added.next(ranks);
    };
    load(&first);
#pragma unroll 1
    while (added.begin < c.count) {
        load(&second);
        add(first);
        if (added.begin >= c.count) return;
        load(&first);
        add(second);
    }
}

template <typename T, typename Out>
__device__ __forceinline__ void add_gradients(const EpPushArgs &a, const Mover &m, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    for_claimed(g, 1, a.shards.chunks, [&](int chunk) {
        int alive =
            with_others(g, m.lane, [&](int r) { return ep_await_record(g, epoch, r, chunk); });
        if (!__all_sync(~0u, alive)) return 0;
        __syncwarp();
        add_chunk<T, Out>(a, chunk, m.lane);
        __syncwarp();
        with_others(g, m.lane, [&](int r) {
            give_credit(g, epoch, r, chunk);
            return 1;
        });
        return 1;
    });
}

template <typename T, typename Out>
__global__ void __launch_bounds__(THREADS, 1) push_sums(const __grid_constant__ EpPushArgs a) {
    extern __shared__ __align__(128) char memory[];
    run(
        a.group, a.receivers, memory,
        [&](const Mover &m, uint32_t epoch) { send_gradient(a, m, epoch); },
        [&](const Mover &m, uint32_t epoch) { add_gradients<T, Out>(a, m, epoch); });
}

/* ---- gathering ----------------------------------------------------------------------------- */

/* Send this rank's shard, `from`(chunk), to all others, and where it is not in its place there. */
template <typename Word, typename From>
__device__ __forceinline__ void send_shard(const EpPushGatherArgs &a, Mover m, uint32_t epoch,
                                           From from) {
    const EpCudaGroup &g = a.group;
    int by_bulk = goes_by_bulk<Word>(a.shards.run.by);
    for_claimed(g, 0, a.shards.chunks, [&](int chunk) {
        const Chunk c = chunk_of(a.shards, chunk);
        auto has_all_room = [&](int r) { return has_room(g, epoch, r, chunk); };
        return send_chunk<Word>(
            &m, by_bulk, c.count, from(c),
            [&] { return __all_sync(~0u, with_others(g, m.lane, has_all_room)); },
            [&](auto store) {
#pragma unroll 1
                for (int i = 1; i < g.size; i++)
                    store(record_of<Word>(g, (g.rank + i) % g.size, g.rank, chunk, c.count));
                if (a.from) store(Runs<Word>{(Word *)a.whole, a.shards, g.rank, c});
            },
            [&] {
                with_others(g, m.lane, [&](int r) {
                    give_head(g, epoch, r, chunk);
                    return 1;
                });
            });
    });
}

template <typename Word>
__device__ __forceinline__ void send_shards(const EpPushGatherArgs &a, const Mover &m,
                                            uint32_t epoch) {
    if (a.from)
        send_shard<Word>(a, m, epoch, [&](const Chunk &c) {
            return Flat<const Word>{(const Word *)a.from + c.first, c.count};
        });
    else
        send_shard<Word>(a, m, epoch, [&](const Chunk &c) {
            return Runs<const Word>{(const Word *)a.whole, a.shards, a.group.rank, c};
        });
}

template <typename Word>
__device__ __forceinline__ void receive_shards(const EpPushGatherArgs &a, Mover m, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int by_bulk = goes_by_bulk<Word>(a.shards.run.by);
    for_claimed(g, 1, a.shards.chunks * (g.size - 1), [&](int item) {
        const PeerChunk p = peer_chunk(g, item);
        const Chunk c = chunk_of(a.shards, p.chunk);
        return receive_chunk<Word>(
            &m, by_bulk, record_of<Word>(g, g.rank, p.peer, p.chunk, c.count),
            Runs<Word>{(Word *)a.whole, a.shards, p.peer, c},
            [&] { return ep_await_record(g, epoch, p.peer, p.chunk); },
            [&] { give_credit(g, epoch, p.peer, p.chunk); });
    });
}

template <typename Word>
__global__ void __launch_bounds__(THREADS, 1)
    push_shards(const __grid_constant__ EpPushGatherArgs a) {
    extern __shared__ __align__(128) char memory[];
    run(
        a.group, a.receivers, memory,
        [&](const Mover &m, uint32_t epoch) { send_shards<Word>(a, m, epoch); },
        [&](const Mover &m, uint32_t epoch) { receive_shards<Word>(a, m, epoch); });
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
    for (int i = lane; i < count; i += NUMBER_THREADS)
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

__global__ void __launch_bounds__(NUMBER_THREADS, 1)
    push_max(const __grid_constant__ EpPushMaxArgs a) {
    const EpCudaGroup &g = a.group;
    const int64_t most = EP_PUSH_BYTES / sizeof(uint32_t);
    run_operation(g, [&](uint32_t epoch) {
        if (!__syncthreads_and(threadIdx.x >= 32 || ep_await_arrivals(g, epoch))) return;
        for (int chunk = 0; chunk * most < a.count; chunk++) {
            int64_t first = chunk * most;
            int count = (int)min(most, a.count - first);
            if (!exchange_numbers(a, epoch, chunk, first, count)) return;
            for (int i = (int)threadIdx.x; i < count; i += NUMBER_THREADS) {
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

extern "C" int ep_cuda_open_push(int shared_bytes) {
    cudaFuncAttributes attributes;
    int error = cudaFuncGetAttributes(&attributes, push_max);
    if (!error) error = ep_open_kernel(push_shards<uint4>, shared_bytes);
    if (!error) error = ep_open_kernel(push_shards<uint32_t>, shared_bytes);
    if (!error) error = ep_open_kernel(push_shards<uint8_t>, shared_bytes);
    if (!error) error = ep_open_kernel(push_sums<__nv_bfloat16, float>, shared_bytes);
    if (!error) error = ep_open_kernel(push_sums<__half, float>, shared_bytes);
    if (!error) error = ep_open_kernel(push_sums<float, float>, shared_bytes);
    if (!error) error = ep_open_kernel(push_sums<__nv_bfloat16, __nv_bfloat16>, shared_bytes);
    if (!error) error = ep_open_kernel(push_sums<__half, __half>, shared_bytes);
    if (!error) error = ep_open_kernel(push_sums<float, __nv_bfloat16>, shared_bytes);
    return error ? error : ep_open_kernel(push_sums<float, __half>, shared_bytes);
}

extern "C" int ep_cuda_launch_push(const EpPushArgs *a, EpPushGrid grid, void *stream) {
    int is_wide = a->type == EP_TYPE_FP32;
    if (a->out_type == EP_TYPE_FP32) {
        if (a->type == EP_TYPE_BF16)
            return launch(push_sums<__nv_bfloat16, float>, a, grid, stream);
        if (a->type == EP_TYPE_FP16) return launch(push_sums<__half, float>, a, grid, stream);
        return launch(push_sums<float, float>, a, grid, stream);
    }
    if (a->out_type == EP_TYPE_BF16)
        return is_wide ? launch(push_sums<float, __nv_bfloat16>, a, grid, stream)
                       : launch(push_sums<__nv_bfloat16, __nv_bfloat16>, a, grid, stream);
    return is_wide ? launch(push_sums<float, __half>, a, grid, stream)
                   : launch(push_sums<__half, __half>, a, grid, stream);
}

extern "C" int ep_cuda_launch_push_max(const EpPushMaxArgs *a, void *stream) {
    return ep_launch(push_max, 1, NUMBER_THREADS, 0, stream, *a);
}

extern "C" int ep_cuda_launch_push_gather(const EpPushGatherArgs *a, EpPushGrid grid,
                                          void *stream) {
    if (a->shards.word == 16) return launch(push_shards<uint4>, a, grid, stream);
    if (a->shards.word == 4) return launch(push_shards<uint32_t>, a, grid, stream);
    return launch(push_shards<uint8_t>, a, grid, stream);
}
