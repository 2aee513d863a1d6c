/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_LATENCY_SEND_CUH
#define EP_DISPATCH_LATENCY_SEND_CUH

/**
 * The sending part of latency mode's dispatch: a block takes a token, reads its row once, and
 * stores the record to each rank that has one of its experts. All other ranks get the record's
 * first step, which has the header, so that each knows of each token whether it comes.
 */

#include "dispatch/latency_route.cuh"

#define SENT_AT_ONCE 2 /* steps of a warp */

/* The ranks in the order in which this rank stores: those that the row goes to come first, each
 * beginning with another one. By a warp. */
__device__ __forceinline__ void list_ranks(const EpLatencyScatterArgs &a, const Desk *d,
                                           int token) {
    const EpCudaGroup &g = a.route.group;
    int lane = threadIdx.x % 32, k = a.route.top_k;
#pragma unroll 1
    for (int r = lane; r < g.size; r += 32)
        d->w->goes[r] = 0;
    __syncwarp();
    int owner = lane < k ? owner_of(d, expert_at(a.route, d, token * k + lane)) : -1;
    if (owner >= 0) d->w->goes[owner] = 1;
    if (lane < k) a.route.plan.entries[(int64_t)token * k + lane].owner = (int16_t)owner;
    __syncwarp();
    int listed = 0;
#pragma unroll 1
    for (int goes = 1; goes >= 0; goes--) {
#pragma unroll 1
        for (int at = 0; at < g.size; at += 32) {
            int r = (g.rank + 1 + token + at + lane) % g.size;
            int is = at + lane < g.size && d->w->goes[r] == goes;
            unsigned all = __ballot_sync(~0u, is);
            if (is) d->w->to[listed + __popc(all & ((1u << lane) - 1))] = r;
            listed += __popc(all);
        }
        if (goes && lane == 0) d->w->num_to = listed;
    }
}

/* The record's header. The block's warps have an entry each. */
__device__ __forceinline__ void write_header(const EpLatencyScatterArgs &a, const Desk *d,
                                             int token) {
    const EpPrepareArgs &route = a.route;
    int k = route.top_k, flat = route.shape.layout == EP_LAYOUT_FLAT;
#pragma unroll 1
    for (int i = (int)threadIdx.x / 32; i < k; i += WARPS) {
        int entry = token * k + i, expert = expert_at(route, d, entry), before = 0;
        if (expert >= 0)
            before = flat ? count_rows_before(route, d, token, owner_of(d, expert))
                          : count_entries_before(route, d, entry, expert);
        if (threadIdx.x % 32 == 0)
            d->w->header[i] = (uint32_t)max(0, expert + 1) | (uint32_t)before
                                                                 << a.record.expert_bits;
    }
    int i = threadIdx.x;
    if (a.carries_weights && i < k)
        d->w->header[k + i] = __float_as_uint(a.topk_weights[(int64_t)token * k + i]);
}

/* ---- units --------------------------------------------------------------------------------- */

