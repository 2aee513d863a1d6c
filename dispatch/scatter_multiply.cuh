/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_SCATTER_MULTIPLY_CUH
#define EP_DISPATCH_SCATTER_MULTIPLY_CUH

/**
 * The workers of a filling block that multiplies, for ep_combine_backward: rows times their slots'
 * weights, and dot products with the rows that lie in the slots.
 */

#include "dispatch/scatter_row.cuh"
#include "runtime/rows.cuh"

#define SLOTS_AT_ONCE 2

/** Dot products of a row's slots, by warp; over all pieces of the row. Two of each, so that one can
 *  be read while the next job's is written. */
typedef struct Dots {
    float partial[2][EP_MAX_TOP_K][WORKER_WARPS];
} Dots;

/* A row in shared memory times the weights of N slots, each product, rounded, in place of the
 * slot's row; and the dot products of the row with those. Each thread sums the products of its
 * vectors in order, each warp its threads', finish_dots the warps': always in the same way. */
template <typename T, int N>
__device__ __forceinline__ void
multiply_few(const EpScatterArgs &a, const Stages &s, const PipeJob &job, uint32_t first,
             const float *weight, int base, int thread, float (*partial)[WORKER_WARPS], int adds) {
    float dot[N] = {0};
    for (int at = thread * 16; at < job.bytes; at += WORKERS * 16) {
        uint4 x = ep_load_shared(first + at), y[N];
        EpVector<T> row = ep_unpack<T>(x);
#pragma unroll
        for (int i = 0; i < N; i++)
            y[i] = a.takes_dots ? ep_load_shared(stage_of(s, first, 1 + base + i) + at) : x;
#pragma unroll
        for (int i = 0; i < N; i++) {
            EpVector<T> other = ep_unpack<T>(y[i]), product;
#pragma unroll
            for (int e = 0; e < EpVector<T>::SIZE; e++) {
                if (a.takes_dots) dot[i] = fmaf(row.at[e], other.at[e], dot[i]);
                product.at[e] = weight[base + i] * row.at[e];
            }
            ep_store_shared(stage_of(s, first, 1 + base + i) + at, a.weighs ? ep_pack(product) : x);
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        for (int d = 16; d > 0; d /= 2)
            dot[i] += __shfl_xor_sync(~0u, dot[i], d);
        float *sum = &partial[base + i][thread / 32];
        if (thread % 32 == 0) *sum = adds ? *sum + dot[i] : dot[i];
    }
}

/* The last piece is multiplied: one thread for each slot adds up the warps' sums. */
__device__ __forceinline__ void finish_dots(const EpScatterArgs &a, const Pipe *p, uint32_t n,
                                            const float (*partial)[WORKER_WARPS], int slots,
                                            int thread) {
    ep_barrier(1, WORKERS);
    if (thread >= slots) return;
    float dot = 0;
    for (int w = 0; w < WORKER_WARPS; w++)
        dot += partial[thread][w];
    a.out_weights[p->slot[n % JOBS * p->shape.width + thread]] = dot;
}

template <typename T>
__device__ void multiply_rows(const EpScatterArgs &a, Pipe *p, Dots *dots, int thread) {
    int pieces = p->shape.pieces;
    Stages s = pipe_stages(p);
    for (uint32_t n = 0, row = 0;; n++) {
        pipe_wait(p->barrier[FULL], n);
        PipeJob job = p->job[n % JOBS];
        if (job.loads == PIPE_END) return;
        uint32_t first = p->first[n % JOBS];
        const float *weight = &p->weight[n % JOBS * p->shape.width];
        int piece = p->piece[n % JOBS], base = 0;
        float(*partial)[WORKER_WARPS] = dots->partial[row % 2];
        for (; base + SLOTS_AT_ONCE <= job.terms; base += SLOTS_AT_ONCE)
            multiply_few<T, SLOTS_AT_ONCE>(a, s, job, first, weight, base, thread, partial, piece);
        if (base < job.terms)
            multiply_few<T, 1>(a, s, job, first, weight, base, thread, partial, piece);
        if (a.takes_dots && piece == pieces - 1) finish_dots(a, p, n, partial, job.terms, thread);
        row += piece == pieces - 1;
        pipe_worked(p, n);
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
