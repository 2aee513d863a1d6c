/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_KERNELS_H
#define BENCH_KERNELS_H

/** ep_bench's own kernels, launched from C. */

#include <stdint.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    KERNEL_MAX_PEERS = 72, /**< size of an NVLink domain; fits a kernel's arguments */
    PUSH_CHUNK = 14336     /**< bytes of one bulk copy */
};

/* ---- synchronization and latency (kernels.cu) ---------------------------------------------- */

/** Occupy the stream for `us`, while the host issues the next work. */
cudaError_t kernel_hold(double us, cudaStream_t stream);

/**
 * flags[r] is rank r's array of one word per rank, in memory that all ranks can access. On timeout
 * *late becomes the missing rank plus 1. While *late is not 0, the kernels wait for no rank.
 */
typedef struct BarrierArgs {
    uint32_t *flags[KERNEL_MAX_PEERS];
    uint32_t *late;
    uint64_t *passed; /**< this rank's: when it passed the barrier before */
    uint64_t timeout_ns;
    int rank, size;
    int first; /**< 1: the timeout counts from now; 0: from *passed */
} BarrierArgs;

/** Ends when every rank's stream has reached the barrier of this epoch, or on timeout. Epochs
 *  increase by one. */
cudaError_t kernel_barrier(const BarrierArgs *args, uint32_t epoch, cudaStream_t stream);

/** One block of one thread that does nothing. */
cudaError_t kernel_empty(cudaStream_t stream);

/** A word to the peer and a word from it; *late as in BarrierArgs. */
typedef struct PingArgs {
    uint32_t *out;      /**< in the peer's memory */
    const uint32_t *in; /**< in this rank's memory */
    uint32_t *late;
    uint64_t timeout_ns;
    int peer;
    int begins; /**< 1 on one of the two ranks, 0 on the other */
} PingArgs;

/** Make `rounds` round trips. `last` is the last word of the previous call, 0 at first. */
cudaError_t kernel_ping(const PingArgs *args, uint32_t last, int rounds, cudaStream_t stream);

/* ---- plain copies (kernels.cu) ------------------------------------------------------------- */

/** Chunks of `source`, repeated as needed, to several targets. */
typedef struct PushArgs {
    char *to[KERNEL_MAX_PEERS];
    int64_t bytes[KERNEL_MAX_PEERS]; /**< multiples of 16 */
    int count;                       /**< number of targets */
    const char *source;
    int32_t source_chunks; /**< whole chunks in `source`, at least 1 */
    int32_t items;         /**< targets times the pieces of the longest; set by the launch */
} PushArgs;

/** Bulk copies: one thread in each of `blocks` blocks, with 8 or 15 chunks in flight. GPUs before
 *  capability 9.0 have none: there it is kernel_store. */
cudaError_t kernel_push(const PushArgs *args, int blocks, int stages, cudaStream_t stream);

/** 16-byte stores of many threads. */
cudaError_t kernel_store(const PushArgs *args, int blocks, cudaStream_t stream);

/* ---- rows of the baseline (baseline.cu) ---------------------------------------------------- */

/** to[i] = from[index[i]], rows of a multiple of 4 bytes. */
cudaError_t kernel_gather_rows(void *to, const void *from, const int32_t *index, int64_t count,
                               size_t row_bytes, cudaStream_t stream);

/** to[index[i]] = from[i], if index[i] is not negative. With `from` NULL it writes zeros. */
cudaError_t kernel_scatter_rows(void *to, const void *from, const int32_t *index, int64_t count,
                                size_t row_bytes, cudaStream_t stream);

/** out[t] = sum over k, ascending, of weights[t, k] * rows[at[t, k]]; at < 0: no term. */
typedef struct SumArgs {
    int type; /**< EpType: BF16, FP16 or FP32 */
    void *out;
    const void *rows;
    const int32_t *at;    /**< [tokens, top_k] */
    const float *weights; /**< [tokens, top_k], or NULL for 1 */
    int64_t tokens;
    int top_k;
    size_t row_bytes; /**< a multiple of 16 */
} SumArgs;

cudaError_t kernel_sum_rows(const SumArgs *args, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
