/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_WEIGHTS_CUDA_PUSH_CUH
#define EP_HANDLES_WEIGHTS_CUDA_PUSH_CUH

/**
 * What kernels share that move weights on one node (push.cu, push_rows.cu): chunks go from rank to
 * rank through the rings of the group's windows.
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

#define THREADS (EP_PUSH_WARPS * 32)

EP_VARIANT_BEGIN

/** The words of a chunk, within the shard. */
struct Chunk {
    uint32_t first, count;
};

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

/* Likewise, in each warp: send(mover, epoch), once all ranks have arrived, or
 * receive(mover, epoch). `memory`: the block's stages; it has none without bulk copies. */
template <typename Send, typename Receive>
__device__ __forceinline__ void run(const EpCudaGroup &g, int receivers, char *memory, Send send,
                                    Receive receive) {
    __shared__ uint64_t loaded[EP_PUSH_WARPS];
    int warp = (int)threadIdx.x / 32, in_block = (int)blockDim.x / 32;
    int index = (int)blockIdx.x * in_block + warp, warps = (int)gridDim.x * in_block;
    Mover m = {(int)threadIdx.x % 32, 0, 0, 0};
    if (EP_HAS_BULK) {
        m.stage = ep_smem(memory) + warp * EP_PUSH_BYTES, m.barrier = ep_smem(&loaded[warp]);
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

/* One side of a copy is flat; the other may be the runs of a shard (push.cu). By lanes:
 * pieces(lane, each) calls each(address, first word, words) for this lane's pieces. By words:
 * at(word). */

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

template <typename Kernel, typename Args>
static int launch(Kernel *kernel, const Args *a, EpPushGrid grid, void *stream) {
    return ep_launch(kernel, grid.blocks, grid.warps * 32, (size_t)grid.shared_bytes, stream, *a);
}

EP_VARIANT_END

#endif
