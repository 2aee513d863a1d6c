/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_ORACLE_SHARDED_H
#define TESTS_ORACLE_SHARDED_H

/**
 * Sharded weights, from the rules of docs/mesh.md, by a program that sees the weight of all ranks.
 * Every element of the weight, and of each rank's gradient, is a function of a seed and its place.
 */

#include "ep/ep_weight.h"

enum { SHARDED_DIMS = 3 };

/** A weight on a mesh; its spec has SHARDED_DIMS dimensions. */
typedef struct Sharded {
    const EpMesh *mesh; /**< without a grid */
    EpTensorKind kind;
    EpSpec spec;
    int64_t shape[SHARDED_DIMS];
    EpType type, grad_type, reduced_type;
    uint64_t seed;
    int nodes; /**< the world's ranks are divided over so many, evenly */
} Sharded;

/** A box of the weight: what a rank stores, or uses. */
typedef struct ShardedBox {
    int64_t begin[SHARDED_DIMS], size[SHARDED_DIMS];
} ShardedBox;

int sharded_ranks(const EpMesh *mesh);
ShardedBox sharded_stored(const Sharded *s, int rank);
ShardedBox sharded_used(const Sharded *s, int rank);
int64_t sharded_elements(const ShardedBox *box);

/** Fill a tensor with a box of the weight. */
void sharded_fill(const Sharded *s, const ShardedBox *box, void *out);

/** Quantise a box of the weight: bytes in `out`, scales, both row-major. `blocks` becomes the
 * number of scales along each dimension. */
void sharded_quantise(const Sharded *s, const ShardedBox *box, const EpWeightForm *form,
                      uint8_t *out, uint8_t *scales, int64_t blocks[SHARDED_DIMS]);

/** Fill a tensor with a rank's gradient of what it uses; `step` tells steps apart. */
void sharded_gradient(const Sharded *s, int rank, int step, void *out);

/** What ep_weight_reduce gives a rank. `before` (NULL: nothing) is what is added to. */
void sharded_reduced(const Sharded *s, int rank, int step, const void *before, void *out);

/** A rank's own magnitude number `i`, and the largest of the ranks that share a scale. */
float sharded_amax(const Sharded *s, int rank, int i);
float sharded_largest(const Sharded *s, int rank, EpAmaxScope scope, int i);

#endif
