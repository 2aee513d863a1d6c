/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_WEIGHTS_CUDA_WEIGHT_H
#define EP_HANDLES_WEIGHTS_CUDA_WEIGHT_H

/**
 * Sharded weights on the CUDA backend. On one node kernels move the bytes (push.h). Between nodes
 * NCCL does, and for what these kernels do not take. Then small kernels do the rest, slice by slice
 * of a large weight (slices.h).
 *
 *     weight.c   gather, sizes
 *     reduce.c   reduce, amax; who needs NCCL
 *     move.c     experts to a new placement
 *
 *     gather   Where one dimension is gathered, the shards of one expert lie side by side in the
 *              weight: one ncclAllGather for each expert, all in one group, straight from the shard
 *              into the weight. Else NCCL gathers whole shards into the workspace, and a kernel
 *              copies them to their places.
 *     reduce   Ranks exchange shards by ncclSend and ncclRecv, and a kernel adds them in the
 *              defined order: NCCL's own reductions round at every hop. Where several ranks keep
 *              the same shard, each adds a piece of it, and ncclAllGather brings the sums.
 *     amax     ncclAllReduce of the numbers' bits, which have the numbers' order.
 *
 * A rank quantises its shard into its own place in the weight (or in the workspace), and NCCL
 * gathers in place.
 */

#include "handles/weights/cuda/weight_kernels.h"
#include "handles/weights/move.h"
#include "handles/weights/rows_quant.h"
#include "handles/weights/weight.h"
#include "runtime/cuda/cuda.h"

EpStatus ep_cuda_weight_open(const EpWeight *weight);
EpStatus ep_cuda_weight_gather(const EpWeightGather *gather);
EpStatus ep_cuda_weight_reduce(const EpWeightReduce *reduce);
EpStatus ep_cuda_weight_amax(const EpWeightAmax *amax);
EpStatus ep_cuda_weight_move(const EpMove *move);
void ep_cuda_weight_measure(const EpWeight *weight, EpWeightView *view);

/** Returns whether NCCL puts all shards of elements of `unit` bytes into place: one dimension is
 *  gathered, in few pieces. */
int ep_weight_goes_directly(const EpShards *s, int64_t unit);

/** Bytes of the workspace of a reduction. */
int64_t ep_weight_reduce_bytes(const EpWeight *weight);

EpStatus ep_cuda_quantise_rows(const EpRowsQuant *quant);

#endif
