/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_WEIGHTS_CUDA_PUSH_H
#define EP_HANDLES_WEIGHTS_CUDA_PUSH_H

/** The kernels that move weights on one node, through the rings of the group: push.cu for shards,
 *  push_rows.cu for whole experts. */

#include "handles/weights/shards.h"
#include "runtime/cuda/device.h"

#define EP_PUSH_WARPS 12 /* of a block: with more, each thread has 128 registers at most */
#define EP_PUSH_RUN_BYTES (EP_PUSH_BYTES / 16) /* shorter runs of a shard go through registers */
#define EP_PUSH_BLOCKS 64

/* Of eight warps so many receive: sums and rows; shards. A sum sends each chunk to one rank and
 * takes one from all. A gather sends each to all, so two ranks need fewer warps that receive. */
#define EP_PUSH_RECEIVERS 5
#define EP_PUSH_GATHER_RECEIVERS(RANKS) ((RANKS) == 2 ? 3 : 5)

/** A launch of the kernels, whose warps each move chunks. */
typedef struct EpPushGrid {
    int32_t blocks, warps; /**< warps of a block */
    int32_t shared_bytes;  /**< of their stages; 0 without bulk copies */
} EpPushGrid;

/** Returns how many of all warps receive, where `eighths` of eight do. */
static inline int32_t ep_push_receivers(EpPushGrid grid, int32_t eighths) {
    int32_t warps = grid.blocks * grid.warps, receivers = warps * eighths / 8;
    return receivers < 1 ? 1 : receivers < warps ? receivers : warps - 1;
}

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

/** Where the shards of a tensor lie, in words of 1, 4 or 16 bytes. */
typedef struct EpPushedShards {
    int32_t word;             /**< bytes */
    int32_t words;            /**< of a shard */
    int32_t chunk, chunks;    /**< words of a chunk; chunks of a shard */
    EpLargeDivisor run, rows; /**< words of a run; runs of a row of dimension 0 */
    int64_t row_step, step;   /**< words between rows of dimension 0, and between runs of one */
    int64_t base[EP_CUDA_MAX_RANKS]; /**< word at which each rank's shard begins */
} EpPushedShards;

/** Reduce a gradient, in words of 16 bytes. */
typedef struct EpPushArgs {
    EpCudaGroup group; /**< with the operation's digest */
    EpPushedShards shards;
    int32_t receivers; /**< warps */
    EpType type, out_type;
    int32_t accumulate;
    const void *grad;
    void *out;
} EpPushArgs;

/** Gather shards. */
typedef struct EpPushGatherArgs {
    EpCudaGroup group;
    EpPushedShards shards;
    int32_t receivers;
    const void *from; /**< this rank's shard, flat; NULL: it is in its place */
    void *whole;
} EpPushGatherArgs;

/** Find the largest of all ranks' numbers, in place. */
typedef struct EpPushMaxArgs {
    EpCudaGroup group;
    uint32_t *numbers;
    int64_t count;
} EpPushMaxArgs;

#define EP_PUSH_ROWS 256 /* of a launch in each direction: kernels get them as arguments */

/** Rows that a rank exchanges, by peer on its node. */
typedef struct EpPushedRows {
    uint16_t begin[EP_CUDA_MAX_RANKS + 1]; /**< where those of each peer begin */
    uint8_t order[EP_CUDA_MAX_RANKS];      /**< peers with rows, those with most first */
    int32_t peers;                         /**< how many these are */
    int32_t row[EP_PUSH_ROWS];
} EpPushedRows;

/** Move whole rows between ranks, in words of 1, 4 or 16 bytes: row i of `from` lies at from + i *
 *  from_step. */
typedef struct EpPushMoveArgs {
    EpCudaGroup group;
    int32_t word, words;   /**< bytes; words of a row */
    int32_t chunk, chunks; /**< words of a chunk; chunks of a row */
    int32_t receivers;
    int32_t warps, shared_bytes; /**< of a block: see EpPushGrid */
    int64_t from_step, to_step;  /**< words */
    const void *from;
    void *to;
    EpPushedRows sent, got;
} EpPushMoveArgs;

#ifdef __cplusplus
static_assert(sizeof(EpPushMoveArgs) <= 4096, "arguments of a kernel");
extern "C" {
#endif
int ep_cuda_open_push(int shared_bytes);
int ep_cuda_launch_push(const EpPushArgs *args, EpPushGrid grid, void *stream);
int ep_cuda_launch_push_gather(const EpPushGatherArgs *args, EpPushGrid grid, void *stream);
int ep_cuda_launch_push_max(const EpPushMaxArgs *args, void *stream);

/** See ep_cuda_open_prepare; with EpPushMoveArgs. */
int ep_cuda_open_push_rows(int shared_bytes);
int ep_cuda_open_push_rows_masked(int shared_bytes);
int ep_cuda_launch_push_rows(const void *args, int blocks, void *stream);
int ep_cuda_launch_push_rows_masked(const void *args, int blocks, void *stream);
#ifdef __cplusplus
}
#endif

/** Returns whether kernels move shards of elements of `unit` bytes between so many ranks: on one
 *  node, and if numbers of words fit. Equal on all ranks. */
int ep_push_reaches(const EpNodeSizes *nodes, int32_t ranks, const EpShards *s, int64_t unit);

/** Returns the bytes of the largest words of which so many bytes are a multiple. */
int32_t ep_push_word_of(int64_t bytes);

/** Likewise of the runs of shards. */
int32_t ep_push_word(const EpShards *s, int64_t unit);

/** Describe shards, but for their bases. Ranks may have different words: chunks are of bytes. */
EpPushedShards ep_push_describe(const EpShards *s, int64_t unit, int32_t word);

#endif
