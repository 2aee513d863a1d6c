/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scatter over NVLink: token rows to slots, for ep_dispatch and ep_combine_backward.
 *
 * One launch, one block on each multiprocessor, two roles. A sending block takes its lanes' tokens
 * one by one: bulk copies bring the row into shared memory, its weights and scales beside it, and
 * then push the whole record into the ring of every rank that needs it, each once. A filling block
 * takes records out of the rings of its lanes, from all sources in turn, and writes each to all the
 * slots that its route names; it has zeroed the padding before.
 *
 * Who waits on whom: a sender for credit, that is, for the receiver's filler to have emptied a
 * record of the ring; a filler for the head. Fillers and senders take lanes in ascending order, so
 * the lowest unfinished lane of all ranks always has both of its ends at work: no deadlock, however
 * many blocks there are.
 *
 * Order: a record's stores have completed (bulk wait_group) before one thread stores the head with
 * release semantics. A filler acquires the head, crosses to the async proxy with a fence, and loads
 * the record; the load has completed (mbarrier) before the credit is stored.
 *
 * Rows of the rank's own tokens go through a ring like all others.
 */
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "handles/plan_cuda.h"
#include "runtime/device.cuh"
#include "runtime/rows.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define MAX_STAGES 16
#define ROWS_PER_PUBLISH 4
/* Stores that may still be reading shared memory, or still be on their way, while a sender goes on:
 * that many stages are not available to loads. */
#define STORES_IN_FLIGHT 2

typedef struct Shared {
    uint64_t full[MAX_STAGES];
    int32_t entry[MAX_STAGES][EP_MAX_TOP_K]; /* of the plan's routes */
    int32_t slot[MAX_STAGES][EP_MAX_TOP_K];  /* to fill, -1 where none */
    int32_t stage_source[MAX_STAGES], stage_row[MAX_STAGES];
    uint32_t count[EP_CUDA_MAX_RANKS];   /* records put into, or taken out of, the lane: ever */
    uint32_t head[EP_CUDA_MAX_RANKS];    /* sender: published; filler: rows of this operation left */
    int32_t issued[EP_CUDA_MAX_RANKS];   /* filler: rows whose load was issued */
    int32_t alive;
    float partial[WARPS];
} Shared;

__device__ __forceinline__ char *stage_at(const EpScatterArgs &a, char *stages, int stage) {
    return stages + stage * a.record.bytes;
}

/* Spin on a local barrier; the copy it waits for cannot fail to come. */
__device__ __forceinline__ void wait_full(Shared *s, int stage, uint32_t parity) {
    while (!ep_mbarrier_try_wait(&s->full[stage], parity)) {
    }
}

/* ---- sending ------------------------------------------------------------------------------- */

/* The ranks that a token goes to, one bit each, in every lane of the warp. */
typedef struct RankSet {
    uint32_t word[(EP_CUDA_MAX_RANKS + 31) / 32];
} RankSet;

__device__ __forceinline__ RankSet ranks_of(const EpScatterArgs &a, int token, int lane) {
    int owner = lane < a.top_k ? a.plan.owner[(int64_t)token * a.top_k + lane] : -1;
    RankSet set;
#pragma unroll
    for (int w = 0; w < (EP_CUDA_MAX_RANKS + 31) / 32; w++)
        set.word[w] = __reduce_or_sync(
            ~0u, owner >= w * 32 && owner < w * 32 + 32 ? 1u << (owner - w * 32) : 0u);
    return set;
}

/* Start bringing a token into a stage; every lane arrives once at the stage's barrier, with its
 * share of weights and scales copied, and one also for the row. */
__device__ __forceinline__ void load_token(const EpScatterArgs &a, Shared *s, char *stages,
                                           int stage, int token, int lane) {
    char *to = stage_at(a, stages, stage);
    if (a.carries_weights && lane < a.top_k)
        ((float *)(to + a.record.weights))[lane] = a.topk_weights[(int64_t)token * a.top_k + lane];
    const uint32_t *scales = (const uint32_t *)(a.scales + token * a.scale_bytes);
    for (int i = lane; i < a.scale_bytes / 4; i += 32)
        ((uint32_t *)(to + a.record.scales))[i] = scales[i];
    ep_fence_proxy_async();
    __syncwarp();
    if (lane)
        return;
    ep_mbarrier_expect(&s->full[stage], (uint32_t)a.row_bytes);
    ep_bulk_load(to, a.rows + token * a.row_bytes, (uint32_t)a.row_bytes, &s->full[stage]);
}

