/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scatter over NVLink: token rows to slots, for ep_dispatch and ep_combine_backward.
 *
 * One launch. A sending block brings tokens into shared memory one by one, and pushes each to every
 * rank that needs it, once: into the ring there; or, where the receiver's rows lie in a window of
 * the group, into the first of the row's slots. A filling block takes what has arrived, and writes
 * it to all (other) slots of each row. How a block works is told in runtime/pipe.cuh, how blocks
 * divide the work and why nobody waits in a circle in runtime/cuda.h.
 *
 * Who waits on whom: a sender for all ranks' arrival and for credit, that is, for the receiver's
 * filler to have emptied a record of the ring; a filler for the head.
 *
 * Rows of the rank's own tokens that are only copied go from the sender straight to their slots;
 * where they are multiplied, the filler reads them where they are.
 */
#include "dispatch/scatter_fill.cuh"
#include "dispatch/scatter_multiply.cuh"
#include "dispatch/scatter_quantise.cuh"
#include "dispatch/scatter_send.cuh"

#define THREADS (FIRST_WORKER * 32 + WORKERS)

typedef struct Shared {
    Pipe pipe;
    union {
        Landings landings;
        struct {
            ChunkRows rows;
            Dots dots;
        };
    };
} Shared;

/* ---- padding ------------------------------------------------------------------------------- */

/* The threads that write zeros. */
typedef struct Zeroers {
    int index, count;
} Zeroers;

template <typename Word> __device__ void zero_words(char *out, int64_t bytes, Zeroers z) {
    int64_t words = bytes / (int64_t)sizeof(Word);
    for (int64_t at = z.index; at < words; at += z.count)
        ((Word *)out)[at] = 0;
}

__device__ void zero_bytes(char *out, int64_t bytes, Zeroers z) {
    if (((uintptr_t)out | (uintptr_t)bytes) % sizeof(uint32_t) == 0)
        zero_words<uint32_t>(out, bytes, z);
    else
        zero_words<uint8_t>(out, bytes, z);
}

/* Slots of one slab: by column, a piece of each of its columns. */
__device__ void zero_scales(const EpScatterArgs &a, int64_t begin, int64_t end, Zeroers z) {
    const EpScaleMap &map = a.scale_map;
    char *out = a.out_scales + ep_scale_at(&map, begin, 0);
    int64_t step = ep_scale_step(&map), rows = end - begin;
    if (!map.by_column) zero_bytes(out, rows * a.scale_bytes, z);
    for (int64_t i = 0; map.by_column && i < map.count; i++)
        zero_bytes(out + i * step, rows * map.element_bytes, z);
}

__device__ void zero_slots(const EpScatterArgs &a, int64_t begin, int64_t end, Zeroers z) {
    if (begin >= end) return;
    for (int64_t at = begin * a.row_bytes + z.index * 16; at < end * a.row_bytes;
         at += z.count * 16)
        *(uint4 *)(a.out_rows + at) = make_uint4(0, 0, 0, 0);
    int64_t values = a.shape.layout == EP_LAYOUT_FLAT && a.carries_weights ? a.top_k : 1;
    if (a.out_weights)
        zero_bytes((char *)(a.out_weights + begin * values), (end - begin) * values * 4, z);
    for (int64_t i = begin * a.top_k + z.index; a.out_idx && i < end * a.top_k; i += z.count) {
        if (a.idx_is_int64)
            ((int64_t *)a.out_idx)[i] = -1;
        else
            ((int32_t *)a.out_idx)[i] = -1;
    }
    if (a.scale_bytes) zero_scales(a, begin, end, z);
}

/* A filling block's share of all padding. */
__device__ void zero_padding(const EpScatterArgs &a, const Role &role, Zeroers z) {
    const EpPlanShape &s = a.shape;
    int batched = s.layout == EP_LAYOUT_BATCHED;
    for (int e = role.index; e < s.num_local && s.layout != EP_LAYOUT_FLAT; e += role.count) {
        int64_t offset = a.plan.expert_offsets[e];
        int64_t end = offset + a.plan.expert_padded[e];
        if (batched && s.zero_tail) end = a.plan.expert_offsets[e + 1];
        zero_slots(a, offset + a.plan.expert_counts[e], end, z);
    }
    int64_t tail = a.plan.header->recv_rows, share = a.out_capacity - tail;
    if (batched || !s.zero_tail || share <= 0) return;
    share = (share + role.count - 1) / role.count;
    int64_t begin = tail + role.index * share;
    zero_slots(a, begin, min(begin + share, a.out_capacity), z);
}

