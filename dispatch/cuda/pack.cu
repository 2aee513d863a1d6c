/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packs tokens for other nodes: a warp for each token. Memory bounds it, and the network is slower
 * by far, so rows pass through registers.
 */
#include "dispatch/cuda/pack.h"

#include "runtime/cuda/plan.cuh"
#include "runtime/cuda/rows.cuh"

#define PACK_THREADS 256
#define PACK_BLOCKS 4 /* on a multiprocessor: most of their time they wait for memory */

/* Returns the record of lane k's entry, for one entry of each node that needs the token; else
 * NULL. `entries`: of the token. */
template <int LIMITED>
__device__ __forceinline__ char *find_record(const EpPackArgs &a, const EpEntry *entries) {
    int k = threadIdx.x % 32;
    if (k >= a.top_k) return NULL;
    const EpEntry e = entries[k];
    int message = e.owner - a.group.size, row = LIMITED ? e.row - a.first_row : e.row;
    if (message < 0 || message >= a.messages || !e.leader) return NULL;
    if ((uint32_t)row >= (uint32_t)a.message_slots) return NULL; /* a damaged plan; elsewhere */
    return a.out + ((int64_t)message * a.message_slots + row) * a.record.bytes;
}

/* Quantise a row into the records. By a warp. */
template <typename T, int IS_NVFP4>
__device__ __forceinline__ void pack_quantised(const EpPackArgs &a, const char *row, char *record) {
    int lane = threadIdx.x % 32, units = (int)(a.t.source_row_bytes / (int)sizeof(EpUnit<T>));
    const auto &format = ep_format_of<IS_NVFP4>(a.t.format, a.t.global_scale);
    unsigned records = __ballot_sync(~0u, record != NULL);
    for (int base = 0; base < units; base += 32) {
        int unit = base + lane, valid = unit < units;
        EpUnit<T> x = {};
        EpQuantScale scale;
        for (int i = 0; i < EpUnit<T>::PARTS && valid; i++)
            x.part[i] = __ldcg((const uint4 *)row + unit * EpUnit<T>::PARTS + i);
        uint4 codes = ep_quantise_unit(format, x, valid, &scale);
        for (unsigned left = records; left; left &= left - 1) {
            char *to = (char *)__shfl_sync(~0u, (unsigned long long)record, __ffs(left) - 1);
            if (!valid) continue;
            ep_store_codes(format, to, unit, codes);
            ep_store_scale_of(format, to + a.record.scales, unit, scale);
        }
    }
}

template <int IS_NVFP4>
__device__ __forceinline__ void pack_row(const EpPackArgs &a, const char *row, char *record) {
    if (!a.t.format.bits)
        spread_row<uint4>(record, row, a.t.row_bytes);
    else if (a.t.source_type == EP_TYPE_BF16)
        pack_quantised<__nv_bfloat16, IS_NVFP4>(a, row, record);
    else if (a.t.source_type == EP_TYPE_FP16)
        pack_quantised<__half, IS_NVFP4>(a, row, record);
    else
        pack_quantised<float, IS_NVFP4>(a, row, record);
}

/* Copy a token's weights and given scales. By a warp. */
__device__ __forceinline__ void pack_metadata(const EpPackArgs &a, int64_t token, char *record) {
    const char *weights = (const char *)a.t.topk_weights + token * a.source.weight_stride;
    if (a.t.carries_weights)
        spread_row<uint32_t>(record ? record + a.record.weights : NULL, weights,
                             a.top_k * (int64_t)sizeof(float));
    if (a.t.scale_bytes && !a.t.format.bits)
        spread_scales(record ? record + a.record.scales : NULL,
                      a.t.scales + token * a.source.scale_stride, a.t.scale_bytes);
}

/* A plan that is not the expected one is not read, and neither are rows without a global scale; the
 * kernels on the node report it. */
template <int IS_NVFP4> __device__ __forceinline__ int is_usable(const EpPackArgs &a) {
    if (ep_failed(a.group) || (IS_NVFP4 && !ep_has_global(a.t.global_scale))) return 0;
    return ep_is_right(a.plan.use, ep_load_plan(a.plan));
}

