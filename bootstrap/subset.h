/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_SUBSET_H
#define EP_BOOTSTRAP_SUBSET_H

/**
 * A bootstrap of some ranks of another bootstrap, "the world", as groups of a mesh need it
 * (handles/mesh/). Where the world has messages, a gathering sends its bytes to each other rank of
 * the subset. Where it has none, the world gathers, and each subset takes its own ranks' bytes.
 */

#include "bootstrap/bootstrap.h"

typedef struct EpSubset {
    EpBootstrap world;
    int32_t rank, size; /* in the subset */
    int32_t first_tag;
    int64_t turn;    /* number of gatherings */
    size_t room;     /* bytes of a rank that `memory` has place for */
    char *memory;    /* of a gathering: [size], or without messages [world's ranks] */
    void **requests; /* [2 * size] receives, then sends */
    char *pending;   /* [2 * size] */
    int32_t ranks[]; /* [size] of the world */
} EpSubset;

/** Allocate a subset that may become as large as the world: the caller sets `rank`, `size` and
 *  `ranks`. Returns NULL when out of memory. */
EpSubset *ep_subset_create(const EpBootstrap *world);
void ep_subset_free(void *subset);

/** Allocate a place for `bytes` bytes of each rank. Returns 0 when out of memory. */
int ep_subset_reserve(EpSubset *self, size_t bytes);

/** Returns the bootstrap, which frees the subset when it is destroyed. `number`: equal on all ranks
 *  of the subset, and different for subsets that share ranks. */
EpBootstrap ep_subset_bootstrap(EpSubset *self, int32_t number);

#endif
