/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moves experts on one node: each rank sends rows to some ranks, and gets rows from some. push.cuh
 * tells how their chunks travel. No row goes to a masked rank, or comes from one.
 */
#include "handles/weights/cuda/push.cuh"

EP_VARIANT_BEGIN

__device__ __forceinline__ int chunks_with(const EpPushMoveArgs &a, const EpPushedRows &rows,
                                           int peer) {
    return (rows.begin[peer + 1] - rows.begin[peer]) * a.chunks;
}

/* Returns item `item` of those in one direction. Chunk n of all peers comes before chunk n + 1 of
 * any, at both ends. So what a warp waits for is never behind an item that waits for this rank.
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

/* Masks: returns whether a peer still takes part, as it did when the launch was described: that may
 * have been long ago, in a graph. By one lane. */
__device__ __forceinline__ int takes_part(const EpCudaGroup &g, uint32_t epoch, int peer) {
    if (ep_is_alive(peer)) return 1;
    ep_report(g, EP_FAULT_ABSENT, EpAwaited{peer, EP_AWAIT_ARRIVAL, 0, epoch, 0});
    return 0;
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
            [&] {
                return __all_sync(~0u, m.lane || (takes_part(g, epoch, p.peer) &&
                                                  has_room(g, epoch, p.peer, p.chunk)));
            },
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
            [&] {
                return takes_part(g, epoch, p.peer) && ep_await_record(g, epoch, p.peer, p.chunk);
            },
            [&] { give_credit(g, epoch, p.peer, p.chunk); });
    });
}

template <typename Word>
__global__ void __launch_bounds__(THREADS, 1) push_rows(const __grid_constant__ EpPushMoveArgs a) {
    extern __shared__ __align__(128) char memory[];
    run(
        a.group, a.receivers, memory,
        [&](const Mover &m, uint32_t epoch) { send_rows<Word>(a, m, epoch); },
        [&](const Mover &m, uint32_t epoch) { receive_rows<Word>(a, m, epoch); });
}

/* ---- launching ----------------------------------------------------------------------------- */

extern "C" int EP_VARIANT(ep_cuda_open_push_rows)(int shared_bytes) {
    int error = ep_open_kernel(push_rows<uint4>, shared_bytes);
    if (!error) error = ep_open_kernel(push_rows<uint32_t>, shared_bytes);
    return error ? error : ep_open_kernel(push_rows<uint8_t>, shared_bytes);
}

extern "C" int EP_VARIANT(ep_cuda_launch_push_rows)(const void *args, int blocks, void *stream) {
    const EpPushMoveArgs *a = (const EpPushMoveArgs *)args;
    const EpPushGrid grid = {blocks, a->warps, a->shared_bytes};
    if (a->word == 16) return launch(push_rows<uint4>, a, grid, stream);
    if (a->word == 4) return launch(push_rows<uint32_t>, a, grid, stream);
    return launch(push_rows<uint8_t>, a, grid, stream);
}

EP_VARIANT_END