/* Let receivers see all records so far, once their copies have completed. */
__device__ __forceinline__ void publish_heads(const EpCudaGroup &g, Shared *s, int ring) {
    ep_bulk_wait<0>();
    for (int r = 0; r < g.size; r++)
        if (s->head[r] != s->count[r]) {
            s->head[r] = s->count[r];
            ep_store_release_sys(ep_head(g, r, g.rank, ring), s->head[r]);
        }
}

/* Room for one more record. A receiver can only empty what it was told of. */
__device__ __forceinline__ int await_room(const EpCudaGroup &g, Shared *s, int peer, int ring) {
    const uint32_t *credit = ep_credit(g, g.rank, peer, ring);
    uint32_t needed = s->count[peer] + 1 - g.layout.depth;
    if (ep_reached(ep_load_acquire_sys(credit), needed))
        return 1;
    ep_bulk_commit();
    publish_heads(g, s, ring);
    return ep_wait_counter(g, credit, needed, peer, EP_PHASE_CREDIT, ring);
}

/* Push a stage to every rank of the set. By lane 0. */
__device__ __forceinline__ int push_record(const EpScatterArgs &a, Shared *s, const char *record,
                                           int ring, RankSet set) {
    const EpCudaGroup &g = a.group;
    for (int w = 0; w < (EP_CUDA_MAX_RANKS + 31) / 32; w++)
        for (uint32_t left = set.word[w]; left; left &= left - 1) {
            int peer = w * 32 + __ffs(left) - 1;
            if (!await_room(g, s, peer, ring))
                return 0;
            ep_bulk_store(ep_ring(g, peer, g.rank, ring, s->count[peer]), record,
                          (uint32_t)a.record.bytes);
            s->count[peer]++;
        }
    ep_bulk_commit();
    return 1;
}

__device__ int is_live(RankSet set) {
    uint32_t any = 0;
    for (int w = 0; w < (EP_CUDA_MAX_RANKS + 31) / 32; w++)
        any |= set.word[w];
    return any != 0;
}

/* Tokens of the lane from `at` on: the first that goes anywhere, or `end`. */
__device__ int next_live(const EpScatterArgs &a, int at, int end, int lane, RankSet *set) {
    for (; at < end; at++) {
        *set = ranks_of(a, at, lane);
        if (is_live(*set))
            break;
    }
    return at;
}

/* One lane, by one warp. Loads run ahead of stores by all stages but those still being stored. */
__device__ int send_lane(const EpScatterArgs &a, Shared *s, char *stages, int ring,
                         uint32_t *loads_before) {
    const EpCudaGroup &g = a.group;
    int lane = threadIdx.x, begin, end, ahead = a.stages - STORES_IN_FLIGHT;
    uint32_t loaded = 0, stored = 0;
    ep_lane_range((int)a.plan.header->num_tokens, ring, &begin, &end);
    for (int r = lane; r < g.size; r += 32)
        s->head[r] = s->count[r] = g.state->sent[r][ring];
    __syncwarp();
    RankSet set;
    int alive = 1, to_load = next_live(a, begin, end, lane, &set);
    for (int at = to_load; at < end && alive; stored++) {
        while (to_load < end && loaded < stored + ahead) {
            uint32_t turn = *loads_before + loaded++;
            /* Lane 0 has stored: the stage's last reader must be done. */
            if (lane == 0)
                ep_bulk_wait_read<STORES_IN_FLIGHT - 1>();
            __syncwarp();
            load_token(a, s, stages, (int)(turn % a.stages), to_load, lane);
            to_load = next_live(a, to_load + 1, end, lane, &set);
        }
        uint32_t turn = *loads_before + stored;
        wait_full(s, (int)(turn % a.stages), turn / a.stages % 2);
        set = ranks_of(a, at, lane);
        if (lane == 0) {
            s->alive = push_record(a, s, stage_at(a, stages, turn % a.stages), ring, set);
            if (stored % ROWS_PER_PUBLISH == ROWS_PER_PUBLISH - 1)
                publish_heads(g, s, ring);
        }
        __syncwarp();
        alive = s->alive;
        at = next_live(a, at + 1, end, lane, &set);
    }
    if (lane == 0)
        publish_heads(g, s, ring);
    __syncwarp();
    *loads_before += loaded;
    for (int r = lane; r < g.size; r += 32)
        g.state->sent[r][ring] = s->count[r];
    __syncwarp();
    return alive;
}

