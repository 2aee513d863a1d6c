/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_KERNELS_H
#define BENCH_KERNELS_H

/** The bench's own kernels, launched from C. */

#include <stdint.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    KERNEL_MAX_PEERS = 72, /**< what fits a kernel's arguments, and an NVLink domain */
    PUSH_CHUNK = 14336     /**< bytes of one bulk copy */
};

/** Keep the stream busy for `us`, while the host issues what comes after. */
cudaError_t kernel_hold(double us, cudaStream_t stream);

/**
 * flags[r] is rank r's array of one word for each rank, in memory that all ranks reach. A rank that
 * does not come in time is left in *late, plus 1; while that is not 0 no rank is waited for.
 */
typedef struct BarrierArgs {
    uint32_t *flags[KERNEL_MAX_PEERS];
    uint32_t *late;
    uint64_t timeout_ns;
    int rank, size;
} BarrierArgs;

/** Done when every rank's stream has come to the barrier of this epoch, or one is late; epochs
 * grow.
 */
cudaError_t kernel_barrier(const BarrierArgs *args, uint32_t epoch, cudaStream_t stream);

/** One block of one thread that does nothing. */
cudaError_t kernel_empty(cudaStream_t stream);

/** A word goes out to the peer, and one comes in from it; *late as in the barrier. */
typedef struct PingArgs {
    uint32_t *out;      /**< in the peer's memory */
    const uint32_t *in; /**< in this rank's */
    uint32_t *late;
    uint64_t timeout_ns;
    int peer;
    int begins; /**< 1 on one of the two, 0 on the other */
} PingArgs;

/** `rounds` round trips; `last` is the word that the ones before ended with, 0 at first. */
cudaError_t kernel_ping(const PingArgs *args, uint32_t last, int rounds, cudaStream_t stream);

/** Chunks of `source`, over and over, to several places. */
typedef struct PushArgs {
    char *to[KERNEL_MAX_PEERS];
    int64_t bytes[KERNEL_MAX_PEERS]; /**< multiples of 16 */
    int count;                       /**< places */
    const char *source;
    int32_t source_chunks; /**< whole chunks in it, at least 1 */
    int32_t items;         /**< places times the pieces of the longest; filled at the launch */
} PushArgs;

/** One copying thread in each of `blocks` blocks, with 8 or 15 chunks in flight. */
cudaError_t kernel_push(const PushArgs *args, int blocks, int stages, cudaStream_t stream);

/** The same bytes in 16-byte stores of many threads. */
cudaError_t kernel_store(const PushArgs *args, int blocks, cudaStream_t stream);

/** to[i] = from[index[i]], rows of a multiple of 4 bytes. */
cudaError_t kernel_gather_rows(void *to, const void *from, const int32_t *index, int64_t count,
                               size_t row_bytes, cudaStream_t stream);

/** to[index[i]] = from[i], where index[i] is not negative; from NULL: zeros. */
cudaError_t kernel_scatter_rows(void *to, const void *from, const int32_t *index, int64_t count,
                                size_t row_bytes, cudaStream_t stream);

/** out[t] = sum over k, ascending, of weights[t, k] * rows[at[t, k]]; negative: no term. */
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
