/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moves weights on one node. Reducing a gradient, each rank sends every other rank the shard that
 * this one keeps, chunk by chunk, through the rings of the group's windows, and adds what comes: in
 * ascending rank from +0, its own shard where it lies. Gathering, each rank sends all others its
 * shard, and puts what comes into its place. Of numbers each rank sends all others its own. Moving
 * experts, each rank sends rows to some ranks, and gets rows from some.
 *
 * Each warp works by itself, with a stage in shared memory: it loads a chunk into the stage, waits,
 * stores it, and signals. Each of these takes a microsecond or two, whatever the chunk's size, so
 * the speed of a multiprocessor is that of its warps together. Runs of a shard that are too short
 * for bulk copies go through registers, and so does everything in code of 8.0 (EP_HAS_BULK).
 *
 * Sending and receiving warps alternate. A warp claims a chunk, or a chunk and a rank, in ascending
 * order, so what it waits for is claimed by warps that run (runtime/cuda/device.h). Block 0 has
 * warps of both kinds, so no other block needs to be resident.
 *
 * Who waits on whom: a sending warp for all ranks' arrivals, and for the credit of the records that
 * a chunk goes to; a receiving warp for the heads of its chunk.
 *
 * Memory order. A warp that sends waits until its bulk copies are written, and its lanes meet. So
 * each lane knows the whole chunk, and its release orders that before the head. A receiver's lane
 * acquires the head, and a proxy fence orders that lane's own bulk copy behind it. Where all lanes
 * load, they meet first. They do not load through L1, which may hold the record's last chunk. A
 * record's credit follows the last load of it: the stage is full, or the lanes have met. A stage is
 * loaded once each lane has waited for its own copies out of it, and the lanes have met.
 */
#include "handles/weights/cuda/push.h"
#include "runtime/cuda/device.cuh"
#include "runtime/cuda/rows.cuh"

#define NUMBER_THREADS 512 /* of push_max */
#define THREADS (EP_PUSH_WARPS * 32)
#define SUMS 4 /* vectors that a lane adds at a time; those of four ranks are under way */

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

/* A warp that moves chunks. */
struct Mover {
    int lane;
    uint32_t stage, barrier; /* addresses in shared memory */
    uint32_t loads;          /* chunks that the stage has had */
};

/* Claim an item of a kind; the result is needed one item later. */
__device__ __forceinline__ int claim(const EpCudaGroup &g, int kind) {
    return ep_count_up(&g.state->claimed[kind], threadIdx.x % 32 == 0);
}