__device__ void send(const EpScatterArgs &a, Shared *s, char *stages) {
    uint32_t loads = 0;
    if (threadIdx.x >= 32)
        return;
    if (threadIdx.x == 0)
        s->alive = 1;
    __syncwarp();
    for (int ring = blockIdx.x; ring < EP_LANES; ring += a.send_blocks)
        if (!send_lane(a, s, stages, ring, &loads))
            return;
}

/* ---- filling slots ------------------------------------------------------------------------- */

/* The next record that has arrived, from any source in turn; -1 where there is none yet. Called by
 * a whole warp. */
__device__ __forceinline__ int find_record(const EpCudaGroup &g, const Shared *s, int ring,
                                           int turn, int lane) {
    for (int at = 0; at < g.size; at += 32) {
        int source = (turn + at + lane) % g.size, ready = 0;
        if (at + lane < g.size && s->issued[source] < (int)s->head[source]) {
            uint32_t head = ep_load_acquire_sys(ep_head(g, g.rank, source, ring));
            ready = (int32_t)(head - (s->count[source] + s->issued[source])) > 0;
        }
        unsigned who = __ballot_sync(~0u, ready);
        if (who)
            return (turn + at + __ffs(who) - 1) % g.size;
    }
    return -1;
}

/* Start taking a record into a stage. */
__device__ __forceinline__ void load_record(const EpScatterArgs &a, Shared *s, char *stages,
                                            int ring, int stage, int source, int lane) {
    const EpCudaGroup &g = a.group;
    int row = s->issued[source];
    if (lane < a.top_k) {
        s->entry[stage][lane] = ep_entry(a.plan, a.group, a.top_k, source, ring, row, lane);
        s->slot[stage][lane] = ep_slot(a.plan, a.group, a.shape, a.top_k, source, ring, row, lane);
    }
    __syncwarp();
    if (lane)
        return;
    s->issued[source] = row + 1;
    s->stage_source[stage] = source;
    s->stage_row[stage] = row;
    ep_fence_proxy_async();
    ep_mbarrier_expect(&s->full[stage], (uint32_t)a.record.bytes);
    ep_bulk_load(stage_at(a, stages, stage),
                 ep_ring(g, g.rank, source, ring, s->count[source] + row), (uint32_t)a.record.bytes,
                 &s->full[stage]);
}

/* A flat row tells its local experts, and their weights. */
__device__ __forceinline__ void describe_flat_row(const EpScatterArgs &a, const Shared *s,
                                                  const float *weights, int stage, int lane) {
    int64_t slot = s->slot[stage][0];
    if (slot < 0 || lane >= a.top_k)
        return;
    int expert = s->entry[stage][lane];
    if (a.carries_weights)
        a.out_weights[slot * a.top_k + lane] = expert >= 0 ? weights[lane] : 0;
    if (a.out_idx && a.idx_is_int64)
        ((int64_t *)a.out_idx)[slot * a.top_k + lane] = expert;
    else if (a.out_idx)
        ((int32_t *)a.out_idx)[slot * a.top_k + lane] = expert;
}

