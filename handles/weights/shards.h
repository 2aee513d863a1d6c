/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_WEIGHTS_SHARDS_H
#define EP_HANDLES_WEIGHTS_SHARDS_H

/**
 * Where the shards of a gathered tensor lie in it. Every tensor has three dimensions here; missing
 * ones are 1, in front. Shards are numbered row-major along the dimensions of the weight, which is
 * the order of the ranks that gather.
 *
 * A shard's elements, row-major, are runs of elements that lie side by side in the tensor, too.
 */

#include "runtime/layout.h"

typedef struct EpShards {
    int64_t part[3];  /**< elements of a shard */
    int64_t count[3]; /**< shards along each dimension */
    int transposed;   /**< 1: the weight's last two dimensions are swapped here */
} EpShards;

EP_HOST_DEVICE static inline int64_t ep_shards_number(const EpShards *s) {
    return s->count[0] * s->count[1] * s->count[2];
}

/** Elements of one shard. */
EP_HOST_DEVICE static inline int64_t ep_shard_elements(const EpShards *s) {
    return s->part[0] * s->part[1] * s->part[2];
}

/** Elements of the gathered tensor along a dimension. */
EP_HOST_DEVICE static inline int64_t ep_shards_whole(const EpShards *s, int dim) {
    return s->part[dim] * s->count[dim];
}

/** First element of a shard along each dimension. */
EP_HOST_DEVICE static inline void ep_shard_begin(const EpShards *s, int64_t shard,
                                                 int64_t begin[3]) {
    int last = s->transposed ? 1 : 2, middle = 3 - last;
    begin[last] = shard % s->count[last] * s->part[last];
    begin[middle] = shard / s->count[last] % s->count[middle] * s->part[middle];
    begin[0] = shard / s->count[last] / s->count[middle] * s->part[0];
}

/** The first dimension such that all after it are whole in a shard. A run takes all elements of the
 *  shard from there on. */
EP_HOST_DEVICE static inline int ep_shards_run_dim(const EpShards *s) {
    int dim = 2;
    while (dim > 0 && s->count[dim] == 1)
        dim--;
    return dim;
}

/** Elements of a run. */
EP_HOST_DEVICE static inline int64_t ep_shards_run(const EpShards *s) {
    int64_t run = 1;
    for (int dim = ep_shards_run_dim(s); dim < 3; dim++)
        run *= s->part[dim];
    return run;
}

/** Where the shard's run number `run` begins in the tensor, in elements. */
EP_HOST_DEVICE static inline int64_t ep_shard_run_at(const EpShards *s, int64_t shard,
                                                     int64_t run) {
    int dim = ep_shards_run_dim(s);
    int64_t at[3] = {0, 0, 0}, begin[3];
    for (int d = dim - 1; d >= 0; d--) {
        at[d] = run % s->part[d];
        run /= s->part[d];
    }
    ep_shard_begin(s, shard, begin);
    return ((begin[0] + at[0]) * ep_shards_whole(s, 1) + begin[1] + at[1]) * ep_shards_whole(s, 2) +
           begin[2] + at[2];
}

#endif