/* Call each(item) for all items that this warp claims, until it returns 0: a wait has failed. */
template <typename Each>
__device__ __forceinline__ void for_claimed(const EpCudaGroup &g, int kind, int items, Each each) {
    for (int claimed = claim(g, kind);;) {
        int item = __shfl_sync(~0u, claimed, 0);
        if (item >= items) return;
        claimed = claim(g, kind);
        if (!each(item)) return;
    }
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

/* The stages of a block; without bulk copies it has none. */
__device__ __forceinline__ char *stages(void) {
    extern __shared__ __align__(128) char memory[];
    return memory;
}

/* Likewise, in each warp: send(mover, epoch), once all ranks have arrived, or
 * receive(mover, epoch). */
template <typename Send, typename Receive>
__device__ __forceinline__ void run(const EpCudaGroup &g, int receivers, Send send,
                                    Receive receive) {
    __shared__ uint64_t loaded[EP_PUSH_WARPS];
    int warp = (int)threadIdx.x / 32, in_block = (int)blockDim.x / 32;
    int index = (int)blockIdx.x * in_block + warp, warps = (int)gridDim.x * in_block;
    Mover m = {(int)threadIdx.x % 32, 0, 0, 0};
    if (EP_HAS_BULK) {
        m.stage = ep_smem(stages()) + warp * EP_PUSH_BYTES, m.barrier = ep_smem(&loaded[warp]);
        if (m.lane == 0) ep_mbarrier_init(&loaded[warp], 1);
        ep_fence_mbarrier_init();
        ep_fence_proxy_shared();
    }
    run_operation(g, [&](uint32_t epoch) {
        if (ep_receivers_before(index + 1, warps, receivers) >
            ep_receivers_before(index, warps, receivers))
            receive(m, epoch);
        else if (ep_await_arrivals(g, epoch))
            send(m, epoch);
        if (EP_HAS_BULK) ep_bulk_wait<0>();
    });
}

/* ---- chunks -------------------------------------------------------------------------------- */

/* One side of a copy is flat, or consists of the runs of a shard. By lanes: pieces(lane, each)
 * calls each(address, first word, words) for this lane's pieces. By words: at(word). */

template <typename Word> struct Flat {
    Word *begin;
    uint32_t count;

    template <typename Each> __device__ __forceinline__ void pieces(int lane, Each each) const {
        if (lane == 0) each(begin, 0, count);
    }
    __device__ __forceinline__ Word *at(uint32_t word) const {
        return begin + word;
    }
};

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

/* Whether a kernel copies runs of so many words by bulk copies. */
template <typename Word> __device__ __forceinline__ int goes_by_bulk(uint32_t run) {
    return EP_HAS_BULK && sizeof(Word) == 16 && run >= EP_PUSH_RUN_BYTES / 16;
}

/* Begin to load a chunk of so many words into the stage. */
template <typename From>
__device__ __forceinline__ void load_stage(const Mover &m, uint32_t count, const From &from) {
    from.pieces(m.lane, [&](const uint4 *address, uint32_t word, uint32_t words) {
        ep_bulk_load(m.stage + word * 16, address, words * 16, m.barrier);
    });
    if (m.lane == 0) ep_mbarrier_expect(ep_shared<uint64_t>(m.barrier), count * 16);
}

__device__ __forceinline__ void await_stage(Mover *m) {
    while (!ep_mbarrier_try_wait(ep_shared<uint64_t>(m->barrier), m->loads & 1)) {
    }
    m->loads++;
}

template <typename To> __device__ __forceinline__ void store_stage(const Mover &m, const To &to) {
    to.pieces(m.lane, [&](uint4 *address, uint32_t word, uint32_t words) {
        ep_bulk_store(address, m.stage + word * 16, words * 16);
    });
}

/* Copy the words of a chunk through registers: load(word) to all places of to_each. */
template <typename Word, typename Load, typename Targets>
__device__ __forceinline__ void copy_words(const Mover &m, uint32_t count, Load load,
                                           Targets to_each) {
    constexpr int COPIES = sizeof(Word) == 16 ? 8 : 16; /* words that a lane has under way */
    for (uint32_t begin = m.lane; begin < count; begin += COPIES * 32) {
        Word x[COPIES];
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            if (begin + i * 32 < count) x[i] = load(begin + i * 32);
        to_each([&](const auto &to) {
#pragma unroll
            for (int i = 0; i < COPIES; i++)
                if (begin + i * 32 < count) *to.at(begin + i * 32) = x[i];
        });
    }
}

/* Send a chunk: to_each(f) calls f for all places that it is stored to. `await` returns whether
 * there is room, in all lanes; `signal` tells the receivers. The chunk is loaded before there is
 * room. Returns 0 if there will be none. */
template <typename Word, typename From, typename Await, typename Targets, typename Signal>
__device__ __forceinline__ int send_chunk(Mover *m, int by_bulk, uint32_t count, const From &from,
                                          Await await, Targets to_each, Signal signal) {
    if constexpr (sizeof(Word) == 16) {
        if (EP_HAS_BULK && by_bulk) {
            load_stage(*m, count, from);
            int alive = await();
            await_stage(m);
            if (!alive) return 0;
            to_each([&](const auto &to) { store_stage(*m, to); });
            ep_bulk_commit();
            ep_bulk_wait<0>();
            __syncwarp();
            signal();
            return 1;
        }
    }
    if (!await()) return 0;
    copy_words<Word>(
        *m, count, [&](uint32_t at) { return *from.at(at); }, to_each);
    __syncwarp();
    signal();
    return 1;
}

/* Receive a chunk: put it into its place, once `await` has returned 1. `signal` gives its record
 * back. */
template <typename Word, typename To, typename Await, typename Signal>
__device__ __forceinline__ int receive_chunk(Mover *m, int by_bulk, const Flat<Word> &from,
                                             const To &to, Await await, Signal signal) {
    int alive = __all_sync(~0u, m->lane || await());
    if (!alive) return 0;
    if constexpr (sizeof(Word) == 16) {
        if (EP_HAS_BULK && by_bulk) {
            ep_bulk_wait_read<0>();
            __syncwarp();
            load_stage(*m, from.count, from);
            await_stage(m);
            if (m->lane == 0) signal();
            store_stage(*m, to);
            ep_bulk_commit();
            return 1;
        }
    }
    __syncwarp();
    copy_words<Word>(
        *m, from.count, [&](uint32_t at) { return __ldcg(from.at(at)); },
        [&](auto store) { store(to); });
    __syncwarp();
    if (m->lane == 0) signal();
    return 1;
}

/* The record of a chunk in a ring. */
template <typename Word>
__device__ __forceinline__ Flat<Word> record_of(const EpCudaGroup &g, int receiver, int sender,
                                                int chunk, uint32_t count) {
    return Flat<Word>{(Word *)ep_ring(g, receiver, sender, chunk), count};
}

/** A chunk that goes to one rank, or comes from one. */
struct PeerChunk {
    int peer, chunk;
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
    run(
        a.group, a.receivers, [&](const Mover &m, uint32_t epoch) { send_gradient(a, m, epoch); },
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
    run(
        a.group, a.receivers,
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

/* ---- moving -------------------------------------------------------------------------------- */

__device__ __forceinline__ int chunks_with(const EpPushMoveArgs &a, const EpPushedRows &rows,
                                           int peer) {
    return (rows.begin[peer + 1] - rows.begin[peer]) * a.chunks;
}

/* Returns item `item` of those in one direction. Chunk n of all peers comes before chunk n + 1 of
 * any, at both ends. So what a block waits for is never behind an item that waits for this rank.
 * Peers with fewer rows come last, and drop out one after the other. */
__device__ __forceinline__ PeerChunk find_moved(const EpPushMoveArgs &a, const EpPushedRows &rows,
                                                int item) {
    int first = 0;
#pragma unroll 1
    for (int peers = rows.peers; peers > 0; peers--) {
        int until = chunks_with(a, rows, rows.order[peers - 1]), here = (until - first) * peers;
        if (item < here) return PeerChunk{rows.order[item % peers], first + item / peers};
        item -= here, first = until;
    }
    return PeerChunk{0, 0};
}

/* Returns the chunk's words within the row, and in *row which row it is. */
__device__ __forceinline__ Chunk place_moved(const EpPushMoveArgs &a, const EpPushedRows &rows,
                                             const PeerChunk &m, int64_t *row) {
    int number = m.chunk / a.chunks;
    uint32_t first = (uint32_t)(m.chunk - number * a.chunks) * a.chunk;
    *row = rows.row[rows.begin[m.peer] + number];
    return Chunk{first, min((uint32_t)a.chunk, (uint32_t)a.words - first)};
}

template <typename Word>
__device__ __forceinline__ void send_rows(const EpPushMoveArgs &a, Mover m, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    for_claimed(g, 0, a.sent.begin[g.size] * a.chunks, [&](int item) {
        const PeerChunk p = find_moved(a, a.sent, item);
        int64_t row;
        const Chunk c = place_moved(a, a.sent, p, &row);
        const Flat<const Word> from = {(const Word *)a.from + row * a.from_step + c.first, c.count};
        return send_chunk<Word>(
            &m, goes_by_bulk<Word>(c.count), c.count, from,
            [&] { return __all_sync(~0u, m.lane || has_room(g, epoch, p.peer, p.chunk)); },
            [&](auto store) { store(record_of<Word>(g, p.peer, g.rank, p.chunk, c.count)); },
            [&] {
                if (m.lane == 0) give_head(g, epoch, p.peer, p.chunk);
            });
    });
}

template <typename Word>
__device__ __forceinline__ void receive_rows(const EpPushMoveArgs &a, Mover m, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    for_claimed(g, 1, a.got.begin[g.size] * a.chunks, [&](int item) {
        const PeerChunk p = find_moved(a, a.got, item);
        int64_t row;
        const Chunk c = place_moved(a, a.got, p, &row);
        return receive_chunk<Word>(
            &m, goes_by_bulk<Word>(c.count), record_of<Word>(g, g.rank, p.peer, p.chunk, c.count),
            Flat<Word>{(Word *)a.to + row * a.to_step + c.first, c.count},
            [&] { return ep_await_record(g, epoch, p.peer, p.chunk); },
            [&] { give_credit(g, epoch, p.peer, p.chunk); });
    });
}

template <typename Word>
__global__ void __launch_bounds__(THREADS, 1) push_rows(const __grid_constant__ EpPushMoveArgs a) {
    run(
        a.group, a.receivers, [&](const Mover &m, uint32_t epoch) { send_rows<Word>(a, m, epoch); },
        [&](const Mover &m, uint32_t epoch) { receive_rows<Word>(a, m, epoch); });
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

extern "C" int ep_cuda_open_push_rows(int shared_bytes) {
    int error = ep_open_kernel(push_rows<uint4>, shared_bytes);
    if (!error) error = ep_open_kernel(push_rows<uint32_t>, shared_bytes);
    return error ? error : ep_open_kernel(push_rows<uint8_t>, shared_bytes);
}

template <typename Kernel, typename Args>
static int launch(Kernel *kernel, const Args *a, EpPushGrid grid, void *stream) {
    return ep_launch(kernel, grid.blocks, grid.warps * 32, (size_t)grid.shared_bytes, stream, *a);
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

extern "C" int ep_cuda_launch_push_rows(const EpPushMoveArgs *a, EpPushGrid grid, void *stream) {
    if (a->word == 16) return launch(push_rows<uint4>, a, grid, stream);
    if (a->word == 4) return launch(push_rows<uint32_t>, a, grid, stream);
    return launch(push_rows<uint8_t>, a, grid, stream);
}
