/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_WEIGHTS_CUDA_QUANTISE_H
#define EP_HANDLES_WEIGHTS_CUDA_QUANTISE_H

/** The kernels that quantise weights and receive rows: quantise_blocks.cu those that 16 bytes at a
 *  time reach, quantise.cu all others. */

#include "runtime/cuda/device.h"
#include "runtime/quant.h"

/** What a launch quantises: all, or only what goes before or after ranks agree on amaxes. */
typedef enum EpQuantPhase { EP_QUANT_WHOLE, EP_QUANT_FIND, EP_QUANT_CONVERT } EpQuantPhase;

/**
 * Quantise a box of a tensor [e, i, j]: a shard of a gathered weight, or rows. Dimensions are those
 * of the result.
 */
typedef struct EpQuantiseArgs {
    EpQuantFormat format;
    EpQuantPhase phase;
    EpType type;
    int32_t tiles;             /**< EP_BLOCKS_TILES */
    int64_t begin[3], part[3]; /**< of the box in the tensor: blocks begin at multiples there */
    const void *from;          /**< the box's first element */
    int64_t step[3];           /**< between elements */
    uint8_t *out;              /**< code of the first element; rows follow by out_step bytes */
    int64_t out_step[2];
    void *scales;          /**< of the first block; FIND: the amaxes found; CONVERT: all amaxes */
    int64_t scale_step[3]; /**< between blocks, by dimension */
    const void *count;     /**< [part[0]] how much of dimension `counted` is there, or NULL: all */
    int32_t counted, count_is_int64;
} EpQuantiseArgs;

#define EP_QUANT_EDGE 128        /* elements of a tile, along both dimensions */
#define EP_QUANT_BLOCKS_PER_SM 8 /* of a launch, for kernels that memory bounds */

/** Tiles that the box touches along dimension 1 or 2. */
EP_HOST_DEVICE static inline int64_t ep_quantise_tiles(const EpQuantiseArgs *a, int dim) {
    int64_t last = a->begin[dim] + a->part[dim] - 1;
    if (a->part[dim] == 0) return 0;
    return last / EP_QUANT_EDGE - a->begin[dim] / EP_QUANT_EDGE + 1;
}

/** Returns how much of dimension `dim` is there. */
EP_HOST_DEVICE static inline int64_t ep_quantise_length(const EpQuantiseArgs *a, int64_t e,
                                                        int dim) {
    if (!a->count || a->counted != dim) return a->part[dim];
    int64_t count =
        a->count_is_int64 ? ((const int64_t *)a->count)[e] : ((const int32_t *)a->count)[e];
    return count < 0 ? 0 : count < a->part[dim] ? count : a->part[dim];
}

#ifdef __cplusplus
extern "C" {
#endif
int ep_cuda_open_quantise_blocks(void);
/** Returns whether ep_cuda_launch_quantise_blocks can do it: whole blocks, 16 bytes at a time. */
int ep_cuda_can_quantise_blocks(const EpQuantiseArgs *args);
int ep_cuda_launch_quantise_blocks(const EpQuantiseArgs *args, int blocks, void *stream);
int ep_cuda_open_quantise(int shared_bytes);
/** By at most `blocks` blocks. */
int ep_cuda_launch_quantise(const EpQuantiseArgs *args, int blocks, void *stream);
#ifdef __cplusplus
}
#endif

#endif
