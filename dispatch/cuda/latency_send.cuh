/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_CUDA_LATENCY_SEND_CUH
#define EP_DISPATCH_CUDA_LATENCY_SEND_CUH

/**
 * The sending part of latency mode's dispatch: a block takes a token, reads its row once, and
 * stores the record to each rank that has one of its experts. Each other rank gets the record's
 * first step, whose header tells it that the row does not come.
 */

#include "dispatch/cuda/latency_route.cuh"

#define SENT_AT_ONCE 2 /* steps of a warp at a time */

/* ---- header -------------------------------------------------------------------------------- */

/* Returns how many 16-bit halves of a word are 0: those whose upper bit is clear and whose lower
 * bits give no carry. */
__device__ __forceinline__ int count_zeros(uint32_t x) {
    return __popc(~(((x & 0x7fff7fffu) + 0x7fff7fffu) | x | 0x7fff7fffu));
}

/* Returns the number of entries for an expert before `entry`. By a warp, eight entries to a
 * lane. */
__device__ __forceinline__ int count_entries_before(const EpLatencyScatterArgs &a, int entry,
                                                    int expert) {
    int lane = threadIdx.x % 32, rest = entry / 8 * 8 + lane, count = 0;
    uint32_t both = (uint32_t)expert * 0x10001u;
#pragma unroll 1
    for (int i = lane; i < entry / 8; i += 32) {
        uint4 x = ((const uint4 *)workspace_experts(a))[i];
        count += count_zeros(x.x ^ both) + count_zeros(x.y ^ both) + count_zeros(x.z ^ both) +
                 count_zeros(x.w ^ both);
    }
    if (rest < entry && lane < 8) count += workspace_experts(a)[rest] == expert;
    return warp_sum(count);
}

/* Returns the number of rows to a rank before a token's. By a warp. */
__device__ __noinline__ int count_rows_before(const EpLatencyScatterArgs &a, int token, int owner) {
    int count = 0, k = a.route.top_k;
#pragma unroll 1
    for (int t = (int)(threadIdx.x % 32); t < token; t += 32) {
        int is_sent = 0;
#pragma unroll 1
        for (int i = t * k; i < (t + 1) * k; i++)
            is_sent |= owner_of(a, workspace_experts(a)[i]) == owner;
        count += is_sent;
    }
    return warp_sum(count);
}

/* Write the record's header, without its weights. By a block, a warp for each entry. */
__device__ __forceinline__ void write_header(const EpLatencyScatterArgs &a, int token) {
    int k = a.route.top_k, flat = a.route.shape.has_rows;
#pragma unroll 1
    for (int i = (int)(threadIdx.x / 32); i < k; i += LATENCY_WARPS) {
        int entry = token * k + i, expert = workspace_experts(a)[entry], before = 0;
        if (expert >= 0)
            before = flat ? count_rows_before(a, token, owner_of(a, expert))
                          : count_entries_before(a, entry, expert);
        if (threadIdx.x % 32 == 0)
            workspace()->header[i] = (uint32_t)max(0, expert + 1) | (uint32_t)before
                                                                        << a.record.expert_bits;
    }
}

/* ---- units --------------------------------------------------------------------------------- */

/* Load a unit of the caller's scales, which may end within a unit, at any multiple of four
 * bytes. */