/* Of scales that the caller brings, which may end within a unit, on any multiple of four. */
__device__ __noinline__ uint4 load_scales(const EpLatencyScatterArgs &a, int token, int unit) {
    const char *from = a.scales + token * a.scale_bytes;
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int64_t at = unit * 16 + i * 4;
        word[i] = at < a.scale_bytes ? *(const uint32_t *)(from + at) : 0;
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

/* A unit of the record, if it is not the header's. */
__device__ __forceinline__ uint4 load_unit(const EpLatencyScatterArgs &a, const Desk *d, int token,
                                           int unit) {
    int at = unit - a.record.header_units, scale = at - a.record.row_units;
    if (at < 0 || scale >= a.record.scale_units) return make_uint4(0, 0, 0, 0);
    if (a.quant > EP_QUANT_NONE) return *((const uint4 *)d->staged + at);
    if (scale < 0) return *((const uint4 *)(a.rows + token * a.row_bytes) + at);
    return load_scales(a, token, scale);
}

__device__ __forceinline__ uint4 header_unit(const EpLatencyScatterArgs &a, const Desk *d,
                                             int unit) {
    int words = a.route.top_k * (1 + a.carries_weights);
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        word[i] = unit * 4 + i < words ? d->w->header[unit * 4 + i] : 0;
    return make_uint4(word[0], word[1], word[2], word[3]);
}

/* Some of a warp's steps, from `step` on: units that were there before the header was. */
__device__ __forceinline__ void load_steps(const EpLatencyScatterArgs &a, const Desk *d, int token,
                                           int step, int stride, uint4 x[SENT_AT_ONCE]) {
#pragma unroll
    for (int i = 0; i < SENT_AT_ONCE; i++) {
        int at = step + i * stride, unit = at * EP_STEP_UNITS + step_unit();
        x[i] = make_uint4(0, 0, 0, 0);
        if (at < a.record.steps && step_unit() >= 0) x[i] = load_unit(a, d, token, unit);
    }
}

/* How many ranks get a step. */
__device__ __forceinline__ int num_receivers(const EpLatencyScatterArgs &a, const Desk *d,
                                             int step) {
    return step >= a.record.steps ? 0 : step == 0 ? a.route.group.size : d->w->num_to;
}

__device__ __forceinline__ void store_steps(const EpLatencyScatterArgs &a, const Desk *d, int token,
                                            int step, int stride, const uint4 x[SENT_AT_ONCE],
                                            uint64_t flag) {
    const EpCudaGroup &g = a.route.group;
    const EpLatency &l = a.latency;
#pragma unroll
    for (int i = 0; i < SENT_AT_ONCE; i++) {
        int at = step + i * stride, unit = at * EP_STEP_UNITS + step_unit();
        bool is_header = step_unit() >= 0 && unit < a.record.header_units;
        ulonglong2 packed = step_pack(is_header ? header_unit(a, d, unit) : x[i], flag);
#pragma unroll 1
        for (int j = 0; j < num_receivers(a, d, at); j++)
            step_store(latency_record(l, d->w->to[j], g.rank, g.size, token, flag) +
                           at * EP_STEP_BYTES,
                       packed, l.whole);
    }
    if (l.whole) return;
    step_fence();
#pragma unroll
    for (int i = 0; i < SENT_AT_ONCE; i++) {
        int at = step + i * stride;
#pragma unroll 1
        for (int j = 0; j < num_receivers(a, d, at); j++)
            step_store_flag(latency_record(l, d->w->to[j], g.rank, g.size, token, flag) +
                                at * EP_STEP_BYTES,
                            flag);
    }
}

/* ---- a token ------------------------------------------------------------------------------- */

__device__ __noinline__ void stage_quantised(const EpLatencyScatterArgs &a, const Desk *d,
                                             int token) {
    ep_quantise_row((EpQuant)a.quant, a.source_type, a.rows + token * a.source_row_bytes,
                    (int)a.row_elements, (uint8_t *)d->staged, d->staged + 16 * a.record.row_units,
                    (int)threadIdx.x, THREADS);
}

/* By a block. */
__device__ void send_token(const EpLatencyScatterArgs &a, const Desk *d, int token, uint64_t flag) {
    int step = (int)threadIdx.x / 32, quantises = a.quant > EP_QUANT_NONE;
    uint4 x[SENT_AT_ONCE];
    if (quantises)
        stage_quantised(a, d, token);
    else
        load_steps(a, d, token, step, WARPS, x);
    write_header(a, d, token);
    if (step == WARPS - 1) list_ranks(a, d, token);
    __syncthreads();
    if (quantises) load_steps(a, d, token, step, WARPS, x);
#pragma unroll 1
    while (step < a.record.steps) {
        store_steps(a, d, token, step, WARPS, x, flag);
        step += SENT_AT_ONCE * WARPS;
        load_steps(a, d, token, step, WARPS, x);
    }
}

/* The heads are the first block's, which runs if any does: everyone waits for them. */
__device__ void send_all(const EpLatencyScatterArgs &a, const Desk *d, const Turn &turn) {
    if (blockIdx.x == 0) {
        send_heads(a, d, turn.flag);
        if (threadIdx.x / 32 == WARPS - 1) announce_operation(a.route.group, a.latency, turn);
        __syncthreads();
    }
    claims_work(a.latency, d->w->tokens, [&](int token) { send_token(a, d, token, turn.flag); });
}

#endif