/* Copy a record that has arrived to its slots: bulk copies for the row, lanes for the rest. */
__device__ __forceinline__ void copy_to_slots(const EpScatterArgs &a, const Shared *s,
                                              const char *record, int stage, int lane) {
    const int32_t *slot = s->slot[stage];
    const float *weights = (const float *)(record + a.record.weights);
    if (lane == 0) {
        for (int k = 0; k < a.top_k; k++)
            if (slot[k] >= 0)
                ep_bulk_store(a.out_rows + slot[k] * a.row_bytes, record, (uint32_t)a.row_bytes);
        ep_bulk_commit();
    }
    if (a.shape.layout == EP_LAYOUT_FLAT)
        describe_flat_row(a, s, weights, stage, lane);
    else if (a.carries_weights && lane < a.top_k && slot[lane] >= 0)
        a.out_weights[slot[lane]] = weights[lane];
    for (int k = 0; k < a.top_k && a.scale_bytes; k++)
        for (int i = lane; i < a.scale_bytes / 4 && slot[k] >= 0; i += 32)
            ((uint32_t *)(a.out_scales + slot[k] * a.scale_bytes))[i] =
                ((const uint32_t *)(record + a.record.scales))[i];
}

/* Wait for a record of any source: a source that is late must not keep the others' rings full, or
 * ranks could wait for each other in a circle. -1 when the deadline has passed. */
__device__ __forceinline__ int await_record(const EpCudaGroup &g, const Shared *s, int ring,
                                            int turn, int lane) {
    EpPatience patience = {0, 0};
    int source;
    while ((source = find_record(g, s, ring, turn, lane)) < 0) {
        int missing = 0;
        while (s->issued[missing] >= (int)s->head[missing])
            missing++;
        uint32_t expected = s->count[missing] + s->issued[missing] + 1;
        int patient = ep_patience(
            g, &patience, EpAwaited{missing, EP_PHASE_RECORD, ring, expected, expected - 1});
        if (!__all_sync(~0u, patient))
            return -1;
    }
    return source;
}

__device__ __forceinline__ int rows_of_lane(const EpScatterArgs &a, Shared *s, int ring, int lane) {
    const EpCudaGroup &g = a.group;
    int rows = 0;
    for (int r = lane; r < g.size; r += 32) {
        s->head[r] = (uint32_t)a.plan.lane_rows[r * EP_LANES + ring];
        s->count[r] = g.state->received[r][ring];
        s->issued[r] = 0;
        rows += (int)s->head[r];
    }
    __syncwarp();
    return __reduce_add_sync(~0u, rows);
}

__device__ __forceinline__ void leave_lane(const EpScatterArgs &a, const Shared *s, int ring,
                                           int lane) {
    __syncwarp();
    for (int r = lane; r < a.group.size; r += 32)
        a.group.state->received[r][ring] = s->count[r] + s->issued[r];
    __syncwarp();
}

/* The record is in shared memory: its place in the ring is free. */
__device__ __forceinline__ void give_credit(const EpCudaGroup &g, const Shared *s, int ring,
                                            int stage) {
    int source = s->stage_source[stage];
    ep_store_relaxed_sys(ep_credit(g, source, g.rank, ring),
                         s->count[source] + s->stage_row[stage] + 1);
}

/* One lane, by one warp: rows are copied as they are. */
__device__ int fill_lane_copying(const EpScatterArgs &a, Shared *s, char *stages, int ring,
                                 uint32_t *loads_before) {
    const EpCudaGroup &g = a.group;
    int lane = threadIdx.x, turn = 0, rows = rows_of_lane(a, s, ring, lane);
    int loaded = 0, ahead = a.stages - STORES_IN_FLIGHT;
    for (int stored = 0; stored < rows; stored++) {
        while (loaded < rows && loaded < stored + ahead) {
            int source = find_record(g, s, ring, turn, lane);
            if (source < 0 && loaded > stored)
                break;
            if (source < 0)
                source = await_record(g, s, ring, turn, lane);
            if (source < 0)
                return 0;
            if (lane == 0)
                ep_bulk_wait_read<STORES_IN_FLIGHT - 1>();
            __syncwarp();
            load_record(a, s, stages, ring, (int)((*loads_before + loaded) % a.stages), source,
                        lane);
            __syncwarp();
            turn = source + 1, loaded++;
        }
        uint32_t at = *loads_before + stored;
        int stage = (int)(at % a.stages);
        wait_full(s, stage, at / a.stages % 2);
        if (lane == 0)
            give_credit(g, s, ring, stage);
        copy_to_slots(a, s, stage_at(a, stages, stage), stage, lane);
        __syncwarp();
    }
    *loads_before += rows;
    leave_lane(a, s, ring, lane);
    return 1;
}

