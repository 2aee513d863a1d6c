/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_WEIGHTS_CUDA_SLICES_H
#define EP_HANDLES_WEIGHTS_CUDA_SLICES_H

/**
 * Large weights go in slices of their first dimension, so that kernels work while NCCL moves bytes:
 *
 *     caller's stream   before 0   before 1            after 0   before 2            after 1  ...
 *                             \             \        /                  \          /
 *     wire                      move 0 ────────────── move 1 ──────────── move 2 ────────────  ...
 *
 * before: a kernel quantises or packs a slice; move: calls of NCCL; after: a kernel puts a slice
 * into place, or adds it up. Only the first `before` and the last `after` add to NCCL's time.
 *
 * A block of NCCL needs nearly all registers of a multiprocessor, so it starts where no other block
 * is. Many small blocks are in its way, whatever the priorities: where one ends the next one
 * starts. So kernels that only copy or add have large blocks, one to a multiprocessor, and leave
 * some to NCCL. Those that quantise have too much to wait for, and are faster in many small ones.
 */

#include "handles/weights/cuda/nccl.h"
#include "handles/weights/cuda/push.h"
#include "handles/weights/cuda/weight_kernels.h"

/* Bytes that a rank receives in a slice: NCCL takes some 200 us for them over NVLink, about as long
 * as the host needs to start a slice. */
#ifndef EP_SLICE_BYTES
#define EP_SLICE_BYTES (64 << 20)
#endif

/** Some rows of the first dimension. */
typedef struct EpSlice {
    int64_t first, rows;
} EpSlice;

/** The stages of an operation; before and after may be NULL. */
typedef struct EpSliceStages {
    int most;       /**< slices: each takes some 45 us more than its bytes */
    int short_ends; /**< whether the slices are short whose `before` or `after` has nothing beside
                       it */
    EpStatus (*before)(const EpWeightWork *w, const void *operation, EpSlice slice);
    EpStatus (*move)(const EpWeightWork *w, const void *operation, EpSlice slice);
    EpStatus (*after)(const EpWeightWork *w, const void *operation, EpSlice slice);
} EpSliceStages;

/** Returns how many slices an operation is worth that receives `bytes` in `rows` rows. */
int ep_weight_slices(const EpSliceStages *stages, int64_t rows, int64_t bytes);

/** Run an operation in `slices` slices of its `rows` rows; one slice is all of it, on the caller's
 *  stream alone. */
EpStatus ep_weight_run_slices(EpWeightWork *w, const EpSliceStages *stages, const void *operation,
                              int64_t rows, int slices);

/** Returns the launch of push.cu's kernels. */
EpPushGrid ep_weight_push_grid(const EpWeightWork *w);

/** Returns how many blocks a kernel has that quantises. */
int ep_weight_blocks(const EpWeightWork *w);

/** Returns the blocks of a kernel that packs, that puts shards into place, that adds. */
EpGrid ep_weight_packing_grid(const EpWeightWork *w);
EpGrid ep_weight_arrange_grid(const EpWeightWork *w);
EpGrid ep_weight_sum_grid(const EpWeightWork *w);

/** The streams and events of slices, in groups that move weights. Local. */
EpStatus ep_cuda_slices_open(EpGroup *group);
void ep_cuda_slices_close(EpGroup *group);

/** Let NCCL connect the ranks of such a group, if it has a communicator for that, so that no later
 * call has to do it. Collective. */
EpStatus ep_cuda_slices_connect(EpGroup *group);

#endif
