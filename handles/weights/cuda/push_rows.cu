/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moves experts on one node: each rank sends rows to some ranks, and gets rows from some. push.cuh
 * tells how their chunks travel. No row goes to a masked rank, or comes from one.
 */
#include "handles/weights/cuda/push.cuh"

EP_VARIANT_BEGIN

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

/* Masks: returns whether a peer still takes part, as it did when the launch was described: that may
 * have been long ago, in a graph. By one lane. */
__device__ __forceinline__ int takes_part(const EpCudaGroup &g, uint32_t epoch, int peer) {
    if (ep_is_alive(peer)) return 1;
    ep_report(g, EP_FAULT_ABSENT, EpAwaited{peer, EP_AWAIT_ARRIVAL, 0, epoch, 0});
    return 0;
}

template <typename Word>
__device__ __forceinline__ void send_rows(const EpPushMoveArgs &a, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int claimed = claim(g, 0), items = a.sent.begin[g.size] * a.chunks;
    int64_t row;
    auto await = [&](int item, int lane) {
        MovedChunk m = find_moved(a, a.sent, item);
        return lane || (takes_part(g, epoch, m.peer) && has_room(g, epoch, m.peer, m.chunk));
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
        return lane || (takes_part(g, epoch, m.peer) && ep_await_record(g, epoch, m.peer, m.chunk));
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

extern "C" int EP_VARIANT(ep_cuda_open_push_rows)(int shared_bytes) {
    int error = ep_open_kernel(push_rows<uint4>, shared_bytes);
    if (!error) error = ep_open_kernel(push_rows<uint32_t>, shared_bytes);
    return error ? error : ep_open_kernel(push_rows<uint8_t>, shared_bytes);
}

extern "C" int EP_VARIANT(ep_cuda_launch_push_rows)(const void *args, int blocks, void *stream) {
    const EpPushMoveArgs *a = (const EpPushMoveArgs *)args;
    if (a->word == 16) return ep_launch(push_rows<uint4>, blocks, THREADS, 0, stream, *a);
    if (a->word == 4) return ep_launch(push_rows<uint32_t>, blocks, THREADS, 0, stream, *a);
    return ep_launch(push_rows<uint8_t>, blocks, THREADS, 0, stream, *a);
}

EP_VARIANT_END