/* ---- filling with arithmetic: combine backward ------------------------------------------------ */

template <typename T>
__device__ __forceinline__ float multiply_vector(const EpScatterArgs &a, const uint4 &x, float w,
                                                 const char *expert_row, char *out) {
    float dot = 0;
    const T *from = (const T *)&x;
    uint4 result;
    T *to = (T *)&result;
#pragma unroll
    for (int i = 0; i < (int)(16 / sizeof(T)); i++)
        to[i] = ep_round<T>(w * ep_float(from[i]));
    *(uint4 *)out = a.weighs ? result : x;
    if (!a.takes_dots)
        return 0;
    uint4 y = *(const uint4 *)expert_row;
    const T *other = (const T *)&y;
#pragma unroll
    for (int i = 0; i < (int)(16 / sizeof(T)); i++)
        dot = fmaf(ep_float(from[i]), ep_float(other[i]), dot);
    return dot;
}

/* Sum over the block in a fixed order; the result is in thread 0. */
__device__ __forceinline__ float block_sum(Shared *s, float value) {
    for (int d = 16; d > 0; d /= 2)
        value += __shfl_xor_sync(~0u, value, d);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        s->partial[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0;
    for (int w = 0; w < WARPS; w++)
        sum += s->partial[w];
    return sum;
}

/* A record that lies in the ring, to its slots, by the whole block. */
template <typename T>
__device__ void multiply_to_slots(const EpScatterArgs &a, Shared *s, const char *record, int source,
                                  int ring, int row) {
    for (int k = 0; k < a.top_k; k++) {
        int64_t slot = ep_slot(a.plan, a.group, a.shape, a.top_k, source, ring, row, k);
        if (slot < 0)
            continue;
        float w = a.weighs ? a.slot_weights[slot] : 1, dot = 0;
        for (int64_t at = threadIdx.x * 16; at < a.row_bytes; at += THREADS * 16)
            dot += multiply_vector<T>(a, __ldcg((const uint4 *)(record + at)), w,
                                      a.slot_rows + slot * a.row_bytes + at,
                                      a.out_rows + slot * a.row_bytes + at);
        if (a.takes_dots) {
            dot = block_sum(s, dot);
            if (threadIdx.x == 0)
                a.out_weights[slot] = dot;
        }
    }
}

/* One lane, by the whole block: the first warp finds records, all warps work on each. */
template <typename T>
__device__ int fill_lane_multiplying(const EpScatterArgs &a, Shared *s, int ring) {
    const EpCudaGroup &g = a.group;
    int lane = threadIdx.x % 32, first = threadIdx.x < 32, turn = 0;
    int rows = 0;
    if (first)
        rows = rows_of_lane(a, s, ring, lane);
    rows = __shfl_sync(~0u, rows, 0);
    if (threadIdx.x == 0)
        s->stage_row[1] = rows;
    __syncthreads();
    rows = s->stage_row[1];
    for (int i = 0; i < rows; i++) {
        if (first) {
            int source = await_record(g, s, ring, turn, lane);
            if (lane == 0)
                s->stage_source[0] = source;
            turn = source + 1;
        }
        __syncthreads();
        int source = s->stage_source[0];
        if (source < 0)
            return 0;
        int row = s->issued[source];
        multiply_to_slots<T>(a, s, ep_ring(g, g.rank, source, ring, s->count[source] + row), source,
                             ring, row);
        __syncthreads();
        if (threadIdx.x == 0) {
            s->issued[source] = row + 1;
            ep_store_relaxed_sys(ep_credit(g, source, g.rank, ring), s->count[source] + row + 1);
        }
        __syncthreads();
    }
    if (first)
        leave_lane(a, s, ring, lane);
    __syncthreads();
    return 1;
}

/* ---- padding ------------------------------------------------------------------------------- */

__device__ void zero_bytes(char *out, int64_t bytes) {
    for (int64_t at = threadIdx.x * 4; at < bytes; at += THREADS * 4)
        *(uint32_t *)(out + at) = 0;
}

__device__ void zero_slots(const EpScatterArgs &a, int64_t begin, int64_t end) {
    if (begin >= end)
        return;
    for (int64_t at = begin * a.row_bytes + threadIdx.x * 16; at < end * a.row_bytes;
         at += THREADS * 16)
        *(uint4 *)(a.out_rows + at) = make_uint4(0, 0, 0, 0);
    int64_t values = a.shape.layout == EP_LAYOUT_FLAT && a.carries_weights ? a.top_k : 1;
    if (a.out_weights)
        zero_bytes((char *)(a.out_weights + begin * values), (end - begin) * values * 4);
    for (int64_t i = begin * a.top_k + threadIdx.x; a.out_idx && i < end * a.top_k; i += THREADS) {
        if (a.idx_is_int64)
            ((int64_t *)a.out_idx)[i] = -1;
        else
            ((int32_t *)a.out_idx)[i] = -1;
    }
    zero_bytes(a.out_scales + begin * a.scale_bytes, (end - begin) * a.scale_bytes);
}

__device__ void zero_padding(const EpScatterArgs &a, int block) {
    const EpPlanShape &s = a.shape;
    int batched = s.layout == EP_LAYOUT_BATCHED;
    for (int e = block; e < s.num_local && s.layout != EP_LAYOUT_FLAT; e += a.fill_blocks) {
        int64_t offset = a.plan.expert_offsets[e];
        int64_t end = offset + a.plan.expert_padded[e];
        if (batched && s.zero_tail)
            end = a.plan.expert_offsets[e + 1];
        zero_slots(a, offset + a.plan.expert_counts[e], end);
    }
    int64_t tail = a.plan.header->recv_rows, share = a.out_capacity - tail;
    if (batched || !s.zero_tail || share <= 0)
        return;
    share = (share + a.fill_blocks - 1) / a.fill_blocks;
    zero_slots(a, tail + block * share, min(tail + (block + 1) * share, a.out_capacity));
}

/* ---- kernel -------------------------------------------------------------------------------- */

__device__ void fill(const EpScatterArgs &a, Shared *s, char *stages) {
    int block = (int)blockIdx.x - a.send_blocks;
    uint32_t loads = 0;
    int alive = 1;
    zero_padding(a, block);
    for (int ring = block; ring < EP_LANES && alive; ring += a.fill_blocks) {
        if (a.type == EP_TYPE_BF16)
            alive = fill_lane_multiplying<__nv_bfloat16>(a, s, ring);
        else if (a.type == EP_TYPE_FP16)
            alive = fill_lane_multiplying<__half>(a, s, ring);
        else if (a.type == EP_TYPE_FP32)
            alive = fill_lane_multiplying<float>(a, s, ring);
        else if (threadIdx.x < 32)
            alive = fill_lane_copying(a, s, stages, ring, &loads);
    }
    ep_bulk_wait<0>();
}

__global__ void __launch_bounds__(THREADS, 1)
    scatter_kernel(const __grid_constant__ EpScatterArgs a) {
    extern __shared__ __align__(128) char stages[];
    __shared__ Shared s;
    if (threadIdx.x == 0) {
        for (int i = 0; i < a.stages; i++)
            ep_mbarrier_init(&s.full[i], 1);
        ep_fence_mbarrier_init();
    }
    __syncthreads();
    if ((int)blockIdx.x < a.send_blocks)
        send(a, &s, stages);
    else
        fill(a, &s, stages);
}

extern "C" int ep_cuda_launch_scatter(const EpScatterArgs *a, void *stream) {
    size_t shared = (size_t)a->stages * (size_t)a->record.bytes;
    cudaError_t error = cudaFuncSetAttribute(
        scatter_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    if (error != cudaSuccess)
        return error;
    scatter_kernel<<<a->send_blocks + a->fill_blocks, THREADS, shared, (cudaStream_t)stream>>>(*a);
    return cudaGetLastError();
}