/* Add the records of each message to the caller's counters. By all threads of a block. */
__device__ __forceinline__ void count_records(const EpPackArgs &a, const int32_t *filled) {
    for (int i = threadIdx.x; i < a.messages; i += PACK_THREADS)
        ep_count_row(a.stats, a.relays[i], min(max(filled[a.group.size + i], 0), a.message_slots));
}

/* Pack the record of a token that has one. By a warp. */
template <int IS_NVFP4>
__device__ __forceinline__ void pack_token(const EpPackArgs &a, int64_t token, char *record) {
    if (!__any_sync(~0u, record != NULL)) return;
    pack_row<IS_NVFP4>(a, a.t.rows + token * a.source.row_stride, record);
    pack_metadata(a, token, record);
}

template <int IS_NVFP4>
__global__ void __launch_bounds__(PACK_THREADS) pack_tokens(const __grid_constant__ EpPackArgs a) {
    int warps = gridDim.x * (PACK_THREADS / 32);
    if (!__syncthreads_and(threadIdx.x || is_usable<IS_NVFP4>(a))) {
        ep_seal_stamp(a.group, a.stamp);
        return;
    }
    int tokens = ep_num_tokens(a.plan, a.group);
    if (blockIdx.x == 0) count_records(a, a.plan.rows_to);
    for (int token = (blockIdx.x * PACK_THREADS + threadIdx.x) / 32; token < tokens; token += warps)
        pack_token<IS_NVFP4>(a, token,
                             find_record<0>(a, a.plan.entries + (int64_t)token * a.top_k));
}

/* Returns the entries of a token of the chunks, or NULL behind the last token. */
__device__ __forceinline__ const EpEntry *find_entries(const EpPackArgs &a, int token) {
    int chunk = token / a.chunk_tokens, at = token % a.chunk_tokens;
    if (chunk >= a.chunks || token >= a.num_rows) return NULL;
    int64_t bytes = chunk * a.chunk_stride;
    const int32_t *tokens = (const int32_t *)((const char *)a.plan.tokens + bytes);
    if (at >= tokens[a.group.rank]) return NULL;
    return (const EpEntry *)((const char *)a.plan.entries + bytes) + (int64_t)at * a.top_k;
}

/* With a limit: look at all tokens that may be in these messages. */
template <int IS_NVFP4>
__global__ void __launch_bounds__(PACK_THREADS) pack_limited(const __grid_constant__ EpPackArgs a) {
    int warps = gridDim.x * (PACK_THREADS / 32);
    if (!__syncthreads_and(threadIdx.x || is_usable<IS_NVFP4>(a))) {
        ep_seal_stamp(a.group, a.stamp);
        return;
    }
    if (blockIdx.x == 0) count_records(a, a.filled);
    for (int token = (blockIdx.x * PACK_THREADS + threadIdx.x) / 32;; token += warps) {
        const EpEntry *entries = find_entries(a, token);
        if (!entries) break;
        pack_token<IS_NVFP4>(a, token, find_record<1>(a, entries));
    }
}

template <int IS_NVFP4> static int open_pack(int shared_bytes) {
    int error = ep_open_kernel(pack_tokens<IS_NVFP4>, shared_bytes);
    return error ? error : ep_open_kernel(pack_limited<IS_NVFP4>, shared_bytes);
}

extern "C" int ep_cuda_open_pack(int shared_bytes) {
    int error = open_pack<0>(shared_bytes);
    return error ? error : open_pack<1>(shared_bytes);
}

extern "C" int ep_cuda_launch_pack(const void *args, int blocks, void *stream) {
    const EpPackArgs *a = (const EpPackArgs *)args;
    auto kernel = a->t.global_scale ? pack_tokens<1> : pack_tokens<0>;
    if (a->chunks) kernel = a->t.global_scale ? pack_limited<1> : pack_limited<0>;
    return ep_launch(kernel, blocks * PACK_BLOCKS, PACK_THREADS, 0, stream, *a);
}