/* ---- kernel -------------------------------------------------------------------------------- */

__device__ void send(const EpScatterArgs &a, Shared *s, uint32_t epoch, int blocks) {
    Pipe *p = &s->pipe;
    PipeWork work = a.quant ? CONVERTED : COPIED;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == PLANNER)
        plan_tokens(a, p, &s->landings, epoch, blocks);
    else if (warp == LOADER)
        pipe_load(p, COPIED); /* of either, all stages stay until they are stored */
    else if (pipe_is_storer(warp) && lane == 0)
        pipe_store(p, warp - FIRST_STORER, work, 1);
    else if (warp == ANNOUNCER)
        pipe_announce(p, a.group, epoch, 1);
    else if (warp >= FIRST_WORKER && work == CONVERTED)
        quantise(a, p, threadIdx.x - FIRST_WORKER * 32);
    else if (warp >= FIRST_SIDE && warp < FIRST_SIDE + ALL_SIDES && has_side(a))
        send_sides(a, p, warp - FIRST_SIDE, work);
}

/* What lies beside rows that are multiplied is the workers' business. */
__device__ __forceinline__ int fills_side(const EpScatterArgs &a) {
    return !a.type && has_side(a);
}

__device__ void fill(const EpScatterArgs &a, Shared *s, uint32_t epoch, const Role &role) {
    Pipe *p = &s->pipe;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int multiplies = a.type != 0, moves_side = fills_side(a);
    PipeWork work = multiplies ? COMPUTED : COPIED;
    int first_free = (moves_side ? FIRST_SIDE + ALL_SIDES : FIRST_WORKER) * 32;
    Zeroers zeroers = {(int)threadIdx.x - first_free, THREADS - first_free};
    if (warp == PLANNER)
        plan_records(a, p, &s->rows, epoch, role.count);
    else if (warp == LOADER)
        pipe_load(p, work);
    else if (pipe_is_storer(warp) && lane == 0)
        pipe_store(p, warp - FIRST_STORER, work, 0);
    else if (warp == ANNOUNCER)
        pipe_announce(p, a.group, epoch, 0);
    else if (warp >= FIRST_SIDE && warp < FIRST_SIDE + ALL_SIDES && moves_side)
        fill_sides(a, p, warp - FIRST_SIDE);
    else if (warp >= FIRST_WORKER && multiplies)
        multiply(a, p, &s->dots, threadIdx.x - FIRST_WORKER * 32);
    if (zeroers.index >= 0) zero_padding(a, role, zeroers);
}

__global__ void __launch_bounds__(THREADS, 1)
    scatter_kernel(const __grid_constant__ EpScatterArgs a) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Shared s;
    Shared *kept = ep_keep_shared(&s);
    uint32_t epoch = ep_epoch(a.group);
    Role role = pipe_role(a.receivers);
    pipe_open(&kept->pipe, role.receives ? a.fill : a.send, memory,
              role.receives ? fills_side(a) : has_side(a), a.top_k);
    if (!ep_enter(a.group, a.plan, epoch)) {
        ep_leave(a.group, epoch);
        return;
    }
    ep_arrive(a.group, epoch, a.where);
    if (role.receives)
        fill(a, kept, epoch, role);
    else
        send(a, kept, epoch, role.count);
    ep_leave(a.group, epoch, 0);
}

extern "C" int ep_cuda_open_scatter(int shared_bytes) {
    return ep_open_kernel(scatter_kernel, shared_bytes);
}

extern "C" int ep_cuda_launch_scatter(const EpScatterArgs *a, void *stream) {
    size_t send = pipe_bytes(a->send), fill = pipe_bytes(a->fill);
    size_t shared = send > fill ? send : fill;
    return ep_launch(scatter_kernel, a->group.blocks, THREADS, shared, stream, *a);
}