__device__ __noinline__ uint4 load_scales(const EpLatencyScatterArgs &a, int token, int unit) {
    const char *from = a.t.scales + (int64_t)token * scale_bytes_of(a);
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int at = unit * 16 + i * 4;
        word[i] = at < scale_bytes_of(a) ? *(const uint32_t *)(from + at) : 0;
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

/* Load the weights of a header's unit; each follows the word of its entry. */
__device__ __forceinline__ uint4 load_weights(const EpLatencyScatterArgs &a, int token, int unit) {
    const float *weights = a.t.topk_weights + (int64_t)token * a.route.top_k + 2 * unit;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (a.t.carries_weights && 2 * unit < a.route.top_k) x.y = __float_as_uint(__ldg(weights));
    if (a.t.carries_weights && 2 * unit + 1 < a.route.top_k)
        x.w = __float_as_uint(__ldg(weights + 1));
    return x;
}

/* Load a unit of the record, without the header's words, which are not known yet. */
__device__ __forceinline__ uint4 load_unit(const EpLatencyScatterArgs &a, int token, int unit) {
    int at = unit - a.record.header_units, scale = at - a.record.row_units;
    if (at < 0) return load_weights(a, token, unit);
    if (scale >= a.record.scale_units) return make_uint4(0, 0, 0, 0);
    if (a.t.format.bits) return *((const uint4 *)(workspace_memory() + a.workspace.staged) + at);
    if (scale < 0) return __ldg((const uint4 *)(a.t.rows + (int64_t)token * row_bytes_of(a)) + at);
    return load_scales(a, token, scale);
}

__device__ __forceinline__ uint32_t entry_word(const EpLatencyScatterArgs &a, int k) {
    return k < a.route.top_k ? workspace()->header[k] : 0;
}

/* Returns a header's unit: its words, and the weights in x if weights travel. */
__device__ __forceinline__ uint4 header_unit(const EpLatencyScatterArgs &a, int unit, uint4 x) {
    if (a.t.carries_weights)
        return make_uint4(entry_word(a, 2 * unit), x.y, entry_word(a, 2 * unit + 1), x.w);
    return make_uint4(entry_word(a, 4 * unit), entry_word(a, 4 * unit + 1),
                      entry_word(a, 4 * unit + 2), entry_word(a, 4 * unit + 3));
}

/* Load this lane's units of SENT_AT_ONCE steps from `step` on, without the header's words. */
__device__ __forceinline__ void load_steps(const EpLatencyScatterArgs &a, int token, int step,
                                           uint4 x[SENT_AT_ONCE]) {
#pragma unroll
    for (int i = 0; i < SENT_AT_ONCE; i++) {
        int at = step + i, unit = at * EP_STEP_UNITS + step_unit();
        x[i] = make_uint4(0, 0, 0, 0);
        if (at < a.record.steps && step_unit() >= 0) x[i] = load_unit(a, token, unit);
    }
}

/* ---- receiving ranks ----------------------------------------------------------------------- */

/* Returns a set of ranks with a bit for each: lane w has word w. Each lane adds `rank`, or none if
 * it is -1. By a warp. */
__device__ __forceinline__ unsigned rank_set(const EpLatencyScatterArgs &a, int rank) {
    int lane = threadIdx.x % 32;
    unsigned own = 0;
#pragma unroll
    for (int w = 0; w < RANK_WORDS; w++)
        if (a.route.group.size > 32 * w) {
            unsigned word = __reduce_or_sync(~0u, rank >> 5 == w ? 1u << rank % 32 : 0);
            own = lane == w ? word : own;
        }
    return own;
}

__device__ __forceinline__ int has_rank(unsigned set, int rank) {
    return __shfl_sync(~0u, set, rank / 32) >> rank % 32 & 1;
}

/* List where a token's record goes: first the ranks that get its row, then the others, which get
 * its first step with the header. Each token begins with another rank. By a warp. */
__device__ __forceinline__ void list_receivers(const EpLatencyScatterArgs &a, int token,
                                               uint64_t flag) {
    const EpCudaGroup &g = a.route.group;
    int lane = threadIdx.x % 32, k = a.route.top_k;
    int owner = lane < k ? owner_of(a, workspace_experts(a)[token * k + lane]) : -1;
    unsigned set = rank_set(a, owner), below = (1u << lane) - 1;
    int num_to = __reduce_add_sync(~0u, __popc(set)), listed = 0, others = num_to;
    int first = g.rank + 1 + ep_remainder(token, a.latency.ranks);
#pragma unroll 1
    for (int base = 0; base < g.size; base += 32) {
        int valid = base + lane < g.size, r = first - (first < g.size ? 0 : g.size);
        r += valid ? base + lane : 0;
        r -= r < g.size ? 0 : g.size;
        unsigned all = __ballot_sync(~0u, valid),
                 with_row = __ballot_sync(~0u, has_rank(set, r) & valid);
        int at = with_row >> lane & 1 ? listed + __popc(with_row & below)
                                      : others + __popc(all & ~with_row & below);
        if (valid)
            workspace()->to[at] =
                latency_record(a.latency, a.latency.window[r], g.rank, g.size, token, flag);
        listed += __popc(with_row), others += __popc(all & ~with_row);
    }
    if (lane == 0) workspace()->num_to = num_to;
    if (lane < k) a.route.plan.entries[(int64_t)token * k + lane].owner = (int16_t)owner;
}

/* Call store(address, i) for step `step` + i of the record, for each rank that gets it. */
template <typename Store>
__device__ __forceinline__ void for_each_step(const EpLatencyScatterArgs &a, int step,
                                              Store store) {
    int num_to = workspace()->num_to;
#pragma unroll 1
    for (int j = 0; j < num_to; j++) {
        char *to = workspace()->to[j] + step * EP_STEP_BYTES;
#pragma unroll
        for (int i = 0; i < SENT_AT_ONCE; i++)
            if (step + i < a.record.steps) store(to + i * EP_STEP_BYTES, i);
    }
#pragma unroll 1
    for (int j = num_to; step == 0 && j < a.route.group.size; j++)
        store(workspace()->to[j], 0);
}

__device__ __forceinline__ void store_steps(const EpLatencyScatterArgs &a, int step,
                                            const uint4 x[SENT_AT_ONCE], uint64_t flag) {
    ulonglong2 packed[SENT_AT_ONCE];
    int whole = a.latency.whole;
#pragma unroll
    for (int i = 0; i < SENT_AT_ONCE; i++) {
        int unit = (step + i) * EP_STEP_UNITS + step_unit();
        bool is_header = step_unit() >= 0 && unit < a.record.header_units;
        packed[i] = step_pack(is_header ? header_unit(a, unit, x[i]) : x[i], flag);
    }
    for_each_step(a, step, [&](char *to, int i) { step_store(to, packed[i], whole); });
    if (whole) return;
    step_fence();
    for_each_step(a, step, [&](char *to, int) { step_store_flag(to, flag); });
}

/* ---- a token ------------------------------------------------------------------------------- */

__device__ __noinline__ void stage_quantised(const EpLatencyScatterArgs &a, int token) {
    char *staged = workspace_memory() + a.workspace.staged;
    ep_quantise_row(a.t.format, a.t.source_type,
                    a.t.rows + (int64_t)token * (int)a.t.source_row_bytes, (int)a.t.row_elements,
                    (uint8_t *)staged, staged + 16 * a.record.row_units, (int)threadIdx.x,
                    LATENCY_THREADS);
}

/* Send a token. By a block. */
__device__ __forceinline__ void send_token(const EpLatencyScatterArgs &a, int token,
                                           uint64_t flag) {
    int warp = threadIdx.x / 32, step = warp * SENT_AT_ONCE, quantises = a.t.format.bits;
    uint4 x[SENT_AT_ONCE];
    if (quantises)
        stage_quantised(a, token);
    else
        load_steps(a, token, step, x);
    write_header(a, token);
    if (warp == LATENCY_WARPS - 1) list_receivers(a, token, flag);
    __syncthreads();
    if (quantises) load_steps(a, token, step, x);
#pragma unroll 1
    while (step < a.record.steps) {
        store_steps(a, step, x, flag);
        step += SENT_AT_ONCE * LATENCY_WARPS;
        load_steps(a, token, step, x);
    }
}

/* Send heads and tokens. The first block sends the heads, before it claims a token: every rank
 * waits for them, and the first block runs if any block does. */
__device__ __forceinline__ void send_all(const EpLatencyScatterArgs &a, const LatencyOp &op) {
    if (__builtin_expect(blockIdx.x == 0, 0)) {
        send_heads(a, op.flag);
        if (threadIdx.x / 32 == LATENCY_WARPS - 1)
            store_operation_number(a.route.group, a.latency, op);
        claims_begin(a.latency);
        __syncthreads();
    }
    claims_work(a.latency, workspace()->tokens, [&](int token) { send_token(a, token, op.flag); });
}

#endif
