/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scatter over NVLink: token rows to slots, for ep_dispatch and ep_combine_backward.
 *
 * One launch, one block on each multiprocessor, two roles. A sending block takes its lanes' tokens
 * one by one: bulk copies bring the row into shared memory, its weights and scales beside it, and
 * then push the whole record into the ring of every rank that needs it, each once. A filling block
 * takes records out of the rings of its lanes, from all sources in turn, and writes each to all the
 * slots that its route names; and the zeros of the padding.
 *
 * Who waits on whom: a sender for credit, that is, for the receiver's filler to have emptied a
 * record of the ring; a filler for the head. Fillers and senders take lanes in ascending order, so
 * the lowest unfinished lane of all ranks always has both of its ends at work: no deadlock, however
 * many blocks there are.
 *
 * Order: a record's stores have completed (bulk wait_group) before one thread fences, for the whole
 * system, and stores the heads. A filler acquires the head, crosses to the async proxy with a
 * fence, and loads the record; the load has completed (mbarrier) before the credit is stored.
 *
 * Rows of the rank's own tokens that are only copied go from the sender straight to their slots;
 * where they are multiplied, they go through a ring like all others, and every pair of lane and
 * source has a group of threads that empties it.
 */
#include "dispatch/scatter_fill.cuh"
#include "dispatch/scatter_multiply.cuh"
#include "dispatch/scatter_send.cuh"

/* ---- padding ------------------------------------------------------------------------------- */

/* The threads that write zeros. */
typedef struct Zeroers {
    int index, count;
} Zeroers;

__device__ void zero_bytes(char *out, int64_t bytes, Zeroers z) {
    for (int64_t at = z.index * 4; at < bytes; at += z.count * 4)
        *(uint32_t *)(out + at) = 0;
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
    zero_bytes(a.out_scales + begin * a.scale_bytes, (end - begin) * a.scale_bytes, z);
}

__device__ void zero_padding(const EpScatterArgs &a, int block, Zeroers z) {
    const EpPlanShape &s = a.shape;
    int batched = s.layout == EP_LAYOUT_BATCHED;
    for (int e = block; e < s.num_local && s.layout != EP_LAYOUT_FLAT; e += a.fill_blocks) {
        int64_t offset = a.plan.expert_offsets[e];
        int64_t end = offset + a.plan.expert_padded[e];
        if (batched && s.zero_tail) end = a.plan.expert_offsets[e + 1];
        zero_slots(a, offset + a.plan.expert_counts[e], end, z);
    }
    int64_t tail = a.plan.header->recv_rows, share = a.out_capacity - tail;
    if (batched || !s.zero_tail || share <= 0) return;
    share = (share + a.fill_blocks - 1) / a.fill_blocks;
    zero_slots(a, tail + block * share, min(tail + (block + 1) * share, a.out_capacity), z);
}

/* ---- kernel -------------------------------------------------------------------------------- */

/* Where rows are copied, one warp does it, and the others write the zeros meanwhile. */
__device__ void fill(const EpScatterArgs &a, Shared *s, char *stages) {
    int block = (int)blockIdx.x - a.send_blocks, thread = threadIdx.x;
    uint32_t turns = 0;
    int alive = 1;
    if (a.type == EP_TYPE_BF16)
        multiply<__nv_bfloat16>(a, s, block);
    else if (a.type == EP_TYPE_FP16)
        multiply<__half>(a, s, block);
    else if (a.type == EP_TYPE_FP32)
        multiply<float>(a, s, block);
    if (a.type)
        zero_padding(a, block, Zeroers{thread, THREADS});
    else if (thread >= 32)
        zero_padding(a, block, Zeroers{thread - 32, THREADS - 32});
    if (a.type || thread >= 32) return;
    for (int ring = block; ring < EP_LANES && alive; ring += a.fill_blocks)
        alive = fill_lane_copying(a, s, stages, ring, &turns);
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
    if (error != cudaSuccess) return error;
    scatter_kernel<<<a->send_blocks + a->fill_blocks, THREADS, shared, (cudaStream_t)stream>>>(*a);
    return cudaGetLastError();
}
