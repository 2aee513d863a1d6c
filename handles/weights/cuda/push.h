/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_WEIGHTS_CUDA_PUSH_H
#define EP_HANDLES_WEIGHTS_CUDA_PUSH_H

/** The kernel that reduces a weight's gradient on one node: push.cu. */

#include "handles/weights/shards.h"
#include "runtime/cuda/device.h"

/* Bytes of a chunk: a record of the group's rings. So many blocks reach the wire's speed. */
#ifndef EP_PUSH_BYTES
#define EP_PUSH_BYTES EP_MAX_ROW_BYTES
#endif
#define EP_PUSH_BLOCKS 64

/** As EpDivisor, for all numbers below 2^31: with log2 of the divisor rounded up, 2^(31 + log2) is
 *  multiplied by its inverse, rounded up. */
typedef struct EpLargeDivisor {
    uint32_t by, magic;
    int32_t shift;
} EpLargeDivisor;

static inline EpLargeDivisor ep_large_divisor(int64_t by) {
    EpLargeDivisor d = {(uint32_t)by, 0, 31};
    while (((int64_t)1 << (d.shift - 31)) < by)
        d.shift++;
    d.magic = (uint32_t)((((uint64_t)1 << d.shift) + (uint64_t)by - 1) / (uint64_t)by);
    return d;
}

EP_HOST_DEVICE static inline uint32_t ep_large_quotient(uint32_t n, EpLargeDivisor d) {
    return (uint32_t)((uint64_t)n * d.magic >> d.shift);
}

/** Vectors are of 16 bytes of the gradient. */
typedef struct EpPushArgs {
    EpCudaGroup group; /**< with the operation's digest */
    EpType type, out_type;
    int32_t accumulate;
    int32_t receivers;        /**< blocks */
    int32_t vectors;          /**< of a shard */
    int32_t chunk, chunks;    /**< vectors of a chunk; chunks of a shard */
    EpLargeDivisor run, rows; /**< vectors of a run; runs of a row of dimension 0 */
    int64_t row_step, step;   /**< vectors between rows of dimension 0, and between runs of one */
    int64_t base[EP_CUDA_MAX_RANKS]; /**< vector at which each rank's shard begins */
    const void *grad;
    void *out;
} EpPushArgs;

#ifdef __cplusplus
extern "C" {
#endif
int ep_cuda_open_push(void);
int ep_cuda_launch_push(const EpPushArgs *args, int blocks, void *stream);
#ifdef __cplusplus
}
#endif

#endif
