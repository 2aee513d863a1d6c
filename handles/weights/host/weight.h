/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_WEIGHTS_HOST_WEIGHT_H
#define EP_HANDLES_WEIGHTS_HOST_WEIGHT_H

/**
 * Sharded weights on the host backend. weight.c exchanges shards and gradients in rounds of
 * messages; weight_quant.c quantises.
 */

#include "handles/weights/rows_quant.h"
#include "handles/weights/weight.h"

EpStatus ep_host_weight_gather(const EpWeightGather *gather);
EpStatus ep_host_weight_reduce(const EpWeightReduce *reduce);
EpStatus ep_host_weight_amax(const EpWeightAmax *amax);
void ep_host_weight_measure(const EpWeight *weight, EpWeightView *view);

/** Gather `shards` of elements of `unit` bytes into `whole`, where this rank's own lies already. */
EpStatus ep_host_gather_shards(const EpWeightGather *gather, const EpShards *shards, int64_t unit,
                               void *whole);

/** Quantise this rank's shard into its place in gather->out, and gather shards and scales. */
EpStatus ep_host_gather_quantised(const EpWeightGather *gather);

EpStatus ep_host_quantise_rows(const EpRowsQuant *quant);

#endif
