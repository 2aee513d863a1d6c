/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_WEIGHTS_HOST_WEIGHT_H
#define EP_HANDLES_WEIGHTS_HOST_WEIGHT_H

/**
 * Sharded weights on the host backend. weight.c exchanges shards and gradients in rounds of
 * messages; quantise.c quantises;
 * move.c moves experts.
 */

#include "handles/weights/move.h"
#include "handles/weights/rows_quant.h"
#include "handles/weights/weight.h"
#include "runtime/host/exchange.h"

EpStatus ep_host_weight_gather(const EpWeightGather *gather);
EpStatus ep_host_weight_reduce(const EpWeightReduce *reduce);
EpStatus ep_host_weight_amax(const EpWeightAmax *amax);
EpStatus ep_host_weight_move(const EpMove *move);
void ep_host_weight_measure(const EpWeight *weight, EpWeightView *view);

/** Gather `shards` of elements of `unit` bytes into `whole`, where this rank's own lies already. */
EpStatus ep_host_gather_shards(const EpWeightGather *gather, const EpShards *shards, int64_t unit,
                               void *whole);

/** Quantise this rank's shard into its place in gather->out, and gather shards and scales. */
EpStatus ep_host_gather_quantised(const EpWeightGather *gather);

EpStatus ep_host_quantise_rows(const EpRowsQuant *quant);

/** An operation in rounds, among the ranks that take part. Offsets and lengths are bytes of a
 *  message of `bytes` bytes. */
typedef struct EpWeightRounds {
    EpGroup *group;
    const EpOp *op;
    int64_t fact[EP_OP_FACTS];
    EpRoundMode mode;
    int64_t bytes;
    void *context;
    /** Fill the region that `peer` reads; in SHARED mode it is the same for all. To a peer on
     *  another node `length` bytes of it travel, or as many as ep_round_fill says in here. */
    void (*fill)(void *context, int32_t peer, int64_t at, int64_t length, void *region);
    /** Take a peer's message. It stays readable until `finish` has returned. */
    void (*take)(void *context, int32_t peer, int64_t at, int64_t length, const void *message);
    /** Optional: all messages of the round are there. */
    void (*finish)(void *context, int64_t at, int64_t length);
} EpWeightRounds;

EpStatus ep_host_weight_rounds(const EpWeightRounds *rounds);

#endif
