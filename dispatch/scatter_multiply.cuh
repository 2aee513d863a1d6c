/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_SCATTER_MULTIPLY_CUH
#define EP_DISPATCH_SCATTER_MULTIPLY_CUH

/**
 * The workers of a filling block that multiplies, for ep_combine_backward: rows times their slots'
 * weights, and dot products with the rows that lie in the slots.
 */

#include "dispatch/scatter_row.cuh"
#include "runtime/rows.cuh"

#define WORKER_WARPS 16
#define WORKERS (WORKER_WARPS * 32)

/** Dot products of a row's slots, by warp; over all pieces of the row. */
typedef struct Dots {
    float partial[EP_MAX_TOP_K][WORKER_WARPS];
} Dots;

/* 16 bytes of a row times w, rounded, in place of those of the slot's row; returns their part of
 * the product of the two rows. */
template <typename T>
__device__ __forceinline__ float multiply_vector(const uint4 &x, float w, int weighs, uint4 *y) {
    EpVector<T> from = ep_unpack<T>(x), with = ep_unpack<T>(*y);
    float dot = 0;
#pragma unroll
    for (int i = 0; i < EpVector<T>::SIZE; i++) {
        dot = fmaf(from.at[i], with.at[i], dot);
        from.at[i] *= w;
    }
    *y = weighs ? ep_pack(from) : x;
    return dot;
}

/* A piece of a row for one slot. Each thread sums the products of its vectors in order, each warp
 * its threads', finish_dots the warps': always in the same way. */
template <typename T>
__device__ __forceinline__ void multiply_slot(const EpScatterArgs &a, const Pipe *p, Dots *dots,
                                              uint32_t n, int i, int vectors, int thread) {
    const uint4 *x = (const uint4 *)pipe_stage(*p, n, 0);
    uint4 *y = (uint4 *)pipe_stage(*p, n, 1 + i);
    int j = n % JOBS;
    float w = p->weight[j * p->shape.width + i], dot = 0;
#pragma unroll 2
    for (int v = thread; v < vectors; v += WORKERS)
        dot += multiply_vector<T>(x[v], w, a.weighs, &y[v]);
    if (!a.takes_dots) return;
    for (int d = 16; d > 0; d /= 2)
        dot += __shfl_xor_sync(~0u, dot, d);
    float *sum = &dots->partial[i][thread / 32];
    if (thread % 32 == 0) *sum = p->piece[j] ? *sum + dot : dot;
}

__device__ __forceinline__ void meet_workers(void) {
    asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
}

/* The last piece is multiplied: one thread for each slot adds up the warps' sums. */
__device__ __forceinline__ void finish_dots(const EpScatterArgs &a, const Pipe *p, const Dots *dots,
                                            uint32_t n, int thread) {
    int j = n % JOBS;
    if (!a.takes_dots || p->piece[j] != p->shape.pieces - 1) return;
    meet_workers();
    if (thread < p->stores[j]) {
        float dot = 0;
        for (int w = 0; w < WORKER_WARPS; w++)
            dot += dots->partial[thread][w];
        a.out_weights[p->slot[j * p->shape.width + thread]] = dot;
    }
    meet_workers();
}

template <typename T>
__device__ void multiply_rows(const EpScatterArgs &a, Pipe *p, Dots *dots, int thread) {
    for (uint32_t n = 0;; n++) {
        int j = n % JOBS;
        pipe_wait(p->posted, n);
        if (p->loads[j] == PIPE_END) return;
        pipe_wait(p->full, n);
        int slots = p->stores[j], vectors = p->bytes[j] / 16;
        for (int i = 0; i < slots; i++)
            multiply_slot<T>(a, p, dots, n, i, vectors, thread);
        finish_dots(a, p, dots, n, thread);
        ep_fence_proxy_async();
        __syncwarp();
        if (thread % 32 == 0) ep_mbarrier_arrive(&p->worked[j]);
    }
}

__device__ __forceinline__ void multiply(const EpScatterArgs &a, Pipe *p, Dots *dots, int thread) {
    if (a.type == EP_TYPE_BF16)
        multiply_rows<__nv_bfloat16>(a, p, dots, thread);
    else if (a.type == EP_TYPE_FP16)
        multiply_rows<__half>(a, p, dots, thread);
    else
        multiply_rows<float>(a, p, dots, thread);
}

#endif
